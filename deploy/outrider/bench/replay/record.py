"""Record hit traces: teacher-force a drafter on every token of a text that the target has written."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from outrider.bench.replay.traces import HitTrace
from outrider.cloud.text_writer import TextRequest
from outrider.deploy.prompts import Prompt
from outrider.edge.drafters.proposals import ProposalRule
from outrider.edge.drafters.protocol import Drafter, DraftState
from outrider.proto.session import PROMPT_TOKENS
from outrider.proto.types import DraftToken, Sampling

# The target's processed probabilities [n] of the tokens [n] that a drafter proposes in place of those of a text.
Chances = Callable[[Sequence[int]], Sequence[float]]


def record_trace(
    prompt: Prompt | TextRequest,
    prompt_tokens: tuple[int, ...],
    tokens: tuple[int, ...],
    drafter: Drafter,
    sampling: Sampling,
    *,
    chances: Chances | None = None,
    ended: bool = False,
) -> HitTrace:
    """Ask `drafter` what it would have proposed in place of each token of the text, in one batched pass.

    Args:
        prompt: whose text it is.
        prompt_tokens: [p] the prompt.
        tokens: [n] the text that the target wrote with `sampling`.
        drafter: whose hits are wanted.
        sampling: of the text; its seed is that of the noise that both sides share.
        chances: what the target thinks of it; None: nobody knows, and the trace has no agreement.
        ended: whether the text ended by itself.

    Raises:
        ConfigError: the text is empty.
    """
    state = drafter.open(ProposalRule(sampling, prompt_length=len(prompt_tokens)))
    try:
        prompt_log_q = read_prompt(state, prompt_tokens)
        forced = state.propose_forced(tokens)
    finally:
        state.close()
    return trace_of(
        prompt,
        len(prompt_tokens),
        tokens,
        drafter,
        sampling,
        forced,
        prompt_log_q=prompt_log_q,
        chances=chances,
        ended=ended,
    )


def read_prompt(state: DraftState, prompt_tokens: tuple[int, ...]) -> float:
    """Let an empty state read the prompt [p]; what the drafter gives to its end, nats a token; NaN: it is one token."""
    first = max(1, len(prompt_tokens) - PROMPT_TOKENS)
    state.extend(prompt_tokens[:first])
    end = prompt_tokens[first:]
    return round(float(state.score(end).mean()), 4) if end else math.nan


def trace_of(
    prompt: Prompt | TextRequest,
    prompt_length: int,
    tokens: tuple[int, ...],
    drafter: Drafter,
    sampling: Sampling,
    forced: tuple[DraftToken, ...],
    *,
    prompt_log_q: float = math.nan,
    chances: Chances | None = None,
    ended: bool = False,
) -> HitTrace:
    """Return the `forced` proposals of `drafter` in place of `tokens` [n] as a trace; see `record_trace`."""
    silent = tuple(draft.id < 0 for draft in forced)
    return HitTrace(
        id=prompt.id,
        domain=prompt.domain,
        drafter=drafter.name,
        drafter_version=drafter.version,
        temperature=sampling.temperature,
        prompt_tokens=prompt_length,
        tokens=tokens,
        hits=tuple(own.id == token for own, token in zip(forced, tokens, strict=True)),
        confidence=_rounded(draft.confidence for draft in forced),
        ended=ended,
        silent=silent if any(silent) else (),
        entropy=_rounded(draft.entropy for draft in forced),
        perturbed_probability=_rounded(draft.perturbed_probability for draft in forced),
        agreement=_rounded(_agreement(forced, chances)) if chances else (),
        seed=sampling.seed,
        prompt_log_q=prompt_log_q,
    )


def _agreement(forced: Sequence[DraftToken], chances: Chances) -> Iterable[float]:
    """Return [n] min(1, p / q), an estimate of 1 - TV (`policies.selection.rewards`); NaN: nothing proposed."""
    likely = chances([max(0, draft.id) for draft in forced])
    q = [draft.confidence for draft in forced]
    return (min(1.0, p / own) if own > 0 else math.nan for p, own in zip(likely, q, strict=True))


def _rounded(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(round(value, 4) for value in values)


class PromptReaders:
    """Drafters that have read a prompt once for all texts after it: a state each, until the last of these texts."""

    def __init__(self, drafters: Mapping[str, Drafter], requests: Sequence[TextRequest]) -> None:
        self._drafters = drafters
        self._to_come = Counter(request.prompt for request in requests)
        self._states: dict[tuple[int, ...], dict[str, tuple[float, DraftState]]] = {}

    def propose_forced(
        self, request: TextRequest, tokens: Sequence[int]
    ) -> dict[str, tuple[float, tuple[DraftToken, ...]]]:
        """Return what each drafter, by name, gives to the prompt's end (`prompt_log_q`), and proposes for `tokens` [n].

        To be asked once for every request.
        """
        rule = ProposalRule(request.sampling, prompt_length=len(request.prompt))
        if request.prompt not in self._states:
            self._states[request.prompt] = {name: self._behind(request, rule, name) for name in self._drafters}
        found = {}
        for name, (log_q, state) in self._states[request.prompt].items():
            state.follow(rule)
            state.truncate(len(request.prompt))
            found[name] = log_q, state.propose_forced(tokens)
        self._to_come[request.prompt] -= 1
        if not self._to_come[request.prompt]:
            for _, state in self._states.pop(request.prompt).values():
                state.close()
        return found

    def close(self) -> None:
        """Close what is left, where a run has ended early."""
        for states in self._states.values():
            for _, state in states.values():
                state.close()
        self._states.clear()

    def _behind(self, request: TextRequest, rule: ProposalRule, name: str) -> tuple[float, DraftState]:
        state = self._drafters[name].open(rule)
        return read_prompt(state, request.prompt), state
