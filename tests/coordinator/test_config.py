"""The coordinator's settings and fleets without Ray: defaults, refusals that name the option, no secret printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from fake_cluster import TOKENIZER_JSON
from grpc_health.v1 import health, health_pb2_grpc

from outrider.coordinator.cluster import StaticCluster, VerifierState
from outrider.coordinator.coordinator_config import CoordinatorConfig, StaticVerifier
from outrider.proto.channel import REPORT_METHOD
from outrider.proto.errors import ConfigError

SECRET = b"0123456789abcdef"
FIXED: dict[str, Any] = {"name": "a", "address": "127.0.0.1:1", "model": "m", "tokenizer_json": "{}"}


def test_the_default_listens_on_loopback_only() -> None:
    assert CoordinatorConfig(lease_secret=SECRET).listen.startswith("127.0.0.1:")


@pytest.mark.parametrize("listen", ["0.0.0.0:1", "[::]:1", "192.168.1.2:1", "example.org:1", "localhost.evil:1"])
def test_an_open_address_needs_insecure_listen_and_the_refusal_names_it(listen: str) -> None:
    with pytest.raises(ConfigError, match="insecure_listen") as refusal:
        CoordinatorConfig(lease_secret=SECRET, listen=listen)
    assert refusal.value.field == "listen"
    assert CoordinatorConfig(lease_secret=SECRET, listen=listen, insecure_listen=True).listen == listen


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "127.1.2.3:50050", "localhost:1", "[::1]:1"])
def test_loopback_needs_no_permission(listen: str) -> None:
    assert CoordinatorConfig(lease_secret=SECRET, listen=listen).listen == listen


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("lease_secret", {"lease_secret": b"short"}),
        ("listen", {"listen": "50050"}),
        ("listen", {"listen": "127.0.0.1:99999"}),
        ("lease_seconds", {"lease_seconds": 0}),
        ("lease_seconds", {"lease_seconds": float("nan")}),
        ("poll_s", {"poll_s": -1}),
        ("drain_grace_s", {"drain_grace_s": -1}),
        ("max_request_bytes", {"max_request_bytes": 10}),
        ("max_reply_bytes", {"max_reply_bytes": 10}),
        ("poll_s", {"poll_s": "often"}),
        ("poll_s", {"poll_s": float("inf")}),
        ("relay", {"relay": 1}),
        ("relay_streams", {"relay_streams": 0}),
        ("relay_streams", {"relay_streams": 1.5}),
        ("state", {"state": "statistics.json"}),
        ("drafters", {"drafters": Path("x")}),
        ("drafters", {"drafters": ("x",)}),
        ("lease_secret", {"lease_secret": "0123456789abcdef"}),
    ],
)
def test_a_wrong_option_is_refused_by_name(field: str, values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refusal:
        CoordinatorConfig(**{"lease_secret": SECRET, **values})
    assert refusal.value.field == field


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("address", {"address": "127.0.0.1"}),
        ("address", {"address": ""}),
        ("tokenizer_json", {"tokenizer_json": ""}),
        ("max_sessions", {"max_sessions": 0}),
    ],
)
def test_a_fixed_verifier_is_checked_too(field: str, change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refusal:
        StaticVerifier(**FIXED | change)
    assert refusal.value.field == field


def test_ray_and_fixed_verifiers_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="ray_address"):
        CoordinatorConfig(lease_secret=SECRET, ray_address="auto", verifiers=(StaticVerifier(**FIXED),))


def test_the_secret_is_not_in_the_repr() -> None:
    assert SECRET.decode() not in repr(CoordinatorConfig(lease_secret=SECRET))


# --- a fleet without Ray ---


SERVICE, METHOD = REPORT_METHOD.strip("/").split("/")
DEEP = b"[" * 100_000


@pytest.mark.parametrize("report", [b"", b"\xff", b"{", b"[]", b"null", b"{}", b'{"name": "a", "state": "odd"}', DEEP])
async def test_a_verifier_whose_report_cannot_be_read_is_ready_by_its_health(report: bytes) -> None:
    async def answer(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return report

    server = grpc.aio.server()
    handlers = {METHOD: grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    cluster = StaticCluster(
        (StaticVerifier("a", f"127.0.0.1:{port}", "tiny", TOKENIZER_JSON),), secret=b"0123456789abcdef"
    )
    try:
        (info,) = await cluster.refresh()
        assert (info.name, info.state) == ("a", VerifierState.READY)
    finally:
        await cluster.close()
        await server.stop(0)
