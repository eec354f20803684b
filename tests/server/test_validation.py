"""What is refused, with which status, naming which field (failure cases h1-h20)."""

import json

import httpx
import pytest

from fake_worker import Script
from minispec.errors import RequestError
from minispec.server.schema import parse_chat
from tokenizers_fixture import BYTE_VOCAB_SIZE

USER = [{"role": "user", "content": "hi"}]
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def assert_error(response, status, param=..., code=...):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["type"]
    assert "Traceback" not in response.text
    if param is not ...:
        assert error["param"] == param, error
    if code is not ...:
        assert error["code"] == code, error
    return error


def send_raw(server, body: str | bytes, path=CHAT, content_type="application/json"):
    headers = {"Content-Type": content_type} if content_type else {}
    return server.client.post(path, content=body, headers=headers)


@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"]
)
@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e400", "true", '"0.7"', "[1]"])
def test_numbers_are_numbers(shared, field, literal):
    body = f'{{"messages": [{{"role": "user", "content": "hi"}}], "{field}": {literal}}}'
    assert_error(send_raw(shared, body), 400, field)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 1e6}, "temperature"),
        ({"temperature": 2.01}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": True}, "top_k"),
        ({"seed": 2**63}, "seed"),
        ({"speculation": True}, "speculation"),
        ({"speculation": {"enabled": 1}}, "speculation.enabled"),
        ({"speculation": {"max_nodes": 0}}, "speculation.max_nodes"),
        ({"speculation": {"max_nodes": 257}}, "speculation.max_nodes"),
        ({"speculation": {"max_nodes": "8"}}, "speculation.max_nodes"),
        ({"speculation": {"drafters": "ngram"}}, "speculation.drafters"),
        ({"speculation": {"drafters": ["nobody"]}}, "speculation.drafters"),
        ({"speculation": {"depth": 3}}, "speculation.depth"),
        ({"trace": "yes"}, "trace"),
        ({"seed": "1"}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "8"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"stream": 1}, "stream"),
        ({"stream": "true"}, "stream"),
        ({"stop": ""}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ["x"] * 10**5}, "stop"),
        ({"model": 5}, "model"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"n": 0}, "n"),
        ({"n": -2}, "n"),
        ({"n": 129}, "n"),
        ({"n": 10**6}, "n"),
        ({"n": True}, "n"),
        ({"n": "2"}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"presence_penalty": -2.1}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 11}, "repetition_penalty"),
        *(
            ({"logit_bias": {key: 1}}, "logit_bias")
            for key in ("cat", "-1", "1.5", "", "²", str(BYTE_VOCAB_SIZE), "9" * 30)
        ),
        *(({"logit_bias": {"5": value}}, "logit_bias") for value in (101, -100.5)),
        *(({"logit_bias": {"5": value}}, "logit_bias.5") for value in (None, True, "1", [1])),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"logit_bias": [[5, 1]]}, "logit_bias"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 1.5}, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        *(({"stop_token_ids": [token], "min_tokens": 1}, "stop_token_ids") for token in (-1, BYTE_VOCAB_SIZE, 2**63)),
        *(({"stop_token_ids": [token]}, "stop_token_ids[0]") for token in (True, 1.0, "a", None)),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"stop_token_ids": [1] * 10**5}, "stop_token_ids"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}},
            "response_format",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]"),
        ({"structured_outputs": {"grammar": "start: nobody"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a" * 10**6}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        # known, not supported
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"length_penalty": 2}, "length_penalty"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
        ({"use_beam_search": True}, "use_beam_search"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("stream", [False, True])
def test_refused_fields(shared, path, fields, param, stream):
    base = {"messages": USER} if path == CHAT else {"prompt": "hi"}
    # what says itself whether it streams is not told otherwise
    streaming = {"stream": True} if stream and "stream_options" not in fields else {}
    assert_error(shared.post(path, {**base, **streaming, **fields}), 400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": "4"}, "max_completion_tokens"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": "yes"}, "logprobs"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"top_logprobs": 5, "logprobs": False}, "top_logprobs"),
        *(
            ({"top_logprobs": count, "logprobs": True}, "top_logprobs")
            for count in (-1, 21, BYTE_VOCAB_SIZE, 1.5, True)
        ),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),  # the template knows none
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * 129}, "tools"),
        ({"tools": {"name": "f"}}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"echo": True}, "echo"),
        ({"best_of": 0}, "best_of"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"max_tokens": 0, "prompt_logprobs": 1}, "max_tokens"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{}]}, "messages[0].role"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages[0].content[0]"),
    ],
)
def test_refused_chat_fields(shared, fields, param):
    assert_error(shared.post(CHAT, {"messages": USER, **fields}), 400, param)


