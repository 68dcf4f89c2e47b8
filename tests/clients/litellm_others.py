"""litellm, Responses and Messages: litellm at /v1/responses and /v1/messages."""

# /// script
# dependencies = ["litellm==1.106.2", "mcp==2.3.0"]
# ///

from __future__ import annotations

import litellm
from cases import API_KEY, BASE_URL, MODEL, QUESTION, case, run

OPENAI = {"model": f"openai/{MODEL}", "api_base": BASE_URL, "api_key": API_KEY}
ANTHROPIC = {"model": f"anthropic/{MODEL}", "api_base": BASE_URL.removesuffix("/v1"), "api_key": API_KEY}


@case("responses")
def _responses() -> None:
    response = litellm.responses(input="2 + 3?", max_output_tokens=8, **OPENAI)
    assert response.output[0].content[0].text
    events = list(litellm.responses(input="2 + 3?", max_output_tokens=8, stream=True, **OPENAI))
    assert "".join(event.delta for event in events if event.type.value == "response.output_text.delta")
    assert events[-1].type.value in ("response.completed", "response.incomplete")


@case("anthropic chat")
def _anthropic() -> None:
    answer = litellm.completion(messages=QUESTION, max_tokens=8, **ANTHROPIC)
    assert answer.choices[0].message.content
    pieces = litellm.completion(messages=QUESTION, max_tokens=8, stream=True, **ANTHROPIC)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces)


if __name__ == "__main__":
    run("litellm")
