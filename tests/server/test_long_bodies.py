"""Long bodies are read beside the streams, one after the other: together they could take any amount of memory."""

from __future__ import annotations

import threading

from fake_worker import Script, wait_for


def test_one_long_body_at_a_time(serve, monkeypatch):
    server = serve(Script(reply=lambda prompt: "yes"))
    tokenizer = server.engine.tokenizer
    encode, inside, most, tidied = tokenizer.encode, [], [], []
    monkeypatch.setattr("minispec.server.app.give_back_memory", lambda: tidied.append(True))

    def slow(text, **more):
        if len(text) > 5000:
            inside.append(text)
            most.append(len(inside))
            assert not gate.wait(0.02)
            inside.pop()
        return encode(text, **more)

    gate = threading.Event()
    monkeypatch.setattr(tokenizer, "encode", slow)
    statuses = []
    threads = [
        threading.Thread(target=lambda: statuses.append(server.complete("x" * 300_000).status_code)) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    wait_for(lambda: most)
    assert server.complete("alive?").status_code == 200  # a short one does not wait for them
    for thread in threads:
        thread.join(20)
    assert statuses == [400] * 6 and max(most) == 1 and len(tidied) == 6
