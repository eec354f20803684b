import pytest
from hypothesis import given
from hypothesis import strategies as st

from minispec.errors import RequestError
from minispec.stop import StopMatcher


def run(stops, pieces):
    matcher = StopMatcher(stops)
    shown = [matcher.feed(piece) for piece in pieces]
    return shown, matcher


@pytest.mark.parametrize("pieces", [["ab##cdefghijklmn"], ["ab#", "#cdefghijklmn"], list("ab##cdefghijklmn")])
def test_found_anywhere_in_a_run_or_across_two(pieces):
    shown, matcher = run(["##"], pieces)
    assert "".join(shown) == "ab"
    assert matcher.matched == "##"
    assert matcher.finish() == ""


@pytest.mark.parametrize("pieces", [list("0123456789"), ["0123", "456789"]])
def test_no_part_of_the_stop_string_is_shown(pieces):
    shown, _ = run(["3456"], pieces)
    assert "".join(shown) == "012"
    assert not any("3" in piece for piece in shown)


def test_held_back_tail_comes_out_at_the_end():
    shown, matcher = run(["<|end|>"], ["hi ", "<|"])
    assert shown == ["hi ", ""]
    assert matcher.matched is None
    assert matcher.finish() == "<|"
    assert matcher.finish() == ""


def test_only_a_possible_beginning_is_held_back():
    shown, _ = run(["ZZZZZZZZ"], list("abcd"))
    assert shown == list("abcd")
    shown, _ = run(["##"], ["a#b#"])
    assert shown == ["a#b"]


@pytest.mark.parametrize(("pieces", "text"), [(["a\n", "\nb"], "a"), ([".\n\nc"], ".")])
def test_tokens_that_straddle_the_stop_string(pieces, text):
    shown, matcher = run(["\n\n"], pieces)
    assert "".join(shown) == text
    assert matcher.matched == "\n\n"


def test_first_complete_match_wins_then_the_earliest_start():
    shown, matcher = run(["abc", "b"], ["xabc"])
    assert ("".join(shown), matcher.matched) == ("xa", "b")
    shown, matcher = run(["bc", "abc"], ["xabc"])
    assert ("".join(shown), matcher.matched) == ("x", "abc")


def test_self_overlapping_stop_string():
    shown, matcher = run(["aab"], list("aaab"))
    assert ("".join(shown), matcher.matched) == ("a", "aab")


def test_silent_after_a_match_and_transparent_without_stops():
    matcher = StopMatcher(["."])
    assert matcher.feed("a.b") == "a"
    assert matcher.feed("c") == "" and matcher.finish() == ""
    assert StopMatcher([]).feed("abc") == "abc"


def test_empty_stop_string_is_refused():
    with pytest.raises(RequestError, match="empty"):
        StopMatcher(["a", ""])


@given(
    stops=st.lists(st.text("ab🦊", min_size=1, max_size=5), max_size=4),
    pieces=st.lists(st.text("ab🦊", max_size=6), max_size=10),
)
def test_agrees_with_find_for_any_split(stops, pieces):
    text = "".join(pieces)
    found = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    matcher = StopMatcher(stops)
    shown = ""
    for piece in pieces:
        shown += matcher.feed(piece)
        seen = text[: len(shown)]
        assert shown == seen  # never anything but the text itself, in order
    if found:
        _, start, stop = min(found)
        assert (shown + matcher.finish(), matcher.matched) == (text[:start], stop)
    else:
        held = matcher.finish()
        assert matcher.matched is None and shown + held == text
        longest = max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)
        assert len(held) == longest
