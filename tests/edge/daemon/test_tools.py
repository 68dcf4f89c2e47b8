"""Functions that a chat's model may call: as its template shows them, and as its answer calls them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from loop_thread import LoopThread
from openai import BadRequestError, OpenAI
from speaking_target import ARGUMENTS, MODEL, SpeakingTarget
from tool_templates import FORMAT_OF, TEMPLATES

from outrider.edge.daemon.body_reading import checked
from outrider.edge.daemon.http_errors import ApiError
from outrider.edge.daemon.schema import ChatRequest
from outrider.proto.errors import InvalidArgument
from outrider.proto.types import GrammarKind

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Say what the weather is like <now>.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "array", "items": {"type": "integer"}}},
            "required": ["city"],
        },
    },
}
CLOCK: dict[str, Any] = {
    "type": "function",
    "function": {"name": "now", "parameters": {"type": "object", "properties": {}}},
}
PARIS = {"city": 'Paris "é" </b>', "days": [1, 2]}
DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]
ASKED: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Rain?"}]
CALLED: list[dict[str, Any]] = [
    *ASKED,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "abcDEF123", "type": "function", "function": {"name": "get_weather", "arguments": json.dumps(PARIS)}}
        ],
    },
    {"role": "tool", "tool_call_id": "abcDEF123", "content": '{"rain": true}'},
]
TEXTS = {
    "hermes": [
        *("I ", "look", ".\n<tool_", 'call>\n{"name": "get_weather"', ', "arguments": {"city": ', '"Paris"}}\n</tool'),
        *("_call>\n<tool_call>", '{"name": "now", "arguments": {}}', "\n</tool_call>"),
    ],
    "llama3": ['{"name": "get_', 'weather", "parameters": {"ci', 'ty": "Paris"}', "}"],
    "mistral": [
        *("[TOOL_", "CALLS] [", '{"name": "get_weather", "arguments": {"city": "Paris"}}, ', '{"name": "now", '),
        '"arguments": {}}]',
    ],
}


@pytest.fixture(scope="module")
def _daemons(start, scripted) -> Iterator[dict[str, Any]]:
    with ExitStack() as running:
        yield {
            name: running.enter_context(start(scripted(chat_template=with_tokens(template))))
            for name, template in TEMPLATES.items()
        }


@pytest.fixture
def speaking(_daemons):
    """Return a daemon whose target speaks a format, and says what the format's `TEXTS` holds."""

    def choose(name: str) -> Any:
        live = _daemons[name]
        live.client.renew()
        live.client.pieces = TEXTS[FORMAT_OF[name]]
        return live

    return choose


def with_tokens(template: str) -> str:
    return json.dumps({"chat_template": template, "bos_token": "<s>", "eos_token": "</s>"})


def openai(live: Any) -> OpenAI:
    return OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        checked(ChatRequest, {"model": "tiny", "messages": ASKED, **fields})
    assert caught.value.status == 400
    return caught.value


# --- what the model is shown ---


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@pytest.mark.parametrize(("messages", "tools"), [(ASKED, None), (ASKED, [WEATHER, CLOCK]), (CALLED, [WEATHER])])
def test_tools_and_calls_reach_the_template_as_transformers_renders(name, messages, tools, speaking) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    turns = json.loads(json.dumps(messages))
    for call in turns[2]["tool_calls"] if len(turns) > 2 else ():
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])  # as its documentation asks for
    if (name, tools) == ("hermes", None):
        return  # it is shown to chats with tools alone
    (expected,), _ = render_jinja_template(
        conversations=[turns],
        tools=tools,
        chat_template=TEMPLATES[name],
        add_generation_prompt=True,
        bos_token="<s>",
        eos_token="</s>",
    )
    live = speaking(name)
    assert live.chat(messages=messages, **({"tools": tools} if tools else {})).status == 200
    assert list(live.client.asked[-1][0]) == live.client.ready.tokenizer.encode(expected, add_special_tokens=False).ids


def test_an_empty_list_of_calls_is_no_call_to_a_template(speaking) -> None:
    live = speaking("llama3")
    answered = [*ASKED, {"role": "assistant", "content": "No.", "tool_calls": []}, {"role": "user", "content": "Sure?"}]
    assert live.chat(messages=answered).status == 200
    assert "No." in live.client.ready.tokenizer.decode(live.client.asked[-1][0])


def test_a_template_of_its_own_for_tools_is_used_with_tools_only(start, scripted) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools }}<tool_call>"}]
    with start(scripted(chat_template=json.dumps({"chat_template": named}))) as live:
        decode = live.client.ready.tokenizer.decode
        assert live.chat().status == 200
        assert decode(live.client.asked[-1][0]) == "plain"
        assert live.chat(tools=[CLOCK]).status == 200
        assert "now" in decode(live.client.asked[-1][0])


def test_other_ids_than_mistrals_are_made_to_fit_and_fit_each_other(speaking) -> None:
    live = speaking("mistral")
    messages = json.loads(json.dumps(CALLED).replace("abcDEF123", "call_of_another_server"))
    assert live.chat(messages=messages, tools=[WEATHER]).status == 200
    prompt = live.client.ready.tokenizer.decode(live.client.asked[-1][0])
    assert prompt.partition('"id": "')[2][:9] == prompt.partition('"call_id": "')[2][:9]


