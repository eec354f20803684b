"""What requests change in the target's distribution, and what is told of it, at every drafted position."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from minispec.batch import Span
from minispec.edits import Editor
from minispec.errors import RequestError
from minispec.kernels.edit_logits import edit_logits_ref
from minispec.request import LOGPROB_FLOOR, MAX_LOGIT_BIAS, FinishReason, Request, SamplingParams
from minispec.tree import DraftTree
from scripted import ScriptedDrafter, chain, generate, run, scripted_engine, table
from tiny_engine import VOCAB, tiny_engine

X, Y, Z = 1, 2, 3


def constant(*logits: float):
    return lambda prefix: list(logits)


def drafting(*tokens: int) -> ScriptedDrafter:
    return ScriptedDrafter(lambda text: chain(tokens))


# Penalties


@pytest.mark.parametrize("drafter", [None, drafting(X, X, X), drafting(X, Y, X)], ids=["plain", "xxx", "xyx"])
def test_a_frequency_penalty_counts_the_drafted_path(drafter):
    engine = scripted_engine(constant(0.0, 10.0, 9.0), 3, drafter)
    assert generate(engine, [0], frequency_penalty=0.6, max_tokens=8).output == [X, X, Y, X, Y, X, Y, X]


@pytest.mark.parametrize("drafter", [None, drafting(Z, Z, Z), drafting(X, X, X)], ids=["plain", "zzz", "xxx"])
def test_rejected_drafts_leave_no_penalty(drafter):
    engine = scripted_engine(constant(0.0, 10.0, 9.8, 9.7), 4, drafter)
    assert generate(engine, [0], presence_penalty=0.5, max_tokens=8).output == [X, Y, Z, X, X, X, X, X]


@pytest.mark.parametrize("drafter", [None, drafting(Y, Y), drafting(X, Y, Z)], ids=["plain", "yy", "xyz"])
def test_a_repetition_penalty_counts_the_prompt_too(drafter):
    """Of the logits 2, 1.9, -1, -1.3 the prompt's token falls to 1 at once, and -1 would double once it came."""
    engine = scripted_engine(constant(2.0, 1.9, -1.0, -1.3), 4, drafter)
    assert generate(engine, [0], repetition_penalty=2.0, max_tokens=3).output == [X, 0, 0]
    bias = {0: -100.0, 1: -100.0}
    assert generate(engine, [0], repetition_penalty=2.0, logit_bias=bias, max_tokens=3).output == [Y, Z, Y]


def edits_by_definition(request: Request, path: list[int], logits: list[float]) -> list[float]:
    """The formula over the whole vocabulary, counts taken anew."""
    params, output = request.params, [*request.output, *path]
    edited = []
    for token, x in enumerate(logits):
        count = output.count(token)
        if count or token in request.prompt:
            x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        x -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        x += params.logit_bias.get(token, 0.0)
        if len(output) < params.min_tokens and token in request.end_ids:
            x = -math.inf
        edited.append(x)
    return edited


def random_tree(rng: random.Random, root: int, vocab: int) -> DraftTree:
    parents, tokens, seen = [-1], [root], set()
    for node in range(1, rng.randrange(1, 9)):
        edge = rng.randrange(node), rng.randrange(vocab)
        if edge not in seen:
            seen.add(edge)
            parents.append(min(edge[0], len(parents) - 1))
            tokens.append(edge[1])
    pairs = list(dict.fromkeys(zip(parents, tokens, strict=True)))
    kept = [pairs[0]] + [pair for i, pair in enumerate(pairs[1:], 1) if pair[0] < i]
    return DraftTree(tuple(t for _, t in kept), tuple(p for p, _ in kept), (0.0,) * len(kept))


