"""What /metrics says: at idle, after aborts, by stage, monotone, and as the dashboard wants it (cases i10-i12)."""

from __future__ import annotations

import itertools
import json
import logging
import random
import re
import threading
from pathlib import Path

import httpx
import promql_parser
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fake_worker import Script, http_bytes, raw_request, wait_for
from minispec.containment import STAGES

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana-dashboard.json"


def scrape(server) -> dict[tuple[str, tuple], float]:
    """(sample name, its labels) → value."""
    response = httpx.get(f"{server.url}/metrics")
    assert response.status_code == 200
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def value(samples, name, **labels) -> float:
    return samples[f"minispec_{name}", tuple(sorted(labels.items()))]


def idle(samples) -> None:
    for name in ("requests_running", "requests_waiting", "kv_pages_used", "kv_cache_usage_perc", "engine_stalled"):
        assert value(samples, name) == 0, name
    assert value(samples, "ready") == 1


def test_a_request_in_numbers(serve):
    server = serve(Script(reply=lambda prompt: "Hello, world!", drafts=2))
    before = scrape(server)
    idle(before)
    server.complete("abcd", max_tokens=8)
    after = scrape(server)
    idle(after)
    assert value(after, "requests_total", reason="length") == 1
    prompt = value(after, "prompt_tokens_total")
    assert prompt >= 4 and value(after, "prefix_cache_queries_total") == prompt
    assert value(after, "generation_tokens_total") == 8
    for histogram in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert value(after, f"{histogram}_count") == 1 and value(after, f"{histogram}_sum") > 0
    assert value(after, "inter_token_latency_seconds_count") == 7
    assert value(after, "request_prompt_tokens_sum") == prompt and value(after, "request_generation_tokens_sum") == 8
    assert value(after, "engine_step_seconds_count") == value(after, "engine_steps_total") > 0
    assert value(after, "http_responses_total", status="200") >= 1
    assert value(after, "drafter_drafted_tokens_total", drafter="scripted", depth="1") > 0
    assert ("process_resident_memory_bytes", ()) in after
    assert value(after, "info", **{k: v for (n, labels) in after if n == "minispec_info" for k, v in labels}) == 1
    assert {dict(labels)["stage"] for name, labels in after if name == "minispec_errors_total"} == set(STAGES)


def test_after_everybody_left(serve):
    """i10, i11: gauges fall back to zero, aborts are counted, and so are the tokens that they got."""
    script = Script(reply=lambda prompt: None, delay=0.002)
    server = serve(script, max_slots=3, max_context=4096, pages=3300)
    connections = [
        raw_request(server, http_bytes("/v1/completions", {"prompt": f"endless {i}", "stream": True}))
        for i in range(20)
    ]
    wait_for(lambda: server.worker.num_open == 20 and script.steps > 5)
    busy = scrape(server)
    assert value(busy, "requests_running") == 3 and value(busy, "requests_waiting") == 17
    assert 0 < value(busy, "kv_cache_usage_perc") <= 1
    for connection in connections:
        connection.close()
    server.wait_idle(2)
    after = scrape(server)
    idle(after)
    assert value(after, "requests_total", reason="abort") == 20
    tokens = value(after, "generation_tokens_total")
    assert tokens == value(after, "request_generation_tokens_sum") > 0
    firsts = value(after, "time_to_first_token_seconds_count")
    assert firsts >= 3 and tokens == firsts + value(after, "inter_token_latency_seconds_count")
    assert value(after, "http_responses_total", status="200") >= 20


def test_counters_only_grow(serve):
    """i12: while requests of all kinds come and go, and pages run short."""
    script = Script(reply=lambda prompt: "ab" * (len(prompt) % 7 + 1), drafts=3)
    server = serve(script, max_slots=3, pages=14, max_context=48)
    rng, stop = random.Random(0), threading.Event()
    seen = []

    def ask() -> None:
        while not stop.is_set():
            server.complete("x" * rng.randint(1, 20), max_tokens=rng.randint(1, 20), speculation={"max_nodes": 3})

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(15):
        seen.append(scrape(server))
    stop.set()
    for thread in threads:
        thread.join()
    server.wait_idle()
    seen.append(scrape(server))
    for earlier, later in itertools.pairwise(seen):
        for key, number in earlier.items():
            if key[0].startswith("minispec_") and key[0].endswith(("_total", "_count", "_bucket", "_sum")):
                assert later[key] >= number, key
    for samples in seen:
        assert value(samples, "speculation_accepted_tokens_total") <= value(samples, "speculation_drafted_tokens_total")
        assert value(samples, "prefix_cache_hits_total") <= value(samples, "prefix_cache_queries_total")
    last = seen[-1]
    idle(last)
    emitted = (
        value(last, "speculation_accepted_tokens_total")
        + value(last, "speculation_steps_total")
        - value(last, "speculation_truncated_tokens_total")
    )
    # the rest are the tokens that the last row of a prompt gives, or of a text read again after a preemption
    others = value(last, "generation_tokens_total") - emitted - value(last, "request_prompt_tokens_count")
    assert 0 <= others <= value(last, "preemptions_total")


