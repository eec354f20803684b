"""The rules that end a request, and the text that may be shown before it ends."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minispec.errors import RequestError
from minispec.request import MAX_STOPS, FinishReason, Request, SamplingParams, SpeculationStats
from minispec.tokenizer import Tokenizer
from tokenizers_fixture import BOS, EOS, byte_tokenizer_folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return Tokenizer.from_folder(byte_tokenizer_folder(tmp_path_factory.mktemp("bytes")))


class Pieces:
    """A decoder whose tokens are whole pieces of text."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = pieces

    def feed(self, token: int) -> str:
        return self.pieces[token]

    def finish(self) -> str:
        return ""


def request_for(decoder, *, max_tokens: int = 1000, eos_ids=frozenset({EOS}), **params) -> Request:
    return Request(
        id="r",
        prompt=(BOS,),
        params=SamplingParams(max_tokens=max_tokens, **params),
        decoder=decoder,
        eos_ids=frozenset(eos_ids),
        limit=max_tokens,
    )


def feed(request: Request, tokens: Sequence[int], sizes: Sequence[int]) -> list[str]:
    """Append in runs of the given sizes (the last size again and again) until the request ends; what each showed."""
    shown, start, step = [], 0, 0
    while start < len(tokens) and not request.finished:
        size = sizes[min(step, len(sizes) - 1)]
        shown.append(request.append(tokens[start : start + size])[1])
        start, step = start + size, step + 1
    return shown


RUNS = [[1], [2], [3], [5], [100]]


@pytest.mark.parametrize("sizes", [[100], [3], [1], [2, 1, 100]], ids=str)
def test_a_stop_string_early_in_a_run(tokenizer, sizes):
    """However far behind the stop the run goes on, and also where the stop itself is cut in two."""
    request = request_for(tokenizer.decoder(), stop=("##",))
    assert "".join(feed(request, list(b"ab##cdefghijklmn"), sizes)) == request.text == "ab"
    assert request.finish_reason is FinishReason.STOP
    # ids and counts end with the token that completes the stop
    assert request.output == list(b"ab##") and request.num_output == 4
    assert request.tokens == [BOS, *b"ab##"] and request.prompt == (BOS,)


@pytest.mark.parametrize(
    ("pieces", "sizes"),
    [(list("0123456789"), [1]), (["0123", "456789"], [1]), (["0123", "456789"], [2]), (list("0123456789"), [4, 6])],
    ids=str,
)
def test_nothing_of_a_stop_string_is_shown_before_it_is_complete(pieces, sizes):
    request = request_for(Pieces(pieces), stop=("3456",))
    shown = feed(request, range(len(pieces)), sizes)
    assert "".join(shown) == request.text == "012"
    assert not any("3" in text for text in shown)
    assert request.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("sizes", RUNS, ids=str)
@pytest.mark.parametrize("ending", ["eos", "length", "abort"])
def test_the_held_back_tail_comes_with_the_end(tokenizer, sizes, ending):
    text = list(b"hi <|")
    limit = len(text) if ending == "length" else 1000
    request = request_for(tokenizer.decoder(), stop=("<|end|>",), max_tokens=limit)
    shown = feed(request, [*text, EOS] if ending == "eos" else text, sizes)
    if ending == "abort":
        assert "".join(shown) == request.text == "hi "
        assert request.end(FinishReason.ABORT) == "<|"
        shown.append("<|")
    assert "".join(shown) == request.text == "hi <|"
    assert (
        request.finish_reason
        is {
            "eos": FinishReason.STOP,
            "length": FinishReason.LENGTH,
            "abort": FinishReason.ABORT,
        }[ending]
    )


def test_a_stop_string_that_cannot_begin_delays_nothing(tokenizer):
    request = request_for(tokenizer.decoder(), stop=("ZZZZZZZZ",))
    assert feed(request, list(b"abcdefgh"), [1]) == list("abcdefgh")


@pytest.mark.parametrize(
    ("pieces", "text"), [(["a\n", "\nb"], "a"), ([".\n\nc"], "."), (["a", "\n", "\n"], "a"), (["\n\n"], "")]
)
@pytest.mark.parametrize("sizes", [[1], [9]], ids=str)
def test_a_stop_string_need_not_begin_or_end_with_a_token(pieces, text, sizes):
    request = request_for(Pieces(pieces), stop=("\n\n",))
    assert "".join(feed(request, range(len(pieces)), sizes)) == request.text == text
    assert request.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("sizes", RUNS, ids=str)
