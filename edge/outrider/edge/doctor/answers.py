"""Whether the server speaks gRPC, and its service is healthy."""

from __future__ import annotations

import time
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.edge.doctor.endpoint import Endpoint
from outrider.edge.doctor.finding import Finding, failed, ok
from outrider.edge.doctor.remedies import failed_by
from outrider.edge.doctor.visit import PATIENT_S
from outrider.proto.errors import OutriderError
from outrider.proto.plumbing.tls import explain
from outrider.proto.rpc_errors import from_rpc_error


async def answer(at: Endpoint) -> Finding:
    """The health of its service."""
    try:
        async with at.channel() as channel:
            began = time.monotonic()
            reply = await ask_health(channel, at.service, at.metadata)
            seconds = time.monotonic() - began
    except OutriderError as error:
        return failed_by(error)
    except grpc.aio.AioRpcError as error:
        return _refused(at, error)
    if reply.status != health_pb2.HealthCheckResponse.SERVING:
        status = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
        return failed(
            f"the {at.role} says that it takes no calls: {status}",
            f"it starts, drains or stops; look again, or start another `outrider {at.role}`",
        )
    return ok(f"the {at.role} serves; first answer after {1000 * seconds:.1f} ms", first_answer_s=seconds)


async def ask_health(channel: grpc.aio.Channel, service: str, metadata: tuple[tuple[str, str], ...]) -> Any:
    """The reply of the health service about `service`; raises `AioRpcError`."""
    stub: Any = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
    request = health_pb2.HealthCheckRequest(service=service)
    return await stub.Check(request, timeout=PATIENT_S, metadata=metadata)


def _refused(at: Endpoint, error: grpc.aio.AioRpcError) -> Finding:
    code = error.code()
    if code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED):
        other = "--verifier" if at.role == "coordinator" else "--coordinator"
        return failed(
            f"something else than a {at.role} answers at {at.address}",
            f"check the port in {at.option}, or give {other} if that is what listens there",
        )
    translated = from_rpc_error(error)
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        why = explain(translated.message).removesuffix("; `outrider doctor` looks closer") or translated.message
        return failed(
            f"no gRPC at {at.address}: {why}",
            f"is that port a {at.role}'s, and are the --tls-… options those that its operator gave out?",
        )
    return failed_by(translated)
