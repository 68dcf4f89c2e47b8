"""Recording hit traces: a drafter is asked at every position of a text that the target has written."""

from __future__ import annotations

import math

from outrider.deploy.prompts import Prompt
from outrider.deploy.replay.traces import HitTrace
from outrider.edge.drafters.proposals import ProposalRule
from outrider.edge.drafters.protocol import Drafter
from outrider.proto.types import Sampling


def record_trace(
    prompt: Prompt,
    prompt_tokens: tuple[int, ...],
    tokens: tuple[int, ...],
    drafter: Drafter,
    sampling: Sampling,
    *,
    ended: bool = False,
) -> HitTrace:
    """Ask `drafter` for one token after every prefix of the text.

    Args:
        prompt: whose text it is.
        prompt_tokens: [p] the prompt.
        tokens: [n] the text that the target wrote with `sampling`.
        drafter: whose hits are wanted.
        sampling: of the text; its seed is that of the noise that both sides share.
        ended: whether the text ended by itself.

    Raises:
        ConfigError: the text is empty.
    """
    rule = ProposalRule(sampling, prompt_length=len(prompt_tokens))
    state = drafter.open(rule)
    hits: list[bool] = []
    confidence: list[float] = []
    silent: list[bool] = []
    try:
        state.extend(prompt_tokens)
        for token in tokens:
            length = state.length
            proposal = state.propose(1)
            hits.append(proposal.tokens[:1] == (token,))
            confidence.append(round(proposal.q[0], 4) if proposal.q else math.nan)
            silent.append(not proposal.tokens)
            state.truncate(length)
            state.extend((token,))
    finally:
        state.close()
    return HitTrace(
        id=prompt.id,
        domain=prompt.domain,
        drafter=drafter.name,
        drafter_version=drafter.version,
        temperature=sampling.temperature,
        prompt_tokens=len(prompt_tokens),
        tokens=tokens,
        hits=tuple(hits),
        confidence=tuple(confidence),
        ended=ended,
        silent=tuple(silent) if any(silent) else (),
    )
