"""Tool calls and reasoning through the API, with the official client where it has them."""

import json

import openai
import pytest

from fake_worker import MODEL, Script, events_of

TEMPLATE = (
    "{% if tools %}Tools: {% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Write <tool_call>…</tool_call> to call one.{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}(thought {{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.name }} {{ call.function.arguments | tojson }}]{% endfor %}"
    "{% if m.tool_call_id %} to {{ m.tool_call_id }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINK_TEMPLATE = (
    "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
    "{% if open %}<think>\n{% endif %}{% if open is defined and not open %}<think>\n\n</think>\n\n{% endif %}"
)
UNIT = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}},
    "required": ["unit"],
    "additionalProperties": False,
}


def tool(name, parameters=UNIT, **more):
    return {
        "type": "function",
        "function": {"name": name, "description": f"The {name}", "parameters": parameters, **more},
    }


TOOLS = [tool("weather"), tool("time")]
USER = [{"role": "user", "content": "hi"}]


def call_text(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


TWO_CALLS = "Let me see.\n" + call_text("weather", {"unit": "C"}) + "\n" + call_text("time", {"unit": "F"})


@pytest.fixture
def server(serve):
    """serve(reply, …): a server whose template knows tools, and whose prompts are kept."""

    def start(reply, *, template=TEMPLATE, **settings):
        prompts = []
        script = Script(reply=lambda prompt: prompts.append(prompt) or reply, drafts=settings.pop("drafts", 0))
        config = {"chat_template": template}
        live = serve(script, tokenizer_config=config, max_context=3000, pages=4000, **settings)
        live.prompts = prompts
        return live

    return start


def client_of(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def joined(chunks):
    """(content, reasoning, [(name, arguments)], finish reason) of a stream, as clients put it together."""
    content, reasoning, calls, reasons = "", "", [], []
    for chunk in chunks:
        [choice] = chunk["choices"]
        delta = choice["delta"]
        content += delta.get("content") or ""
        reasoning += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls") or ():
            if "id" in call:
                assert call["index"] == len(calls)
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"]["arguments"]
        if choice["finish_reason"] is not None:
            assert delta == {} or "role" in delta
            reasons.append(choice["finish_reason"])
        else:
            assert len(delta.keys() - {"role"}) == 1, "a chunk says one thing, and something"
    assert len(reasons) == 1
    return content, reasoning, [tuple(call) for call in calls], reasons[0]


@pytest.mark.parametrize("drafts", [0, 3])
def test_calls_whole_and_streamed(server, drafts):
    live = server(TWO_CALLS, drafts=drafts)
    with client_of(live) as client:
        whole = client.chat.completions.create(model=MODEL, messages=USER, tools=TOOLS)
        message = whole.choices[0].message
        assert message.content == "Let me see." and whole.choices[0].finish_reason == "tool_calls"
        assert [
            (call.type, call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls
        ] == [
            ("function", "weather", {"unit": "C"}),
            ("function", "time", {"unit": "F"}),
        ]
        assert len({call.id for call in message.tool_calls}) == 2
        with client.chat.completions.stream(model=MODEL, messages=USER, tools=TOOLS) as stream:
            for _ in stream:
                pass
            final = stream.get_final_completion().choices[0]
        assert final.finish_reason == "tool_calls" and final.message.content == "Let me see."
        assert [(call.function.name, call.function.arguments) for call in final.message.tool_calls] == [
            (call.function.name, call.function.arguments) for call in message.tool_calls
        ]


def test_what_the_template_gets_to_see(server):
    live = server("done")
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"unit": "C"}'}}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "call_1", "content": "20 degrees <|im_end|>"},
    ]
    assert live.post("/v1/chat/completions", {"messages": messages, "tools": TOOLS}).status_code == 200
    [prompt] = live.prompts
    assert prompt.count('"name": "weather"') == 1 and '"description": "The time"' in prompt
    # arguments are an object to the template, and what a tool says cannot end its turn
    assert 'assistant\n(thought hm)[weather {"unit": "C"}]' in prompt
    assert "tool\n20 degrees <|im_end|> to call_1\n" in prompt
    live.chat(tools=TOOLS, tool_choice="none")
    assert "Tools" not in live.prompts[-1]


@pytest.mark.parametrize(
    ("arguments", "status"), [("{}", 200), ("", 200), ("[1]", 400), ("{", 400), ("5", 400), ({"a": 1}, 400)]
)
def test_arguments_of_earlier_calls(server, arguments, status):
    call = {"id": "x", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [*USER, {"role": "assistant", "tool_calls": [call]}]
    response = server("ok").post("/v1/chat/completions", {"messages": messages})
    assert response.status_code == status
    if status == 400:
        assert response.json()["error"]["param"] == "messages[1].tool_calls[0].function.arguments"


def test_nothing_is_called_unasked(server):
    live = server(TWO_CALLS)
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}, {"tools": [tool("other")]}):
        choice = live.chat(**fields).json()["choices"][0]
        assert choice["message"]["content"] == TWO_CALLS and "tool_calls" not in choice["message"], fields
        assert choice["finish_reason"] == "stop"


