"""A client that goes away is a cancelled request; one that does not read holds up nobody (failure cases c9, c10)."""

import asyncio
import contextlib
import json
import socket
import struct
import threading
import time

import httpx
import pytest

from fake_worker import Script, http_bytes, raw_request, wait_for
from minispec.request import FinishReason


def answer_or_endless(prompt):
    return "yes" if "alive" in prompt else None


def reset(connection):
    """Close with RST instead of FIN."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


LEAVING = {
    "RST": reset,
    "FIN": lambda connection: connection.close(),
    "half-close": lambda connection: connection.shutdown(socket.SHUT_WR),
}


@pytest.mark.parametrize("how", LEAVING)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["decoding", "prefill", "queued"])
def test_leaving_frees_the_slot(serve, how, stream, when):
    script = Script(reply=answer_or_endless, delay=0.002)
    server = serve(script, max_slots=1, max_context=4096, pages=1100)
    blocker = None
    if when == "prefill":
        script.gate.clear()
    elif when == "queued":
        blocker = raw_request(server, http_bytes("/v1/completions", {"prompt": "endless", "stream": True}))
        wait_for(lambda: script.steps > 2)
    connection = raw_request(server, http_bytes("/v1/completions", {"prompt": "endless", "stream": stream}))
    wait_for(lambda: server.worker.num_open == (2 if blocker else 1))
    if when == "decoding":
        wait_for(lambda: script.steps > 3)
    LEAVING[how](connection)
    if when == "prefill":
        wait_for(lambda: not server.api.active)
        script.gate.set()
    if blocker:
        wait_for(lambda: server.worker.num_open == 1, 2)
        blocker.close()
    server.assert_alive()
    connection.close()
    assert server.engine.stats.finished["abort"] == (2 if blocker else 1)


def test_sixty_clients_drop(serve):
    script = Script(reply=answer_or_endless, delay=0.001)
    server = serve(script, max_slots=2, max_context=4096, pages=2200)
    for wave in range(3):
        connections = [
            raw_request(
                server,
                http_bytes(
                    "/v1/chat/completions",
                    {"messages": [{"role": "user", "content": f"{wave} {index}"}], "stream": bool(index % 2)},
                ),
            )
            for index in range(20)
        ]
        wait_for(lambda: server.worker.num_open == 20)
        for connection in connections:
            reset(connection)
        server.wait_idle(2)
    assert server.engine.stats.finished["abort"] == 60
    metrics = httpx.get(f"{server.url}/metrics").text
    for line in ("minispec_requests_running 0.0", "minispec_requests_waiting 0.0", "minispec_kv_pages_used 0.0"):
        assert line in metrics.splitlines()
    server.assert_alive()


@pytest.mark.parametrize("shut", [False, True], ids=["open", "shut for reading"])
def test_a_client_that_never_reads(serve, shut):
    """Its tokens pile up to max_tokens at most; others are served meanwhile; in the end the connection is cut off."""
    script = Script(reply=lambda prompt: "yes" if "alive" in prompt else None)
    server = serve(script, max_slots=9, pages=600, send_buffer=4096, options={"write_timeout": 0.5})
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    connection.connect(server.address)
    prompts = [f"endless {index}" for index in range(8)]  # enough text to fill the buffers of both sides
    connection.sendall(http_bytes("/v1/completions", {"prompt": prompts, "stream": True, "max_tokens": 120}))
    if shut:
        connection.shutdown(socket.SHUT_RD)  # of which the other side hears nothing
    wait_for(lambda: script.steps > 20)
    assert server.complete("alive?").json()["choices"][0]["text"] == "yes"
    wait_for(lambda: not server.api.active, 20)
    server.assert_alive()
    with connection, contextlib.suppress(ConnectionResetError):
        received = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        assert not received.endswith(b"0\r\n\r\n"), "the answer was complete"


def asgi_call(server, body, receive_more, messages):
    """Drive the application without a socket, as an ASGI server would."""
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "root_path": "",
        "scheme": "http",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": ("test", 1),
        "server": ("test", 80),
        "http_version": "1.1",
        "asgi": {"version": "3.0"},
    }
    sent_body = False

    async def receive():
        nonlocal sent_body
        if not sent_body:
            sent_body = True
            return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        return await receive_more()

    async def send(message):
        messages.append(message)

    return server.api.app()(scope, receive, send)


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_message(serve, stream):
    server = serve(Script(reply=answer_or_endless, delay=0.002), max_context=4096, pages=1100)
    messages = []

    async def main():
        async def leave():
            while not server.script.steps > 5:
                await asyncio.sleep(0.005)
            return {"type": "http.disconnect"}

        await asyncio.wait_for(asgi_call(server, {"prompt": "x", "stream": stream}, leave, messages), 5)

    asyncio.run(main())
    server.assert_alive()
    if stream:
        assert not any(b"[DONE]" in message.get("body", b"") for message in messages)


@pytest.mark.parametrize("stream", [False, True])
def test_cancelled_handler(serve, stream):
    """What uvicorn does at the end of a shutdown."""
    server = serve(Script(reply=answer_or_endless, delay=0.002), max_context=4096, pages=1100)

    async def main():
        async def never():
            await asyncio.Event().wait()

        task = asyncio.create_task(asgi_call(server, {"prompt": "x", "stream": stream}, never, []))
        while not server.script.steps > 5:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    server.assert_alive()


def test_disconnect_in_the_body(serve):
    server = serve()
    connection = raw_request(
        server,
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{",
    )
    time.sleep(0.05)
    connection.close()
    server.assert_alive()


def test_full_queue(serve):
    script = Script(reply=lambda prompt: "x")
    server = serve(script, max_slots=1, max_waiting=2)
    script.gate.clear()
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(server.complete())) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_for(lambda: server.worker.num_open == 3)
    for fields in ({}, {"stream": True}):
        started = time.monotonic()
        refused = server.complete(**fields)
        assert time.monotonic() - started < 0.5
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "queue_full"
        assert refused.headers["retry-after"]
    # Of several prompts, all or none are queued.
    assert server.complete(["a", "b"]).status_code == 429 and server.worker.num_open == 3
    # What will never fit is not told to come again.
    never = server.complete(n=4)
    assert never.status_code == 400 and never.json()["error"]["param"] == "n" and "3 requests" in never.text
    assert httpx.get(f"{server.url}/health").status_code == 200
    script.gate.set()
    for thread in threads:
        thread.join(20)
    assert [answer.status_code for answer in answers] == [200] * 3
    server.assert_alive()
    assert server.engine.stats.finished[FinishReason.STOP] == 4
