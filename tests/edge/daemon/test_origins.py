"""Pages of other sites: allowed by --allow-origin, as browsers ask for it, and refused otherwise."""

from __future__ import annotations

import pytest

from outrider.edge.daemon import DaemonConfig
from outrider.proto.errors import ConfigError
from outrider.proto.plumbing.access import Key, new_secret, secret_sha256

APP = "https://app.example.com"
HEADERS = "authorization,x-stainless-os"
BODY = {"model": "tiny", "prompt": "x"}


def preflight(live, origin: str, **more: str):
    headers = {
        "Access_Control_Request_Method": "POST",
        "Access_Control_Request_Headers": HEADERS,
    }
    return live.request("OPTIONS", "/v1/completions", Origin=origin, **headers, **more)


def test_a_page_of_an_allowed_origin_may_ask_and_read_answers_and_errors(start) -> None:
    with start(allow_origin=("http://localhost:5173", APP)) as live:
        asked = preflight(live, APP, Access_Control_Request_Private_Network="true")
        assert (asked.status, asked.body) == (204, b"")
        assert asked.headers["Access-Control-Allow-Origin"] == APP
        assert asked.headers["Access-Control-Allow-Headers"] == HEADERS
        assert "POST" in asked.headers["Access-Control-Allow-Methods"]
        assert asked.headers["Access-Control-Allow-Private-Network"] == "true"
        assert "Access-Control-Allow-Credentials" not in asked.headers
        for body, status in ((BODY, 200), ({**BODY, "stream": True}, 200), ({**BODY, "n": 0}, 400)):
            reply = live.post("/v1/completions", {**body, "odd": 1}, Origin=APP, Sec_Fetch_Site="cross-site")
            assert reply.status == status
            assert reply.headers["Access-Control-Allow-Origin"] == APP
            assert "X-Outrider-Ignored" in reply.headers["Access-Control-Expose-Headers"]
            assert reply.headers["Vary"] == "Origin"
        assert live.get("/health").headers["Vary"] == "Origin", "a cache must not keep it for another page"


def test_a_page_of_another_origin_is_refused_and_can_read_nothing(start) -> None:
    with start(allow_origin=(APP,)) as live:
        for origin in ("https://evil.example", "null", f"{APP}.evil.example", "http://app.example.com", f"{APP}:444"):
            for reply in (preflight(live, origin), live.post("/v1/completions", BODY, Origin=origin)):
                assert (reply.status, reply.error["code"]) == (403, "origin_not_allowed"), origin
                assert "Access-Control-Allow-Origin" not in reply.headers
                assert "--allow-origin" in reply.error["message"]
        assert live.client.asked == []


@pytest.mark.parametrize("path", ["/drafters", "/metrics", "/v1/models"])
def test_no_page_elsewhere_has_the_daemon_ask_its_coordinator_even_unread(live, path) -> None:
    refused = live.get(path, Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors")
    assert (refused.status, refused.error["code"]) == (403, "origin_not_allowed")
    assert live.get("/", Sec_Fetch_Site="cross-site").status == 200, "a link may lead to the page"


def test_an_allowed_page_still_needs_a_name_of_this_machine(start) -> None:
    with start(allow_origin=(APP,)) as live:
        assert preflight(live, APP, Host="evil.example").error["code"] == "host_not_allowed"


def test_every_page_may_be_allowed_where_requests_show_a_key(start, tmp_path) -> None:
    secret = new_secret()
    keys = tmp_path / "keys.toml"
    keys.write_text(Key("alice", secret_sha256(secret)).toml())
    keys.chmod(0o600)
    with start(api_keys=keys, allow_origin=("*",)) as live:
        assert preflight(live, "https://any.example").status == 204
        refused = live.post("/v1/completions", BODY, Origin="https://any.example")
        assert (refused.status, refused.error["code"]) == (401, "missing_api_key")
        assert refused.headers["Access-Control-Allow-Origin"] == "https://any.example"
        allowed = live.post("/v1/completions", BODY, Origin="https://any.example", Authorization=f"Bearer {secret}")
        assert allowed.status == 200


def test_options_without_an_allowed_page_is_an_ordinary_405(live) -> None:
    assert live.request("OPTIONS", "/v1/completions").status == 405


@pytest.mark.parametrize("wrong", ["", "null", "app.example.com", "https://a.example/path", "https://*.example", "*,a"])
def test_what_is_no_origin_cannot_be_allowed(wrong) -> None:
    with pytest.raises(ConfigError, match="no origin") as caught:
        DaemonConfig(allow_origin=(wrong,))
    assert caught.value.field == "allow_origin"


def test_all_origins_cannot_be_allowed_without_keys() -> None:
    with pytest.raises(ConfigError, match="--api-keys"):
        DaemonConfig(allow_origin=("*",))
    assert DaemonConfig(allow_origin=("chrome-extension://abcdef", "tauri://localhost")).allow_origin
