"""The control logic, without gRPC: it takes domain types, and returns domain types or raises `OutriderError`."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import AsyncGenerator, Callable, Container
from contextlib import closing
from dataclasses import replace

from outrider.coordinator.catalogue import Catalogue
from outrider.coordinator.cluster import Cluster, SendAway, VerifierInfo, VerifierState
from outrider.coordinator.coordinator_config import CoordinatorConfig
from outrider.coordinator.coordinator_metrics import CoordinatorMetrics, FleetMetrics, RelayMetrics
from outrider.coordinator.fleet_view import FleetView, keeps
from outrider.coordinator.lease_admission import ANYBODY, Caller, CallerAdmission
from outrider.coordinator.queue import InquiryPace
from outrider.coordinator.statistics import FleetStatistics
from outrider.coordinator.version_trials import VersionState
from outrider.proto.cluster_status import ClusterStatus
from outrider.proto.errors import (
    InvalidArgument,
    NotFound,
    OutriderError,
    ResourceExhausted,
    Unavailable,
    UnsupportedProtocol,
)
from outrider.proto.lease import LeaseClaim, sign_lease
from outrider.proto.plumbing.access import Keys
from outrider.proto.plumbing.logs import about
from outrider.proto.release import release
from outrider.proto.salts import key_salt
from outrider.proto.types import (
    NAME,
    PROTOCOL_VERSION,
    SHA256,
    DrafterManifest,
    DraftingPrior,
    Lease,
    LeaseRequest,
    SessionReport,
)

logger = logging.getLogger(__name__)

CHUNK_BYTES = 256 << 10
# Edges that fail together must not each cause a poll of the fleet.
REFRESH_GAP_S = 0.1
MAX_NAME_LENGTH = 256
TELL_EVERY_S = 0.003  # from one watch that is told of a change to the next: leases come between


class ControlService:
    """The work of a coordinator, in one event loop; `clock` is Unix time in seconds.

    Raises:
        ConfigError: the file of API keys is invalid.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        cluster: Cluster,
        catalogue: Catalogue,
        *,
        metrics: CoordinatorMetrics | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.catalogue = catalogue
        self._config = config
        self._cluster = cluster
        self._clock = clock
        self.metrics = metrics or CoordinatorMetrics()
        keys = Keys.from_file(config.api_keys) if config.api_keys is not None else None
        self.admission = CallerAdmission(keys)
        self.relay_metrics = relayed = RelayMetrics(self.metrics.registry) if config.relay else None
        most = (lambda: config.relay_streams - relayed.streams) if relayed is not None else (lambda: math.inf)
        self._view = FleetView(config.poll_s, most)
        self._statistics = FleetStatistics(unix_clock=clock, votes_a_day=config.votes_a_day)
        self._by_text: set[tuple[str, str]] = set()  # name and version of drafters that were logged
        fleet = (lambda: self.verifiers, lambda: cluster.trainers, lambda: len(catalogue.manifests))
        self.metrics.registry.register(FleetMetrics(*fleet, lambda: self._statistics.version_states))
        if config.state is not None:
            self._statistics.load(config.state)
        self._unsaved = False
        self._pace = InquiryPace()
        self._watches = 0
        self._refreshing = asyncio.Lock()
        self._refreshed_s = float("-inf")

    @property
    def verifiers(self) -> tuple[VerifierInfo, ...]:
        """Verifiers at the last poll, with those marked that are being drained."""
        return self._view.verifiers

    async def refresh(self) -> None:
        """Poll the fleet; if it does not answer, keep the last view, since its verifiers may be fine."""
        async with self._refreshing:
            if time.monotonic() - self._refreshed_s < REFRESH_GAP_S:
                return
            asked_s = time.monotonic()
            try:
                self._view.observe(await self._cluster.refresh(), asked_s)
                if away := self.admission.observe(self._view.known, asked_s):
                    self._note_away(away)
                    await self._cluster.send_away(away)
                await self._tell_trainers()
            except OutriderError as error:
                logger.warning("the cluster cannot be asked: %s", error)
            self._refreshed_s = time.monotonic()
            for verifier in self._view.known:
                if verifier.state is not VerifierState.DOWN:
                    await self._learn_files(verifier)

    async def _learn_files(self, verifier: VerifierInfo) -> None:
        """Take in the tokenizer and the chat template of a verifier's target, where they are not known yet."""
        name, sha256 = verifier.name, verifier.tokenizer_sha256
        try:
            if sha256 and self.catalogue.tokenizer(sha256) is None:
                self.catalogue.add_tokenizer(await self._cluster.tokenizer_json(name))
                if self.catalogue.tokenizer(sha256) is None:
                    logger.warning("verifier %s serves a tokenizer that is not %s", name, sha256[:12])
            if verifier.model and not self.catalogue.knows_chat_template(verifier.model):
                self.catalogue.add_chat_template(verifier.model, await self._cluster.chat_template_json(name))
        except OutriderError as error:
            logger.warning("the tokenizer or chat template of verifier %s is not served: %s", name, error)

    def _note_away(self, away: SendAway) -> None:
        for verifier, texts in away.items():
            for text in sorted(texts):
                session = text.rpartition("/")[2]
                logger.warning("a text beyond its API key's sessions is sent away", extra=about(session, verifier))

    async def _tell_trainers(self) -> None:
        """Tell the trainers which keys allow learning now, if there are keys, and which versions are retired."""
        if (names := self.admission.learning_keys()) is not None:
            await self._cluster.allow_learning(frozenset(key_salt(self._config.lease_secret, name) for name in names))
        await self._cluster.retire_versions(self._retired())

    async def scan_drafters(self) -> None:
        await self.catalogue.refresh()
        packages = self.catalogue.packages
        offered = ((each.manifest.name, each.manifest.version, each.sequence) for each in packages)
        self._note_versions(changed=self._statistics.look(offered))

    async def open_lease(self, request: LeaseRequest, caller: Caller = ANYBODY) -> Lease:
        """Return a lease for one session on the most suitable verifier.

        An inquiry gets the same without a token, is not counted, and is told when to ask again.

        Raises:
            UnsupportedProtocol: the edge speaks another version of the contract.
            InvalidArgument: a field is malformed.
            NotFound, TokenizerMismatch, ResourceExhausted, Unavailable: see `place`.
            ResourceExhausted: the caller's key has no session or token left.
        """
        if request.service is None and caller.key is not None:
            request = replace(request, service=caller.key.service)
        ask_again_s = self._pace.again_in(time.monotonic()) if request.inquiry else 0.0
        try:
            _check_lease_request(request)
            verifier = await self._place(request, caller)
            if not request.inquiry:
                self.admission.grant(caller, request.session, self._config.lease_seconds, verifier.name)
        except OutriderError as error:
            if error.retry_after_s:
                error.retry_after_s = max(error.retry_after_s, ask_again_s)
            self.metrics.refuse(error)
            # A refused session may have any name, of any length.
            session = request.session if NAME.fullmatch(request.session) else ""
            logger.info("a lease is refused: %s", error, extra=about(session, error=error))
            raise
        kept = keeps(verifier, request.service)
        if not request.inquiry:
            self._count_grant(request, verifier, caller, kept=kept)
        drafters = self._offers(verifier.tokenizer_sha256, (verifier.model,))
        relayed = self.relay_metrics is not None
        return Lease(
            token=b"" if request.inquiry else self._sign(request, verifier, caller),
            verifier=verifier.name,
            address="" if relayed else verifier.address,
            tls=verifier.tls and not relayed,
            tls_name="" if relayed else verifier.tls_name,
            relayed=relayed,
            expires_in_s=self._config.lease_seconds,
            model=verifier.model,
            tokenizer_sha256=verifier.tokenizer_sha256,
            tokenizer=self.catalogue.tokenizer(verifier.tokenizer_sha256),
            chat_template=self.catalogue.chat_template(verifier.model),
            # Drafters of its tokens come first, and of these those distilled for this target; the sort is stable.
            drafters=tuple(
                sorted(
                    drafters,
                    key=lambda d: (d.tokenizer_sha256 != verifier.tokenizer_sha256, d.target != verifier.model),
                )
            ),
            prior=DraftingPrior(
                drafters=self._statistics.acceptance.prior(verifier.model, request.prompt_class, request.link_class)
            ),
            release=release(),
            context_length=verifier.context_length,
            service=request.service,
            service_unkept=not kept,
            ask_again_s=ask_again_s,
        )

    def _count_grant(self, request: LeaseRequest, verifier: VerifierInfo, caller: Caller, *, kept: bool) -> None:
        self.metrics.grant(verifier.model, request, kept=kept)
        if not kept:
            line = "no verifier with room is expected to keep the service %s"
            logger.warning(line, request.service, extra=about(request.session, verifier.name))
        if request.prefixes:
            known = self._view.known_prefixes(request, caller.tenant)
            self.metrics.place_prefix(known.get(verifier.name, 0), max(known.values(), default=0))
        logger.info("a lease is granted", extra=about(request.session, verifier.name))
        self._view.grant(request, caller.tenant, verifier, time.monotonic())
        self._statistics.leases_granted += 1
        self._unsaved = True

    def _sign(self, request: LeaseRequest, verifier: VerifierInfo, caller: Caller) -> bytes:
        key = caller.key
        claim = LeaseClaim(
            verifier=verifier.name,
            model=verifier.model,
            session=request.session,
            expires_at_s=self._clock() + self._config.lease_seconds,
            key=caller.tenant,
            tokens_per_minute=(key.tokens_per_minute or 0) if key is not None else 0,
            max_sessions=(key.max_sessions or 0) if key is not None else 0,
            learning=key is None or key.learning,  # without keys, operator and edge decide alone
            epoch=request.epoch,
            incarnation=verifier.incarnation,
        )
        return sign_lease(claim, self._config.lease_secret)

    async def list_drafters(self, tokenizer_sha256: str) -> tuple[DrafterManifest, ...]:
        """Return the drafters offered for targets with this tokenizer; empty: all. Raises `InvalidArgument`."""
        _check_tokenizer(tokenizer_sha256, "list_drafters.tokenizer_sha256")
        return self._offers(tokenizer_sha256, self._models_with(tokenizer_sha256))

    def _models_with(self, tokenizer_sha256: str) -> frozenset[str]:
        return frozenset(v.model for v in self._view.known if v.model and v.tokenizer_sha256 == tokenizer_sha256)

    def _offers(self, tokenizer_sha256: str = "", models: Container[str] = ()) -> tuple[DrafterManifest, ...]:
        """Return the drafters with this tokenizer in states in which edges take them, the current of a name first.

        Drafters that were exported for one of `models`, which have this tokenizer, are offered with another tokenizer
        too: edges let them draft by text.
        """
        offers = []
        for manifest in self.catalogue.fits(tokenizer_sha256, models):
            identity = manifest.name, manifest.version
            if tokenizer_sha256 not in ("", manifest.tokenizer_sha256) and identity not in self._by_text:
                self._by_text.add(identity)
                words = "drafter %s version %s is offered by text to edges of %s, whose tokenizer is another"
                logger.info(words, *identity, manifest.target)
            share = self._statistics.share(*identity)
            if self._statistics.versions.state(*identity) is VersionState.CURRENT:
                offers.append(manifest)
            elif share:
                offers.append(replace(manifest, share=share))
        return tuple(sorted(offers, key=lambda offer: offer.share > 0))

    def _retired(self) -> frozenset[tuple[str, str]]:
        """Return the retired versions whose files are here, each by its drafter's name and itself."""
        state = self._statistics.versions.state
        offered = ((manifest.name, manifest.version) for manifest in self.catalogue.manifests)
        return frozenset(each for each in offered if state(*each) is VersionState.RETIRED)

    def _note_versions(self, *, changed: bool) -> None:
        """Tell edges that watch, and save, if the state of any version changed."""
        if changed:
            self._unsaved = True
            self.catalogue.wake()

    async def fetch(self, sha256: str, offset: int) -> AsyncGenerator[bytes, None]:
        """Read the content with this hash from `offset`, in chunks of 256 KiB at most; raises like `Catalogue.open`."""
        with closing(await asyncio.to_thread(self.catalogue.open, sha256, offset)) as reader:
            while chunk := await asyncio.to_thread(reader.read, CHUNK_BYTES):
                yield chunk

    async def report(self, report: SessionReport, caller: Caller = ANYBODY) -> None:
        """Count a finished session, or free the slot of one that no verifier took.

        Only sessions that this coordinator leased to the caller's key count in its statistics.

        Raises:
            InvalidArgument: a field is malformed.
            NotFound: nobody serves its model.
        """
        models = {v.model for v in self._view.known if v.model}
        if models and report.model not in models:
            raise NotFound(f"no verifier serves {report.model[:MAX_NAME_LENGTH]!r}", field="report.model")
        self._view.leave(caller.tenant, report.session)
        self.admission.settle(caller, report)
        if not report.verifier:
            return  # refused everywhere: there is nothing to count
        if not self.admission.had_lease(caller, report.session):
            logger.debug("a report of a session without a lease is not counted", extra=about(report.session))
            return
        served = {(drafter.name, drafter.version) for drafter in self._offers()}
        self._note_versions(changed=self._statistics.add(report, served, self.admission.votes_as(caller)))
        self.metrics.report(report)
        self._unsaved = True

    async def status(self) -> ClusterStatus:
        """Return the state of the fleet, its drafters and its statistics."""
        return ClusterStatus(
            verifiers=tuple(verifier.status() for verifier in self.verifiers),
            drafters=self.catalogue.manifests,
            leases_granted=self._statistics.leases_granted,
            recent=tuple(self._statistics.recent),
            relay=self.relay_metrics.status() if self.relay_metrics is not None else None,
            edges=self._statistics.edges,
            acceptance=self._statistics.acceptance.shown,
            versions=self._statistics.version_states,
            trainers=self._cluster.trainers,
            release=release(),
        )

    async def drain(self, name: str) -> int:
        """Give verifier `name` no more sessions, ask its sessions to move, and return their number.

        Raises:
            NotFound: there is no such verifier.
            Unavailable: it does not answer.
        """
        names = [v.name for v in self._view.known]
        if name not in names:
            there_is = ", ".join(names) or "none"
            raise NotFound(f"no verifier {name[:MAX_NAME_LENGTH]!r}; there is {there_is}", field="drain.verifier")
        with self._view.draining(name):
            sessions = await self._cluster.drain(name)
            # Its new state must be known before the mark goes, or the next lease would land on it.
            self._refreshed_s = float("-inf")
            await self.refresh()
            return sessions

    async def watch(self, tokenizer_sha256: str, caller: Caller) -> AsyncGenerator[tuple[DrafterManifest, ...], None]:
        """Yield the drafters for targets with this tokenizer (empty: all), at once and soon after every change.

        Raises:
            InvalidArgument: this is no hash.
            Unauthenticated: the caller's key has been revoked.
            Unavailable: the coordinator stops.
        """
        _check_tokenizer(tokenizer_sha256, "watch_drafters.tokenizer_sha256")
        shown: tuple[DrafterManifest, ...] | None = None
        self._watches += 1
        try:
            while True:
                self.admission.check_still_known(caller)
                # No await between the comparison and `changed`, or a change could be missed.
                now = self._offers(tokenizer_sha256, self._models_with(tokenizer_sha256))
                if now != shown:
                    shown = now
                    yield now
                    continue
                if not await self.catalogue.changed():
                    raise Unavailable("the coordinator stops", retry_after_s=1.0)
                await asyncio.sleep(random.uniform(0, TELL_EVERY_S * (self._watches - 1)))
        finally:
            self._watches -= 1

    async def save(self) -> None:
        """Write the statistics to the state file, if there is one and they have changed."""
        if self._config.state is None or not self._unsaved:
            return
        self._unsaved = False
        try:
            self._statistics.save(self._config.state)
        except OSError as error:
            self._unsaved = True
            logger.warning("statistics cannot be saved: %s", error)

    async def _place(self, request: LeaseRequest, caller: Caller) -> VerifierInfo:
        admission, session = self.admission, request.session
        try:
            if not request.inquiry:
                admission.check_tokens(caller)
        except ResourceExhausted:
            self._view.withdraw(caller.tenant, session)
            raise
        has_slot = admission.has_slot(caller, session)
        chosen = self._view.welcome(request, caller.tenant, time.monotonic(), admission.room, has_slot=has_slot)
        if chosen is not None:
            return chosen
        await self.refresh()
        has_slot = admission.has_slot(caller, session)
        try:
            return self._view.choose(request, caller.tenant, time.monotonic(), admission.room, has_slot=has_slot)
        except ResourceExhausted as error:
            raise admission.explained(error, caller, session) from error


def _check_lease_request(request: LeaseRequest) -> None:
    # Checked first, since every other field may mean something else to a newer edge.
    if request.protocol_version != PROTOCOL_VERSION:
        raise UnsupportedProtocol(
            f"the edge speaks version {request.protocol_version}, this coordinator {PROTOCOL_VERSION}; "
            "bring both to the same release",
            field="lease_request.protocol_version",
        )
    if not NAME.fullmatch(request.session):
        raise InvalidArgument("must be 1 to 64 of A-Z a-z 0-9 - _", field="lease_request.session")
    for name in ("model", "precision"):
        if len(getattr(request, name)) > MAX_NAME_LENGTH:
            raise InvalidArgument(f"is longer than {MAX_NAME_LENGTH} characters", field=f"lease_request.{name}")
    _check_tokenizer(request.tokenizer_sha256, "lease_request.tokenizer_sha256")


def _check_tokenizer(tokenizer_sha256: str, field: str) -> None:
    if tokenizer_sha256 and not SHA256.fullmatch(tokenizer_sha256):
        raise InvalidArgument("must be 64 hexadecimal digits, or empty", field=field)