@pytest.mark.parametrize(
    "prompt",
    [
        *("", [""], [], [[]], None, 5, {}, [None]),
        *([BYTE_VOCAB_SIZE], [-1], [2**63], [True], [1.0], ["a", 1], [1, "a"], [[1], "a"], ["a", [1]], [[1, "a"]]),
        *(["a", ""], [[1], []], ["x"] * 129, ["x"] * 10**5),
    ],
    ids=lambda prompt: json.dumps(prompt)[:20],
)
def test_refused_prompts(shared, prompt):
    assert_error(shared.complete(prompt), 400, "prompt")


@pytest.mark.parametrize(
    "fields",
    [
        *({"logprobs": value} for value in (True, -1, 21, BYTE_VOCAB_SIZE, 1.5, "1")),
        {"echo": "yes"},
        {"suffix": "x"},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"max_tokens": 0},
        {"max_tokens": 0, "echo": False},
        {"max_tokens": -1, "echo": True},
    ],
    ids=str,
)
def test_refused_completion_fields(shared, fields):
    assert_error(shared.complete(**fields), 400, next(iter(fields)))


def test_choices_are_counted_over_all_prompts(shared):
    assert_error(shared.complete(["a"] * 20, n=10), 400, "n")
    assert_error(shared.complete(["a"] * 129), 400, "prompt")


def test_missing_fields(shared):
    assert_error(shared.post(CHAT, {}), 400, "messages")
    assert_error(shared.post(COMPLETION, {}), 400, "prompt")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"foo": 1, "user": "me", "metadata": {"a": 1}, "store": False},
        {"temperature": 0},
        {"temperature": 1e-12},
        {"temperature": 2},
        {"top_p": 0},
        {"top_p": 1e-9},
        {"top_p": 1},
        {"top_k": 0},
        {"top_k": -1},
        {"top_k": 10**9},
        {"min_p": 0.0},
        {"stop": None},
        {"stop": []},
        {"stop": "zzz"},
        {"stop": ["zzz"] * 16},
        {"max_tokens": None},
        {"max_tokens": 2**63},
        {"seed": -5},
        {"model": "scripted"},
        {"model": None},
        {"stream": False},
        {"stream_options": None},
        {"n": 1, "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "best_of": 1},
        {"n": None, "tools": None, "response_format": None, "logprobs": None, "stop_token_ids": []},
        {"n": 2, "best_of": 2},
        {"response_format": {"type": "text"}},
        {"top_k": 10**30, "temperature": 1},
        {"frequency_penalty": 2, "presence_penalty": -2, "repetition_penalty": 0.01},
        {"logit_bias": {"5": 100, "6": -100, "0": 0.5}},
        {"min_tokens": 3},
        {"stop_token_ids": [0, 255]},
        {"guided_json": None, "guided_choice": [], "skip_special_tokens": True},
        {"structured_outputs": {"regex": "Hello, world!"}},
        {"prompt_logprobs": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_accepted_fields(shared, path, fields):
    base = {"messages": USER} if path == CHAT else {"prompt": "hi"}
    response = shared.post(path, {**base, **fields})
    assert response.status_code == 200, response.text
    assert {choice["finish_reason"] for choice in response.json()["choices"]} == {"stop"}


def test_token_id_prompts(shared):
    for prompt in ([BYTE_VOCAB_SIZE - 1], [0], [[104, 105]]):
        response = shared.complete(prompt)
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["prompt_tokens"] == len(prompt if isinstance(prompt[0], int) else prompt[0])


@pytest.mark.parametrize("stream", [False, True])
def test_context_length(shared, stream):
    limit = shared.engine.max_context
    for path, body in (
        (COMPLETION, {"prompt": "x" * 10_000}),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 300}]}),
    ):
        error = assert_error(shared.post(path, {**body, "stream": stream}), 400, code="context_length_exceeded")
        assert str(limit) in error["message"]
    assert "10001" in shared.complete("x" * 10_000).json()["error"]["message"]
    assert_error(shared.complete([1] * limit, stream=stream), 400, code="context_length_exceeded")


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("stream", [False, True])
def test_unknown_model(shared, path, stream):
    base = {"messages": USER} if path == CHAT else {"prompt": "hi"}
    error = assert_error(
        shared.post(path, {**base, "model": "nope", "stream": stream}), 404, "model", "model_not_found"
    )
    assert "nope" in error["message"] and "scripted" in error["message"]
    assert_error(shared.post(path, {**base, "model": "x" * 10**6}), 404, "model")


def test_models(shared):
    listed = httpx.get(f"{shared.url}/v1/models").json()
    [card] = listed["data"]
    assert listed["object"] == "list" and card["id"] == "scripted" and card["object"] == "model"
    assert httpx.get(f"{shared.url}/v1/models/scripted").json() == card
    for name in ("nope", "a/b", ""):
        assert_error(httpx.get(f"{shared.url}/v1/models/{name}"), 404, "model", "model_not_found")


