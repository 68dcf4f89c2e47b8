"""Drafters that have read a prompt once for all texts after it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from outrider.bench.comparison.texts import Wish
from outrider.bench.replay.record import read_prompt
from outrider.edge.drafters.proposals import ProposalRule
from outrider.edge.drafters.protocol import Drafter, DraftState, Proposal


class PromptReaders:
    """States of `drafters` behind the prompts of `wishes`, each for as long as a text after it is to come."""

    def __init__(self, drafters: Mapping[str, Drafter], wishes: Sequence[Wish]) -> None:
        self._drafters = drafters
        self._to_come = Counter(wish.tokens for wish in wishes)
        self._states: dict[tuple[int, ...], dict[str, tuple[float, DraftState]]] = {}

    def foresee(self, wish: Wish, tokens: Sequence[int]) -> dict[str, tuple[float, Proposal]]:
        """What each drafter, by name, gives to the prompt's end (`prompt_log_q`), and says in place of `tokens` [n].

        To be asked once for every wish.
        """
        rule = ProposalRule(wish.sampling, prompt_length=len(wish.tokens))
        if wish.tokens not in self._states:
            self._states[wish.tokens] = {name: self._behind(wish, rule, name) for name in self._drafters}
        found = {}
        for name, (log_q, state) in self._states[wish.tokens].items():
            state.follow(rule)
            state.truncate(len(wish.tokens))
            found[name] = log_q, state.foresee(tokens)
        self._to_come[wish.tokens] -= 1
        if not self._to_come[wish.tokens]:
            for _, state in self._states.pop(wish.tokens).values():
                state.close()
        return found

    def close(self) -> None:
        """Close what is left, where a run has ended early."""
        for states in self._states.values():
            for _, state in states.values():
                state.close()
        self._states.clear()

    def _behind(self, wish: Wish, rule: ProposalRule, name: str) -> tuple[float, DraftState]:
        state = self._drafters[name].open(rule)
        return read_prompt(state, wish.tokens), state
