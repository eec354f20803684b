"""Log-probabilities, echo and n over HTTP (failure cases d1, d4-d7, d9-d12, d14, b4)."""

import json
import math

import pytest
import torch
from transformers import LlamaForCausalLM

from fake_worker import MODEL, Script, events_of
from minispec.request import LOGPROB_FLOOR
from tokenizers_fixture import BOS, BYTE_VOCAB_SIZE

PROMPT = "abcabcabc"


def strict(response):
    """The body, which must hold finite numbers only."""
    assert response.status_code == 200, response.text
    return json.loads(response.text, parse_constant=lambda literal: pytest.fail(f"{literal} is not JSON"))


def without_names(body):
    """What must be equal between two answers to the same request."""
    usage = {key: value for key, value in body["usage"].items() if key.endswith("_tokens")}
    return {"choices": body["choices"], "usage": usage}


def streamed(chunks, path):
    """The choices of a stream put together, in the shape of an answer in one piece."""
    choices = {}
    for chunk in chunks:
        for piece in chunk["choices"]:
            whole = choices.setdefault(piece["index"], {"text": "", "logprobs": None, "finish_reason": None})
            assert whole["finish_reason"] is None, "nothing comes after the end"
            whole["text"] += piece["text"] if path == "complete" else piece["delta"].get("content", "")
            whole["finish_reason"] = piece["finish_reason"]
            if piece["logprobs"] is not None:
                if whole["logprobs"] is None:
                    whole["logprobs"] = {key: [] for key, value in piece["logprobs"].items() if value is not None}
                for key, value in whole["logprobs"].items():
                    value += piece["logprobs"][key]
    return [choices[index] for index in sorted(choices)]


def summed(choices):
    """Text, log-probabilities and finish reason of whole choices, likewise."""
    result = []
    for choice in choices:
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        logprobs = {key: value for key, value in (choice["logprobs"] or {}).items() if value is not None}
        result.append({"text": text, "logprobs": logprobs or None, "finish_reason": choice["finish_reason"]})
    return result


@pytest.mark.parametrize("temperature", [0, 1])
def test_speculation_changes_no_logprob(tiny, temperature):
    common = {"temperature": temperature, "seed": 5, "max_tokens": 30, "stop": ["zq"]}
    for fields in ({"prompt": PROMPT, "logprobs": 3}, {"prompt": PROMPT, "logprobs": 3, "echo": True}):
        plain, drafted = (
            without_names(strict(tiny.post("/v1/completions", {**common, **fields, "speculation": {"enabled": on}})))
            for on in (False, True)
        )
        for one, other in zip(plain["choices"], drafted["choices"], strict=True):
            one, other = one.pop("logprobs"), other.pop("logprobs")
            assert one["tokens"] == other["tokens"] and one["text_offset"] == other["text_offset"]
            assert [x for x in one["token_logprobs"] if x] == pytest.approx(
                [x for x in other["token_logprobs"] if x], abs=1e-4
            )
            assert [top and list(top) for top in one["top_logprobs"]] == [
                top and list(top) for top in other["top_logprobs"]
            ]
        assert plain == drafted


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_everything_together_is_the_same_with_speculation(tiny, temperature):
    """Log-probabilities, penalties, bias, min_p, a grammar, several choices and stops in one request."""
    fields = {
        "n": 3,
        "temperature": temperature,
        "seed": 9,
        "max_tokens": 40,
        "min_tokens": 4,
        "logprobs": 2,
        "echo": True,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.2,
        "repetition_penalty": 1.1,
        "logit_bias": {"97": 2, "98": -3},
        "min_p": 0.01,
        "stop": ["gg", "hh"],
        "structured_outputs": {"regex": "([a-h]{3} )*"},
    }
    plain, drafted = (
        strict(tiny.complete(["aha ", "bab cab "], **fields, speculation={"enabled": on})) for on in (False, True)
    )
    for one, other in zip(plain["choices"], drafted["choices"], strict=True):
        first, second = one.pop("logprobs"), other.pop("logprobs")
        assert first["tokens"] == second["tokens"] and first["text_offset"] == second["text_offset"]
        assert first["token_logprobs"][1:] == pytest.approx(second["token_logprobs"][1:], abs=1e-4)
    assert without_names(plain) == without_names(drafted)
    assert drafted["usage"]["speculation"]["drafted"] > plain["usage"]["speculation"]["drafted"]


