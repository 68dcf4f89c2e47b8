"""Addresses: taken apart, put together, and known for local or not."""

from __future__ import annotations

import pytest

from outrider.proto.address import is_local_address, is_loopback, join_address, split_address
from outrider.proto.errors import ConfigError


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 0), ("a.example", 65535), ("::1", 7), ("2001:db8::1", 50050)])
def test_an_address_that_is_put_together_comes_apart_again(host, port):
    assert split_address(join_address(host, port), "listen") == (host, port)


@pytest.mark.parametrize("address", ["", "host", ":1", "host:", "host:x", "host:-1", "host:65536", "1:\u0661\u0662x"])
def test_what_is_no_address_is_refused_on_its_field(address):
    with pytest.raises(ConfigError, match="is not host:port") as refusal:
        split_address(address, "listen")
    assert refusal.value.field == "listen"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.8.7", "localhost", "::1"])
def test_loopback_is_known(host):
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "10.0.0.1", "127.evil.example", "localhost.evil", "example.org"])
def test_anything_else_may_be_reached_from_elsewhere(host):
    assert not is_loopback(host)


def test_an_address_is_as_local_as_its_host():
    assert is_local_address("[::1]:1", "listen")
    assert not is_local_address("[::]:1", "listen")
