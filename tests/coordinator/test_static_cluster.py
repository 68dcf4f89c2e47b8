"""Fixed verifiers whose reports cannot be read are known by their health alone."""

from __future__ import annotations

import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2_grpc

from outrider.coordinator.cluster import StaticCluster, VerifierState
from outrider.coordinator.coordinator_config import StaticVerifier
from outrider.coordinator.fake_cluster import TOKENIZER_JSON
from outrider.proto.channel import REPORT_METHOD

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