def test_a_stop_string_cuts_text_and_not_tokens(serve):
    """Failure case b4: the whole body is the same with drafts and without."""
    bodies = []
    for drafts in (0, 5):
        server = serve(Script(reply=lambda prompt: "ab##cdefgh", drafts=drafts))
        body = strict(server.complete(stop="##", logprobs=2))
        [choice] = body["choices"]
        assert choice["text"] == "ab" and choice["finish_reason"] == "stop"
        assert choice["logprobs"]["tokens"] == ["a", "b", "#", "#"]
        assert body["usage"]["completion_tokens"] == 4
        bodies.append(without_names(body))
        chat = strict(server.chat(stop="##", logprobs=True))
        assert len(chat["choices"][0]["logprobs"]["content"]) == chat["usage"]["completion_tokens"] == 4
    assert bodies[0] == bodies[1]


def test_shapes(tiny):
    """Failure case d5."""
    for fields, count in (
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 4}, 4),
    ):
        [choice] = strict(tiny.chat(max_tokens=5, ignore_eos=True, **fields))["choices"]
        entries = choice["logprobs"]["content"]
        assert len(entries) == 5 and choice["logprobs"]["refusal"] is None
        for entry in entries:
            assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"} and len(entry["top_logprobs"]) == count
            assert entry["logprob"] <= 0
            tops = [top["logprob"] for top in entry["top_logprobs"]]
            assert tops == sorted(tops, reverse=True)
    assert strict(tiny.chat(max_tokens=5))["choices"][0]["logprobs"] is None
    for count in (0, 2):
        [choice] = strict(tiny.complete(max_tokens=5, ignore_eos=True, logprobs=count))["choices"]
        logprobs = choice["logprobs"]
        assert all(count <= len(top) <= count + 1 for top in logprobs["top_logprobs"])
        for token, logprob, top in zip(
            *(logprobs[key] for key in ("tokens", "token_logprobs", "top_logprobs")), strict=True
        ):
            assert top[token] == logprob
    assert strict(tiny.complete(max_tokens=5))["choices"][0]["logprobs"] is None


def test_numbers_are_finite(tiny):
    """Failure case d4: banned and padded tokens have a floor."""
    bias = {str(token): -100 for token in range(BYTE_VOCAB_SIZE)}
    body = strict(tiny.chat(logprobs=True, top_logprobs=20, logit_bias=bias, max_tokens=8, temperature=1))
    for entry in body["choices"][0]["logprobs"]["content"]:
        assert all(LOGPROB_FLOOR <= one["logprob"] <= 0 for one in (entry, *entry["top_logprobs"]))


@pytest.fixture(scope="module")
def oracle(tiny_model_folder):
    model = LlamaForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float32)

    def logprobs(ids):
        """Of each token but the first, given those before it."""
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, :, :BYTE_VOCAB_SIZE]
        rows = logits.log_softmax(-1)
        return [float(rows[i, token]) for i, token in enumerate(ids[1:])]

    return logprobs


@pytest.mark.parametrize("limit", [0, 1])
def test_echo_scores_the_prompt(tiny, oracle, limit):
    """Failure cases d6, d7."""
    body = strict(tiny.complete(PROMPT, echo=True, max_tokens=limit, logprobs=1, temperature=0, ignore_eos=True))
    [choice] = body["choices"]
    logprobs = choice["logprobs"]
    ids = [BOS, *PROMPT.encode()]
    assert choice["text"].startswith(PROMPT) and choice["finish_reason"] == "length"
    assert choice["text"] == PROMPT or limit
    assert body["usage"]["prompt_tokens"] == len(ids) and body["usage"]["completion_tokens"] == limit
    assert len(logprobs["tokens"]) == len(ids) + limit
    assert logprobs["tokens"][: len(ids)] == ["<|bos|>", *PROMPT] and logprobs["text_offset"][:4] == [0, 0, 1, 2]
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1 : len(ids)] == pytest.approx(oracle(ids), abs=1e-4)


