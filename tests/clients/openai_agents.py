"""OpenAI Agents SDK: agents over /v1/responses."""

# /// script
# dependencies = ["openai-agents==0.24.0"]
# ///

from __future__ import annotations

import asyncio
from typing import Any

from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from cases import API_KEY, BASE_URL, MODEL, case, each_tool_url, run
from openai import AsyncOpenAI

set_tracing_disabled(True)


def agent(url: str = BASE_URL, **options: Any) -> Agent:
    client = AsyncOpenAI(base_url=url, api_key=API_KEY, max_retries=0)
    model = OpenAIResponsesModel(model=MODEL, openai_client=client)
    return Agent(name="adder", instructions="Add.", model=model, model_settings=ModelSettings(temperature=0), **options)


@case("run")
def _run() -> None:
    assert asyncio.run(Runner.run(agent(), "2 + 3?")).final_output


@case("stream")
def _stream() -> None:
    async def main() -> None:
        result = Runner.run_streamed(agent(), "2 + 3?")
        kinds = [event.type async for event in result.stream_events()]
        assert "raw_response_event" in kinds
        assert result.final_output

    asyncio.run(main())


@case("turns")
def _turns() -> None:
    async def main() -> None:
        first = await Runner.run(agent(), "2 + 3?")
        again = await Runner.run(agent(), [*first.to_input_list(), {"role": "user", "content": "And 4?"}])
        assert again.final_output

    asyncio.run(main())


@case("function_tool")
@each_tool_url
def _function_tool(url: str) -> None:
    @function_tool
    def get_weather(city: str) -> str:
        """Say what the weather is like in a city."""
        return f"warm in {city}"

    result = asyncio.run(Runner.run(agent(url, tools=[get_weather]), "Is it warm in Paris?"))
    assert "warm in Paris" in result.final_output


if __name__ == "__main__":
    run("openai-agents")
