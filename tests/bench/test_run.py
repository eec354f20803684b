"""``minispec bench`` over a tiny model: every section of its report, against real servers and processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from minispec.bench.against import duel, served, spread
from minispec.bench.client import Answer, Client, Endpoint, base_url
from minispec.bench.plot import check_plot
from minispec.bench.run import BenchOptions, Prompt, measure, read_prompts, run_bench, serve_arguments
from minispec.bench.sweep import context_sweep, prefill_sweep
from minispec.config import EngineConfig
from minispec.drafters.base import NoDrafter
from minispec.errors import ConfigError
from minispec.load import load_engine
from minispec.request import SamplingParams
from tiny_folders import tiny_folder

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model") / "tiny", max_position=256)


@pytest.fixture
def prompts(tmp_path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "one two one two", "category": "a"}, {"prompt": "x" * 20, "category": "b"}, {"prompt": "hello"}]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    return path


def config(folder: Path, **settings) -> EngineConfig:
    return EngineConfig(target=str(folder), draft="ngram", dtype="float32", **settings)


def test_every_section_of_the_report(folder, prompts, tmp_path, capsys):
    options = BenchOptions(
        prompts=prompts,
        max_tokens=8,
        concurrency=(1, 2),
        profile=True,
        context_sweep=True,
        prefill=True,
        http=True,
        plot=tmp_path / "bench.png",
        as_json=True,
    )
    assert run_bench(config(folder), options) == 0
    out = capsys.readouterr().out
    report = json.loads(out)
    assert out.count("\n") == 1
    assert [level["concurrency"] for level in report["sweep"]] == [1, 2]
    for level in report["sweep"]:
        assert level["prompts"] == 3 and level["identical"] == 1
        assert level["speedup_min"] <= level["speedup_q1"] <= level["speedup"] <= level["speedup_q3"]
        assert set(level["categories"]) <= {"a", "b", "all"}
    assert set(report["sweep"][0]["categories"]) == {"a", "b", "all"}
    assert report["profile"]["steps"] > 0
    assert list(report["context_sweep"]["step_ms"]) == ["128", "239"]  # 512 and beyond: all there is room for
    assert report["context_sweep"]["growth"] > 0
    assert list(report["prefill"]["ttft_ms"]) == ["32", "128"]
    assert report["http_over_offline"]["ratio"] > 0
    assert report["machine"]["dtype"] == "float32"
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_start_up_runs_a_server_with_the_same_settings(folder, prompts, capsys):
    options = BenchOptions(prompts=prompts, max_tokens=2, startup=True)
    assert run_bench(config(folder, max_context=200), options) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["startup"]["ready_s"] > 0
    assert report["startup"]["rss_after_mb"] > 0


def test_a_server_gets_the_options_that_differ_from_the_defaults(folder):
    assert serve_arguments(config(folder, max_slots=3)) == [
        *("--target", str(folder)),
        *("--draft", "ngram"),
        *("--dtype", "float32"),
        *("--max-slots", "3"),
    ]


def test_a_server_that_does_not_answer_is_known_before_anything_is_measured(folder, prompts, monkeypatch):
    monkeypatch.setattr("minispec.bench.run.load_engine", lambda *args: pytest.fail("it loaded the model"))
    options = BenchOptions(prompts=prompts, others=[Endpoint("http://127.0.0.1:1")], as_json=True)
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:1"):
        run_bench(config(folder), options)


def test_compares_with_another_server(folder, prompts, capsys):
    theirs = load_engine(config(folder))
    with served(theirs, "theirs") as url:
        options = BenchOptions(prompts=prompts, max_tokens=6, others=[Endpoint(url)], as_json=True)
        assert run_bench(config(folder), options) == 0
    report = json.loads(capsys.readouterr().out)
    [figures] = report["compare"]
    assert figures["model"] == "theirs" and figures["url"] == url
    assert figures["ratio"] > 0 and figures["their_tokens_counted"] is True
    assert figures["tokens_per_s"] > 0 and figures["their_tokens_per_s"] > 0


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "not a url"])
def test_a_server_that_does_not_answer_is_named(url):
    with pytest.raises(ConfigError, match="cannot list its models"), Client(Endpoint(url)):
        pass


def test_an_error_of_the_other_server_is_shown(folder):
    with (
        served(load_engine(config(folder)), "tiny") as url,
        Client(Endpoint(url, model="other")) as client,
        pytest.raises(ConfigError, match=r"404.*other"),
    ):
        client.run(["hello"], 4, 0.0, [0])


def test_the_client_counts_as_the_server_does(folder):
    engine = load_engine(config(folder))
    with served(engine, "tiny") as url, Client(Endpoint(url)) as client:
        answers = client.run(["hello", "one two"], 6, 0.0, [0, 1])
    params = SamplingParams(max_tokens=6, temperature=0.0)
    for answer, text in zip(answers, ["hello", "one two"], strict=True):
        [request] = measure(engine, NoDrafter(), [Prompt(text, "")], [params]).requests
        assert isinstance(answer, Answer)
        assert (answer.text, answer.tokens, answer.counted) == (request.text, request.num_output, True)
        assert 0 < answer.ttft <= answer.seconds


def test_duel_alternates_and_leaves_out_what_has_no_speed():
    order = []

    def side(name, speed):
        def measure(group):
            order.append((name, tuple(group)))
            return (0, 1.0) if 2 in group else (speed * len(group), 1.0)

        return measure

    figures = duel(side("ours", 20), side("theirs", 10), 5, 2, QUIET)
    assert order == [
        *(("ours", (0, 1)), ("theirs", (0, 1))),
        *(("theirs", (2, 3)), ("ours", (2, 3))),
        *(("ours", (4,)), ("theirs", (4,))),
    ]
    assert figures["ratio"] == figures["ratio_q1"] == 2.0
    assert figures["tokens_per_s"] == 20.0 and figures["their_tokens_per_s"] == 10.0


@pytest.mark.parametrize(
    ("values", "expected"), [([], (None, None, None)), ([2.0], (2.0, 2.0, 2.0)), ([1, 2, 3, 4, 5], (2, 3, 4))]
)
def test_spread(values, expected):
    figures = spread("x", values)
    assert (figures["x_q1"], figures["x"], figures["x_q3"]) == expected


def test_base_url():
    assert {base_url(url) for url in ("http://a:1", "http://a:1/", "http://a:1/v1", "http://a:1/v1/")} == {
        "http://a:1/v1"
    }


def test_sweeps_without_room(folder):
    engine = load_engine(config(folder, max_context=20))
    assert list(context_sweep(engine)["step_ms"]) == ["3"]
    assert prefill_sweep(engine)["ttft_ms"] == {}


def test_a_bad_picture_is_refused_before_anything_is_measured(tmp_path):
    with pytest.raises(ConfigError, match=r"bench.xyz.*end the name in"):
        check_plot(tmp_path / "bench.xyz")
    with pytest.raises(ConfigError, match="no folder"):
        check_plot(tmp_path / "missing" / "bench.png")


@pytest.mark.parametrize("line", ["{", "[]", '{"prompt": 5}', '{"text": "x"}', '{"prompt": "x", "category": 5}'])
def test_bad_prompt_lines_are_named(tmp_path, line):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(ConfigError, match="line 2"):
        read_prompts(path)


def test_a_file_without_prompts(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("\n")
    with pytest.raises(ConfigError, match="no prompts"):
        read_prompts(path)
