"""One drafter's way through a text in synchronous rounds: speculative decoding over a network, without the network.

The target's text does not depend on the drafts: position i takes argmax log p_i + G(seed, i) with noise that both sides
share, and a draft is accepted where it equals that token (DESIGN section 1). So the text is known beforehand, a step
that verifies drafts commits those before the first that differs from the text, and the text's next token, and only the
drafter's proposals are left to find out, by the calls of an edge that waits for every commit. The steps are those of
such a session, one for one, where the prompt is read in the step that verifies the first drafts. (A verifier that reads
the prompt while these are still on their way takes as many steps, or one more.)
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from outrider.bench.vectors import SentVectors
from outrider.cloud.text_writer import WrittenText
from outrider.drafters.proposals import ProposalRule
from outrider.drafters.protocol import Drafter
from outrider.proto.types import Sampling, token_ids


@dataclass(frozen=True, slots=True)
class Rounds:
    """Result of one text.

    Attributes:
        tokens: tokens of the text.
        steps: target steps.
        accepted: drafts that agreed with the text.
        compared: drafts with no miss before them in their round; acceptance is accepted / compared.
        first_s: processor time of each round's first draft, in seconds, with the work before it: reading the target's
            token, and the vector. The text's first round, which reads the prompt, is left out.
        next_s: the same for the drafts after it.
    """

    tokens: int
    steps: int
    accepted: int
    compared: int
    first_s: tuple[float, ...] = ()
    next_s: tuple[float, ...] = ()


def synchronous_rounds(
    drafter: Drafter, text: WrittenText, sampling: Sampling, vectors: SentVectors | None, *, drafts: int
) -> Rounds:
    """Take `drafter` through `text`, and return the counts.

    Args:
        drafter: drafter that proposes.
        text: text that the target wrote with `sampling`.
        sampling: sampling whose seed is that of the shared noise.
        vectors: vectors that come with the commits; None: the drafter is never steered.
        drafts: most drafts in a round; fewer where the text may have no more tokens.
    """
    prompt, end = text.prompt_length, len(text.transcript)
    right, known = 0, prompt  # tokens of the drafter's prefix that are the text's; tokens committed
    steps = accepted = compared = 0
    first_s, next_s = list[float](), list[float]()
    state = drafter.open(ProposalRule(sampling, prompt_length=prompt))
    try:
        while known < end:
            vector = vectors.after(known) if vectors is not None else None
            began = time.thread_time()  # the drafters compared compute in this thread alone
            state.truncate(right)
            if vectors is not None and steps:
                state.steer(vector, prompt)
            state.extend(text.transcript[right:known])
            hits = verified = 0
            for token in text.transcript[known : known + min(drafts, prompt + text.limit - known - 1)]:
                proposed = token_ids(state.propose(1))
                if steps and proposed:
                    (next_s if verified else first_s).append(time.thread_time() - began)
                verified += len(proposed)
                if proposed != (token,):
                    break
                hits += 1
                began = time.thread_time()
            accepted += hits
            compared += verified
            steps += 1
            right = known + hits
            known = min(right + 1, end)
    finally:
        state.close()
    return Rounds(len(text), steps, accepted, compared, tuple(first_s), tuple(next_s))