@pytest.mark.parametrize(
    "body",
    [
        *("{", "", "[]", "5", "null", '"hi"', "{'a': 1}", '{"messages": [}', "nonsense"),
        *(b"\xff\xfe{}", b'{"messages": "\xc3("}', "[" * 100_000, '{"a": ' * 50_000, '{"seed": ' + "9" * 5000 + "}"),
        *('{"foo": NaN, "messages": [{"role": "user", "content": "hi"}]}',),
    ],
    ids=lambda body: str(body)[:12],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_malformed_json(shared, path, body):
    assert_error(send_raw(shared, body, path), 400)


def test_content_type(shared):
    body = json.dumps({"prompt": "hi"})
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "json"):
        assert_error(send_raw(shared, body, COMPLETION, kind), 415, code="unsupported_media_type")
    for kind in ("application/json; charset=utf-8", "Application/JSON", "application/ld+json", None):
        assert send_raw(shared, body, COMPLETION, kind).status_code == 200


@pytest.mark.parametrize("field", ["content", "prompt", "stop", "model", "user", "key"])
def test_lone_surrogates(shared, field):
    bad = '"\\ud83e"'
    bodies = {
        "content": f'{{"messages": [{{"role": "user", "content": {bad}}}]}}',
        "prompt": f'{{"prompt": {bad}}}',
        "key": f'{{"prompt": "hi", {bad}: 1}}',
    }
    body = bodies.get(field, f'{{"prompt": "hi", "{field}": {bad}}}')
    response = send_raw(shared, body, CHAT if field == "content" else COMPLETION)
    assert_error(response, 400, code="invalid_unicode")


def test_paired_surrogates(shared):
    assert send_raw(shared, '{"prompt": "\\ud83e\\udd8a"}', COMPLETION).status_code == 200


def test_content_parts(shared):
    def prompt_tokens(content):
        response = shared.post(CHAT, {"messages": [{"role": "user", "content": content}]})
        assert response.status_code == 200, response.text
        return response.json()["usage"]["prompt_tokens"]

    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert prompt_tokens(parts) == prompt_tokens("ab")
    messages = [*USER, {"role": "assistant", "content": None}, *USER]
    assert shared.post(CHAT, {"messages": messages}).status_code == 200


def test_roles(shared):
    messages = [{"role": role, "content": "x"} for role in ("system", "user", "assistant", "user")]
    as_system = shared.post(CHAT, {"messages": messages}).json()["usage"]
    messages[0]["role"] = "developer"
    assert shared.post(CHAT, {"messages": messages}).json()["usage"] == as_system


def test_max_completion_tokens_wins(shared):
    body = {"messages": USER, "max_tokens": 9, "max_completion_tokens": 3}
    response = shared.post(CHAT, body).json()
    assert response["usage"]["completion_tokens"] == 3
    assert response["choices"][0]["finish_reason"] == "length"


def test_body_limit(shared):
    big = b'{"prompt": "' + b"x" * (9 << 20) + b'"}'
    assert_error(send_raw(shared, big, COMPLETION), 413, code="body_too_large")

    def chunks():
        for _ in range(12):
            yield b"x" * (1 << 20)

    response = httpx.post(
        shared.url + COMPLETION, content=chunks(), headers={"Content-Type": "application/json"}, timeout=20
    )
    assert_error(response, 413, code="body_too_large")


def test_routes_and_methods(shared):
    for method, path, status in (
        ("GET", "/nope", 404),
        ("POST", "/v1/nope", 404),
        ("GET", "/v1/models/x/", 404),
        ("POST", "/v1/chat/completions/", 404),
        ("GET", CHAT, 405),
        ("DELETE", COMPLETION, 405),
        ("POST", "/health", 405),
        ("PUT", "/v1/models", 405),
        ("OPTIONS", CHAT, 405),
    ):
        response = httpx.request(method, shared.url + path)
        assert_error(response, status)
        if status == 405:
            assert response.headers["allow"]
    assert httpx.head(f"{shared.url}/health").status_code == 200


def test_alive_after_all_this(shared):
    shared.assert_alive()


@pytest.mark.parametrize("field", ["speculation", "stream_options", "chat_template_kwargs"])
def test_what_must_be_an_object_is_called_one(field):
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, field: [1]}
    with pytest.raises(RequestError, match=rf"^{field}: input should be an object, \[1\] given$"):
        parse_chat(json.dumps(body).encode())


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_a_form_that_leads_nowhere_is_no_fault_of_the_server(serve, path):
    live = serve(Script(reply=lambda prompt: "bd"))
    base = {"messages": USER} if path == CHAT else {"prompt": "hi"}
    fields = {**base, "temperature": 0, "structured_outputs": {"regex": "[bc]d(a?){3000}a{3000}"}}
    error = assert_error(live.post(path, fields), 400, None, "form_failed")
    assert "too complex" in error["message"] and "response_format" not in error["message"]
    last = [line for line in live.post(path, {**fields, "stream": True}).text.splitlines() if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"] == error