def test_echo_of_several_prompts_and_of_ids(tiny):
    body = strict(tiny.complete(["ab", "xyz"], echo=True, max_tokens=3, n=2, ignore_eos=True))
    texts = [choice["text"] for choice in body["choices"]]
    assert [text.startswith("ab" if i < 2 else "xyz") for i, text in enumerate(texts)] == [True] * 4
    assert body["usage"]["prompt_tokens"] == 3 + 4 and body["usage"]["completion_tokens"] == 12
    assert strict(tiny.complete([104, 105], echo=True, max_tokens=0))["choices"][0]["text"] == "hi"
    *chunks, _ = events_of(tiny.complete(["ab", "xyz"], echo=True, max_tokens=3, stream=True, ignore_eos=True).text)
    first = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            first.setdefault(choice["index"], choice["text"])
    assert first[0].startswith("ab") and first[1].startswith("xyz")


def test_prompt_logprobs(tiny, oracle):
    ids = [BOS, *PROMPT.encode()]
    for body in (
        tiny.complete(PROMPT, prompt_logprobs=2, max_tokens=1),
        tiny.complete(ids, prompt_logprobs=0, max_tokens=1),
    ):
        first, *others = strict(body)["choices"][0]["prompt_logprobs"]
        assert first is None
        scores = [entry[str(token)]["logprob"] for entry, token in zip(others, ids[1:], strict=True)]
        assert scores == pytest.approx(oracle(ids), abs=1e-4)
    assert len(strict(tiny.chat(prompt_logprobs=1, max_tokens=1))["choices"][0]["prompt_logprobs"]) > 5
    assert "prompt_logprobs" not in strict(tiny.complete(max_tokens=1))["choices"][0]


def test_choices_differ_and_come_again(tiny):
    """Failure case d9."""
    fields = {"temperature": 1, "max_tokens": 12, "ignore_eos": True, "seed": 7}
    four = strict(tiny.complete(PROMPT, n=4, **fields))["choices"]
    assert [choice["index"] for choice in four] == [0, 1, 2, 3]
    assert len({choice["text"] for choice in four}) == 4
    assert strict(tiny.complete(PROMPT, n=4, **fields))["choices"] == four
    assert strict(tiny.complete(PROMPT, **fields))["choices"][0] == four[0]
    assert (
        len({choice["text"] for choice in strict(tiny.complete(PROMPT, n=4, temperature=1, max_tokens=12))["choices"]})
        == 4
    )


