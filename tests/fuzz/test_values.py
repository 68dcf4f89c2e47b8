"""Requests of valid form and extreme value get a right answer, or a refusal that names a field, at every door."""

from __future__ import annotations

import json
import math
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import golden_messages
import grpc
import http_door
import pytest
import value_doors
from extreme_values import NUMERALS, Extreme, arguments, changed, changed_body, fields_of, json_ways
from fake_cluster import ScriptedCluster, ready
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from loop_thread import LoopThread
from malformed_http import CHAT, COMPLETIONS, request
from refusals import check_refusal
from value_doors import VerifierAtDoor, messages, opening, oracle_text, written

from outrider.coordinator.coordinator_config import CoordinatorConfig
from outrider.coordinator.coordinator_server import CoordinatorServer
from outrider.edge import Client, EdgeConfig
from outrider.edge.daemon.api_access import RESPONSES
from outrider.edge.daemon.http_errors import MESSAGES
from outrider.edge.daemon.messages import COUNT_TOKENS, CountRequest, MessagesRequest
from outrider.edge.daemon.responses import MAX_PAGE_ITEMS, ResponsesRequest
from outrider.edge.daemon.schema import ChatRequest, CompletionRequest
from outrider.proto import codec
from outrider.proto.errors import OutriderError
from outrider.proto.types import EdgeFrame, Sampling

PHASES = (Phase.generate, Phase.shrink)
PLAIN = Sampling(temperature=1.0, seed=5, max_tokens=value_doors.TEXT, ignore_eos=True)
SAMPLINGS = (PLAIN, value_doors.SETTINGS)


def examples(number: int) -> Any:
    """Try the same `number` of examples each time; what is found is made smaller."""
    return settings(
        max_examples=number,
        derandomize=True,
        database=None,
        deadline=None,
        phases=PHASES,
        report_multiple_bugs=False,
        suppress_health_check=HealthCheck,
    )


def streams(frames: list[EdgeFrame]) -> st.SearchStrategy[list[Extreme]]:
    """Return streams of which some frames are extreme; others come out of order, not at all or twice."""
    right = [Extreme(each.SerializeToString(), each.WhichOneof("body")) for each in messages(frames)]
    extreme = list(map(changed, messages(frames)))
    others = range(1, len(right))

    @st.composite
    def drawn(draw: Any) -> list[Extreme]:
        order = [0, *(draw(st.permutations(others)) if draw(st.integers(0, 3)) == 0 else others)]
        order = order[: draw(st.integers(1, len(order)))]
        order += draw(st.lists(st.sampled_from(order), max_size=2)) if len(order) > 1 else []
        hurt = draw(st.sets(st.sampled_from(range(len(order))), min_size=1, max_size=2))
        return [draw(extreme[each]) if place in hurt else right[each] for place, each in enumerate(order)]

    return drawn()


def fire_at_codec(number: int, _: Path) -> None:
    @examples(number)
    @given(st.one_of(map(changed, messages(written(oracle_text(), opening())))))
    def fire(message: Extreme) -> None:
        value_doors.decoded(message.data)

    fire()


def fire_at_machine(number: int, _: Path) -> None:
    @examples(number)
    @given(
        st.one_of(streams(written(oracle_text(), opening(sampling=sampling))) for sampling in SAMPLINGS),
        st.integers(0, 99),
    )
    def fire(frames: list[Extreme], seed: int) -> None:
        value_doors.drive_machine([frame.data for frame in frames], seed)

    fire()


def fire_at_verifier(number: int, folder: Path) -> None:
    with VerifierAtDoor(folder) as verifier:

        @examples(number)
        @given(st.one_of(streams(some) for sampling in SAMPLINGS for some in _long_and_short(verifier, sampling)))
        def fire(frames: list[Extreme]) -> None:
            verifier.run(verifier.check(verifier.stream([frame.data for frame in frames])))

        fire()


def _long_and_short(verifier: VerifierAtDoor, sampling: Sampling) -> tuple[list[EdgeFrame], list[EdgeFrame]]:
    frames = verifier.frames(sampling=sampling)
    return frames, frames[:1]


def fire_at_sampling(number: int, _: Path) -> None:
    @examples(number)
    @given(arguments(fields_of(Sampling)))
    def fire(chosen: dict[str, Any]) -> None:
        try:
            sampling = Sampling(**chosen)
        except OutriderError as error:
            check_refusal(error)
            return
        value_doors.check_single(sampling)
        value_doors.decoded(codec.encode_edge_frame(opening(sampling=sampling)))

    fire()


def fire_at_client(number: int, folder: Path) -> None:
    hints = typing.get_type_hints(Client.generate)
    hints = {name: hint for name, hint in hints.items() if name not in ("observer", "overrides", "return")}
    with VerifierAtDoor(folder) as verifier:
        config = EdgeConfig(verifier=verifier.address, model="m", tokenizer=folder / "tokenizer.json", drafter="none")

        @examples(number)
        @given(arguments(hints | fields_of(Sampling)))
        def fire(chosen: dict[str, Any]) -> None:
            verifier.run(verifier.check(generate(config, {"prompt": value_doors.PROMPT, **chosen})))

        fire()


