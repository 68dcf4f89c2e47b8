"""Routes to verifiers: hashes of a text's beginnings, equal where texts of one key begin alike, and fixed addresses."""

from __future__ import annotations

import asyncio
import random

import pytest

from outrider.edge.features import TextFeatures
from outrider.edge.link.routes import PREFIX_LENGTHS, CoordinatorRoute, DirectRoute, prefix_key, text_prefixes
from outrider.edge.link.security import Security
from outrider.proto.types import MAX_PREFIXES, MAX_TOKEN_ID, Lease, LeaseRequest

KEY = prefix_key("secret", "tiny", "ab" * 32)
TEXT = random.Random(3).choices(range(MAX_TOKEN_ID + 1), k=PREFIX_LENGTHS[-1] + 5)


def test_lengths_grow_by_half_an_octave_from_sixteen_tokens() -> None:
    assert PREFIX_LENGTHS[:6] == (16, 22, 32, 45, 64, 90)
    assert PREFIX_LENGTHS[4::4] == (64, 256, 1024, 4096, 16384), "four more are a fourfold length"
    assert len(PREFIX_LENGTHS) == MAX_PREFIXES


@pytest.mark.parametrize("common", [0, 15, 16, 63, 64, 500, len(TEXT)])
def test_texts_have_those_hashes_in_common_whose_lengths_they_share(common: int) -> None:
    other = [*TEXT[:common], *((token + 1) % (MAX_TOKEN_ID + 1) for token in TEXT[common:])]
    one, two = text_prefixes(TEXT, KEY), text_prefixes(other, KEY)
    shared = sum(length <= common for length in PREFIX_LENGTHS)
    assert one[:shared] == two[:shared]
    assert not set(one[shared:]) & set(two)
    assert text_prefixes(TEXT[:common], KEY) == one[:shared], "a longer text goes on with further ones"
    assert LeaseRequest("m", "s", prefixes=one).prefixes == one


class Asked:
    """A coordinator's client that notes the requests for leases, and gives none."""

    security = Security(api_key="secret")

    def __init__(self) -> None:
        self.requests: list[LeaseRequest] = []

    async def open_lease(self, request: LeaseRequest) -> Lease:
        self.requests.append(request)
        return Lease(b"", "v", "a:1", 60.0, "tiny", "ab" * 32)


def test_a_lease_is_asked_for_by_hashes_of_whom_the_text_is_for() -> None:
    client = Asked()
    route = CoordinatorRoute(client, "tiny", "ab" * 32)  # type: ignore[arg-type]
    for isolation in (b"", b"alice", b"bob"):
        asyncio.run(route.about(TextFeatures(), isolation).lease(LeaseRequest("tiny", "s"), TEXT))
    found = [request.prefixes for request in client.requests]
    assert found[0] == text_prefixes(TEXT, KEY)
    assert len({hash_ for prefixes in found for hash_ in prefixes}) == 3 * MAX_PREFIXES


def test_a_key_a_model_and_a_tokenizer_have_hashes_of_their_own() -> None:
    keys = [
        KEY,
        prefix_key("another", "tiny", "ab" * 32),
        prefix_key("", "tiny", "ab" * 32),
        prefix_key("secret", "big", "ab" * 32),
        prefix_key("secret", "tiny", "cd" * 32),
        prefix_key("secret", "tiny", "ab" * 32, b"alice"),
        prefix_key("secret", "tiny", "ab" * 32, b"bob"),
    ]
    hashes = [hash_ for key in keys for hash_ in text_prefixes(TEXT, key)]
    assert len(set(hashes)) == len(keys) * MAX_PREFIXES


# --- without a coordinator ---


@pytest.mark.parametrize(
    ("lost", "next_one"),
    [("", "a:1"), ("a", "b:1"), ("ab", "c:1"), ("abc", "a:1"), ("bca", "b:1"), ("cab", "c:1"), ("cb", "a:1")],
)
def test_the_next_address_was_not_lost_or_else_was_lost_longest_ago(lost, next_one) -> None:
    route = DirectRoute(("a:1", "b:1", "c:1"), "tiny", "")
    lease = asyncio.run(route.lease(LeaseRequest("tiny", "s", avoid=tuple(f"{name}:1" for name in lost))))
    assert lease.address == next_one