def test_the_prefix_cache_in_numbers(serve):
    server = serve(Script(reply=lambda prompt: "ok"), pages=12, max_context=48, prefix_cache=True)
    for text in ("a" * 20, "a" * 20, "b" * 20, "c" * 20):
        assert server.complete(text).status_code == 200
    samples = scrape(server)
    idle(samples)
    # 21 tokens a prompt, pages of 4, the last token is always read; 23 of a text are read, so it fills 5 pages
    assert value(samples, "prefix_cache_queries_total") == 4 * 21
    assert value(samples, "prefix_cache_hits_total") == 20
    assert value(samples, "prefix_cache_evictions_total") > 0
    assert value(samples, "kv_pages_cached") + value(samples, "kv_pages_free") == value(samples, "kv_pages") == 12


def test_faults_and_refusals_are_counted(serve):
    script = Script(reply=lambda prompt: "yes", fail_at=2)
    server = serve(script, max_slots=1, max_waiting=0)
    assert server.complete("hi").status_code == 500
    assert value(scrape(server), "errors_total", stage="forward") == 1
    assert value(scrape(server), "requests_total", reason="error") == 1
    script.gate.clear()
    waiting = threading.Thread(target=server.complete)
    waiting.start()
    wait_for(lambda: server.worker.num_open == 1)
    assert server.complete("more").status_code == 429
    assert value(scrape(server), "requests_refused_total") == 1
    script.gate.set()
    waiting.join()
    samples = scrape(server)
    idle(samples)
    assert value(samples, "http_responses_total", status="429") == 1


def test_a_stuck_step_shows(serve, caplog):
    """i17: /health turns 503 while a step does not return, and 200 again when it has."""
    script = Script(reply=lambda prompt: "yes")
    server = serve(script, step_timeout=0.2)
    script.gate.clear()
    waiting = threading.Thread(target=server.complete)
    waiting.start()
    wait_for(lambda: httpx.get(f"{server.url}/health").status_code == 503)
    assert httpx.get(f"{server.url}/health").json()["status"] == "stalled"
    assert value(scrape(server), "engine_stalled") == 1
    wait_for(lambda: "has not returned" in caplog.text)
    script.gate.set()
    waiting.join()
    assert httpx.get(f"{server.url}/health").status_code == 200
    samples = scrape(server)
    assert value(samples, "engine_stalls_total") == 1
    idle(samples)


def test_log_lines_of_a_request(serve, caplog):
    caplog.set_level(logging.INFO, "minispec")
    server = serve(Script(reply=lambda prompt: "yes"))
    answer = httpx.post(
        f"{server.url}/v1/completions", json={"prompt": "hi"}, headers={"X-Request-Id": "mine"}, timeout=20
    )
    refused = server.complete("hi", temperature=-1)
    wait_for(lambda: sum(record.getMessage() == "answered" for record in caplog.records) == 2)
    lines = {record.getMessage(): record for record in caplog.records if hasattr(record, "http_request_id")}
    started, ended = lines["request started"], lines["request ended"]
    assert started.request_id == ended.request_id and started.request_id.startswith(answer.json()["id"])
    assert started.http_request_id == ended.http_request_id == "mine"
    assert (ended.reason, ended.completion_tokens, ended.error) == ("stop", 4, None)
    assert ended.first_token_seconds <= ended.seconds
    first, second = (record for record in caplog.records if record.getMessage() == "answered")
    assert (first.http_request_id, first.method, first.path, first.status) == ("mine", "POST", "/v1/completions", 200)
    assert (second.http_request_id, second.status) == (refused.headers["x-request-id"], 400)


# ----------------------------------------------------------------------------------------------------- the dashboard


def queries() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def test_the_dashboard_shows_what_is_exported(serve):
    server = serve(Script(reply=lambda prompt: "Hello, world!", drafts=2))
    server.complete("abcd", max_tokens=8)
    exported = {name for name, _ in scrape(server)}
    mentioned = {name for query in queries() for name in re.findall(r"\b(?:minispec|process)_\w+", query)}
    assert mentioned and mentioned <= exported, mentioned - exported
    # and nothing of ours is left out that has something to say at all times
    bare = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name in exported if name.startswith("minispec_")}
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in mentioned}
    assert bare - shown <= {
        "minispec_info",
        "minispec_ready",
        "minispec_kv_pages",
        "minispec_speculation_truncated_tokens_total",
    }


def test_the_docs_name_every_metric(serve):
    exported = {
        re.sub(r"_(bucket|sum|count)$", "", name) for name, _ in scrape(serve()) if name.startswith("minispec_")
    }
    documented = set(re.findall(r"`(minispec_\w+)", (DASHBOARD.parent / "reliability.md").read_text()))
    assert exported - documented == set() and documented - exported == {  # until something happens
        "minispec_http_responses_total",
        "minispec_drafter_drafted_tokens_total",
        "minispec_drafter_accepted_tokens_total",
    }


@pytest.mark.parametrize("query", queries())
def test_every_panel_query_parses(query):
    promql_parser.parse(query.replace("$__rate_interval", "5m"))


def test_the_dashboard_is_one():
    dashboard = json.loads(DASHBOARD.read_text())
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids) and dashboard["title"] == "minispec" and dashboard["schemaVersion"] >= 36
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24 and panel["title"]
        assert panel["type"] == "row" or all(target["refId"] for target in panel["targets"])
