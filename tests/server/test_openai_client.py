"""The official client against the server, feature by feature, with a real (tiny, random) model."""

import asyncio
from typing import Literal

import openai
import pytest
from openai.types.chat import ChatCompletion
from pydantic import BaseModel

from fake_worker import Script

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def client(tiny):
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0) as one:
        yield one


@pytest.fixture
def chat(client):
    """chat(**fields): a short greedy answer."""
    model = client.models.list().data[0].id

    def create(**fields) -> ChatCompletion:
        return client.chat.completions.create(
            **{"model": model, "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 8, **fields}
        )

    return create


def text(answer):
    return answer.choices[0].message.content


def test_models(client):
    [model] = client.models.list()
    assert client.models.retrieve(model.id) == model and model.owned_by == "minispec"


def test_sampling(chat):
    plain = chat(extra_body={"ignore_eos": True})
    assert plain.usage.completion_tokens == 8 and plain.choices[0].finish_reason == "length"
    assert text(chat(top_p=0, temperature=1)) == text(chat(extra_body={"top_k": 1}, temperature=2)) == text(chat())
    assert text(chat(temperature=1, seed=3)) == text(chat(temperature=1, seed=3)) != text(chat(temperature=1, seed=4))
    assert chat(temperature=1, extra_body={"min_p": 0.5, "repetition_penalty": 1.3}).choices


def test_penalties_and_bias(chat):
    a = ord("a")
    assert text(chat(logit_bias={str(a): 100})) == "a" * 8
    # two tokens far above the rest: a penalty makes them take turns
    two = {str(a): 100, str(a + 1): 99}
    often = text(chat(logit_bias=two, frequency_penalty=2))
    assert set(often) == {"a", "b"} and min(often.count("a"), often.count("b")) >= 3
    assert set(text(chat(logit_bias=two, presence_penalty=2))) == {"a", "b"}


def test_ends(chat):
    bias = {str(ord(letter)): 100 - number for number, letter in enumerate("abc")}
    fields = {"logit_bias": bias, "presence_penalty": 1.5}  # "abcaaa…": each letter once before the first comes again
    whole = text(chat(**fields))
    assert whole.startswith("ab")
    stopped = chat(stop=["b"], **fields)
    assert text(stopped) == "a" and stopped.choices[0].finish_reason == "stop"
    assert text(chat(extra_body={"stop_token_ids": [ord("b")]}, **fields)) == "a"
    assert text(chat(stop="b", extra_body={"min_tokens": 8}, **fields)) == whole


def test_several_choices(chat):
    answer = chat(n=3, temperature=1, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 3


def test_logprobs(chat):
    entries = chat(logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert all(len(entry.top_logprobs) == 3 and entry.top_logprobs[0].logprob == entry.logprob for entry in entries)


def test_streams(client, chat):
    whole = chat()
    with client.chat.completions.create(
        model=whole.model,
        messages=MESSAGES,
        temperature=0,
        max_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        *chunks, last = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text(whole)
    assert last.usage.completion_tokens == whole.usage.completion_tokens and last.choices == []


class Weather(BaseModel):
    unit: Literal["C", "F"]
    days: Literal[1, 2, 3]


def test_parsed_answers(client, chat):
    model = chat().model
    parsed = client.chat.completions.parse(
        model=model, messages=MESSAGES, response_format=Weather, temperature=1, seed=2
    )
    assert isinstance(parsed.choices[0].message.parsed, Weather)
    with client.chat.completions.stream(
        model=model, messages=MESSAGES, response_format=Weather, temperature=1
    ) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Weather)
    for form in ({"choice": ["yes", "no"]}, {"regex": "yes|no"}, {"grammar": 'start: "yes" | "no"'}):
        assert text(chat(extra_body={"structured_outputs": form}, temperature=1)) in ("yes", "no")
    assert text(chat(response_format={"type": "json_object"}))[0] == "{"


def test_going_on_with_a_message(chat):
    messages = [*MESSAGES, {"role": "assistant", "content": "I th"}]
    new_turn, continued = chat(messages=messages), chat(messages=messages, extra_body={"continue_final_message": True})
    assert continued.usage.prompt_tokens < new_turn.usage.prompt_tokens


def test_speculation_is_told(chat):
    usage = chat(extra_body={"speculation": {"enabled": False}}).usage
    assert usage.model_extra["speculation"]["drafted"] == 0 and usage.prompt_tokens_details.cached_tokens >= 0


def test_completions(client, chat):
    model = chat().model
    answer = client.completions.create(
        model=model, prompt=["ab", "cd"], n=2, max_tokens=4, echo=True, logprobs=1, seed=1
    )
    assert [choice.text[:2] for choice in answer.choices] == ["ab", "ab", "cd", "cd"]
    assert all(choice.logprobs.token_logprobs[0] is None for choice in answer.choices)
    ids = client.completions.create(model=model, prompt=[1, 2, 3], max_tokens=2, extra_body={"ignore_eos": True})
    assert ids.usage.prompt_tokens == 3 and ids.usage.completion_tokens == 2


def test_errors_are_of_the_clients_kinds(client, chat, serve):
    model = chat().model
    with pytest.raises(openai.BadRequestError) as refused:
        chat(temperature=3)
    assert refused.value.param == "temperature" and refused.value.request_id
    with pytest.raises(openai.BadRequestError, match=r"512"):
        client.completions.create(model=model, prompt="x" * 600)
    with pytest.raises(openai.NotFoundError):
        chat(model="nope")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=model, input="x")
    server = serve(Script(), options={"api_keys": ("key",)}, max_slots=1, max_waiting=0)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError):
            stranger.models.list()
        friend = stranger.with_options(api_key="key")
        assert friend.models.list().data
        server.script.gate.clear()
        stream = friend.completions.create(model="scripted", prompt="hi", stream=True)
        with pytest.raises(openai.RateLimitError) as full:
            friend.completions.create(model="scripted", prompt="hi")
        assert full.value.response.headers["retry-after"] and full.value.code == "queue_full"
        server.script.gate.set()
        assert "".join(chunk.choices[0].text for chunk in stream) == "Hello, world!"


def test_raw_answers_carry_the_request_id(client):
    answer = client.models.with_raw_response.list(extra_headers={"X-Request-Id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"


def test_the_async_client(tiny, chat):
    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0) as client:
            fields = {"model": chat().model, "messages": MESSAGES, "temperature": 0, "max_tokens": 8}
            whole = await client.chat.completions.create(**fields)
            pieces = [
                chunk.choices[0].delta.content or ""
                async for chunk in await client.chat.completions.create(**fields, stream=True)
            ]
            return text(whole), "".join(pieces)

    whole, joined = asyncio.run(ask())
    assert whole == joined == text(chat())
