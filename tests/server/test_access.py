"""Who gets in: API keys, CORS, readiness, metrics, the HTTP layer (failure cases i9, i10, i14, i15, h20)."""

import httpx
import pytest

from fake_worker import Script, live_server, raw_request, wait_for
from minispec.worker import WorkerState

KEYS = ("first-key", "second-key")
ORIGIN = "https://example.org"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    options = {"api_keys": KEYS, "cors_origins": (ORIGIN,)}
    with live_server(Script(), tmp_path_factory.mktemp("model"), options=options) as server:
        yield server


PATHS = (
    *("/", "/nope", "/metrics", "/health/", "//health", "/health/x", "/Health", "/v1", "/v1/", "/v1/models"),
    *("/v1/models/", "/v1/models/scripted", "/v1/chat/completions", "/v1/chat/completions/", "//v1/completions"),
    *("/v1/completions", "/v1/completions/", "/v1/../health", "/%68ealth/", "/v1/models/../../health", "/docs"),
    *("/openapi.json", "/tokenize", "/detokenize", "/v1/tokenize"),
)


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
def test_everything_is_guarded(guarded, method):
    """Every route there is, whatever it is spelt like, and what is none."""
    routes = [route.path.partition("{")[0] for route in guarded.api.routes() if route.path != "/health"]
    assert len(routes) >= 8
    for path in dict.fromkeys([*PATHS, *routes, *(f"/{path}" for path in routes), *(f"{path}/" for path in routes)]):
        # As raw bytes: clients would tidy up the path.
        request = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        with raw_request(guarded, request.encode()) as connection:
            assert connection.recv(64).startswith(b"HTTP/1.1 401 "), (method, path)


def test_health_is_open(guarded):
    assert httpx.get(f"{guarded.url}/health").json() == {"status": "ok"}
    assert httpx.head(f"{guarded.url}/health").status_code == 200
    assert httpx.post(f"{guarded.url}/health").status_code == 401


@pytest.mark.parametrize(
    ("header", "status"),
    [
        *((f"Bearer {key}", 200) for key in KEYS),
        (f"bearer  {KEYS[0]}", 200),
        ("Bearer first-ke", 401),
        ("Bearer first-keyy", 401),
        ("Bearer", 401),
        (KEYS[0], 401),
        (f"Basic {KEYS[0]}", 401),
        ("Bearer first-key,second-key", 401),
        ("Bearer \u00fc", 401),
    ],
)
def test_keys(guarded, header, status):
    response = httpx.get(f"{guarded.url}/v1/models", headers={"Authorization": header.encode()})
    assert response.status_code == status
    if status == 401:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert response.headers["www-authenticate"] == "Bearer"
        assert not any(key in response.text for key in KEYS)


