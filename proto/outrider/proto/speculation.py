"""What edge and verifier both count of speculation, and show under vLLM's names; who shows it is the label `part`."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.proto.figures import Figure, Page

SHARED = ("part", "model_name", "drafter")

DRAFTS = Figure("counter", "outrider:spec_decode_num_drafts", "Target steps that judged drafts.", SHARED)
DRAFT_TOKENS = Figure("counter", "outrider:spec_decode_num_draft_tokens", "Draft tokens judged.", SHARED)
ACCEPTED = Figure("counter", "outrider:spec_decode_num_accepted_tokens", "Draft tokens accepted.", SHARED)
ACCEPTED_PER_POS = Figure(
    "counter",
    "outrider:spec_decode_num_accepted_tokens_per_pos",
    "Draft tokens accepted, by their position among those judged in one step, from 0.",
    (*SHARED, "position"),
)
GENERATED = Figure("counter", "outrider:generation_tokens", "Tokens committed.", SHARED)

FIGURES = (DRAFTS, DRAFT_TOKENS, ACCEPTED, ACCEPTED_PER_POS, GENERATED)


@dataclass(slots=True)
class JudgedDrafts:
    """Drafts that target steps judged. One thread counts; any may show.

    Attributes:
        draft_tokens: judged.
        accepted_of: judged blocks by how many of their drafts were accepted.
    """

    draft_tokens: int = 0
    accepted_of: list[int] = field(default_factory=lambda: [0] * 17)

    def judge(self, judged: int, accepted: int) -> None:
        """A step judged so many drafts, at least one, and accepted so many of them."""
        self.draft_tokens += judged
        if accepted >= len(self.accepted_of):
            self.accepted_of += [0] * (accepted + 1 - len(self.accepted_of))
        self.accepted_of[accepted] += 1

    def show(self, page: Page, labels: tuple[str, ...]) -> None:
        """Put the figures of drafts on `page`; the values of `SHARED` are `labels`."""
        accepted_of = list(self.accepted_of)
        page.put(DRAFTS, labels, sum(accepted_of))
        page.put(DRAFT_TOKENS, labels, self.draft_tokens)
        page.put(ACCEPTED, labels, sum(accepted * steps for accepted, steps in enumerate(accepted_of)))
        for position in range(len(accepted_of) - 1):
            page.put(ACCEPTED_PER_POS, (*labels, str(position)), sum(accepted_of[position + 1 :]))
