"""The offline Python API, over tiny model folders."""

from __future__ import annotations

import pytest

from minispec.containment import EngineFailed
from minispec.errors import RequestError
from minispec.llm import LLM
from minispec.request import SamplingParams
from tiny_folders import tiny_folder
from tokenizers_fixture import BOS, EOS, IM_END, IM_START

SETTINGS = {"device": "cpu", "dtype": "float32", "max_context": 128, "max_slots": 3, "page_size": 8}
DRAFTS = ("none", "ngram", "itself", "other")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {"itself": tiny_folder(root / "target"), "other": tiny_folder(root / "draft", seed=1, layers=1)}


@pytest.fixture(scope="module")
def llms(folders):
    target = folders["itself"]
    return {draft: LLM(str(target), str(folders.get(draft, draft)), **SETTINGS) for draft in DRAFTS}


@pytest.fixture
def llm(llms):
    yield llms["ngram"]
    nothing_is_left(llms["ngram"])


def nothing_is_left(llm: LLM) -> None:
    assert not llm.engine.has_work and llm.engine.pool.owned == 0
    llm.engine.check()


def greedy(max_tokens: int = 12, **params) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, **params)


def tokens_of(text: str) -> list[int]:
    return [BOS, *text.encode()]


def test_strings_and_ids(llm):
    [a] = llm.generate("Hello", greedy())
    [b] = llm.generate(tokens_of("Hello"), greedy())
    [c] = llm.generate(tuple(tokens_of("Hello")), greedy())
    d, e = llm.generate(["Hello", tokens_of("Hello")], greedy())
    assert a.token_ids == b.token_ids == c.token_ids == d.token_ids == e.token_ids
    assert a.text == llm.engine.tokenizer.decode(a.token_ids) and len(a.token_ids) == 12
    assert a.finish_reason == "length"
    assert llm.generate([], greedy()) == []


def test_usage(llms):
    for draft, llm in llms.items():
        [output] = llm.generate("Hello", greedy(21))
        speculation = output.usage["speculation"]
        assert output.usage == {
            "prompt_tokens": 6,
            "completion_tokens": 21,
            "total_tokens": 27,
            "prompt_tokens_details": {"cached_tokens": 0},
            "speculation": speculation,
        }
        assert set(speculation) == {"steps", "drafted", "accepted", "acceptance_length"}
        assert speculation["acceptance_length"] == pytest.approx(20 / speculation["steps"], abs=1e-4)
        assert 0 <= speculation["accepted"] <= speculation["drafted"]
        if draft == "none":
            assert speculation == {"steps": 20, "drafted": 0, "accepted": 0, "acceptance_length": 1.0}


@pytest.mark.parametrize(
    "params", [greedy(40), SamplingParams(max_tokens=40, temperature=0.8, top_p=0.9, seed=3, ignore_eos=True)]
)
def test_the_draft_does_not_change_the_text(llms, params):
    prompts = ["Hello", "abcabcabcabc", "x"]
    expected = [output.token_ids for output in llms["none"].generate(prompts, params)]
    for llm in llms.values():
        assert [output.token_ids for output in llm.generate(prompts, params)] == expected
        nothing_is_left(llm)


def test_a_folder_as_draft_drafts(llms, folders):
    llms["itself"].generate("Hello", greedy(40))
    stats = llms["itself"].engine.stats
    assert stats.drafted > 0 and llms["itself"].engine.description["draft"] == str(folders["itself"])
    assert llms["none"].engine.stats.drafted == 0


def test_outputs_come_in_the_order_of_the_prompts(llm):
    """Also where later ones end first and more are given than run at once."""
    prompts = [f"prompt {i}" for i in range(7)]
    params = [greedy(20 - 2 * i) for i in range(7)]
    together = llm.generate(prompts, params)
    assert [len(output.token_ids) for output in together] == [20 - 2 * i for i in range(7)]
    for prompt, one, output in zip(prompts, params, together, strict=True):
        assert llm.generate(prompt, one)[0].token_ids == output.token_ids