def test_whose_request_it_is(guarded, shared, monkeypatch):
    """What drafters learn from an answer stays with its key."""
    owners = []
    for server in (guarded, shared):
        make = server.engine.make_request
        monkeypatch.setattr(
            server.engine, "make_request", lambda *a, make=make, **k: owners.append(k["owner"]) or make(*a, **k)
        )
    for key in (*KEYS, KEYS[0]):
        headers = {"Authorization": f"Bearer {key}"}
        for path, body in (
            ("/v1/completions", {"prompt": ["a", "b"]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ):
            assert guarded.post(path, body, headers=headers).status_code == 200
    first, second, again = owners[:3], owners[3:6], owners[6:]
    assert len({*first}) == len({*second}) == 1 and first == again != second
    assert not any(key in owner or not owner for key in KEYS for owner in owners)
    owners.clear()
    shared.post("/v1/completions", {"prompt": "a"}, headers={"Authorization": "Bearer whatever"})
    shared.chat()
    assert owners == ["", ""]


def test_open_metrics(serve):
    server = serve(options={"api_keys": KEYS, "open_metrics": True})
    assert httpx.get(f"{server.url}/metrics").status_code == 200
    assert httpx.get(f"{server.url}/v1/models").status_code == 401


def preflight(server, origin=ORIGIN):
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    return httpx.options(f"{server.url}/v1/chat/completions", headers=headers)


def test_cors(guarded):
    allowed = preflight(guarded)
    assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == ORIGIN
    assert "authorization" in allowed.headers["access-control-allow-headers"]
    refused = httpx.post(f"{guarded.url}/v1/completions", json={"prompt": "x"}, headers={"Origin": ORIGIN})
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == ORIGIN
    stranger = preflight(guarded, "https://evil.example")
    assert stranger.status_code == 400 and stranger.json()["error"]["code"] == "cors_refused"
    assert "access-control-allow-origin" not in stranger.headers


def test_no_cors_by_default(shared):
    assert preflight(shared).status_code == 405
    response = httpx.get(f"{shared.url}/health", headers={"Origin": ORIGIN})
    assert not any(name.startswith("access-control") for name in response.headers)


def assert_not_ready(server, status):
    health = httpx.get(f"{server.url}/health")
    assert health.status_code == 503 and health.json()["status"] == status
    for response in (server.chat(), server.chat(stream=True), server.complete(), httpx.get(f"{server.url}/v1/models")):
        assert response.status_code == 503, response.text
        assert response.headers["retry-after"] and response.json()["error"]["code"] == status
    assert httpx.get(f"{server.url}/metrics").status_code == 200


def test_loading(serve):
    server = serve(loaded=False)
    assert_not_ready(server, "loading")
    server.load.set()
    wait_for(lambda: httpx.get(f"{server.url}/health").status_code == 200)
    server.assert_alive()


def test_loading_fails(serve):
    server = serve(loaded=False, default_params=5)  # dict(5) raises
    server.load.set()
    wait_for(lambda: server.worker.state is WorkerState.FAILED)
    assert_not_ready(server, "failed")


def test_draining(serve):
    server = serve()
    server.worker.drain()
    assert_not_ready(server, "draining")


def test_metrics(serve):
    server = serve(Script(reply=lambda prompt: "0123456789", drafts=4), max_slots=2)
    for _ in range(3):
        assert server.complete("abc").status_code == 200
    assert server.complete("abc", max_tokens=2).status_code == 200
    response = httpx.get(f"{server.url}/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    values = dict(line.rsplit(" ", 1) for line in response.text.splitlines() if not line.startswith("#"))
    expected = {
        "minispec_requests_running": 0,
        "minispec_requests_waiting": 0,
        "minispec_kv_pages_used": 0,
        "minispec_kv_pages": 400,
        "minispec_prompt_tokens_total": 16,
        "minispec_generation_tokens_total": 35,
        'minispec_requests_total{reason="stop"}': 3,
        'minispec_requests_total{reason="length"}': 1,
        'minispec_requests_total{reason="abort"}': 0,
        "minispec_speculation_steps_total": 7,
        "minispec_time_to_first_token_seconds_count": 4,
        "minispec_inter_token_latency_seconds_count": 31,
        'minispec_time_to_first_token_seconds_bucket{le="+Inf"}': 4,
    }
    assert {name: float(values[name]) for name in expected} == expected
    drafted = float(values["minispec_speculation_drafted_tokens_total"])
    assert 24 <= float(values["minispec_speculation_accepted_tokens_total"]) <= drafted


def test_what_is_no_http(shared):
    with raw_request(shared, b"nonsense\r\n\r\n") as connection:
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and b"application/json" in head
    assert body.startswith(b'{"error":{"message":')


def test_bugs_are_500(shared, monkeypatch):
    def broken(*args, **kwargs):
        raise ZeroDivisionError("a secret detail")

    monkeypatch.setattr(shared.engine, "make_request", broken)
    response = shared.complete()
    assert response.status_code == 500 and response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text and response.headers["x-request-id"]
