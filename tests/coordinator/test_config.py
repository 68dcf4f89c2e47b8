"""The coordinator's settings and fleets without Ray: defaults, refusals that name the option, no secret printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from fake_cluster import TOKENIZER_JSON, add_report

from outrider.coordinator.cluster import StaticCluster, VerifierState
from outrider.coordinator.coordinator_config import CoordinatorConfig, StaticVerifier
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
    [("address", {"address": "127.0.0.1"}), ("address", {"address": ""}), ("tokenizer_json", {"tokenizer_json": ""})],
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


DEEP = b"[" * 100_000


@pytest.mark.parametrize("report", [b"", b"\xff", b"{", b"[]", b"null", b"{}", b'{"name": "a", "state": "odd"}', DEEP])
async def test_a_verifier_whose_report_cannot_be_read_is_down_and_the_log_says_so_once(report: bytes, caplog) -> None:
    server = grpc.aio.server()
    add_report(server, report)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    fixed = StaticVerifier("a", f"127.0.0.1:{port}", "tiny", TOKENIZER_JSON)
    cluster = StaticCluster((fixed,), secret=b"0123456789abcdef")
    try:
        for _ in range(2):
            (info,) = await cluster.refresh()
            assert (info.name, info.state) == ("a", VerifierState.DOWN)
    finally:
        await cluster.close()
        await server.stop(0)
    assert caplog.text.count("verifier a answers with no report") == 1


async def test_what_is_no_verifier_is_down_and_the_log_says_so(caplog) -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    fixed = StaticVerifier("a", f"127.0.0.1:{port}", "tiny", TOKENIZER_JSON)
    cluster = StaticCluster((fixed,), secret=b"0123456789abcdef")
    (info,) = await cluster.refresh()
    await cluster.close()
    await server.stop(0)
    assert info.state is VerifierState.DOWN
    assert "verifier a is no verifier, or of another release" in caplog.text
