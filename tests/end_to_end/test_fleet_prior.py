"""Hits that edges see become the prior of other edges' texts, and nothing else leaves an edge for it."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from pathlib import Path

import pytest

from outrider.cloud.serving.verifier_server import VerifierServer
from outrider.cloud.verifier_config import VerifierConfig
from outrider.coordinator.coordinator_config import CoordinatorConfig, StaticVerifier
from outrider.coordinator.coordinator_server import CoordinatorServer
from outrider.edge import Client, EdgeConfig
from outrider.edge.features import MIN_COMPARED, PromptClass, TextFeatures
from outrider.edge.link.control_client import CoordinatorClient
from outrider.proto import codec
from outrider.proto.types import DrafterHits, Patience

SECRET = b"a secret of the two of them"
CODE = """    def __init__(self, zanzibar):
        self.zanzibar = zanzibar
        self.count = len(zanzibar) + 1

    def __len__(self):
"""
PROSE = "The zanzibar merchant had hardly closed his shutters before the rain came down upon the roofs, and the"


@pytest.mark.usefixtures("all_drafts_pay")
def test_one_edges_texts_are_another_edges_prior(tokenizer_file: Path, tmp_path: Path, monkeypatch) -> None:
    said: defaultdict[str, list[bytes]] = defaultdict(list)
    tokenizer_json = tokenizer_file.read_text()
    right = CoordinatorClient._call

    async def call(self, method, request, decode):
        said[method].append(request)
        return await right(self, method, request, decode)

    monkeypatch.setattr(CoordinatorClient, "_call", call)

    async def main() -> None:
        verifier = VerifierServer(VerifierConfig(threads=1), lease_secret=SECRET)
        fixed = StaticVerifier("verifier", await verifier.start(), "reference", tokenizer_json)
        coordinator = CoordinatorServer(
            CoordinatorConfig(lease_secret=SECRET, listen="127.0.0.1:0", verifiers=(fixed,))
        )
        config = EdgeConfig(
            coordinator=await coordinator.start(),
            cache=tmp_path,
            drafter="general",
            window=4,
            patience=Patience(math.inf, 3),  # else a busy machine's drafts may all come too late
        )
        async with Client(config) as first:
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
        control = CoordinatorClient(config.coordinator)
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
        async with Client(config) as second:
            ready = second.ready
            assert ready is not None
            any_text = ready.route.prior(TextFeatures(PromptClass.CODE, 1))
            assert drafter in any_text, "the first inquiry brought texts of any kind"
            assert [(await second.complete(prompt, max_tokens=24)).ids for prompt in (CODE, PROSE)] == alone
            priors = [ready.route.prior(TextFeatures(kind, 1)) for kind in (PromptClass.CODE, PromptClass.PROSE)]
            assert priors[0] != priors[1] != any_text, "each of its texts asked for texts of its kind"
            assert all(drafter in prior for prior in priors)
        await control.close()
        await coordinator.stop()
        await verifier.stop(0)

    asyncio.run(main())
    every = [request for requests in said.values() for request in requests]
    assert not any(b"zanzibar" in request for request in every), "no text leaves the edge"
    assert max(map(len, every)) < 400
    reports = [codec.decode_report(request) for request in said["ReportSession"]]
    kinds = [PromptClass.CODE, PromptClass.PROSE]
    assert [report.prompt_class for report in reports] == [*kinds, PromptClass.UNKNOWN, PromptClass.CODE, *kinds]
    assert all(1 <= report.link_class <= 5 for report in reports)
    asked = [codec.decode_lease_request(request) for request in said["OpenLease"]]
    assert {request.prompt_class for request in asked if not request.inquiry} == {*kinds, PromptClass.UNKNOWN}
