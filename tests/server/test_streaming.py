"""Streams: framing, contents, usage, errors, keep-alive (failure cases c1-c8, c14, c15)."""

import contextlib
import threading
import time

import httpx
import openai
import pytest

from fake_worker import MODEL, Script, events_of, raw_request, wait_for

TEXT = "żółw🦉한 \u2028 end"


def joined(chunks):
    return "".join(
        choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        for chunk in chunks
        for choice in chunk["choices"]
    )


@pytest.mark.parametrize("drafts", [0, 1, 2, 4])
@pytest.mark.parametrize("path", ["chat", "complete"])
def test_stream_equals_whole(serve, drafts, path):
    server = serve(Script(reply=lambda prompt: TEXT, drafts=drafts))
    call = getattr(server, path)
    whole = call().json()
    choice = whole["choices"][0]
    assert (choice["message"]["content"] if path == "chat" else choice["text"]) == TEXT

    response = call(stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert "\u2028" not in response.text, "line splitters would cut the event in two"
    *chunks, last, done = events_of(response.text)
    assert done == "[DONE]"
    assert joined(chunks) == TEXT and "\ufffd" not in response.text
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert len({chunk["id"] for chunk in [*chunks, last]}) == 1
    if path == "chat":
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        roles = ["role" in chunk["choices"][0]["delta"] for chunk in chunks]
        assert roles == [True] + [False] * (len(chunks) - 1)
        assert all(chunk["choices"][0]["delta"].get("content", "x") for chunk in chunks), "an empty content chunk"


def test_usage(serve):
    server = serve(Script(reply=lambda prompt: "0123456789", drafts=4))
    usage = server.complete("abc").json()["usage"]
    # BOS and three bytes; ten bytes and EOS, the first from the prompt's last row, the others in runs of five
    assert usage == {
        "prompt_tokens": 4,
        "completion_tokens": 11,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 0},
        "speculation": {"steps": 2, "drafted": 8, "accepted": 8, "acceptance_length": 5.0},
    }
    assert serve().complete(max_tokens=1).json()["usage"]["speculation"]["acceptance_length"] is None


@pytest.mark.parametrize("limit", [5, 40])
def test_usage_of_a_long_prompt_read_in_chunks(serve, limit):
    """However many tokens a step reads or brings, streamed or not, they are counted once."""
    server = serve(Script(reply=lambda prompt: "0123456789" * 3, drafts=4), max_context=1024)
    server.engine.scheduler.max_step_tokens = 100
    prompt, asked = "x" * 600, {"max_tokens": limit}
    whole = server.complete(prompt, **asked).json()["usage"]
    assert max(server.engine.runner.rows) <= 100, "it was read in one go"
    *_, last, done = events_of(
        server.complete(prompt, stream=True, stream_options={"include_usage": True}, **asked).text
    )
    assert done == "[DONE]" and last["usage"] == whole
    assert (whole["prompt_tokens"], whole["completion_tokens"]) == (601, min(limit, 31))


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
def test_no_usage_unasked(shared, options):
    response = shared.chat(stream=True, stream_options=options)
    *chunks, done = events_of(response.text)
    assert done == "[DONE]" and all("usage" not in chunk for chunk in chunks)


def test_length_and_empty_answers(serve):
    server = serve(Script(reply=lambda prompt: "🦊" if "fox" in prompt else ""))
    for limit, text in ((1, ""), (3, ""), (4, "🦊")):
        whole = server.chat("fox", max_tokens=limit).json()
        assert whole["choices"][0]["message"]["content"] == text
        assert whole["choices"][0]["finish_reason"] == "length"
        assert whole["usage"]["completion_tokens"] == limit
        *chunks, _ = events_of(server.chat("fox", max_tokens=limit, stream=True).text)
        assert joined(chunks) == text
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    *chunks, _ = events_of(server.chat("empty", stream=True).text)
    [choice] = [chunk["choices"][0] for chunk in chunks]
    assert choice["delta"] == {"role": "assistant"} and choice["finish_reason"] == "stop"


def test_max_tokens_is_a_cap(serve):
    server = serve(Script(reply=lambda prompt: None), max_context=64)
    for limit in ({"max_tokens": 64}, {}, {"max_tokens": 2**63}):
        answer = server.complete([1] * 10, **limit).json()
        assert answer["usage"]["completion_tokens"] == 54
        assert answer["choices"][0]["finish_reason"] == "length"


