"""A coordinator that polls, grants leases and counts the sessions of a key, and forgets all when it restarts."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.coordinator.fleet_view import FleetView
from outrider.coordinator.lease_admission import Caller, CallerAdmission
from outrider.coordinator.roster import Roster
from outrider.proto.errors import OutriderError, Unavailable
from outrider.proto.lease import LeaseClaim, sign_lease
from outrider.proto.plumbing.access import Key
from outrider.proto.types import Lease, LeaseRequest, SessionReport
from research.chaos.chaos_verifier import Verifier
from research.chaos.world import MODEL, SECRET, TOKENIZER, LocalClock, Path, World

POLL_S = 1.0


class Coordinator:
    """The control plane of a schedule, which has a path to each verifier."""

    def __init__(
        self, world: World, clock: LocalClock, verifiers: Sequence[Verifier], key: Key, lease_s: float
    ) -> None:
        """Coordinate `verifiers`; leases of `key` last `lease_s` seconds."""
        self.clock = clock
        self.verifiers = {verifier.name: verifier for verifier in verifiers}
        self.paths = {name: Path(world, 0.001, 0.002) for name in self.verifiers}
        self.is_up = True
        self._world = world
        self._key, self._caller = key, Caller(key)
        self._lease_s = lease_s
        self._start()
        world.after(POLL_S, self._poll)

    @property
    def running(self) -> int:
        return sum(self._admission.running().values())

    def restart(self, down_s: float) -> None:
        """Forget everything, and answer nobody for true `down_s`."""
        self.is_up = False
        self._world.note("c", "restarts")
        self._world.after(down_s, self._start)

    def _start(self) -> None:
        self.is_up = True
        self._view = FleetView(POLL_S)
        self._roster = Roster()
        self._admission = CallerAdmission(None, clock=self.clock.monotonic)
        self._refresh()

    def _poll(self) -> None:
        if not self._world.is_over:
            if self.is_up:
                self._refresh()
            self.clock.after(POLL_S, self._poll)

    def _refresh(self) -> None:
        """Ask every verifier that can be reached and runs."""
        reports = {
            name: verifier.process.report()
            for name, verifier in self.verifiers.items()
            if verifier.is_up and not self.paths[name].is_cut and self._world.now >= verifier.process.frozen_until
        }
        self._roster.observe(tuple(self.verifiers), reports)
        self._view.observe(self._roster.infos, self.clock.monotonic())

    def drain(self, name: str) -> None:
        """Have verifier `name` send its sessions elsewhere, and give it no more."""
        verifier = self.verifiers[name]
        if verifier.is_up:
            verifier.process.serve(verifier.process.engine.post_drain)
            self._roster.drained(name)
            self._view.observe(self._roster.infos, self.clock.monotonic())

    def answer(self, request: LeaseRequest) -> Lease | OutriderError:
        try:
            return self._lease(request) if self.is_up else Unavailable("nobody listens", field="coordinator")
        except OutriderError as error:
            return error

    def _lease(self, request: LeaseRequest) -> Lease:
        tenant, now_s = self._caller.tenant, self.clock.monotonic()
        verifier = self._view.welcome(request, tenant, now_s)
        if verifier is None:
            self._refresh()
            verifier = self._view.choose(request, tenant, now_s)
        if not self.paths[verifier.name].is_cut:
            self.verifiers[verifier.name].process.check_lease()
        self._admission.grant(self._caller, request.session, self._lease_s, verifier.name)
        self._view.grant(request, tenant, verifier, now_s)
        claim = LeaseClaim(
            verifier.name,
            MODEL,
            request.session,
            self.clock.wall() + self._lease_s,
            tenant,
            tokens_per_minute=self._key.tokens_per_minute or 0,
            max_sessions=self._key.max_sessions or 0,
            epoch=request.epoch,
            incarnation=verifier.incarnation,
        )
        return Lease(sign_lease(claim, SECRET), verifier.name, verifier.address, self._lease_s, MODEL, TOKENIZER)

    def report(self, report: SessionReport) -> None:
        if self.is_up:
            self._view.leave(self._caller.tenant, report.session)
            self._admission.settle(self._caller, report)
