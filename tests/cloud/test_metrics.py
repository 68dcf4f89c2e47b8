"""A verifier's metrics: what its engine and its streams did, over HTTP, with nothing that tells whose text it was."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families
from scripted_drafters import ScriptedDrafter

from outrider.cloud.serving.verifier_server import VerifierServer
from outrider.cloud.testing import save_tiny_target
from outrider.cloud.verifier_config import VerifierConfig
from outrider.edge import Client, EdgeConfig
from outrider.edge.edge_metrics import EdgeMetrics
from outrider.proto.errors import ConfigError
from outrider.proto.plumbing.logs import JsonLines
from outrider.proto.types import Patience

TOKENS = 24
PROMPT = "w7 w8 w9"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_target(tmp_path_factory.mktemp("tiny"), sharpness=1, max_position_embeddings=512)


def samples(exposition: bytes) -> dict[tuple[str, tuple[str, ...]], float]:
    """Samples by name and label values, in the order of the labels' names."""
    return {
        (sample.name, tuple(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(exposition.decode())
        for sample in family.samples
    }


def scrape(address: str) -> dict[tuple[str, tuple[str, ...]], float]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as reply:
        return samples(reply.read())


def run(folder, scenario, **changes):
    """The result of `scenario(server, address)` against a verifier of its own."""

    async def main():
        defaults = {"target": str(folder), "model": "tiny", "kv_tokens": 1024, "threads": 1, "max_sessions": 2}
        server = VerifierServer(VerifierConfig(**(defaults | {"metrics_listen": "127.0.0.1:0"} | changes)))
        address = await server.start()
        try:
            return await asyncio.wait_for(scenario(server, address), 60)
        finally:
            await server.stop(0.2)

    return asyncio.run(main())


def edge(folder, address: str, drafter=None) -> Client:
    """A client; with a drafter it has the verifier wait for drafts, which a busy machine would bring too late."""
    patience = None if drafter is None else Patience(1.0)
    config = EdgeConfig(
        verifier=address, model="tiny", tokenizer=folder / "tokenizer.json", drafter="none", patience=patience
    )
    return Client(config, drafters=() if drafter is None else (drafter,))


@pytest.mark.usefixtures("all_drafts_pay")
def test_both_ends_count_the_same_decoding_alike(folder) -> None:
    async def scenario(server, address):
        async with edge(folder, address) as plain:
            text = (await plain.complete(PROMPT, max_tokens=TOKENS, ignore_eos=True)).ids
        before = await asyncio.to_thread(scrape, server.metrics_address)
        drafter = ScriptedDrafter((0, 0, 0, *text[:10], *(1 for _ in text[10:])))
        metrics = EdgeMetrics()
        async with edge(folder, address, drafter) as client:
            events = client.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True, observer=metrics.observer())
            [_ async for _ in events]
        after = await asyncio.to_thread(scrape, server.metrics_address)
        return before, after, samples(metrics.exposition()[0])

    before, after, at_edge = run(folder, scenario)
    for name in ("drafts", "draft_tokens", "accepted_tokens"):
        counter = f"outrider:spec_decode_num_{name}_total"
        assert after[counter, ("", "tiny", "verifier")] == at_edge[counter, ("scripted", "tiny", "edge")] > 0
    for position in range(16):
        counter = "outrider:spec_decode_num_accepted_tokens_per_pos_total"
        there = after[counter, ("", "tiny", "verifier", str(position))]
        assert there == at_edge[counter, ("scripted", "tiny", "edge", str(position))]
    generated = "outrider:generation_tokens_total"
    assert before[generated, ("", "tiny", "verifier")] == TOKENS
    assert after[generated, ("", "tiny", "verifier")] == 2 * TOKENS
    assert at_edge[generated, ("scripted", "tiny", "edge")] == TOKENS
    whose = ("tiny", "verifier")
    assert after["outrider:request_success_total", ("length", *whose)] == 2
    assert after["outrider:verifier_admitted_sessions_total", whose] == 2
    steps = after["outrider:verifier_step_rows_count", whose]
    assert steps == after["outrider:verifier_step_seconds_count", ("tiny", "forward", "verifier")] > 0
    assert at_edge["outrider:edge_phase_seconds_count", ("scripted", "tiny", "verify")] <= steps


def test_pages_and_sessions_come_back_when_texts_end(folder) -> None:
    whose = ("tiny", "verifier")

    async def scenario(server, address):
        async with edge(folder, address) as client:
            events = client.generate(PROMPT, max_tokens=400, ignore_eos=True)
            await anext(events)
            running = await asyncio.to_thread(scrape, server.metrics_address)
            await events.aclose()
            while server.status().sessions:  # noqa: ASYNC110 - counted in another thread
                await asyncio.sleep(0.01)
        return running, await asyncio.to_thread(scrape, server.metrics_address)

    running, idle = run(folder, scenario, min_step_s=0.01)
    assert running["outrider:num_requests_running", whose] + running["outrider:num_requests_waiting", whose] == 1
    used = running["outrider:verifier_kv_pages", ("tiny", "used", "verifier")]
    assert 1 < used < 26, "of 16 positions; the whole text, 3 + 400 tokens, would take 26"
    assert running["outrider:kv_cache_usage_perc", whose] == pytest.approx(used / 64)
    assert idle["outrider:verifier_kv_pages", ("tiny", "free", "verifier")] == 64
    assert idle["outrider:num_requests_running", whose] == idle["outrider:num_requests_waiting", whose] == 0
    assert idle["outrider:verifier_max_sessions", whose] == 2


def test_refusals_are_counted_by_kind_and_logged_with_their_session_and_no_text(folder) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    logger = logging.getLogger("outrider")
    logger.addHandler(handler)
    before, logger.level = logger.level, logging.DEBUG

    async def scenario(server, address):
        async with edge(folder, address) as client:
            first = client.generate(PROMPT, max_tokens=60, ignore_eos=True)
            await anext(first)
            second = asyncio.create_task(client.complete(PROMPT, max_tokens=4))
            metrics = {}
            while metrics.get(("outrider:verifier_sheds_total", whose), 0) == 0:
                metrics = await asyncio.to_thread(scrape, server.metrics_address)
            await first.aclose()
            await second
        return metrics

    whose = ("tiny", "verifier")
    try:
        metrics = run(folder, scenario, max_sessions=1, min_step_s=0.05)
    finally:
        logger.removeHandler(handler)
        logger.level = before
    assert metrics["outrider:verifier_refused_sessions_total", ("ResourceExhausted", *whose)] >= 1
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    refused = [line for line in lines if line.get("error") == "ResourceExhausted"]
    assert {line["logger"] for line in refused} == {"outrider.cloud.serving.decode_streams", "outrider.edge.decoding"}
    assert len({line["session"] for line in refused}) == 1
    about_sessions = [line for line in lines if "session" in line["message"]]
    assert about_sessions
    assert all(line.get("session") for line in about_sessions)
    assert "w7" not in stream.getvalue()


def test_only_metrics_are_served_and_only_at_the_given_address(folder) -> None:
    async def scenario(server, address):
        def statuses():
            found = []
            for path, data in (("/metrics", None), ("/other", None), ("/metrics", b"x")):
                try:
                    request = urllib.request.Request(f"http://{server.metrics_address}{path}", data)
                    with urllib.request.urlopen(request, timeout=20) as reply:
                        found.append(reply.status)
                except urllib.error.HTTPError as error:
                    found.append(error.code)
            return found

        return await asyncio.to_thread(statuses)

    assert run(folder, scenario) == [200, 404, 404]

    async def address_of(server, address):
        return server.metrics_address

    assert run(folder, address_of, metrics_listen="") == ""


@pytest.mark.parametrize("listen", ["0.0.0.0:9100", "nonsense", "127.0.0.1:99999", "example.org:1"])
def test_metrics_beyond_loopback_must_be_asked_for_plainly(listen) -> None:
    with pytest.raises(ConfigError) as caught:
        VerifierConfig(metrics_listen=listen)
    assert caught.value.field == "metrics_listen"
    assert VerifierConfig(metrics_listen="0.0.0.0:9100", insecure_metrics=True).metrics_listen == "0.0.0.0:9100"