@pytest.mark.parametrize(
    ("tokens", "max_tokens", "output", "reason"),
    [
        ([*b"abcdef"], 4, [*b"abcd"], FinishReason.LENGTH),
        ([*b"abc", EOS, *b"de"], 4, [*b"abc", EOS], FinishReason.STOP),  # both at once: the text had ended
        ([*b"abcd", EOS], 4, [*b"abcd"], FinishReason.LENGTH),
        ([*b"ab##"], 4, [*b"ab##"], FinishReason.STOP),
        ([*b"abc##"], 4, [*b"abc#"], FinishReason.LENGTH),
        ([EOS, *b"abc"], 4, [EOS], FinishReason.STOP),
    ],
)
def test_the_reason_is_what_came_first(tokenizer, tokens, max_tokens, output, reason, sizes):
    request = request_for(tokenizer.decoder(), max_tokens=max_tokens, stop=("##",))
    feed(request, tokens, sizes)
    assert request.output == output and request.finish_reason is reason


@pytest.mark.parametrize("sizes", RUNS, ids=str)
def test_any_of_several_end_tokens(tokenizer, sizes):
    tokens = [*b"a", EOS, *b"b", 65, *b"c"]
    for eos_ids, output in (({EOS, 65}, [*b"a", EOS]), ({65}, [*b"a", EOS, *b"b", 65]), (set(), tokens)):
        request = request_for(tokenizer.decoder(), eos_ids=eos_ids, max_tokens=len(tokens))
        feed(request, tokens, sizes)
        assert request.output == output
    request = request_for(tokenizer.decoder(), eos_ids={EOS, 65}, ignore_eos=True, max_tokens=len(tokens))
    feed(request, tokens, sizes)
    assert request.output == tokens and request.finish_reason is FinishReason.LENGTH
    assert request.text == "abAc"


@pytest.mark.parametrize("sizes", RUNS, ids=str)
def test_characters_of_several_tokens_appear_whole(tokenizer, sizes):
    text = "żółw🦉한"
    request = request_for(tokenizer.decoder())
    shown = feed(request, list(text.encode()), sizes)
    assert "".join(shown) == request.text == text
    assert not any("\ufffd" in piece for piece in shown)
    if sizes == [1]:
        assert [piece for piece in shown if piece] == list(text)


@pytest.mark.parametrize(("max_tokens", "text"), [(1, ""), (2, ""), (3, ""), (4, "🦊")])
@pytest.mark.parametrize("sizes", [[1], [4]], ids=str)
def test_a_character_cut_by_the_end_is_dropped(tokenizer, max_tokens, text, sizes):
    request = request_for(tokenizer.decoder(), max_tokens=max_tokens)
    assert "".join(feed(request, [240, 159, 166, 138], sizes)) == request.text == text
    assert request.num_output == max_tokens and request.finish_reason is FinishReason.LENGTH


ALPHABET = "ab#é🦉"


@given(
    text=st.text(ALPHABET, max_size=24),
    stops=st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=12),
    max_tokens=st.integers(1, 40),
    eos_at=st.integers(0, 60),
)
def test_the_same_whatever_the_run_lengths(tokenizer, text, stops, sizes, max_tokens, eos_at):
    tokens = [*text.encode(), *b"ab"]
    tokens[eos_at:eos_at] = [EOS]

    # Independently: token by token, the text so far decoded anew each time.
    output, expected, reason = [], "", None
    for token in tokens[:max_tokens]:
        output.append(token)
        if token == EOS:
            reason = FinishReason.STOP
            break
        expected = bytes(output).decode(errors="ignore")
        if ends := [stop for stop in stops if expected.endswith(stop) and not bytes(output[-1:]).isspace()]:
            expected = expected[: -len(max(ends, key=len))]
            reason = FinishReason.STOP
            break
    else:
        reason = FinishReason.LENGTH if len(output) == max_tokens else None

    request = request_for(tokenizer.decoder(), stop=stops, max_tokens=max_tokens)
    shown = feed(request, tokens, sizes)
    assert request.output == output and request.finish_reason is reason
    assert "".join(shown) == request.text
    if reason is None:
        assert expected.startswith(request.text)
        request.end(FinishReason.ABORT)
    assert request.text == expected


def test_ending_twice_changes_nothing(tokenizer):
    request = request_for(tokenizer.decoder(), stop=("bcd",))
    assert feed(request, list(b"abc"), [3]) == ["a"]
    assert request.end(FinishReason.ERROR, "broken") == "bc"
    assert request.end(FinishReason.ABORT, "again") == ""
    assert (request.finish_reason, request.error, request.text) == (FinishReason.ERROR, "broken", "abc")


