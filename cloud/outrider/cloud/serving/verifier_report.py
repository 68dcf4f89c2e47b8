"""Reports of a verifier to coordinators: its state, and the texts of API keys that go on here.

A coordinator in the same Ray cluster asks the actor. One that knows addresses alone makes a gRPC call beside the
decoding streams, with a token under the lease secret.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Protocol

import grpc

from outrider.cloud.serving.lease_end import LeaseEnds
from outrider.proto.channel import REPORT_METHOD
from outrider.proto.errors import InvalidArgument, OutriderError
from outrider.proto.lease import check_coordinator
from outrider.proto.plumbing.half_open import token_in
from outrider.proto.rpc_errors import to_status
from outrider.proto.status import VerifierStatus

SERVICE, METHOD = REPORT_METHOD.strip("/").split("/")


class _Server(Protocol):
    """The part of `VerifierServer`, which imports this module, that reports."""

    tokenizer_sha256: str
    incarnation: str
    lease_ends: LeaseEnds

    @property
    def admitted(self) -> dict[str, int]: ...

    @property
    def metrics_address(self) -> str: ...

    @property
    def speaks_tls(self) -> bool: ...

    @property
    def tls_name(self) -> str: ...

    @property
    def texts_of_keys(self) -> dict[str, dict[str, float]]: ...

    def status(self) -> VerifierStatus: ...

    def send_away(self, sessions: frozenset[str]) -> None: ...


def verifier_report(server: _Server) -> dict[str, Any]:
    """Return what a coordinator that asks places sessions by; `incarnation` changes with every start.

    Call it in the server's event loop.
    """
    server.lease_ends.asked()
    return (
        {"admitted": server.admitted}
        | asdict(server.status())
        | {  # so that none is missing in both
            "tokenizer_sha256": server.tokenizer_sha256,
            "metrics_address": server.metrics_address,
            "tls": server.speaks_tls,
            "tls_name": server.tls_name,
            "incarnation": server.incarnation,
            "lists_texts": True,
            "lists_admitted": True,
            "ends_texts_of_keys": True,
            "texts_of_keys": server.texts_of_keys,
        }
    )


def report_service(server: _Server, secret: bytes) -> grpc.GenericRpcHandler:
    """Return the service that answers coordinators, which prove that they have `secret`; empty: nobody needs to.

    A request is a JSON object, whose `send_away` lists texts that are to end here, as `Admission.send_away` names them;
    the answer is the report.
    """

    async def handle(data: bytes, context: Any) -> bytes:
        try:
            if secret:
                token = token_in(context.invocation_metadata() or ())
                check_coordinator(token, secret, verifier=server.status().name, now_s=time.time())
            if texts := _to_send_away(data):
                server.send_away(texts)
        except OutriderError as error:
            await context.abort(*to_status(error))
        return json.dumps(verifier_report(server)).encode()

    return grpc.method_handlers_generic_handler(SERVICE, {METHOD: grpc.unary_unary_rpc_method_handler(handle)})


def _to_send_away(data: bytes) -> frozenset[str]:
    try:
        request = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument("is not JSON", field="report_request") from error
    texts = request.get("send_away", []) if isinstance(request, Mapping) else None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InvalidArgument("must be a list of texts", field="report_request.send_away")
    return frozenset(texts)
