"""The OpenAPI document is true: every route, every field, every limit, and the answers."""

import json
import re
from pathlib import Path

import httpx
import jsonschema
import pytest

from fake_worker import Script, events_of
from minispec.server import schema
from minispec.server.openapi import openapi_document
from minispec.server.response_schema import (
    ChatChunk,
    ChatCompletion,
    Completion,
    CompletionChunk,
    DetokenizeAnswer,
    ErrorBody,
    HealthBody,
    ModelCard,
    ModelList,
    TokenizeAnswer,
    UnhealthyBody,
)
from minispec.server.tools import Tool
from tokenizers_fixture import BOS

DOCS = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
}


def test_every_route_is_in_the_document(shared):
    document = httpx.get(f"{shared.url}/openapi.json").json()
    assert document == json.loads(json.dumps(openapi_document()))
    described = {
        (path.replace("{model}", "{model:path}"), method.upper())
        for path, item in document["paths"].items()
        for method in item
        if method in ("get", "post")
    }
    real = {(route.path, method) for route in shared.api.routes() for method in route.methods or () if method != "HEAD"}
    assert described == real


def test_every_reference_has_its_schema():
    document = openapi_document()
    schemas = document["components"]["schemas"]
    for name in re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)):
        assert name in schemas
    for one in schemas.values():
        jsonschema.Draft202012Validator.check_schema(one)


@pytest.mark.parametrize("kind", [schema.ChatBody, schema.CompletionBody, schema.TokenizeBody, schema.DetokenizeBody])
def test_every_field_is_documented(kind):
    properties = openapi_document()["components"]["schemas"][kind.__name__]["properties"]
    assert set(properties) == {field.alias or name for name, field in kind.model_fields.items()}
    for name in properties:
        assert f"`{name}`" in DOCS, name


def test_every_unsupported_field_is_documented():
    for name in {**schema.UNSUPPORTED_CHAT, **schema.UNSUPPORTED_COMPLETION}:
        assert f"`{name}`" in DOCS, name
    assert not schema.UNSUPPORTED_CHAT.keys() & schema.ChatBody.model_fields.keys()
    assert not schema.UNSUPPORTED_COMPLETION.keys() & schema.CompletionBody.model_fields.keys()


@pytest.mark.parametrize("path", BODIES)
def test_limits_are_those_that_hold(serve, path):
    """The document's bounds are accepted, what lies beyond is refused, naming the field."""
    shared = serve(max_waiting=schema.MAX_CHOICES)
    reference = openapi_document()["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"][
        "$ref"
    ]
    properties = openapi_document()["components"]["schemas"][reference.rsplit("/", 1)[1]]["properties"]
    bounded = {
        name: one
        for name, one in properties.items()
        if one.keys() & {"minimum", "maximum", "maxItems", "maxProperties"}
    }
    assert len(bounded) > 12
    extra = {"top_logprobs": {"logprobs": True}, "n": {"max_tokens": 1}, "min_tokens": {"max_tokens": 1}}
    items = {"stop_token_ids": 5, "tools": None}
    for name, one in bounded.items():
        for key, step in (("minimum", -1), ("maximum", 1)):
            if key not in one:
                continue
            edge = one[key]
            body = {**BODIES[path], **extra.get(name, {})}
            accepted = shared.post(path, {**body, name: edge})
            assert accepted.status_code == 200, (name, edge, accepted.text)
            refused = shared.post(path, {**body, name: edge + step})
            assert refused.status_code == 400, (name, edge + step)
            assert refused.json()["error"]["param"] == name
        if items.get(name) is not None:
            counts = (one["maxItems"], one["maxItems"] + 1)
            answers = [shared.post(path, {**BODIES[path], name: [items[name]] * count}) for count in counts]
            assert [answer.status_code for answer in answers] == [200, 400], name


def test_answers_are_as_described(serve):
    server = serve(Script(reply=lambda prompt: "Hi", drafts=2))
    options = {"trace": True, "n": 2}
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    for path, whole, chunk, more in (
        ("/v1/chat/completions", ChatCompletion, ChatChunk, {"logprobs": True, "top_logprobs": 2}),
        ("/v1/completions", Completion, CompletionChunk, {"logprobs": 2, "echo": True}),
    ):
        for extra in ({}, {**options, **more}):
            body = {**BODIES[path], **extra}
            whole.model_validate_json(server.post(path, body).text)
            *chunks, _ = events_of(server.post(path, {**body, **usage}).text)
            for one in chunks:
                chunk.model_validate_json(json.dumps(one))
    ModelList.model_validate_json(httpx.get(f"{server.url}/v1/models").text)
    ModelCard.model_validate_json(httpx.get(f"{server.url}/v1/models/scripted").text)
    HealthBody.model_validate_json(httpx.get(f"{server.url}/health").text)
    ErrorBody.model_validate_json(httpx.get(f"{server.url}/nope").text)
    server.api.draining = True
    UnhealthyBody.model_validate_json(httpx.get(f"{server.url}/health").text)


def test_tokenize_and_detokenize(shared):
    answer = shared.post("/tokenize", {"prompt": "hé"})
    body = TokenizeAnswer.model_validate_json(answer.text)
    assert body.tokens == [BOS, *"hé".encode()] and body.count == 4 and body.max_model_len == shared.engine.max_context
    assert shared.post("/tokenize", {"prompt": "h", "add_special_tokens": False}).json()["tokens"] == [104]
    assert shared.post("/tokenize", {"prompt": ""}).json()["count"] == 1
    chat = shared.post("/tokenize", {"messages": [{"role": "user", "content": "h<|im_end|>"}]}).json()
    assert chat["count"] == shared.chat("h<|im_end|>").json()["usage"]["prompt_tokens"]
    text = shared.post("/detokenize", {"tokens": chat["tokens"]})
    assert DetokenizeAnswer.model_validate_json(text.text).prompt == (
        "<|im_start|>user\nh<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    )
    assert shared.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}
    for path, body, status, param in (
        ("/tokenize", {}, 400, None),
        ("/tokenize", {"prompt": "a", "messages": []}, 400, None),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, 400, None),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": "a", "model": "nope"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [10**6]}, 400, "tokens"),
        ("/detokenize", {"tokens": [True]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [1], "model": "nope"}, 404, "model"),
    ):
        response = shared.post(path, body)
        assert (response.status_code, response.json()["error"]["param"]) == (status, param), (path, body, response.text)


def test_names_of_functions_are_limited_as_described():
    pattern = Tool.model_json_schema()["$defs"]["Function"]["properties"]["name"]["pattern"]
    assert re.search(pattern, "get_weather-2.x") and not re.search(pattern, "a b") and not re.search(pattern, "a" * 65)
