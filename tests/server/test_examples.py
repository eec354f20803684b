"""The examples of the README and of docs/api.md, as a newcomer runs them."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/api.md")}
BLOCKS = [(name, block) for name, text in TEXTS.items() for block in re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)]
CURLS = [
    match
    for _, block in BLOCKS
    for match in re.findall(r"curl .*?127\.0\.0\.1:8000(/\S+).*?-d '(.*?)'", block, re.DOTALL)
]
CLIENTS = [block for _, block in BLOCKS if "from openai import" in block]


def test_there_are_some():
    assert len(CURLS) >= 2 and len(CLIENTS) >= 2


@pytest.mark.parametrize(("path", "body"), CURLS)
def test_curl(tiny, path, body):
    # an untrained model fills what a grammar allows with blanks now and then, so not by chance
    response = tiny.client.post(path, json=json.loads(body) | {"seed": 0})
    assert response.status_code == 200, response.text
    if not json.loads(body).get("stream"):
        assert response.json()["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("code", CLIENTS)
def test_python(tiny, code, capsys):
    name = tiny.client.get("/v1/models").json()["data"][0]["id"]
    exec(code.replace("http://127.0.0.1:8000", tiny.url).replace("smollm2-135m", name), {})
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("{'messages': 1}", "not valid JSON"),
        ("{}", "messages is missing; it is required."),
        ('{"messages": "hi"}', "messages: input should be a valid list"),
        ('{"messages": [{"role": "bot", "content": "hi"}]}', "'system', 'developer', 'user', 'assistant' or 'tool'"),
        ('{"messages": [{"role": "user", "content": "hi"}], "temperature": 5}', "a number from 0 to 2"),
        ('{"messages": [{"role": "user", "content": "hi"}], "n": 1000}', "from 1 to 128"),
        ('{"messages": [{"role": "user", "content": "hi"}], "guided_json": {"a": 1}}', "use structured_outputs"),
        ('{"messages": [{"role": "user", "content": "hi"}], "model": "gpt-4"}', "this server serves"),
    ],
)
def test_the_first_error_says_what_to_do(tiny, body, words):
    response = tiny.client.post("/v1/chat/completions", content=body)
    assert response.status_code in (400, 404) and words in response.json()["error"]["message"]


def test_a_mistyped_route_gets_a_suggestion(tiny):
    for path, words in (
        ("/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/embeddings", "docs/api.md"),
    ):
        response = tiny.post(path, {})
        assert response.status_code == 404 and words in response.json()["error"]["message"], response.text
