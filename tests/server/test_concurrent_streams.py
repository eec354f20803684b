"""64 streams at once through real sockets, each equal to the same request made alone without streaming."""

import asyncio
import json
import random

import httpx

from fake_worker import events_of

STREAMS = 64


def requests():
    """Bodies of every sort: greedy and seeded, penalties, stops, forms, logprobs, several choices."""
    random.seed(11)
    bodies = []
    for number in range(STREAMS):
        text = "".join(random.choice("abcde żó🦉") for _ in range(random.randint(1, 30)))
        body = {"max_tokens": random.randint(1, 20), "seed": number, "temperature": random.choice([0, 0.7, 1.3])}
        extra = [
            {},
            {"frequency_penalty": 0.8, "presence_penalty": 0.4, "repetition_penalty": 1.2},
            {"stop": ["a", "zz", "e"], "min_tokens": min(3, body["max_tokens"])},
            {"logprobs": 2},
            {"n": 2, "logit_bias": {"97": 5, "98": -100}},
            {"structured_outputs": {"regex": "[a-f]{4,20}"}},
            {"min_p": 0.02, "top_k": 40, "top_p": 0.95},
            {"ignore_eos": True, "stop_token_ids": [101]},
        ][number % 8]
        bodies.append({"prompt": text * random.randint(1, 3), **body, **extra})
    return bodies


def test_64_streams_say_what_they_say_alone(tiny):
    bodies = requests()
    alone = [tiny.post("/v1/completions", {**body, "speculation": {"enabled": False}}).json() for body in bodies]

    async def stream(client, body):
        options = {"stream": True, "stream_options": {"include_usage": True}}
        response = await client.post("/v1/completions", json={**body, **options})
        assert response.status_code == 200, response.text
        return events_of(response.text)

    async def all_at_once():
        limits = httpx.Limits(max_connections=STREAMS)
        async with httpx.AsyncClient(base_url=tiny.url, timeout=120, limits=limits) as client:
            return await asyncio.gather(*(stream(client, body) for body in bodies))

    for body, whole, events in zip(bodies, alone, asyncio.run(all_at_once()), strict=True):
        assert "choices" in whole, whole
        *chunks, last, done = events
        assert done == "[DONE]"
        for choice in whole["choices"]:
            own = [piece for chunk in chunks for piece in chunk["choices"] if piece["index"] == choice["index"]]
            assert "".join(piece["text"] for piece in own) == choice["text"], json.dumps(body)
            assert [piece["finish_reason"] for piece in own if piece["finish_reason"]] == [choice["finish_reason"]]
        for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert last["usage"][count] == whole["usage"][count]
    tiny.wait_idle()
