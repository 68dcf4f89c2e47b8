"""Hits that edges see become the prior of other edges' texts, and nothing else leaves an edge for it."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from pathlib import Path

import pytest
from fleets import fleet

from outrider.edge.features import MIN_COMPARED, PromptClass, TextFeatures
from outrider.edge.link.control_client import CoordinatorClient
from outrider.proto import codec
from outrider.proto.types import DrafterHits, Patience

CODE = """    def __init__(self, zanzibar):
        self.zanzibar = zanzibar
        self.count = len(zanzibar) + 1

    def __len__(self):
"""
PROSE = "The zanzibar merchant had hardly closed his shutters before the rain came down upon the roofs, and the"


@pytest.mark.usefixtures("all_drafts_pay")
async def test_one_edges_texts_are_another_edges_prior(tmp_path: Path, monkeypatch) -> None:
    said: defaultdict[str, list[bytes]] = defaultdict(list)
    right = CoordinatorClient._call

    async def call(self, method, request, decode, *waits):
        said[method].append(request)
        return await right(self, method, request, decode, *waits)

    monkeypatch.setattr(CoordinatorClient, "_call", call)

    patient = {"drafter": "general", "window": 4, "patience": Patience(math.inf, 3)}  # however busy the machine is
    async with fleet("verifier") as found:
        async with found.client(tmp_path, **patient) as first:
            assert first.drafter is not None
            drafter = (first.drafter.name, first.drafter.version)
            alone = [(await first.complete(prompt, max_tokens=24)).ids for prompt in (CODE, PROSE)]
            await first.complete("Hi", max_tokens=2)
            whole = await first.complete(CODE, max_tokens=24)
        newest = [codec.decode_report(request) for request in said["ReportSession"]][-1]
        (reported,) = newest.drafter_hits
        counted = DrafterHits(*drafter, whole.statistics.hits, whole.statistics.compared, reported.draft_s)
        assert reported == counted
        assert 0 < reported.draft_s < 1
        assert reported.compared >= MIN_COMPARED
        control = CoordinatorClient(found.address)
        while len((status := await control.status()).recent) < 4:  # noqa: ASYNC110 - reports come beside the texts
            await asyncio.sleep(0.05)
        cells = status.acceptance
        kinds = {PromptClass.CODE, PromptClass.PROSE}
        assert {cell.prompt_class for cell in cells} == kinds, "the text of two tokens was not reported"
        assert {(cell.prior.drafter, cell.prior.drafter_version) for cell in cells} == {drafter}
        compared = sum(
            hits.compared for report in map(codec.decode_report, said["ReportSession"]) for hits in report.drafter_hits
        )
        assert sum(cell.prior.trials for cell in cells) == pytest.approx(compared, rel=0.02)
        async with found.client(tmp_path, **patient) as second:
            ready = second.ready
            assert ready is not None
            any_text = ready.route.prior(TextFeatures(PromptClass.CODE, 1))
            assert drafter in any_text, "the first inquiry brought texts of any kind"
            assert [(await second.complete(prompt, max_tokens=24)).ids for prompt in (CODE, PROSE)] == alone
            priors = [ready.route.prior(TextFeatures(kind, 1)) for kind in (PromptClass.CODE, PromptClass.PROSE)]
            assert priors[0] != priors[1] != any_text, "each of its texts asked for texts of its kind"
            assert all(drafter in prior for prior in priors)
        await control.close()

    every = [request for requests in said.values() for request in requests]
    assert not any(b"zanzibar" in request for request in every), "no text leaves the edge"
    assert max(map(len, every)) < 400
    reports = [codec.decode_report(request) for request in said["ReportSession"]]
    kinds = [PromptClass.CODE, PromptClass.PROSE]
    assert [report.prompt_class for report in reports] == [*kinds, PromptClass.UNKNOWN, PromptClass.CODE, *kinds]
    assert all(1 <= report.link_class <= 5 for report in reports)
    asked = [codec.decode_lease_request(request) for request in said["OpenLease"]]
    assert {request.prompt_class for request in asked if not request.inquiry} == {*kinds, PromptClass.UNKNOWN}
