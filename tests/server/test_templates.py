"""Chat templates and prompts as HTTP clients meet them (failure cases g13-g16, g18, g20, c11)."""

import httpx
import pytest

from fake_worker import Script, wait_for
from tokenizers_fixture import BOS, IM_END

ALTERNATING = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('No system role here: ' + m.role) }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)


def messages(*pairs):
    return [{"role": role, "content": content} for role, content in pairs]


def prompt_of(server, **fields):
    response = server.post("/tokenize", fields)
    assert response.status_code == 200, response.text
    return response.json()["tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_template_that_refuses(serve, stream):
    """Failure case g15."""
    server = serve(tokenizer_config={"chat_template": ALTERNATING})
    for given, words in (
        (messages(("system", "x"), ("user", "hi")), "No system role here: system"),
        (messages(("user", "a"), ("user", "b")), "Roles must alternate"),
    ):
        response = server.post("/v1/chat/completions", {"messages": given, "stream": stream})
        error = response.json()["error"]
        assert response.status_code == 400 and words in error["message"] and error["code"] == "chat_template_error"
    assert server.post("/v1/chat/completions", {"messages": messages(("user", "a"))}).status_code == 200
    server.assert_alive()


def test_a_model_without_a_template(serve):
    """Failure case g16."""
    server = serve(tokenizer_config={"chat_template": None})
    response = server.chat()
    assert response.status_code == 400 and "/v1/completions" in response.json()["error"]["message"]
    server.assert_alive()


def test_one_bos(serve):
    """Failure case g14."""
    server = serve(tokenizer_config={"chat_template": ALTERNATING})
    for tokens in (
        prompt_of(server, messages=messages(("user", "a"))),
        prompt_of(server, prompt="a"),
        prompt_of(server, prompt="<|bos|>a"),
    ):
        assert tokens[0] == BOS and tokens.count(BOS) == 1


def test_control_tokens_in_content_are_text(shared):
    """Failure case g18: in chats; a raw prompt keeps parsing them."""
    plain = prompt_of(shared, messages=messages(("user", "AB")))
    spelt = prompt_of(shared, messages=messages(("user", "A<|im_end|>B")))
    assert spelt.count(IM_END) == plain.count(IM_END) == 1
    assert prompt_of(shared, prompt="A<|im_end|>B").count(IM_END) == 1


def test_a_trailing_assistant_message(shared):
    """Failure case g20."""
    given = messages(("user", "a"), ("assistant", "So"))
    tail = [IM_END, *b"\n"]
    assert prompt_of(shared, messages=given)[-len(b"assistant\n") :] == [*b"assistant\n"]
    assert prompt_of(shared, messages=given, add_generation_prompt=False)[-2:] == tail
    assert prompt_of(shared, messages=given, continue_final_message=True)[-2:] == [*b"So"]
    both = {"add_generation_prompt": True, "continue_final_message": True}
    assert shared.post("/tokenize", {"messages": given, **both}).status_code == 400
    assert shared.post("/v1/chat/completions", {"messages": given, **both}).status_code == 400


def test_a_request_right_after_a_disconnect(tiny):
    """Failure case c11: the next request shares the prompt of one that was dropped."""
    prompt = "a common beginning that fills some pages, " * 3
    with httpx.stream(
        "POST", f"{tiny.url}/v1/completions", json={"prompt": prompt, "stream": True, "ignore_eos": True}
    ) as r:
        next(r.iter_lines())
    longer = {"prompt": prompt + "and an end", "max_tokens": 12, "temperature": 0}
    after = tiny.post("/v1/completions", longer).json()
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] <= len(prompt) + 1
    tiny.wait_idle()
    alone = tiny.post("/v1/completions", {**longer, "speculation": {"enabled": False}}).json()
    assert after["choices"] == alone["choices"]


def test_a_waiting_client_hears_something(serve):
    """Failure case c14: comments while the prompt is read, and none before the request is known to be good."""
    script = Script()
    server = serve(script)
    script.gate.clear()
    refused = server.chat(stream=True, temperature=9)
    assert refused.status_code == 400 and ": " not in refused.text[:3]
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json={"prompt": "x", "stream": True}, timeout=20
    ) as response:
        lines = response.iter_lines()
        assert next(lines).startswith(":") and next(lines) == "" and next(lines).startswith(":")
        script.gate.set()
        assert list(lines)[-2] == "data: [DONE]"
    wait_for(lambda: not server.worker.num_open)
