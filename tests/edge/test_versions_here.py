"""An edge tells the versions of its drafters with a coordinator that answers, that does not, and without one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from outrider.drafters import DrafterShelf, NgramDrafter
from outrider.edge import Client, EdgeConfig
from outrider.proto.cluster_status import VersionStatus
from outrider.proto.drafter_format import published_name, trial_name
from outrider.proto.errors import PermissionDenied

KNOWN = (VersionStatus("swift", "7", "retired", why="hits -0.1 against 6 in 20 texts"),)
READY = SimpleNamespace(shelf=DrafterShelf(NgramDrafter(name="a"), NgramDrafter(name=trial_name("a", "2"))))


class Coordinator:
    def __init__(self, *, may: bool) -> None:
        self.may = may

    async def status(self):
        if not self.may:
            raise PermissionDenied("the key may not", field="api_key")
        return SimpleNamespace(versions=KNOWN)


async def versions_of(coordinator: Coordinator | None, ready: SimpleNamespace | None) -> tuple[VersionStatus, ...]:
    client = Client(EdgeConfig(verifier="127.0.0.1:1", model="m"))
    client._coordinator, client._preparation.ready = coordinator, ready  # type: ignore[assignment]
    return await client.versions()


def test_the_coordinator_says_what_it_knows() -> None:
    assert asyncio.run(versions_of(Coordinator(may=True), READY)) == KNOWN


def test_an_edge_that_may_not_ask_tells_its_own_drafters_and_previous_ones() -> None:
    own = (VersionStatus("a", NgramDrafter.version, "current"), VersionStatus("a", NgramDrafter.version, "previous"))
    for coordinator in (Coordinator(may=False), None):
        assert asyncio.run(versions_of(coordinator, READY)) == own
    assert asyncio.run(versions_of(None, None)) == ()


def test_a_name_on_trial_leads_back_to_the_published_one() -> None:
    assert published_name(trial_name("a", "2")) == published_name("a") == "a"
    assert trial_name("a", "2") != trial_name("a", "3")