def test_stop_strings_are_not_streamed(serve):
    server = serve(Script(reply=lambda prompt: "one STOP two", drafts=2))
    *chunks, _ = events_of(server.complete(stream=True, stop=["STOP"]).text)
    assert joined(chunks) == "one " and chunks[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts(serve, stream):
    server = serve(Script(reply=lambda prompt: f"answer to {prompt}"), max_slots=2)
    response = server.complete(["a", "b", "c"], stream=stream)
    if stream:
        *chunks, done = events_of(response.text)
        choices = [chunk["choices"][0] for chunk in chunks]
        texts = ["".join(choice["text"] for choice in choices if choice["index"] == index) for index in range(3)]
        assert done == "[DONE]" and sum(choice["finish_reason"] is not None for choice in choices) == 3
    else:
        answer = response.json()
        texts = [choice["text"] for choice in answer["choices"]]
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        assert answer["usage"]["prompt_tokens"] == 6
    assert texts == ["answer to a", "answer to b", "answer to c"]


def test_sampling_defaults_of_the_model(serve):
    server = serve(default_params={"temperature": 0.1, "top_k": 1})
    seen = []
    make_request = server.engine.make_request
    server.engine.make_request = lambda ids, params, **more: seen.append(params) or make_request(ids, params, **more)
    for fields in ({}, {"temperature": 1.0}, {"temperature": 0, "top_k": 0}, {"temperature": None}):
        assert server.chat(**fields).status_code == 200
    assert [params.temperature for params in seen] == [0.1, 1.0, 0, 0.1]
    assert [params.top_k for params in seen] == [1, 1, 0, 1]


def test_keep_alive_comments(serve):
    script = Script()
    server = serve(script)
    script.gate.clear()
    body = {"prompt": "hi", "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=20) as response:
        assert response.status_code == 200  # before the first token
        received = []
        for data in response.iter_text():
            received.append(data)
            if "".join(received).count(": keep-alive") >= 3:
                script.gate.set()
    *chunks, done = events_of("".join(received))
    assert joined(chunks) == "Hello, world!" and done == "[DONE]"


def test_a_fault_in_a_stream(serve):
    """Failure cases c4, i5: one error event, a closed connection, and a server that goes on."""
    server = serve(Script(reply=lambda prompt: "yes" if "alive" in prompt else None, fail_at=4))
    started = time.monotonic()
    response = server.chat(stream=True)
    assert time.monotonic() - started < 2
    *chunks, error = events_of(response.text)
    assert response.status_code == 200 and len(chunks) == 3
    assert set(error) == {"error"} and error["error"]["code"] == "engine_error"
    assert "scripted failure" not in response.text
    assert httpx.get(f"{server.url}/health").status_code == 200
    server.assert_alive()


def test_a_fatal_fault(serve):
    """Everyone is answered, and the server says that it is out of order."""
    server = serve(Script(reply=lambda prompt: None, fail_from=4), max_slots=1)
    answers = {}

    def ask(prompt):
        answers[prompt] = server.complete(prompt, stream=prompt == "streamed")

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in ("streamed", "waiting")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    health = httpx.get(f"{server.url}/health")
    assert health.status_code == 503 and health.json()["status"] == "failed"
    assert server.chat().status_code == 503
    assert events_of(answers["streamed"].text)[-1]["error"]["code"] == "engine_error"
    assert answers["waiting"].status_code in (500, 503)
    assert server.engine.stats.finished["error"] == 2


def test_a_fault_without_a_stream(serve):
    response = serve(Script(reply=lambda prompt: None, fail_at=3)).chat()
    assert response.status_code == 500 and response.json()["error"]["type"] == "server_error"


def test_openai_client(serve):
    server = serve(Script(reply=lambda prompt: "Hello, world!", drafts=2))
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        messages = [{"role": "user", "content": "hi"}]
        whole = client.chat.completions.create(model=MODEL, messages=messages)
        assert whole.choices[0].message.content == "Hello, world!" and whole.choices[0].finish_reason == "stop"
        stream = client.chat.completions.create(
            model=MODEL, messages=messages, stream=True, stream_options={"include_usage": True}
        )
        *chunks, last = list(stream)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello, world!"
        assert last.usage == whole.usage
        completion = client.completions.create(model=MODEL, prompt="hi", max_tokens=5)
        assert completion.choices[0].text == "Hello" and completion.choices[0].finish_reason == "length"
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model=MODEL, messages=messages, temperature=-1, stream=True)
        assert refused.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("nope")
        server.script.fail_from = server.script.steps + 3
        with pytest.raises(openai.APIError):
            list(client.chat.completions.create(model=MODEL, messages=messages, stream=True))


def test_same_request_id_twice(serve):
    script = Script(reply=lambda prompt: f"answer to {prompt}", delay=0.005)
    server = serve(script)
    answers = {}

    def ask(prompt):
        answers[prompt] = server.post("/v1/completions", {"prompt": prompt}, headers={"X-Request-Id": "same"})

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in ("a", "b")]
    for thread in threads:
        thread.start()
    # A third with the same id leaves at once.
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json={"prompt": "c", "stream": True}, headers={"X-Request-Id": "same"}
    ) as response:
        assert response.headers["x-request-id"] == "same"
    for thread in threads:
        thread.join(20)
    for prompt, answer in answers.items():
        assert answer.json()["choices"][0]["text"] == f"answer to {prompt}"
        assert answer.headers["x-request-id"] == "same"
    assert len({answer.json()["id"] for answer in answers.values()}) == 2


def test_sane_request_ids_only(shared):
    for given in ("x" * 129, "x" * 10_000, "caf\u00e9", "a\tb"):
        response = httpx.get(f"{shared.url}/health", headers={"X-Request-Id": given.encode()})
        assert response.headers["x-request-id"] != given and len(response.headers["x-request-id"]) == 32
    assert httpx.get(f"{shared.url}/nope").headers["x-request-id"]
    for given, status in ((b"a\x01b", b"200"), (b"a\x00b", b"400"), (b"x" * (1 << 20), b"400")):
        request = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Request-Id: %b\r\n\r\n" % given
        answer = b""
        with contextlib.suppress(ConnectionError), raw_request(shared, request) as connection:
            answer = connection.recv(4096)
        # of a megabyte not all is read, and the answer may be lost with the connection
        assert given not in answer and (answer.startswith(b"HTTP/1.1 " + status) or (len(given) > 9 and not answer))
    shared.assert_alive()


def test_streams_run_side_by_side(serve):
    script = Script(reply=lambda prompt: None if "long" in prompt else "short", delay=0.002)
    server = serve(script)
    thread = threading.Thread(target=lambda: server.complete("long", max_tokens=200))
    thread.start()
    wait_for(lambda: script.steps > 5)
    assert server.complete("quick").json()["choices"][0]["text"] == "short"
    assert thread.is_alive()
    thread.join(20)