def test_a_model_that_shall_not_call_is_shown_no_tools_and_its_text_stays_text(speaking) -> None:
    live = speaking("mistral")
    reply = live.chat(tools=[WEATHER], tool_choice="none")
    assert "get_weather" not in live.client.ready.tokenizer.decode(live.client.asked[-1][0])
    (choice,) = reply.json["choices"]
    assert choice["message"]["content"] == "".join(TEXTS["mistral"])
    assert choice["finish_reason"] == "stop"


# --- what the model calls ---


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral"])
def test_openais_client_reads_the_calls_whole_and_streamed(name, speaking) -> None:
    live = speaking(name)
    request: Any = {"model": "tiny", "messages": ASKED, "tools": [WEATHER, CLOCK], "n": 2}
    with openai(live) as client:
        whole = client.chat.completions.create(**request)
        with client.chat.completions.stream(**request) as stream:
            streamed = stream.until_done().get_final_completion()
    expected = [("get_weather", {"city": "Paris"}), ("now", {})][: 1 if name == "llama3" else 2]
    said = "I look." if name == "hermes" else None
    ids = []
    for choice in [*whole.choices, *streamed.choices]:
        calls = choice.message.tool_calls or []
        assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == expected
        assert all(call.type == "function" for call in calls)
        assert (choice.message.content, choice.finish_reason) == (said, "tool_calls")
        ids += [call.id for call in calls]
    assert len(set(ids)) == len(ids)


def test_a_streamed_call_begins_with_its_name_and_goes_on_with_its_arguments(speaking) -> None:
    live = speaking("hermes")
    events = live.chat(tools=[WEATHER, CLOCK], stream=True).events
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert deltas[0] == {"role": "assistant", "content": None}
    assert "".join(delta.get("content") or "" for delta in deltas) == "I look."
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    firsts = [call for call in calls if "id" in call]
    assert [(call["index"], call["type"], call["function"]["name"]) for call in firsts] == [
        (0, "function", "get_weather"),
        (1, "function", "now"),
    ]
    assert all(set(call) == {"index", "function"} for call in calls if call not in firsts)
    assert [call["function"]["arguments"] for call in calls] == ['{"city": ', '"Paris"}', "{}"]
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None] * (len(deltas) - 1) + [
        "tool_calls"
    ]


def test_every_token_has_its_chunk_where_more_than_its_text_is_asked_for(speaking) -> None:
    live = speaking("mistral")
    fields = {"tools": [WEATHER], "stream": True}
    few = live.chat(**fields).events
    spoken = live.chat(**fields, stream_options={"include_speculation": True}).events
    shown = live.chat(**fields, logprobs=True).events
    assert len(few) < len(spoken) == len(shown) == len(TEXTS["mistral"]) + 3
    pieces = [piece["text"] for event in spoken[1:-1] for piece in event["speculation"]["pieces"]]
    assert "".join(pieces) == "".join(TEXTS["mistral"])
    assert sum(len((event["choices"][0]["logprobs"] or {}).get("content", ())) for event in shown[:-1]) == 5


def test_a_text_without_calls_is_as_it_would_be_without_tools(speaking) -> None:
    live = speaking("hermes")
    live.client.pieces = ["Hello, ", "world. \n", "\n"]
    reply = live.chat(tools=[WEATHER])
    assert reply.json["choices"][0]["message"] == {
        "role": "assistant",
        "content": "Hello, world. \n\n",
        "refusal": None,
    }
    deltas = [event["choices"][0]["delta"] for event in live.chat(tools=[WEATHER], stream=True).events[:-1]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Hello, world. \n\n"


# --- what a grammar holds ---


@pytest.mark.parametrize(
    ("fields", "held"),
    [
        ({}, None),
        ({"tool_choice": "auto", "parallel_tool_calls": True, "response_format": {"type": "text"}}, None),
        ({"tool_choice": "required"}, ["get_weather", "now"]),
        ({"tool_choice": {"type": "function", "function": {"name": "now"}}}, ["now"]),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [CLOCK]}}},
            ["now", "TEXT"],
        ),
        ({"parallel_tool_calls": False}, ["get_weather", "now", "TEXT"]),
        ({"tools": [WEATHER, {**CLOCK, "function": {**CLOCK["function"], "strict": True}}]}, ["get_weather", "TEXT"]),
        ({"response_format": {"type": "json_object"}}, ["get_weather", "now", "answer"]),
    ],
)
def test_a_grammar_holds_what_a_request_insists_on_and_nothing_else(fields, held, speaking) -> None:
    live = speaking("hermes")
    assert live.chat(**{"tools": [WEATHER, CLOCK], **fields}).status == 200
    grammar = live.client.asked[-1][1].grammar
    if held is None:
        assert grammar is None
    else:
        assert grammar.kind is GrammarKind.LARK
        found = {name for name in ("get_weather", "now", "TEXT", "answer") if re.search(rf"\b{name}\b", grammar.text)}
        assert found >= set(held)
        assert not {"TEXT", "answer"} & found - set(held)
        assert "now" not in held or len(held) > 1 or "get_weather" not in grammar.text


