"""Share of 20 simple calls that a model makes right through the API: `python tests/real/measure_tools.py [TARGET]`.

Each question comes with one function, greedily, with one call at most (`parallel_tool_calls` false), once with
`tool_choice` "auto" and once with "required". Right is a call of that function whose arguments are the expected ones,
apart from case and spaces around; a name counts alone, too.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from serving_daemon import serving

STRING, NUMBER, INTEGER = ({"type": name} for name in ("string", "number", "integer"))


def function(name: str, description: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


WEATHER = function("get_weather", "Get the current weather of a city", city=STRING)
ADD = function("add", "Add two numbers", a=NUMBER, b=NUMBER)
MULTIPLY = function("multiply", "Multiply two numbers", a=NUMBER, b=NUMBER)
TIMER = function("set_timer", "Set a timer", minutes=INTEGER)
SEARCH = function("search_web", "Search the web", query=STRING)
TRANSLATE = function("translate", "Translate a word into another language", word=STRING, language=STRING)
MAIL = function("send_email", "Send an email", to=STRING, subject=STRING)
LIGHT = function("switch_light", "Switch the light of a room", room=STRING, state={"enum": ["on", "off"]})
STOCK = function("get_stock_price", "Get the price of a stock", symbol=STRING)
MUSIC = function("play_song", "Play a song", title=STRING)

QUESTIONS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("What is the weather in Paris?", WEATHER, {"city": "Paris"}),
    ("Is it raining in Tokyo?", WEATHER, {"city": "Tokyo"}),
    ("How warm is it in Berlin right now?", WEATHER, {"city": "Berlin"}),
    ("What is 12 plus 30?", ADD, {"a": 12, "b": 30}),
    ("Add 7 and 5.", ADD, {"a": 7, "b": 5}),
    ("What is 6 times 9?", MULTIPLY, {"a": 6, "b": 9}),
    ("Multiply 15 by 4.", MULTIPLY, {"a": 15, "b": 4}),
    ("Set a timer for 10 minutes.", TIMER, {"minutes": 10}),
    ("Please remind me in 25 minutes.", TIMER, {"minutes": 25}),
    ("Start a timer of 3 minutes for my tea.", TIMER, {"minutes": 3}),
    ("Search the web for cheap flights.", SEARCH, {"query": "cheap flights"}),
    ("Search for chocolate cake recipes.", SEARCH, {"query": "chocolate cake recipes"}),
    ("Translate the word house into French.", TRANSLATE, {"word": "house", "language": "French"}),
    ("Translate dog into Spanish.", TRANSLATE, {"word": "dog", "language": "Spanish"}),
    ("Send an email to anna@example.com with the subject Hello.", MAIL, {"to": "anna@example.com", "subject": "Hello"}),
    ("Turn on the light in the kitchen.", LIGHT, {"room": "kitchen", "state": "on"}),
    ("Turn off the light in the bedroom.", LIGHT, {"room": "bedroom", "state": "off"}),
    ("What is the price of the stock AAPL?", STOCK, {"symbol": "AAPL"}),
    ("How is the stock MSFT doing?", STOCK, {"symbol": "MSFT"}),
    ("Play the song Yesterday.", MUSIC, {"title": "Yesterday"}),
]


def folded(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value.strip().lower() if isinstance(value, str) else value for name, value in arguments.items()}


async def right(openai: Any, target: str, choice: str) -> tuple[int, int]:
    """Return how many of the 20 questions led to a call, and to the expected one."""
    named = whole = 0
    for question, tool, expected in QUESTIONS:
        reply = await openai.chat.completions.create(
            model=target,
            messages=[{"role": "user", "content": question}],
            tools=[tool],
            tool_choice=choice,
            parallel_tool_calls=False,
            max_tokens=80,
            temperature=0,
        )
        message = reply.choices[0].message
        calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
        name = tool["function"]["name"]
        found = bool(calls) and calls[0][0] == name
        try:
            same = found and folded(json.loads(calls[0][1])) == folded(expected)
        except ValueError:
            same = False
        named, whole = named + found, whole + same
        print(f"{choice:9}{'right' if same else 'name' if found else '-':6}{question}  {calls or message.content!r}")
    return named, whole


async def main(target: str) -> None:
    async with serving(target) as openai:
        for choice in ("auto", "required"):
            named, whole = await right(openai, target, choice)
            print(f"{target}, {choice}: {named} of {len(QUESTIONS)} names, {whole} with the expected arguments")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:] or ["smollm2"]))