@pytest.mark.parametrize("path", ["chat", "complete"])
def test_each_choice_streams_to_its_own_end(tiny, path):
    """Failure case d10, and logprobs in streams (d14)."""
    fields = {"n": 6, "seed": 3, "temperature": 1, "max_tokens": 24, "stop": ["e", "t", "a"]}
    fields["logprobs"] = 2 if path == "complete" else True
    whole = strict(getattr(tiny, path)(PROMPT, **fields))
    *chunks, last, done = events_of(
        getattr(tiny, path)(PROMPT, stream=True, stream_options={"include_usage": True}, **fields).text
    )
    assert done == "[DONE]"
    own = streamed(chunks, path)
    assert len(own) == 6 and own == summed(whole["choices"])
    assert len({len(choice["text"]) for choice in own}) > 1, "they should end at different times"
    assert without_names({**last, "choices": []}) == without_names({**whole, "choices": []})
    counts = [len(choice["logprobs"]["tokens" if path == "complete" else "content"]) for choice in own]
    assert sum(counts) == whole["usage"]["completion_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_usage_of_several_choices(tiny, stream):
    """Failure case d11."""
    fields = {"n": 4, "max_tokens": 6, "ignore_eos": True}
    if stream:
        response = tiny.complete([1, 2, 3], stream=True, stream_options={"include_usage": True}, **fields)
        usage = events_of(response.text)[-2]["usage"]
    else:
        usage = strict(tiny.complete([1, 2, 3], **fields))["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 24, 27)
    assert usage["prompt_tokens_details"]["cached_tokens"] <= 3


@pytest.mark.parametrize("drafts", [0, 3])
def test_bytes_of_split_characters(serve, drafts):
    """Failure case d12: every token has its own bytes, and together they are the text."""
    server = serve(Script(reply=lambda prompt: "a🔥ż", drafts=drafts))
    whole = strict(server.chat(logprobs=True, top_logprobs=1))
    entries = whole["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in entries] == [[97], [240], [159], [148], [165], [197], [188], None]
    assert entries[-1]["token"] == "<|eos|>" and len(entries) == whole["usage"]["completion_tokens"]
    joined = bytes(byte for entry in entries for byte in entry["bytes"] or ())
    assert joined.decode() == whole["choices"][0]["message"]["content"] == "a🔥ż"
    *chunks, _ = events_of(server.chat(logprobs=True, top_logprobs=1, stream=True).text)
    assert streamed(chunks, "chat") == summed(whole["choices"])
    assert all(choice["logprobs"] is None or choice["logprobs"]["content"] for c in chunks for choice in c["choices"])
    logprobs = strict(server.complete(logprobs=0))["choices"][0]["logprobs"]
    assert logprobs["tokens"][:3] == ["a", "bytes:\\xf0", "bytes:\\x9f"]
    assert logprobs["text_offset"] == [0, 1, 1, 1, 1, 2, 2, 3]


@pytest.mark.parametrize("limit", [1, 2, 3, 5])
def test_entries_without_text(serve, limit):
    """Failure case d14: held-back text and half a character have entries too."""
    server = serve(Script(reply=lambda prompt: "x🔥", drafts=2))
    for fields in ({"stop": ["xyz"]}, {}):
        whole = strict(server.chat(logprobs=True, max_tokens=limit, **fields))
        assert len(whole["choices"][0]["logprobs"]["content"]) == limit == whole["usage"]["completion_tokens"]
        *chunks, _ = events_of(server.chat(logprobs=True, max_tokens=limit, stream=True, **fields).text)
        assert streamed(chunks, "chat") == summed(whole["choices"])


def test_stop_tokens_and_their_entries(serve):
    server = serve(Script(reply=lambda prompt: "abcabc", drafts=4))
    whole = strict(server.complete(stop_token_ids=[ord("c")], logprobs=0))
    [choice] = whole["choices"]
    assert choice["text"] == "ab" and choice["finish_reason"] == "stop" and whole["usage"]["completion_tokens"] == 3
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert all(math.isfinite(logprob) for logprob in choice["logprobs"]["token_logprobs"])
    ignoring = strict(server.complete(stop_token_ids=[ord("c")], ignore_eos=True, min_tokens=4, max_tokens=20))
    assert ignoring["choices"][0]["text"][:3] != "abc" or ignoring["usage"]["completion_tokens"] >= 4


def test_openai_client_reads_them(serve):
    import openai

    server = serve(Script(reply=lambda prompt: "Hi", drafts=1))
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        messages = [{"role": "user", "content": "hi"}]
        answer = client.chat.completions.create(
            model=MODEL, messages=messages, logprobs=True, top_logprobs=2, n=2, seed=1
        )
        for choice in answer.choices:
            assert [entry.token for entry in choice.logprobs.content] == ["H", "i", "<|eos|>"]
            assert len(choice.logprobs.content[0].top_logprobs) == 2
        scored = client.completions.create(model=MODEL, prompt="abc", echo=True, logprobs=1, max_tokens=0)
        assert scored.choices[0].text == "abc" and scored.choices[0].logprobs.token_logprobs[0] is None
        assert scored.usage.completion_tokens == 0
