"""An edge tells the versions of its drafters with a coordinator that answers, that does not, and without one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from outrider.drafters import NgramDrafter
from outrider.drafters.pool import DrafterPool
from outrider.edge.pool.known_versions import versions_of
from outrider.proto.drafter_format import published_name, trial_name
from outrider.proto.errors import PermissionDenied
from outrider.proto.types import VersionStatus

KNOWN = (VersionStatus("swift", "7", "retired", why="hits -0.1 against 6 in 20 texts"),)
READY = SimpleNamespace(drafters=DrafterPool.of(NgramDrafter(name="a"), NgramDrafter(name=trial_name("a", "2"))))


class Coordinator:
    def __init__(self, *, may: bool) -> None:
        self.may = may

    async def status(self):
        if not self.may:
            raise PermissionDenied("the key may not", field="api_key")
        return SimpleNamespace(versions=KNOWN)


def test_the_coordinator_says_what_it_knows() -> None:
    assert asyncio.run(versions_of(Coordinator(may=True), READY)) == KNOWN  # type: ignore[arg-type]


def test_an_edge_that_may_not_ask_tells_its_own_drafters_and_former_ones() -> None:
    own = (VersionStatus("a", NgramDrafter.version, "current"), VersionStatus("a", NgramDrafter.version, "former"))
    for coordinator in (Coordinator(may=False), None):
        assert asyncio.run(versions_of(coordinator, READY)) == own  # type: ignore[arg-type]
    assert asyncio.run(versions_of(None, None)) == ()


def test_a_name_on_trial_leads_back_to_the_published_one() -> None:
    assert published_name(trial_name("a", "2")) == published_name("a") == "a"
    assert trial_name("a", "2") != trial_name("a", "3")