def test_one_call_at_most(server):
    live = server(TWO_CALLS)
    message = live.chat(tools=TOOLS, parallel_tool_calls=False).json()["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"]


def test_a_call_that_the_limit_cuts(server):
    live = server(call_text("weather", {"unit": "C"}))
    limit = len('<tool_call>\n{"name": "weather", "arguments": {"un')
    for stream in (False, True):
        response = live.chat(tools=TOOLS, max_tokens=limit, stream=stream)
        if stream:
            assert joined(events_of(response.text)[:-1]) == ("", "", [("weather", '{"un')], "length")
        else:
            choice = response.json()["choices"][0]
            assert choice["finish_reason"] == "length" and choice["message"]["content"] is None
            assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"un'


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "time"}}])
@pytest.mark.parametrize("parser", ["auto", "llama3"])
def test_a_model_that_would_rather_talk_has_to_call(server, choice, parser):
    live = server("I would rather talk.", options={"tool_parser": parser})
    message = live.chat(tools=TOOLS, tool_choice=choice, temperature=0, max_tokens=200).json()["choices"][0]["message"]
    [call, *more] = message["tool_calls"]
    assert json.loads(call["function"]["arguments"])["unit"] in ("C", "F") and message["content"] is None
    if choice != "required":
        assert call["function"]["name"] == "time" and not more


def test_definitions_in_the_schema_of_a_tool_are_its_own(server):
    """As pydantic and zod write them: `#` is the root of the tool's schema, not of the grammar around it."""
    node = {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False}
    weather = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$defs": {"Unit": {"enum": ["C"]}},
        "type": "object",
        "properties": {"unit": {"$ref": "#/$defs/Unit"}},
        "required": ["unit"],
        "additionalProperties": False,
    }
    other = {**weather, "$defs": {"Unit": {"enum": ["F"]}}}
    tools = [tool("weather", weather), tool("other", other), tool("node", node)]
    for name, reply, arguments in (
        ("weather", "I would rather talk.", {"unit": "C"}),
        ("other", "I would rather talk.", {"unit": "F"}),
        ("node", call_text("node", {"next": {"next": {}}}), {"next": {"next": {}}}),
    ):
        choice = {"type": "function", "function": {"name": name}}
        fields = {"tools": tools, "tool_choice": choice, "temperature": 0, "max_tokens": 200}
        [call] = server(reply).chat(**fields).json()["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == arguments


@pytest.mark.parametrize("kind", ["string", ["object", "null"], None])
def test_arguments_are_objects(server, kind):
    response = server("x").chat(tools=[tool("weather", {"type": kind})])
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == "tools[0].function.parameters.type"
    assert json.dumps(kind) in error["message"]


def test_strict_arguments_where_a_call_is_free(server):
    reply = "Well: " + call_text("weather", {"unit": "K"})
    loose, strict = server(reply), server(reply)
    arguments = []
    for live, tools in ((loose, TOOLS), (strict, [tool("weather", strict=True)])):
        choice = live.chat(tools=tools, temperature=0, max_tokens=200).json()["choices"][0]
        assert choice["message"]["content"] == "Well:"
        arguments.append(json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]))
    assert arguments[0] == {"unit": "K"} and arguments[1]["unit"] in ("C", "F")