def test_a_seed_is_a_text(llm):
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=5, ignore_eos=True)
    [first], [again] = llm.generate("Hello", params), llm.generate("Hello", params)
    assert first.token_ids == again.token_ids
    one, two = llm.generate(["Hello"] * 2, SamplingParams(max_tokens=20, ignore_eos=True))
    assert one.token_ids != two.token_ids


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (["fine", []], greedy(), "the prompt is empty"),
        ([[1, 2], [1, 260]], greedy(), "from 0 to 259, not 260"),
        (["fine", "x" * 127], greedy(), "128 tokens; the prompt has 128 tokens"),
        (["fine", "fine"], [greedy()], "2 prompts need as many SamplingParams, or one; 1 given"),
        ("fine", [], "1 prompts need as many SamplingParams, or one; 0 given"),
        (["fine", "\ud83e"], greedy(), "surrogate"),
    ],
)
def test_a_bad_request_is_refused_before_anything_runs(llm, prompts, params, message):
    steps = llm.engine.stats.steps
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, params)
    assert llm.engine.stats.steps == steps


def text_of(llm, prompt: str, count: int) -> str:
    return llm.generate(prompt, greedy(count))[0].text


def test_stop_strings(llms):
    for llm in llms.values():
        text = text_of(llm, "Hello", 60)
        start = next(i for i in range(5, len(text)) if text.find(text[i : i + 2]) == i)
        [output] = llm.generate("Hello", greedy(60, stop=(text[start : start + 2],)))
        assert output.text == text[:start] and output.finish_reason == "stop"


def test_end_of_sequence(llm):
    """Whether and when the model ends its text, nothing follows an end token unless that is ignored."""
    params = [{"max_tokens": 60, "temperature": 1.5, "seed": seed} for seed in range(12)]
    on = llm.generate(["Hello"] * 12, [SamplingParams(**one, ignore_eos=True) for one in params])
    off = llm.generate(["Hello"] * 12, [SamplingParams(**one) for one in params])
    ended = 0
    for ignored, kept in zip(on, off, strict=True):
        assert len(ignored.token_ids) == 60 and ignored.finish_reason == "length"
        end = ignored.token_ids.index(EOS) + 1 if EOS in ignored.token_ids else 60
        assert kept.token_ids == ignored.token_ids[:end] and kept.usage["completion_tokens"] == end
        assert kept.finish_reason == ("length" if EOS not in kept.token_ids else "stop")
        ended += EOS in ignored.token_ids
    assert 0 < ended < 12


def test_the_context_ends_a_request(llm):
    [output] = llm.generate("x" * 119, SamplingParams(temperature=0, ignore_eos=True))
    assert len(output.token_ids) == 8 and output.finish_reason == "length"


def test_chat(llm):
    messages = [{"role": "user", "content": "Hi"}]
    rendered = [IM_START, *b"user\nHi", IM_END, *b"\n", IM_START, *b"assistant\n"]
    [answer] = llm.chat(messages, greedy())
    assert answer.token_ids == llm.generate(rendered, greedy())[0].token_ids
    assert answer.usage["prompt_tokens"] == len(rendered)
    both = llm.chat([messages, [{"role": "user", "content": "Ho"}]], [greedy(5), greedy(6)])
    assert [len(output.token_ids) for output in both] == [5, 6]
    assert both[0].token_ids == answer.token_ids[:5]
    with pytest.raises(RequestError, match="no messages"):
        llm.chat([], greedy())


@pytest.mark.parametrize("prompt", ["Hello", tokens_of("Hello"), [{"role": "user", "content": "Hi"}]], ids=str)
def test_a_stream_gives_what_generate_gives(llm, prompt):
    events = list(llm.stream(prompt, greedy(30)))
    [output] = llm.chat(prompt, greedy(30)) if isinstance(prompt[0], dict) else llm.generate(prompt, greedy(30))
    assert [token for event in events for token in event.tokens] == output.token_ids
    assert "".join(event.text for event in events) == output.text
    assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1].finish_reason == "length"


def test_a_closed_stream_is_cancelled(llms):
    for llm in llms.values():
        stream = llm.stream("Hello", greedy(100))
        request = next(stream).request
        next(stream)
        assert llm.engine.has_work
        stream.close()
        assert request.finish_reason == "abort"
        nothing_is_left(llm)


def test_a_stream_that_was_not_begun_costs_nothing(llm):
    steps = llm.engine.stats.steps
    llm.stream("Hello", greedy()).close()
    assert llm.engine.stats.steps == steps


