"""Record hit traces: teacher-force drafters on every token of a text that the target has written."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from outrider.drafters.proposals import ProposalRule
from outrider.drafters.protocol import Drafter, DraftState
from outrider.proto.policy.likely_branches import RUNNERS_UP
from outrider.proto.session import PROMPT_TOKENS
from outrider.proto.types import DraftToken
from research.replay.hit_traces import HitTrace
from research.text_writer import TextRequest
from research.vectors import SentVectors

# The target's processed probabilities [n] of the tokens [n] that a drafter proposes in place of those of a text.
Chances = Callable[[Sequence[int]], Sequence[float]]


class HitRecorder:
    """Records the hits of drafters, each of which reads a prompt once for all texts after it."""

    def __init__(self, drafters: Mapping[str, Drafter], requests: Sequence[TextRequest]) -> None:
        """Take the drafters, by the names of their traces, and the requests of all texts to come."""
        self._drafters = drafters
        self._to_come = Counter(request.prompt for request in requests)
        self._states: dict[tuple[int, ...], dict[str, tuple[float, DraftState]]] = {}

    def record(
        self,
        request: TextRequest,
        tokens: Sequence[int],
        *,
        chances: Chances | None = None,
        ended: bool = False,
        vectors: Mapping[str, SentVectors] | None = None,
    ) -> list[HitTrace]:
        """Return what each drafter would have proposed in place of each token of a text, in one batched pass.

        A steered drafter reads token by token, each with the vector that is there by then.

        Args:
            request: one of the requests, each of which is recorded once.
            tokens: [n] the text that the target wrote for it.
            chances: the target's probabilities; None: they are not known, and the traces have no agreement.
            ended: whether the text ended by itself.
            vectors: steering vectors of the text, by the names of the drafters that they steer.

        Raises:
            ConfigError: the text is empty.
        """
        rule = ProposalRule(request.sampling, prompt_length=len(request.prompt), runners_up=RUNNERS_UP)
        if request.prompt not in self._states:
            self._states[request.prompt] = {n: _read(d.open(rule), request.prompt) for n, d in self._drafters.items()}
        traces = []
        for name, (prompt_log_q, state) in self._states[request.prompt].items():
            state.follow(rule)
            state.truncate(len(request.prompt))
            sent = (vectors or {}).get(name)
            forced = state.propose_forced(tokens) if sent is None else _propose_steered(state, tokens, sent)
            silent = tuple(draft.id < 0 for draft in forced)
            traces.append(
                HitTrace(
                    id=request.id,
                    domain=request.domain,
                    drafter=name,
                    drafter_version=self._drafters[name].version,
                    temperature=request.sampling.temperature,
                    prompt_tokens=len(request.prompt),
                    tokens=tuple(tokens),
                    hits=tuple(own.id == token for own, token in zip(forced, tokens, strict=True)),
                    confidence=_rounded(draft.confidence for draft in forced),
                    ended=ended,
                    silent=silent if any(silent) else (),
                    perturbed_probability=_rounded(draft.perturbed_probability for draft in forced),
                    agreement=_rounded(_agreement(forced, chances)) if chances else (),
                    runner_up=_ranks(forced, tokens),
                    choices=tuple((own.id, *own.runners_up) if own.id >= 0 else () for own in forced),
                    seed=request.sampling.seed,
                    prompt_log_q=prompt_log_q,
                )
            )
        self._to_come[request.prompt] -= 1
        if not self._to_come[request.prompt]:
            _close(self._states.pop(request.prompt))
        return traces

    def close(self) -> None:
        """Close what is left, where a run has ended early."""
        while self._states:
            _close(self._states.popitem()[1])


def _read(state: DraftState, prompt: tuple[int, ...]) -> tuple[float, DraftState]:
    """Let an empty state read the prompt; return the log q of its end, in nats a token; NaN: it is one token."""
    first = max(1, len(prompt) - PROMPT_TOKENS)
    state.extend(prompt[:first])
    end = prompt[first:]
    return round(float(state.score(end).mean()), 4) if end else math.nan, state


def _propose_steered(state: DraftState, tokens: Sequence[int], vectors: SentVectors) -> tuple[DraftToken, ...]:
    """Return the proposals in place of each token after a prompt, and leave the state unsteered."""
    prompt, proposed = state.length, list[DraftToken]()
    for token in tokens:
        state.steer(vectors.after(state.length), prompt)
        proposed += state.propose_forced((token,))
    state.steer(None, prompt)
    return tuple(proposed)


def _close(states: Mapping[str, tuple[float, DraftState]]) -> None:
    for _, state in states.values():
        state.close()


def _agreement(forced: Sequence[DraftToken], chances: Chances) -> Iterable[float]:
    """Return [n] min(1, p / q), an estimate of 1 - TV (`outrider.edge.selectors`); NaN: nothing proposed."""
    likely = chances([max(0, draft.id) for draft in forced])
    q = [draft.confidence for draft in forced]
    return (min(1.0, p / own) if own > 0 else math.nan for p, own in zip(likely, q, strict=True))


def _ranks(forced: Sequence[DraftToken], tokens: Sequence[int]) -> tuple[int, ...]:
    """Return [n] the rank of each token among the runners-up in its place, from 1 on; 0: it is none."""
    return tuple(
        draft.runners_up.index(token) + 1 if token in draft.runners_up else 0
        for draft, token in zip(forced, tokens, strict=True)
    )


def _rounded(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(round(value, 4) for value in values)