async def generate(config: EdgeConfig, chosen: dict[str, Any]) -> None:
    try:
        async with Client(config) as client:
            async for event in client.generate(**chosen):
                for token in getattr(event, "tokens", ()):
                    assert not math.isnan(token.logprob or 0.0), event
                    assert not math.isnan(token.logp or 0.0), event
    except OutriderError as error:
        check_refusal(error)


def fire_at_http(number: int, _: Path) -> None:
    chat = {"model": http_door.MODEL, "messages": [{"role": "user", "content": "w5"}], "max_tokens": 3}
    text = {"model": http_door.MODEL, "prompt": "w5 w6", "max_tokens": 3}
    asked = {"model": http_door.MODEL, "input": [{"role": "user", "content": "w5"}], "max_output_tokens": 3}
    doors = (
        (CHAT, ChatRequest, chat), (COMPLETIONS, CompletionRequest, text), (RESPONSES, ResponsesRequest, asked),
        (MESSAGES, MessagesRequest, chat), (COUNT_TOKENS, CountRequest, chat),
    )  # fmt: skip
    bodies = [
        st.tuples(st.just(path), changed_body(base, json_ways(kind.model_json_schema()))) for path, kind, base in doors
    ]

    @examples(number)
    @given(st.one_of(bodies))
    def fire(drawn: tuple[str, Any]) -> None:
        path, body = drawn
        http_door.try_input(request("POST", path, json.dumps(body).encode(), http_door.PORT))

    fire()


def fire_at_pages(number: int, _: Path) -> None:
    items = [{"role": "user", "content": "w5"}] * (3 * MAX_PAGE_ITEMS // 2)
    kept = talk("POST", RESPONSES, {"model": http_door.MODEL, "input": items, "max_output_tokens": 3})["id"]
    names = st.sampled_from(["limit", "limit", "after", "order", "include", "stream", "starting_after"])

    @examples(number)
    @given(st.dictionaries(names, NUMERALS, min_size=1, max_size=2))
    def fire(query: dict[str, str]) -> None:
        page = talk("GET", f"{RESPONSES}/{kept}/input_items?{urlencode(query)}").get("data", [])
        assert len(page) <= MAX_PAGE_ITEMS, f"a page has {len(page)} items"

    fire()


def talk(method: str, path: str, body: Any = None) -> dict[str, Any]:
    """Send a request to the daemon, check the answer's form, and return its body."""
    data = request(method, path, b"" if body is None else json.dumps(body).encode(), http_door.PORT)
    http_door.try_input(data)
    answer: dict[str, Any] = json.loads(http_door._door().talk(data).partition(b"\r\n\r\n")[2])
    return answer


def fire_at_coordinator(number: int, _: Path) -> None:
    loop = LoopThread()
    facts: dict[str, Any] = {"model": "reference", "tokenizer_sha256": golden_messages.HASH, "context_length": 4096}
    config = CoordinatorConfig(lease_secret=b"0123456789abcdef", listen="127.0.0.1:0", poll_s=3600.0)
    server = CoordinatorServer(
        config, ScriptedCluster(ready("v0", **facts), ready("honest", **facts))
    )  # v0 is drained on request

    async def serve() -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(await server.start())

    async def lease() -> str:
        honest = codec.encode_lease_request(golden_messages.t.LeaseRequest("reference", "honest"))
        method: Any = channel.unary_unary(f"/{codec.CONTROL_SERVICE}/OpenLease")
        return codec.decode_lease(await method(honest, timeout=value_doors.ANSWER_WITHIN_S)).verifier

    channel = loop.run(serve())
    methods = value_doors.control_methods().items()
    bases = [st.tuples(st.just(name), changed(value_doors.control_base(kind))) for name, (kind, _) in methods]
    streaming = {name: streams for name, (_, streams) in methods}

    @examples(number)
    @given(st.one_of(bases))
    def fire(drawn: tuple[str, Extreme]) -> None:
        name, message = drawn
        loop.run(value_doors.ask(channel, name, streaming[name], message.data))

    try:
        fire()
        assert loop.run(lease()) in ("v0", "honest")
    finally:
        loop.run(channel.close())
        loop.run(server.stop(0.1))
        loop.close()


DOORS: dict[str, tuple[Callable[[int, Path], None], int, int]] = {
    "codec": (fire_at_codec, 200, 1000),
    "machine": (fire_at_machine, 300, 2000),
    "verifier": (fire_at_verifier, 40, 225),
    "sampling": (fire_at_sampling, 120, 1000),
    "client": (fire_at_client, 12, 500),
    "http": (fire_at_http, 80, 500),
    "pages": (fire_at_pages, 60, 500),
    "coordinator": (fire_at_coordinator, 100, 375),
}
"""Function that fires at each door, its number of examples in each run of the tests, and in soak."""


@pytest.mark.parametrize("door", DOORS)
def test_a_few_extreme_values_are_answered_right_or_refused(door: str, tmp_path: Path) -> None:
    fire, few, _ = DOORS[door]
    fire(few, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("door", DOORS)
def test_extreme_values_are_answered_right_or_refused(door: str, tmp_path: Path) -> None:
    fire, _, many = DOORS[door]
    fire(many, tmp_path)