def test_streams_side_by_side_get_their_own_events(llm):
    first, second = llm.stream("Hello", greedy(30)), llm.stream("World", greedy(20))
    texts = {first: [], second: []}
    for _ in range(3):
        for stream in (first, second):
            texts[stream] += next(stream).tokens
    [between] = llm.generate("Between", greedy(25))
    for stream in (second, first):
        for event in stream:
            texts[stream] += event.tokens
    assert texts[first] == llm.generate("Hello", greedy(30))[0].token_ids
    assert texts[second] == llm.generate("World", greedy(20))[0].token_ids
    assert between.token_ids == llm.generate("Between", greedy(25))[0].token_ids


def test_a_fault_in_one_prompt_is_that_ones_error(llm):
    alone = llm.generate("Hello", greedy(30))[0]

    def fail(stage, requests):
        if stage == "sample" and any(bytes(request.prompt[-5:]) == b"World" for request in requests):
            raise RuntimeError("boom")

    llm.engine.on_stage = fail
    good, bad = llm.generate(["Hello", "World"], greedy(30))
    llm.engine.on_stage = None
    assert good.token_ids == alone.token_ids and good.error is None
    assert bad.finish_reason == "error" and "sample" in bad.error
    nothing_is_left(llm)


def test_a_fatal_fault_leaves_nothing_behind(llm, monkeypatch):
    forward, calls = llm.engine.runner.forward, 0

    def breaks(*args, **named):
        nonlocal calls
        calls += 1
        if calls >= 4:
            raise RuntimeError("boom")
        return forward(*args, **named)

    monkeypatch.setattr(llm.engine.runner, "forward", breaks)
    with pytest.raises(EngineFailed, match="boom"):
        llm.generate(["Hello", "World"], greedy(90))
    nothing_is_left(llm)
    monkeypatch.undo()
    assert len(llm.generate("Hello", greedy())[0].token_ids) == 12


def test_the_models_defaults_are_used_where_none_are_given(tmp_path):
    folder = tiny_folder(tmp_path / "m", generation={"temperature": 0.7, "top_p": 0.8, "top_k": 20})
    llm = LLM(str(folder), "none", **SETTINGS)
    assert llm.default_params() == SamplingParams(temperature=0.7, top_p=0.8, top_k=20)
    # what is given wins, also where it is nothing
    params = llm.default_params(temperature=0, top_k=0, max_tokens=5)
    assert params == SamplingParams(temperature=0, top_p=0.8, top_k=0, max_tokens=5)
    assert len(llm.generate("Hello", params)[0].token_ids) <= 5


def test_a_greedy_model_is_greedy_by_default(tmp_path):
    folder = tiny_folder(tmp_path / "m", generation={"do_sample": False, "temperature": 0.7}, max_position=24)
    llm = LLM(str(folder), "none", device="cpu", dtype="float32", max_slots=1)
    [first], [again] = llm.generate("Hello"), llm.generate("Hello")
    assert first == again and 1 <= len(first.token_ids) <= 24 - 6


@pytest.mark.parametrize("prompts", [5, [None], ["Hi", 7.5]])
def test_a_prompt_that_is_neither_text_nor_ids_is_named(llm, prompts):
    with pytest.raises(RequestError, match="must be a string or a list of token ids, not"):
        llm.generate(prompts)


def test_log_probabilities_come_with_the_output(llm):
    [plain] = llm.generate("Hello", greedy())
    assert plain.logprobs is None and plain.prompt_logprobs is None
    [scored] = llm.generate("Hello", greedy(logprobs=2, prompt_logprobs=0))
    assert [entry.token for entry in scored.logprobs] == scored.token_ids == plain.token_ids
    assert all(entry.top[0] == (entry.token, entry.logprob) and len(entry.top) == 2 for entry in scored.logprobs)
    assert scored.prompt_logprobs[0] is None
    assert [entry.token for entry in scored.prompt_logprobs[1:]] == tokens_of("Hello")[1:]
    [only] = llm.generate("Hello", SamplingParams(max_tokens=0, prompt_logprobs=1))
    assert (only.text, only.token_ids, only.finish_reason, only.logprobs) == ("", [], "length", None)
    assert [entry.logprob for entry in only.prompt_logprobs[1:]] == pytest.approx(
        [entry.logprob for entry in scored.prompt_logprobs[1:]], abs=1e-4
    )
