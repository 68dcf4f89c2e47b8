"""Lessons of an edge's texts, for its next texts and for its coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import numpy as np

from outrider.drafters.protocol import Drafter, steering_of
from outrider.drafters.retrieval import RetrievalDrafter
from outrider.drafters.search import RETRIEVAL
from outrider.drafters.suffix_index import SuffixIndex
from outrider.edge.edge_config import EdgeConfig, edge_of_this_process
from outrider.edge.features import TOKENS_LOOKED_AT, TextFeatures, reported_hits
from outrider.edge.pool.preparation import Ready
from outrider.edge.pool.text_drafters import TextDrafters
from outrider.edge.request import Tenant
from outrider.edge.selectors import default_selector, selector_named
from outrider.edge.warm_start import OwnTexts, TextKind
from outrider.proto.drafter_format import published_name
from outrider.proto.policy.selector import Selector, StaticSelector
from outrider.proto.policy.suspicion import ReopenBudget
from outrider.proto.session import DrafterSteering, EdgeSession, Selection, SharedMeasurements
from outrider.proto.types import Open, Sampling, SessionReport, SteeringRequest

REPORT_WITHIN_S = 1.0


class TextHistory:
    """Measurements and hits of one client's texts, and the reports on them that are under way.

    Attributes:
        budget: budget of the suspicion that all texts share.
    """

    def __init__(self, config: EdgeConfig) -> None:
        self._config = config
        # A drafter's confidence means one thing where the most likely token is taken and another where one is drawn.
        self._measured = {greedy: SharedMeasurements() for greedy in (True, False)}
        self.budget = ReopenBudget(config.silence)
        self._own_texts = OwnTexts()
        self._reports: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Wait for reports that are under way, for a moment at most."""
        if self._reports:
            await asyncio.wait(self._reports, timeout=REPORT_WITHIN_S)

    def measured(self, sampling: Sampling) -> SharedMeasurements:
        """Return the measurements of texts of such sampling."""
        return self._measured[sampling.temperature == 0]

    def features(self, ready: Ready, frame: Open) -> TextFeatures:
        """Return the features of a text that begins, for a coordinator and for the choice among drafters."""
        return self._features(ready, frame.prompt, self.measured(frame.sampling).newest.round_trip.base)

    def _features(self, ready: Ready, prompt: Sequence[int], round_trip_s: float) -> TextFeatures:
        unread = not (self._config.coordinator or self._config.share_texts)
        if unread and len(ready.shelf.offered) < 2:
            return TextFeatures()  # nobody reads them
        return TextFeatures.of(ready.decode(prompt[-TOKENS_LOOKED_AT:]), round_trip_s)

    def drafters(
        self, ready: Ready, frame: Open, features: TextFeatures, prediction: SuffixIndex | None, *, busy: bool
    ) -> TextDrafters:
        """Return the drafters of a text or turn that begins, while others run if `busy`."""
        if ready.local_texts is not None:
            ready.local_texts.refresh()
        offered = ready.shelf.offered
        drafters, steered = _with_copier(ready, prediction)
        if self._config.drafter == "auto" and busy:  # many texts at once on one thread
            drafters = (*drafters[:1], *(one for one in drafters[1:] if isinstance(one, RetrievalDrafter)))
            steered = 0 if steered == 0 else None
        if not drafters:
            return TextDrafters((), None, offered)
        selection = Selection(
            self._selector(ready, frame.sampling, features, drafters),
            tuple(drafter.name for drafter in drafters),
            versions=tuple(drafter.version for drafter in drafters),
            steered=steered,
        )
        shape = steering_of(drafters[steered]) if steered is not None else None
        policy = self._config.steering_policy(shape.rank, shape.gain) if shape is not None else None
        if shape is None or policy is None:
            return TextDrafters(drafters, selection, offered)
        request = SteeringRequest(shape.projection)
        return TextDrafters(drafters, selection, offered, DrafterSteering(shape.rank, policy), request)

    def _selector(
        self, ready: Ready, sampling: Sampling, features: TextFeatures, drafters: Sequence[Drafter]
    ) -> Selector:
        if len(drafters) == 1:
            return StaticSelector()
        if self._config.selector == "leader":
            versions = [(drafter.name, drafter.version) for drafter in drafters]
            fleet = ready.route.prior(features)
            prior = self._own_texts.acceptances(_kind(features, sampling), versions, fleet)
            return default_selector(len(drafters), prior)
        return selector_named(self._config.selector)(len(drafters), np.random.default_rng())

    def learn(self, ready: Ready, session: str, machine: EdgeSession, seconds: float, tenant: Tenant) -> None:
        """Learn from a text that ended after `seconds`, report it in the background, and keep it if `tenant` allows.

        Of one that no verifier took it is only reported that its session has ended.
        """
        if not machine.verifier:
            self._send(ready.route.give_back(session))
            return
        if tenant.learning and ready.local_texts is not None:
            ready.local_texts.keep(machine.transcript[machine.prompt_length :])
        features = self._features(ready, machine.transcript[: machine.prompt_length], machine.round_trip_s)
        self._own_texts.learn(_kind(features, machine.sampling), machine.statistics.of_drafters)
        self._send(ready.route.report(self._report(ready, session, machine, seconds, features)))

    def _send(self, report: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(report)
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)

    def _report(
        self, ready: Ready, session: str, machine: EdgeSession, seconds: float, features: TextFeatures
    ) -> SessionReport:
        statistics = machine.statistics
        (drafter, version), *_ = machine.drafters  # the text's, though texts that begin now may have others
        # Hits of what copies, or has learned, here would tell of this edge's texts, and nobody else has these versions.
        own = ready.own_versions
        versions = {name: each for name, each in machine.drafters if name != RETRIEVAL and each not in own}
        return SessionReport(
            session=session,
            model=ready.model,
            verifier=machine.verifier,
            drafter=published_name(drafter),
            drafter_version="" if version in own else version,
            committed_tokens=statistics.committed,
            accepted_tokens=statistics.accepted - statistics.accepted_here,
            drafted_tokens=statistics.drafted,
            verified_tokens=statistics.verified - statistics.verified_here,
            steps=statistics.steps,
            seconds=seconds,
            uplink_bytes=statistics.uplink_bytes,
            downlink_bytes=statistics.downlink_bytes,
            resumes=statistics.resumes,
            round_trip_s=statistics.round_trip_s,
            edge=self._config.edge or edge_of_this_process(),
            drafter_hits=reported_hits(statistics.of_drafters, versions, machine.measurements),
            prompt_class=features.prompt_class,
            link_class=features.link_class,
        )


def _with_copier(ready: Ready, prediction: SuffixIndex | None) -> tuple[tuple[Drafter, ...], int | None]:
    """Return the shelf's drafters, and which is steered, with one of the text's own to copy from what is here."""
    begun = ready.shelf.begun.done()
    drafters, steered = ready.shelf.drafters()
    if prediction is not None and not begun:
        drafters = ()  # nothing can be chosen among while one of them loads
    own = RetrievalDrafter(
        tuple if ready.local_texts is None else ready.local_texts.sources,
        prediction,
        vocab_size=ready.tokenizer.get_vocab_size(),
    )
    drafters = tuple(own if isinstance(drafter, RetrievalDrafter) else drafter for drafter in drafters)
    if prediction is not None and own not in drafters:
        drafters = (*drafters, own)
    return drafters, steered


def _kind(features: TextFeatures, sampling: Sampling) -> TextKind:
    return TextKind(features.prompt_class, sampling.temperature == 0)
