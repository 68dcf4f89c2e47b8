"""Errors cross gRPC and come out as what they were."""

from __future__ import annotations

import math

import grpc
import pytest

from outrider.proto import errors
from outrider.proto.errors import NotFound, OutriderError, Unavailable
from outrider.proto.rpc_errors import DETAIL_KEY, from_rpc_error, to_status
from outrider.proto.v1 import decoding_pb2 as pb

KINDS = sorted(
    (kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, OutriderError)),
    key=lambda kind: kind.__name__,
)


class FakeRpcError(grpc.RpcError):
    def __init__(self, code, details, metadata):
        self._answers = code, details, metadata

    def code(self):
        return self._answers[0]

    def details(self):
        return self._answers[1]

    def trailing_metadata(self):
        return self._answers[2]


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_comes_back_from_grpc_as_itself(kind):
    error = kind("is wrong; mend it", field="open.prompt", retry_after_s=1.5)
    status, message, metadata = to_status(error)
    back = from_rpc_error(FakeRpcError(status, message, (("other", "x"), *metadata)))
    assert type(back) is kind
    assert (back.message, back.field, back.retry_after_s) == (error.message, "open.prompt", 1.5)
    assert back.code == kind.usual_code
    assert str(back) == str(error) == message
    assert message.startswith("open.prompt: is wrong; mend it")


def test_a_code_is_in_the_message_once_and_goes_over_grpc_and_into_other_errors():
    error = errors.TokenizerMismatch("is another", code="OUT-407")  # rather than the usual one of its kind
    status, message, metadata = to_status(error)
    back = from_rpc_error(FakeRpcError(status, message, metadata))
    assert back.message == message == "is another (OUT-407)"
    assert errors.ModelRefused(f"{back.message}; leave it out").code == back.code == "OUT-407"
    assert from_rpc_error(FakeRpcError(grpc.StatusCode.UNIMPLEMENTED, "Method not found!", ())).code == "OUT-107"
    assert Unavailable("is away").code == ""


@pytest.mark.parametrize(("sent", "taken"), [(1e9, 3600.0), (math.inf, 3600.0), (math.nan, 0.0), (-5.0, 0.0)])
def test_a_strangers_time_to_wait_is_bounded(sent, taken):
    status, message, metadata = to_status(Unavailable("is away", retry_after_s=sent))
    assert from_rpc_error(FakeRpcError(status, message, metadata)).retry_after_s == taken


@pytest.mark.parametrize("kind", KINDS)
def test_without_details_the_status_alone_gives_an_error_of_the_same_branch(kind):
    back = from_rpc_error(FakeRpcError(grpc.StatusCode[kind.status], "it failed", None))
    assert back.status == kind.status
    assert issubclass(kind, type(back)) or kind is OutriderError
    assert (str(back), back.field, back.retry_after_s) == (str(type(back)("it failed")), "", 0.0)


@pytest.mark.parametrize("code", list(grpc.StatusCode))
def test_every_status_of_grpc_becomes_an_error_of_the_tree(code):
    back = from_rpc_error(FakeRpcError(code, "", ()))
    assert isinstance(back, OutriderError)
    assert back.message


def test_a_kind_from_a_newer_version_falls_back_to_its_status():
    detail = pb.ErrorDetail(kind="NotInventedYet", message="m", field="f").SerializeToString()
    back = from_rpc_error(FakeRpcError(grpc.StatusCode.NOT_FOUND, "m", ((DETAIL_KEY, detail),)))
    assert type(back) is errors.NotFound
    assert back.field == "f"


def test_status_codes_are_the_documented_ones():
    codes = {kind.__name__: kind.status for kind in KINDS}
    assert codes["PromptTooLong"] == codes["UnknownToken"] == codes["ConfigError"] == "INVALID_ARGUMENT"
    assert codes["TokenizerMismatch"] == codes["UnsupportedProtocol"] == codes["ModelRefused"] == "FAILED_PRECONDITION"
    assert codes["LeaseExpired"] == "UNAUTHENTICATED"
    assert codes["Internal"] == codes["OutriderError"] == "INTERNAL"


def test_a_detail_that_was_damaged_on_the_way_leaves_the_status():
    metadata = grpc.aio.Metadata((DETAIL_KEY, b"\xff\xff\xff"))
    error = grpc.aio.AioRpcError(grpc.StatusCode.NOT_FOUND, grpc.aio.Metadata(), metadata, details="gone")
    assert type(from_rpc_error(error)) is NotFound