def test_edits_kept_from_step_to_step_are_those_counted_anew():
    rng = random.Random(0)
    vocab, editor = 40, Editor()
    settings = [
        {"frequency_penalty": 0.7, "presence_penalty": -0.2},
        {"repetition_penalty": 1.4},
        {"logit_bias": {3: 5.0, 39: -100.0}},
        {},
        {"min_tokens": 5, "stop_token_ids": (4, 9)},
        {"repetition_penalty": 0.7, "frequency_penalty": -1.0, "logit_bias": {1: 1.5}, "min_tokens": 3},
    ]
    requests = [
        Request(str(i), (1, 2, 2, i), SamplingParams(**one), eos_ids=frozenset({7}), limit=10**6)
        for i, one in enumerate(settings)
    ]
    for _ in range(12):
        step = [(r, random_tree(rng, r.tokens[-1], vocab)) for r in requests if rng.random() < 0.8]
        rows = [(request, tree, node) for request, tree in step for node in range(len(tree))]
        logits = torch.randn(len(rows), vocab) * 3
        expected = [
            edits_by_definition(request, [tree.tokens[i] for i in tree.path(node)[1:]], row.tolist())
            for (request, tree, node), row in zip(rows, logits, strict=True)
        ]
        edits = editor.build(step, "cpu")
        actual = logits.clone()
        if edits is not None:
            assert all(rows[row][0] is not requests[3] for row in edits.rows.tolist())
            actual[edits.rows] = edit_logits_ref(logits, edits)
        torch.testing.assert_close(actual, torch.tensor(expected).view(len(rows), vocab))
        for request, _ in step:
            request.append([rng.choice([t for t in range(vocab) if t not in request.end_ids])])


def test_nobody_s_edits_cost_nothing():
    request = Request("r", (1,), SamplingParams(min_tokens=3), limit=10)  # nothing could end it early
    assert Editor().build([(request, DraftTree.root(1))], "cpu") is None


# Bias and min-p reach every drafted position


def test_a_banned_token_never_comes_whatever_is_drafted():
    engine = scripted_engine(constant(0.0, 10.0, 9.0), 3, drafting(X, X, X))
    assert generate(engine, [0], logit_bias={X: -100.0}, max_tokens=6).output == [Y] * 6


@pytest.mark.parametrize("draft", [(0, 0, 0), (1, 1, 1), (2, 0, 1)])
def test_min_p_at_every_draft_position(draft):
    engine = scripted_engine(lambda _: np.log([0.6, 0.25, 0.15]).tolist(), 3, drafting(*draft), max_slots=32, pages=256)
    params = [SamplingParams(min_p=0.5, max_tokens=5, seed=seed) for seed in range(200)]
    assert {token for request in run(engine, [[0]] * 200, params) for token in request.output} == {0}


# Ends


def test_min_tokens_hold_back_the_end_of_sequence_position_by_position():
    """The target wants 5, 1, 7 (end), 6 and then 7 for ever; up to the third token 7 is not to be had."""

    def wants(prefix):
        return {1: 5, 2: 1}.get(len(prefix), 7)

    def logits(prefix):
        row = [0.0] * 8
        row[wants(prefix)], row[6] = 50.0, 40.0
        return row

    for drafter in (None, drafting(5, 7, 6, 6), drafting(1, 7, 7), drafting(1, 6, 6, 7)):
        engine = scripted_engine(logits, 8, drafter, eos_ids=frozenset({7}))
        assert generate(engine, [0], max_tokens=9).output == [5, 1, 7]
        request = generate(engine, [0], max_tokens=9, min_tokens=4)
        assert request.output == [5, 1, 6, 6, 7] and request.finish_reason is FinishReason.STOP
        assert generate(engine, [0], max_tokens=4, min_tokens=4).output == [5, 1, 6, 6]
        # other ends likewise
        request = generate(engine, [0], max_tokens=6, min_tokens=3, stop_token_ids=(1, 7), ignore_eos=True)
        assert request.output == [5, 6, 6, 7] and request.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("drafter", [None, drafting(1, 2, 7), drafting(4, 4, 1)], ids=["plain", "ends", "right"])
def test_min_tokens_hold_back_every_end_of_sequence(drafter):
    """Of several ends each is likelier than any other token; none comes before the fourth token, whoever drafts it."""
    engine = scripted_engine(constant(0, 9, 8, 0, 7, 0, 0, 8.5), 8, drafter, eos_ids=frozenset({1, 2, 7}))
    request = generate(engine, [0], max_tokens=9, min_tokens=3)
    assert request.output == [4, 4, 4, 1] and request.finish_reason is FinishReason.STOP


