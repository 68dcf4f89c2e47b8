"""Whether the coordinator grants a lease, and on what."""

from __future__ import annotations

import time
import uuid

from outrider.edge.control import CoordinatorClient
from outrider.edge.doctor.endpoint import Endpoint
from outrider.edge.doctor.finding import Finding, ok
from outrider.edge.doctor.remedies import failed_by
from outrider.edge.doctor.visit import PATIENT_S, Visit
from outrider.proto import codec
from outrider.proto.errors import OutriderError
from outrider.proto.types import Lease, LeaseRequest


async def lease(visit: Visit) -> Finding:
    """One lease, as any session would get it. It is not used and runs out by itself."""
    at = visit.coordinator
    assert at is not None  # noqa: S101 - without a coordinator this check is not made
    client = CoordinatorClient(at.address, PATIENT_S, at.security)
    began = time.time()
    try:
        granted = await client.open_lease(LeaseRequest(model=visit.config.model, session=f"doctor-{uuid.uuid4().hex}"))
    except OutriderError as error:
        return failed_by(error)
    finally:
        await client.close()
    visit.lease = granted
    visit.leased_between = (began, time.time())
    visit.verifier = _verifier(at, granted)
    way = "through the coordinator" if granted.relayed else f"at {granted.address}"
    return ok(
        f"verifier {granted.verifier} with {granted.model}, {way}, for {granted.expires_in_s:g} s",
        verifier=granted.verifier,
        model=granted.model,
        relayed=granted.relayed,
        expires_in_s=granted.expires_in_s,
    )


def _verifier(coordinator: Endpoint, granted: Lease) -> Endpoint:
    """Where the sessions go: to the coordinator itself where it relays."""
    if granted.relayed:
        return coordinator
    return Endpoint(
        role="verifier",
        address=granted.address,
        option="`outrider verifier --advertise`",
        service=codec.DECODING_SERVICE,
        security=coordinator.security,
        tls_name=granted.tls_name if granted.tls else None,
    )
