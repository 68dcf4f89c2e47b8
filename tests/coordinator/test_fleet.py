"""The fleet's hit rates of each drafter: sums by kind of text, which fade, are bounded and hard to poison."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from fake_cluster import ScriptedCluster, ready, write_package
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.coordinator.fleet_hits import (
    BROADER_TRIALS,
    HALF_LIFE,
    MAX_DRAFTERS,
    MAX_UNSERVED,
    REPORT_COMPARED,
    FleetAcceptance,
    Hits,
)
from outrider.edge.features import PromptClass, TextFeatures
from outrider.edge.link.control_client import CoordinatorClient
from outrider.edge.link.routes import CoordinatorRoute
from outrider.proto.errors import InvalidArgument, NotFound
from outrider.proto.types import MAX_REPORTED_DRAFTERS, DrafterHits, DrafterPrior, LeaseRequest, SessionReport
from outrider.proto.v1 import decoding_pb2 as pb

Coordinating = Callable[..., AbstractAsyncContextManager[Any]]
CODE, PROSE = PromptClass.CODE, PromptClass.PROSE


def text(*hits: DrafterHits, prompt: int = CODE, link: int = 2, model: str = "tiny") -> SessionReport:
    return SessionReport("s", model, "v", drafter_hits=hits, prompt_class=prompt, link_class=link)


def hits(share: float, compared: int = 200, drafter: str = "general", version: str = "1") -> DrafterHits:
    return DrafterHits(drafter, version, round(share * compared), compared)


def fleet(*reports: SessionReport) -> FleetAcceptance:
    made = FleetAcceptance()
    for report in reports:
        made.add(report, ())
    return made


def prior_of(known: FleetAcceptance, prompt: int, link: int, drafter: str = "general") -> DrafterPrior:
    return next(prior for prior in known.prior("tiny", prompt, link) if prior.drafter == drafter)


# --- priors ---


def test_texts_of_one_kind_say_what_to_expect_of_the_next_one_of_that_kind() -> None:
    known = fleet(*[text(hits(0.9)) for _ in range(30)], *[text(hits(0.3), prompt=PROSE) for _ in range(30)])
    assert prior_of(known, CODE, 2).acceptance == pytest.approx(0.9, abs=0.02)
    assert prior_of(known, PROSE, 2).acceptance == pytest.approx(0.3, abs=0.02)
    assert prior_of(known, 0, 0).acceptance == pytest.approx(0.6, abs=0.01), "any text"
    assert prior_of(known, 0, 2).acceptance == pytest.approx(0.6, abs=0.01), "any text over such a link"


def test_a_prompt_of_no_known_kind_is_told_of_links_like_its_own() -> None:
    known = fleet(*[text(hits(0.9), link=1) for _ in range(30)], *[text(hits(0.3), link=4) for _ in range(30)])
    assert prior_of(known, 0, 1).acceptance == pytest.approx(0.9, abs=0.02)
    assert prior_of(known, 0, 4).acceptance == pytest.approx(0.3, abs=0.02)


def test_a_kind_of_text_that_was_hardly_seen_is_backed_by_broader_ones() -> None:
    known = fleet(*[text(hits(0.8)) for _ in range(10)], text(hits(0.2, 8), link=5))
    elsewhere = prior_of(known, CODE, 5)
    own, broader = Hits(2, 8), Hits(1602, 2008)
    expected = own.backed_by(broader.backed_by(broader))
    assert elsewhere.acceptance == pytest.approx(expected.rate, rel=0.02)
    assert elsewhere.trials == pytest.approx(8 + BROADER_TRIALS, rel=0.02), "it does not pass for well known"
    unseen = prior_of(known, PROSE, 5)
    assert (unseen.acceptance, unseen.trials) == (pytest.approx(0.8, abs=0.01), pytest.approx(BROADER_TRIALS))


def test_priors_cover_one_model_and_a_limited_number_of_drafters() -> None:
    known = fleet(text(hits(0.5)))
    assert known.prior("another", CODE, 2) == ()
    served = {(f"d{i}", "1") for i in range(MAX_REPORTED_DRAFTERS + 3)}
    for i, (name, _) in enumerate(sorted(served)):
        known.add(text(hits(0.5, 8 + i, name)), served)
    priors = known.prior("tiny", CODE, 2)
    assert len(priors) == MAX_REPORTED_DRAFTERS
    assert [prior.trials for prior in priors] == sorted((prior.trials for prior in priors), reverse=True)


def test_a_new_version_begins_with_nothing_of_the_old_one() -> None:
    known = fleet(text(hits(0.9)), text(hits(0.1, version="2")))
    by_version = {prior.drafter_version: prior.acceptance for prior in known.prior("tiny", CODE, 2)}
    assert by_version == {"1": pytest.approx(0.9), "2": pytest.approx(0.1)}


# --- fading, and false reports ---


def test_what_was_seen_a_half_life_ago_weighs_half() -> None:
    known = fleet(*[text(hits(1.0, REPORT_COMPARED))] * 32)
    before = known.total("general", "1")
    for _ in range(int(HALF_LIFE) // REPORT_COMPARED):
        known.add(text(hits(0.0, REPORT_COMPARED)), ())
    kept = known.total("general", "1")
    assert kept.hits == pytest.approx(before.hits / 2)
    assert kept.trials < HALF_LIFE / math.log(2) + REPORT_COMPARED, "it fills up"


def test_one_report_weighs_as_a_text_of_usual_length_however_much_it_claims() -> None:
    known = fleet(*[text(hits(0.8)) for _ in range(60)])
    before = prior_of(known, CODE, 2).acceptance
    known.add(text(DrafterHits("general", "1", 0, (1 << 32) - 1)), ())
    assert before - prior_of(known, CODE, 2).acceptance < 0.04
    for _ in range(4):  # a report that names a drafter often is one report
        known.add(text(*[DrafterHits("general", "1", 0, 1 << 31)] * MAX_REPORTED_DRAFTERS), ())
    assert prior_of(known, CODE, 2).acceptance > 0.65


def test_a_liar_in_one_kind_of_text_does_no_harm_in_another() -> None:
    known = fleet(*[text(hits(0.8)) for _ in range(30)])
    for _ in range(200):
        known.add(text(hits(0.0), prompt=PROSE), ())
    assert prior_of(known, CODE, 2).acceptance == pytest.approx(0.8, abs=0.02)


def test_invented_versions_push_out_each_other_and_none_that_many_texts_had() -> None:
    known = fleet(*[text(hits(0.8)) for _ in range(5)])
    for i in range(500):
        known.add(text(hits(1.0, REPORT_COMPARED, drafter=f"invented{i}")), ())
    priors = known.prior("tiny", 0, 0)
    assert len(priors) == MAX_UNSERVED
    assert "general" in {prior.drafter for prior in priors}
    assert "invented499" in {prior.drafter for prior in priors}, "what is new gets its chance"


def test_drafters_of_the_catalogue_have_room_whatever_else_is_reported() -> None:
    served = {("code", "7")}
    known = FleetAcceptance()
    known.add(text(hits(0.5, 8, "code", "7")), served)
    for i in range(500):
        known.add(text(hits(1.0, drafter=f"invented{i}")), served)
    assert ("code", "7") in {(prior.drafter, prior.drafter_version) for prior in known.prior("tiny", 0, 0)}
    before = {row[1] for row in known.rows()}
    known.add(text(hits(0.5, 8, "docs", "7")), {*served, ("docs", "7")})
    assert {row[1] for row in known.rows()} == before | {"docs"}, "and they take no room from others"


def test_of_too_many_drafters_the_one_that_was_longest_not_reported_goes() -> None:
    known = FleetAcceptance()
    names = [(f"d{i}", "1") for i in range(MAX_DRAFTERS + 1)]
    for name, _ in names[:-1]:
        known.add(text(hits(0.5, drafter=name)), set(names))
    known.add(text(hits(0.5, drafter="d0")), set(names))
    known.add(text(hits(0.5, drafter=names[-1][0])), set(names))
    left = {row[1] for row in known.rows()}
    assert len(left) == MAX_DRAFTERS
    assert "d0" in left
    assert "d1" not in left


counts = st.integers(0, (1 << 32) - 1)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.sampled_from(["a", "b"]), counts, counts, st.integers(0, 15), st.integers(0, 5)), max_size=30)
)
def test_whatever_is_reported_rates_stay_rates(reported: list[tuple[str, int, int, int, int]]) -> None:
    known = FleetAcceptance()
    for name, one, other, prompt, link in reported:
        known.add(text(DrafterHits(name, "1", min(one, other), max(one, other)), prompt=prompt, link=link), ())
    for prompt in range(16):
        for link in range(6):
            for prior in known.prior("tiny", prompt, link):
                assert 0 <= prior.acceptance <= 1
                assert 0 < prior.trials < math.inf
    again = FleetAcceptance()
    again.take_over(known.rows())
    assert again.rows() == known.rows()


@pytest.mark.parametrize(
    "row",
    [
        ("tiny", "d", "1", 16, 0, 1.0, 2.0, ""),
        ("tiny", "d", "1", 0, -1, 1.0, 2.0, ""),
        ("tiny", "d", "1", 0, 0, 3.0, 2.0, ""),
        ("tiny", "d", "1", 0, 0, math.nan, 2.0, ""),
        ("tiny", "d", "1"),
        None,
    ],
)
def test_a_state_that_cannot_be_is_refused_and_changes_nothing(row: Any) -> None:
    known = fleet(text(hits(0.5)))
    before = known.rows()
    with pytest.raises((ValueError, TypeError)):
        known.take_over([row])
    assert known.rows() == before


# --- over gRPC ---


async def test_reports_come_back_as_the_prior_of_leases_and_in_the_status_only_as_sums(
    coordinating: Coordinating, drafters: Path
) -> None:
    write_package(drafters / "a")
    async with coordinating(ScriptedCluster(ready("a")), drafters=(drafters,)) as call:
        client = CoordinatorClient(call.address)
        try:
            route = CoordinatorRoute(client, "tiny", "")
            code = route.about(TextFeatures(CODE, 2))
            await client.open_lease(LeaseRequest("tiny", "s"))
            for _ in range(20):
                await client.report(text(hits(0.9), hits(0.4, drafter="tiny-drafter")))
                await client.report(text(hits(0.2), prompt=PROSE, link=4))
            lease = await code.lease(LeaseRequest("tiny", "s1"))
            rates = {prior.drafter: prior.acceptance for prior in lease.prior.drafters}
            assert rates == {"general": pytest.approx(0.9, abs=0.03), "tiny-drafter": pytest.approx(0.4, abs=0.01)}
            assert tuple(route.prior(TextFeatures(CODE, 2)).values()) == lease.prior.drafters
            assert route.prior(TextFeatures(PROSE, 4)) == {}, "not asked for yet"
            prose = await client.open_lease(LeaseRequest("tiny", "s2", inquiry=True, prompt_class=PROSE, link_class=4))
            assert tuple(route.prior(TextFeatures(PROSE, 4)).values()) == prose.prior.drafters
            assert route.prior(TextFeatures(PROSE, 4))["general", "1"].acceptance == pytest.approx(0.2, abs=0.05)
            status = await client.status()
            shown = {(cell.prior.drafter, cell.prompt_class, cell.link_class): cell for cell in status.acceptance}
            assert set(shown) == {("general", CODE, 2), ("tiny-drafter", CODE, 2), ("general", PROSE, 4)}
            assert shown["general", PROSE, 4].prior.acceptance == pytest.approx(0.2)
            for report in (*status.recent, *(edge.last for edge in status.edges)):
                assert (report.drafter_hits, report.prompt_class, report.link_class) == ((), 0, 0)
        finally:
            await client.close()


@pytest.mark.parametrize(
    ("wire", "field"),
    [
        (pb.SessionReport(drafter_hits=[pb.DrafterHits(hits=2, compared=1)]), "report.drafter_hits"),
        (pb.SessionReport(drafter_hits=[pb.DrafterHits()] * 17), "report.drafter_hits"),
        (pb.SessionReport(drafter_hits=[pb.DrafterHits(drafter="x" * 300)]), "report.drafter_hits"),
        (pb.SessionReport(prompt_class=16), "report.prompt_class"),
        (pb.SessionReport(link_class=6), "report.link_class"),
    ],
)
async def test_a_report_that_cannot_be_is_refused_by_field_and_not_counted(
    coordinating: Coordinating, wire: pb.SessionReport, field: str
) -> None:
    async with coordinating(ScriptedCluster(ready("a"))) as call:
        await call("OpenLease", LeaseRequest("tiny", "s"))
        wire.MergeFrom(pb.SessionReport(session="s", model="tiny", verifier="a"))
        with pytest.raises(InvalidArgument) as refused:
            await call.raw("ReportSession", wire.SerializeToString())
        assert refused.value.field == field
        with pytest.raises(NotFound):
            await call("ReportSession", text(hits(0.5), model="invented"))
        with pytest.raises(InvalidArgument) as asked:
            await call.raw("OpenLease", pb.LeaseRequest(session="s", prompt_class=16).SerializeToString())
        assert asked.value.field == "lease_request.prompt_class"
        status = await call("Status", None)
        assert (status.acceptance, status.recent) == ((), ())
