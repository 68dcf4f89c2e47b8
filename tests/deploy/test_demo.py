"""The demonstration says why its two ratios differ."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
from tokenizers import Tokenizer

from outrider.deploy import demo
from outrider.deploy.commands.decode_options import BuiltInPrompts
from outrider.deploy.commands.serving_options import ConditionSettings
from outrider.deploy.demo import ComparedTexts
from outrider.deploy.link.shape import LinkShape
from outrider.drafters import DrafterShelf
from outrider.edge import Completion
from outrider.edge.preparation import Ready
from outrider.proto.session import EdgeStatistics
from outrider.proto.types import CommittedToken, FinishReason

EMULATED = ConditionSettings(pace=30, link=LinkShape.of(rtt_ms=20))


def compared(ratio: float) -> ComparedTexts:
    """Texts that Outrider decodes so many times as fast."""

    def text(seconds: float) -> Completion:
        tokens = (CommittedToken(1), CommittedToken(2))
        return Completion(3, tokens, (), "", FinishReason.LENGTH, EdgeStatistics(), seconds, 0.1)

    return ComparedTexts([text(1.0)], [text(ratio)])


@pytest.fixture(autouse=True)
def _idle(monkeypatch) -> None:
    monkeypatch.setattr(demo.os, "getloadavg", lambda: (0.0, 0.0, 0.0))


def test_both_figures_stand_together_with_the_reason_of_the_lower_one() -> None:
    lines = list(demo._reasons(compared(3.0), compared(1.0), EMULATED, 6.2))
    assert lines[0] == "target paced at 30 ms, link 20 ms: 3.00 times the speed of cloud streaming"
    assert lines[1] == "bare loopback, target at its own speed: 1.00 times"
    assert "about 6 ms" in lines[2]
    assert len(lines) == 3


def test_without_pace_and_link_the_reason_stands_alone() -> None:
    ratio, reason = demo._reasons(compared(1.0), None, ConditionSettings(), 6.2)
    assert ratio.startswith("target at its own speed, no link between: 1.00 times")
    assert "larger targets" in reason
    assert len(list(demo._reasons(compared(1.0), None, ConditionSettings(), 30.0))) == 1, (
        "that is a target's usual step"
    )


@pytest.mark.parametrize("target", ["reference", "another"])
def test_a_target_with_a_chat_template_is_asked_and_an_embedded_one_goes_on(target, tokenizer_file, tmp_path) -> None:
    template = "{% for message in messages %}<|user|>{{ message.content }}<|end|>{% endfor %}"
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    ready = Ready(None, target, tokenizer, "", DrafterShelf(), template)
    client = SimpleNamespace(find=AsyncMock(return_value=ready))
    prompts = asyncio.run(demo._prompts(BuiltInPrompts(per_domain=1), target, client))
    for prompt, shown, tokens in prompts:
        text = tokenizer.decode(list(tokens), skip_special_tokens=False)
        if target == "reference":
            assert text == prompt.text
            assert text.endswith(shown)
        else:
            assert (shown, text) == (f"{prompt.text}\n", f"<|user|>{prompt.text}<|end|>")
    assert len({prompt.domain for prompt, _, _ in prompts}) == len(prompts) == (4 if target == "reference" else 8)
    own = tmp_path / "own.txt"
    own.write_text("A question?")
    ((prompt, _, tokens),) = asyncio.run(demo._prompts(BuiltInPrompts(prompts=own), target, client))
    assert prompt.text == "A question?"
    assert (tokenizer.decode(list(tokens)) == prompt.text) or target == "another"
