"""What a request says of speculation, and what it gets to see of it."""

import httpx
import pytest

from fake_worker import Script, events_of


@pytest.fixture
def server(serve):
    return serve(Script(reply=lambda prompt: "Hello, world!", drafts=4))


def samples(server) -> dict[str, float]:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def test_what_a_request_asks_for_is_what_it_gets(server):
    def speculation(**fields):
        answer = server.complete(speculation=fields or None).json()
        assert answer["choices"][0]["text"] == "Hello, world!"
        assert "speculation_trace" not in answer["choices"][0]
        return answer["usage"]["speculation"]

    drafted = speculation()
    assert drafted["accepted"] > 0 and speculation(enabled=True) == drafted
    assert speculation(drafters=["scripted"]) == drafted
    assert speculation(max_nodes=2)["acceptance_length"] <= 2
    for off in ({"enabled": False}, {"max_nodes": 1}, {"drafters": []}):
        assert speculation(**off)["drafted"] == 0


def test_an_unknown_drafter_is_refused_with_those_that_are_loaded(server):
    response = server.chat(speculation={"drafters": ["scripted", "eagle"]})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "there is no drafter 'eagle' here; loaded: scripted"
    response = server.chat(speculation={"node": 3})
    assert response.status_code == 400
    assert "enabled, max_nodes, drafters" in response.json()["error"]["message"]


def test_a_trace_tells_the_text(server):
    [choice] = server.complete(trace=True).json()["choices"]
    trace = choice["speculation_trace"]
    assert trace[0]["tokens"] == [*b"Hello"] and trace[0]["parents"] == [-1, 0, 1, 2, 3]
    assert trace[0]["accepted"] == [0, 1, 2, 3, 4] and trace[0]["bonus"] == ord(",")
    tokens = [trace[0]["tokens"][0]]
    for step in trace:
        assert step["tokens"][0] == tokens[-1]
        tokens += [step["tokens"][node] for node in step["accepted"][1:]]
        tokens += [] if step["bonus"] is None else [step["bonus"]]
    assert bytes(token for token in tokens if token < 256) == b"Hello, world!"


def test_a_stream_carries_the_trace_with_the_finish_reason(server):
    for path, body in (
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ):
        whole = server.post(path, {**body, "trace": True}).json()["choices"][0]["speculation_trace"]
        *chunks, done = events_of(server.post(path, {**body, "trace": True, "stream": True}).text)
        assert done == "[DONE]"
        assert [choice.get("speculation_trace") for chunk in chunks for choice in chunk["choices"]][-1] == whole
        assert all("speculation_trace" not in choice for chunk in chunks[:-1] for choice in chunk["choices"])


def test_counts_by_drafter_and_depth(server):
    server.complete()
    values = samples(server)
    for depth in range(1, 5):
        labels = f'{{depth="{depth}",drafter="scripted"}}'
        drafted = values[f"minispec_drafter_drafted_tokens_total{labels}"]
        assert 0 < values[f"minispec_drafter_accepted_tokens_total{labels}"] <= drafted
    for kind in ("drafted", "accepted"):
        total = values[f"minispec_speculation_{kind}_tokens_total"]
        assert total == sum(v for name, v in values.items() if name.startswith(f"minispec_drafter_{kind}_tokens_total"))
    assert values['minispec_drafter_steps_total{drafter="scripted"}'] > 0
    assert values['minispec_drafter_invalid_rows_total{drafter="scripted"}'] == 0