def test_ignore_eos_ignores_all_of_them_but_no_stop_token():
    tokens = [3, 2, 7, 4, 2, 9, 7, 7, 7, 7, 7]
    engine = scripted_engine(
        table(lambda prefix: tokens[len(prefix) - 1], 10), 10, drafting(2, 7, 4, 2), eos_ids=frozenset({2, 7})
    )
    assert generate(engine, [0], max_tokens=8).output == [3, 2]
    request = generate(engine, [0], max_tokens=8, ignore_eos=True)
    assert request.output == tokens[:8] and request.finish_reason is FinishReason.LENGTH
    request = generate(engine, [0], max_tokens=8, ignore_eos=True, stop_token_ids=(9,))
    assert request.output == tokens[:6] and request.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("params", [{"logit_bias": {8: 1.0}}, {"stop_token_ids": (8,)}, {"stop_token_ids": (2**40,)}])
def test_ids_outside_the_vocabulary_are_refused_by_name(params):
    engine = scripted_engine(constant(*[0.0] * 8), 8)
    with pytest.raises(RequestError, match="0 to 7") as caught:
        engine.make_request([0], SamplingParams(**params, min_tokens=1))
    assert caught.value.param == next(iter(params))
    assert generate(engine, [0], max_tokens=2, logit_bias={7: 1.0}, stop_token_ids=(6,)).output == [7, 7]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("frequency_penalty", [-2.1, 2.1, math.nan, "1", True]),
        ("presence_penalty", [-2.1, 2.1, math.inf, None]),
        ("repetition_penalty", [0, 0.0, -1, 10.1, math.nan, "1"]),
        ("min_tokens", [-1, 1.5, True, None]),
        ("logprobs", [-1, 21, True, 1.0]),
        ("prompt_logprobs", [-1, 21, "1"]),
        ("stop_token_ids", [[-1], [True], ["1"], [1.0], range(17)]),
        (
            "logit_bias",
            [
                *({1: value} for value in (101, -101.0, math.nan, None, True)),
                *({key: 1} for key in ("1", -1, 1.5)),
                [1],
                dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1),
            ],
        ),
    ],
)
def test_bad_parameters_are_refused_by_name(field, values):
    for value in values:
        with pytest.raises(RequestError) as caught:
            SamplingParams(**{field: value})
        assert caught.value.param == field, value


def test_limits_that_contradict_each_other():
    with pytest.raises(RequestError, match="min_tokens is 4, above max_tokens, which is 3"):
        SamplingParams(min_tokens=4, max_tokens=3)
    with pytest.raises(RequestError, match="max_tokens must be at least 1"):
        SamplingParams(max_tokens=0)


# Log-probabilities


def rounded(entries):
    return [
        None if e is None else (e.token, round(e.logprob, 4), [(t, round(v, 4)) for t, v in e.top]) for e in entries
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.1])
@pytest.mark.parametrize("drafter", [None, drafting(0, 0), drafting(1, 1, 1)], ids=["plain", "right", "wrong"])
def test_log_probabilities_are_the_model_s_own(drafter, temperature):
    """Neither temperature nor bias show, for drafted tokens and bonus tokens alike."""
    engine = scripted_engine(lambda _: np.log([0.7, 0.2, 0.1]).tolist(), 3, drafter)
    request = generate(engine, [0], temperature=temperature, seed=1, logprobs=2, max_tokens=5)
    expected = (0, -0.3567, [(0, -0.3567), (1, -1.6094)])
    assert rounded(request.logprobs) == [expected] * 5
    request = generate(engine, [0], temperature=temperature, seed=1, logprobs=0, logit_bias={1: 5.0}, max_tokens=5)
    assert rounded(request.logprobs) == [(1, -1.6094, [])] * 5
    assert generate(engine, [0], temperature=temperature).logprobs == []


def test_impossible_tokens_have_finite_log_probabilities():
    engine = scripted_engine(lambda _: [1.0, float("-inf"), 0.0, float("-inf")], 4)
    request = generate(engine, [0], logprobs=20, max_tokens=2)
    for entry in request.logprobs:
        assert [token for token, _ in entry.top][:2] == [0, 2] and len(entry.top) == 4
        assert [value for _, value in entry.top][2:] == [LOGPROB_FLOOR] * 2