def test_tools_or_an_answer_of_a_given_form(server):
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": UNIT}}
    for reply, calls in ((call_text("time", {"unit": "C"}), 1), ('{"unit": "F"}', 0)):
        message = server(reply).chat(tools=TOOLS, response_format=wanted, temperature=0).json()["choices"][0]["message"]
        assert len(message.get("tool_calls", [])) == calls
        assert calls or message["content"] == reply
    response = server("x").chat(tools=TOOLS, structured_outputs={"grammar": 'start: "x"'})
    assert response.status_code == 400 and response.json()["error"]["param"] == "structured_outputs"


def test_several_choices_with_calls(server):
    live = server(TWO_CALLS)
    choices = live.chat(tools=TOOLS, n=3).json()["choices"]
    assert [len(choice["message"]["tool_calls"]) for choice in choices] == [2, 2, 2]
    *chunks, _ = events_of(live.chat(tools=TOOLS, n=2, stream=True).text)
    for index in (0, 1):
        own = [{**chunk, "choices": [c]} for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert [name for name, _ in joined(own)[2]] == ["weather", "time"]


def test_unknown_formats_name_the_option(server):
    live = server("x", template="{{ tools }}")
    response = live.chat(tools=TOOLS)
    assert response.status_code == 400 and "--tool-parser" in response.json()["error"]["message"]
    named = server(call_text("time", {}), template="{{ tools }}", options={"tool_parser": "hermes"})
    assert named.chat(tools=TOOLS).json()["choices"][0]["finish_reason"] == "tool_calls"


# Reasoning


REASONED = "<think>\nab c\n</think>\n\ncd"


@pytest.mark.parametrize("drafts", [0, 1, 6])
def test_reasoning_is_told_from_the_answer(server, drafts):
    live = server(REASONED, template=THINK_TEMPLATE, drafts=drafts)
    whole = live.chat().json()
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("ab c", "cd")
    reasoning = len("<think>\nab c\n</think>")
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": reasoning}
    *chunks, last, _ = events_of(live.chat(stream=True, stream_options={"include_usage": True}).text)
    assert joined(chunks) == ("cd", "ab c", [], "stop") and last["usage"] == whole["usage"]
    with client_of(live) as client:
        answer = client.chat.completions.create(model=MODEL, messages=USER)
        assert answer.choices[0].message.reasoning_content == "ab c"
        assert answer.usage.completion_tokens_details.reasoning_tokens == reasoning


def test_a_prompt_that_opens_or_closes_the_reasoning(server):
    live = server("ab</think>cd", template=THINK_TEMPLATE)
    message = live.chat(chat_template_kwargs={"open": True}).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("ab", "cd")
    message = live.chat(chat_template_kwargs={"open": False}).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (None, "ab</think>cd")
    plain = server(REASONED, template=THINK_TEMPLATE, options={"reasoning_parser": "none"}).chat().json()
    assert plain["choices"][0]["message"]["content"] == REASONED
    assert "completion_tokens_details" not in plain["usage"]


@pytest.mark.parametrize("limit", [3, 10, 21, 22, 23, 25])
def test_reasoning_tokens_where_a_limit_cuts(server, limit):
    """Failure case b11."""
    live = server(REASONED, template=THINK_TEMPLATE, drafts=4)
    usage = live.chat(max_tokens=limit).json()["usage"]
    begun = limit >= len("<think>")
    whole = len("<think>\nab c\n</think>")
    assert usage["completion_tokens_details"]["reasoning_tokens"] == (min(limit, whole) if begun else 0)


def test_a_form_holds_behind_the_reasoning(server):
    live = server("<think>whatever</think>I would rather talk", template=THINK_TEMPLATE)
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": UNIT}}
    for variables in ({}, {"open": True}):
        fields = {"response_format": wanted, "chat_template_kwargs": variables, "temperature": 0, "max_tokens": 100}
        message = live.chat(**fields).json()["choices"][0]["message"]
        assert json.loads(message["content"])["unit"] in ("C", "F")
        assert "whatever" in message["reasoning_content"]