def test_a_grammar_that_the_verifier_refuses_is_an_error_about_tools(speaking) -> None:
    live = speaking("hermes")
    live.client.pieces = []
    live.client.error = InvalidArgument("uniqueItems is unknown", field="sampling.grammar")
    reply = live.chat(tools=[WEATHER], tool_choice="required")
    assert (reply.status, reply.error["param"]) == (400, "tools")
    live.client.error = InvalidArgument("uniqueItems is unknown", field="sampling.grammar")
    reply = live.chat(tools=[WEATHER], response_format={"type": "text"})
    assert reply.error["param"] == "response_format", "without a grammar of calls it is the format's"


def test_tools_whose_grammar_is_too_large_are_refused_with_the_remedy(speaking) -> None:
    large = {"type": "object", "properties": {f"key_{i}": {"enum": ["x" * 40]} for i in range(1500)}}
    tool = {"type": "function", "function": {"name": "f", "parameters": large}}
    live = speaking("hermes")
    reply = live.chat(tools=[tool], tool_choice="required")
    assert (reply.status, reply.error["param"]) == (400, "tools")
    assert "fewer tools" in reply.error["message"]
    described = {"type": "object", "properties": {"a": {"type": "string", "description": "x" * 70_000}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": described}}
    assert live.chat(tools=[tool], tool_choice="required").status == 200


# --- what cannot be ---


@pytest.mark.parametrize("template", ["{{ messages }}", "{{ tools }}{{ messages }}"])
def test_tools_are_refused_with_the_remedy_where_the_target_knows_none(template, start, scripted) -> None:
    with start(scripted(chat_template=template)) as live:
        with openai(live) as client, pytest.raises(BadRequestError) as refused:
            client.chat.completions.create(model="tiny", messages=ASKED, tools=[WEATHER])  # type: ignore[arg-type, list-item]
        assert (refused.value.param, refused.value.code) == ("tools", "tools_not_supported")
        assert ("leave tools out" if "tools" not in template else "--tool-format") in str(refused.value)
        assert live.chat(tools=[]).status == live.chat(tools=[WEATHER], tool_choice="none").status == 200


def test_the_operator_may_name_the_format(start, scripted) -> None:
    with start(scripted(chat_template="{{ tools }}{{ messages }}"), tool_format="llama3") as live:
        live.client.pieces = TEXTS["llama3"]
        (choice,) = live.chat(tools=[WEATHER]).json["choices"]
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": DEEP}}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [CLOCK, CLOCK]}, "tools"),
        ({"tools": [CLOCK], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [CLOCK], "prediction": {"type": "content", "content": "x"}}, "tools"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "["}}]}
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_what_is_wrong_about_tools_is_named(fields, param) -> None:
    assert refusal(**fields).param == param


# --- targets that speak each format, from their tokens to OpenAI's client and back ---

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module", params=sorted(TEMPLATES))
def client(request, tokenizer_file, tmp_path_factory) -> Iterator[OpenAI]:
    target = SpeakingTarget(request.param, tokenizer_file, tmp_path_factory.mktemp("target"))
    loop = LoopThread()
    url = loop.run(target.start())
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made
    loop.run(target.stop())
    loop.close()


def asked(client: OpenAI, messages: list[Any], streamed: bool, **options: Any) -> Any:
    request: Any = {"model": MODEL, "messages": messages, "tools": [TOOL], **options}
    if not streamed:
        return client.chat.completions.create(**request).choices[0]
    with client.chat.completions.stream(**request) as stream:
        return stream.until_done().get_final_completion().choices[0]


@pytest.mark.parametrize("streamed", [True, False])
def test_a_question_becomes_a_call_and_its_result_an_answer(client, streamed) -> None:
    messages: list[Any] = [{"role": "user", "content": "Is it warm in Paris?"}]
    choice = asked(client, messages, streamed, logprobs=True)
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert (call.function.name, call.function.arguments) == ("get_weather", ARGUMENTS)
    assert len(choice.logprobs.content) > 5, "each token of a call has its log probability"
    messages += [choice.message.model_dump(exclude_none=True)]
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "warm"}]
    answer = asked(client, messages, streamed)
    assert (answer.finish_reason, answer.message.tool_calls) == ("stop", None)
    assert answer.message.content == "It is said: warm"


def test_a_stop_string_and_a_limit_cut_a_call_where_they_cut_any_text(client) -> None:
    messages = [{"role": "user", "content": "Is it warm?"}]
    stopped = asked(client, messages, False, stop='"Par')
    assert stopped.message.tool_calls[0].function.arguments == '{"city": '
    assert stopped.finish_reason == "tool_calls"
    cut = asked(client, messages, False, max_tokens=24)
    assert cut.finish_reason == "length"
    if cut.message.tool_calls:
        assert not is_json(cut.message.tool_calls[0].function.arguments)


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