def test_without_a_decoder_there_are_ids_and_no_text():
    request = request_for(None, stop=("a",), max_tokens=3)
    assert request.append([*b"aaaa"]) == ([*b"aaa"], "")
    assert request.text == "" and request.finish_reason is FinishReason.LENGTH


def test_remaining_counts_down(tokenizer):
    request = request_for(tokenizer.decoder(), max_tokens=5)
    assert (request.remaining, request.num_output, request.finished) == (5, 0, False)
    request.append([1, 2])
    assert (request.remaining, request.num_output, request.finished) == (3, 2, False)
    request.append([3, 4, 5, 6])
    assert (request.remaining, request.num_output, request.finished) == (0, 5, True)


def test_seeds():
    assert request_for(None, seed=7).seed == 7
    assert request_for(None, seed=-(2**63)).seed == -(2**63)
    drawn = {request_for(None).seed for _ in range(20)}
    assert len(drawn) == 20 and all(0 <= seed < 2**63 for seed in drawn)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("param", "values"),
    [
        ("temperature", [-0.01, 2.01, NAN, INF, -INF, True, "0.7", None, 10**400]),
        ("top_p", [-0.1, 1.1, NAN, INF, True, "1"]),
        ("min_p", [-0.1, 1.1, NAN, INF, False, [0.5]]),
        ("top_k", [-2, 1.5, True, "4"]),
        ("max_tokens", [0, -1, 1.5, "8", True]),
        ("seed", [2**63, -(2**63) - 1, 0.5, "1", True]),
        ("stop", ["", [""], ["a", ""], ["a", 5], [None], ["x"] * (MAX_STOPS + 1)]),
    ],
)
def test_values_out_of_range_are_refused_by_name(param, values):
    for value in values:
        if (param, value) == ("stop", ""):
            continue  # as one string it is the same as none
        with pytest.raises(RequestError) as caught:
            SamplingParams(**{param: value})
        assert caught.value.param == param and param.split("_")[0] in str(caught.value)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 2},
        {"top_p": 0},
        {"top_p": 1e-9},
        {"min_p": 1},
        {"top_k": -1},
        {"top_k": 10**9},
        {"max_tokens": 2**63},
        {"seed": 2**63 - 1},
        {"stop": ["x"] * MAX_STOPS},
    ],
    ids=str,
)
def test_values_at_the_bounds_are_taken(params):
    SamplingParams(**params)


def test_stop_strings_in_every_form():
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=None).stop == SamplingParams(stop=[]).stop == ()


@pytest.mark.parametrize(
    ("temperature", "greedy"), [(0, True), (1e-12, True), (1e-4, True), (2e-4, False), (1.0, False)]
)
def test_a_tiny_temperature_is_greedy(temperature, greedy):
    assert SamplingParams(temperature=temperature).greedy is greedy


def test_speculation_counts():
    assert SpeculationStats().as_dict() == {"steps": 0, "drafted": 0, "accepted": 0, "acceptance_length": None}
    stats = SpeculationStats(steps=3, drafted=6, accepted=4, emitted=7)
    assert stats.as_dict() == {"steps": 3, "drafted": 6, "accepted": 4, "acceptance_length": 2.3333}


@pytest.mark.parametrize("sizes", RUNS, ids=str)
def test_a_stop_string_before_min_tokens_is_text(sizes):
    """A line break as the second and the seventh token, at least three tokens: it ends at the seventh."""
    request = request_for(Pieces(list("a\nbcde\nfg")), stop=("\n",), min_tokens=3)
    assert "".join(feed(request, range(9), sizes)) == request.text == "a\nbcde"
    assert request.num_output == 7 and request.finish_reason is FinishReason.STOP
    # a stop string that begins before and is complete after
    request = request_for(Pieces(list("ab##c##")), stop=("##",), min_tokens=3)
    assert "".join(feed(request, range(7), sizes)) == request.text == "ab"
    request = request_for(Pieces(list("ab##c##")), stop=("##",), min_tokens=4)
    assert "".join(feed(request, range(7), sizes)) == request.text == "ab##c"


@pytest.mark.parametrize("sizes", RUNS, ids=str)
def test_a_stop_token_ends_the_text_and_is_not_part_of_it(sizes):
    request = request_for(Pieces(list("abcd")), stop_token_ids=(2,), ignore_eos=True)
    assert "".join(feed(request, range(4), sizes)) == request.text == "ab"
    assert request.output == [0, 1, 2] and request.finish_reason is FinishReason.STOP