@pytest.mark.parametrize("drafter", [None, drafting(1, 2, 7, 3, 3)], ids=["plain", "drafted"])
def test_one_entry_per_token_and_none_behind_the_end(drafter):
    engine = scripted_engine(table(lambda p: [1, 2, 7, 3, 3, 3, 3][len(p) - 1], 8), 8, drafter, eos_ids=frozenset({7}))
    request = engine.make_request([0], SamplingParams(temperature=0, logprobs=1, max_tokens=6))
    engine.add(request)
    events = []
    while engine.has_work:
        events += engine.step()
    assert request.output == [1, 2, 7]
    assert [entry.token for entry in request.logprobs] == request.output
    for event in events:
        assert [entry.token for entry in event.logprobs] == list(event.tokens)


def teacher_forced(prompt: list[int], count: int) -> list:
    """What the model gives each token of a prompt, computed in one forward."""
    engine = tiny_engine(max_step_tokens=512)
    span = Span.chunk(prompt, [0, 1, 2, 3], 0, sample_last=True, sample_all=True)
    scores = engine.runner.forward([span]).log_softmax(-1)
    rows = []
    for row, token in zip(scores, prompt[1:], strict=False):
        top = row.topk(count)
        rows.append((token, float(row[token]), top.indices.tolist(), top.values.tolist()))
    return rows


@pytest.mark.parametrize(
    "settings", [{}, {"max_step_tokens": 7}, {"pages": 9, "page_size": 8, "max_slots": 3}], ids=str
)
def test_the_prompt_is_scored_token_by_token(settings):
    """Whole, in chunks, beside preempted neighbours; and once more, when the prefix cache has it."""
    rng = random.Random(1)
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in (1, 2, 30, 23)]
    prompts.append(prompts[2])
    params = [
        SamplingParams(temperature=0, max_tokens=n, prompt_logprobs=k, logprobs=1)
        for n, k in [(3, 2), (12, 0), (0, 3), (12, 1), (2, 3)]
    ]
    engine = tiny_engine("ngram", **settings)
    alone = tiny_engine()
    for _ in range(2):
        for request, prompt, one in zip(run(engine, prompts, params), prompts, params, strict=True):
            scores = request.prompt_logprobs
            assert len(scores) == len(prompt) and scores[0] is None
            for entry, (token, value, top, values) in zip(
                scores[1:], teacher_forced(prompt, one.prompt_logprobs or 1), strict=True
            ):
                assert entry.token == token and entry.logprob == pytest.approx(value, abs=1e-4)
                assert [t for t, _ in entry.top] == top[: one.prompt_logprobs]
                assert [v for _, v in entry.top] == pytest.approx(values[: one.prompt_logprobs], abs=1e-4)
            if one.max_tokens == 0:
                assert request.output == [] and request.finish_reason is FinishReason.LENGTH
            else:
                expected = run(alone, [prompt], [one])[0]
                assert request.output == expected.output
                assert len(request.logprobs) == len(request.output)
                for got, want in zip(request.logprobs, expected.logprobs, strict=True):
                    assert got.logprob == pytest.approx(want.logprob, abs=1e-4)


# Seeds


def test_choices_count_the_seed_up():
    params = SamplingParams(seed=7)
    assert params.choice(0) is params and [params.choice(i).seed for i in (1, 3)] == [8, 10]
    assert SamplingParams(seed=2**63 - 1).choice(1).seed == -(2**63)
    assert SamplingParams().choice(2).seed is None
    engine = scripted_engine(constant(*[0.0] * 50), 50, max_slots=5)
    four = [request.output for request in run(engine, [[0]] * 4, [params.choice(i) for i in range(4)])]
    assert len({tuple(output) for output in four}) == 4
    assert [request.output for request in run(engine, [[0]] * 4, [params.choice(i) for i in range(4)])] == four
    assert generate(engine, [0], temperature=1.0, seed=7).output == four[0]
