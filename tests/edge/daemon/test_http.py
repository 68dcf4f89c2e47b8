"""The daemon's HTTP: every status with OpenAI's error object, ids, origins, keys, limits, the end of its life."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import socket
import ssl
import threading
import time
from typing import Any

import pytest
from self_signed import certify

from outrider.edge.daemon import DaemonConfig
from outrider.edge.daemon.app import ROUTES
from outrider.edge.daemon.cloud import LOOK_EVERY_S, LOOK_SOON_S, LOOK_WITHIN_S, Cloud
from outrider.edge.daemon.http_errors import ApiError
from outrider.edge.daemon.http_server import Daemon, HttpProtocol
from outrider.edge.link.control_client import _plain
from outrider.proto.errors import (
    ConfigError,
    DataLoss,
    DeadlineExceeded,
    InvalidArgument,
    OutriderError,
    PromptTooLong,
    ResourceExhausted,
    TokenizerMismatch,
    Unauthenticated,
    Unavailable,
    UnknownToken,
)
from outrider.proto.plumbing.access import Key, new_secret, secret_sha256
from outrider.proto.plumbing.tls import ServerTls
from outrider.proto.testing import write_keys


def test_models_health_version_metrics_and_the_page_answer(start) -> None:
    with start() as live:
        assert live.get("/v1/models").json["data"][0]["id"] == "tiny"
        assert live.get("/v1/models/tiny").json["max_model_len"] is None, "no verifier has said it"
        live.client.ready.prompts.context_length = 4096
        assert live.get("/v1/models/tiny").json["max_model_len"] == 4096
        assert live.get("/v1/models/tiny").json["object"] == "model"
        assert live.get("/v1/models/other").error["code"] == "model_not_found"
        assert live.get("/health").json == {"status": "ok", "reason": "", "drafter": "scripted"}
        assert live.get("/version").json["version"]
        (version,) = live.get("/drafters").json["versions"]
        assert (version["drafter"], version["state"]) == ("scripted", "current")
        live.complete()
        metrics = live.get("/metrics").body.decode()
        assert 'outrider:http_requests_total{route="/v1/completions",status="200"} 1.0' in metrics
        assert "outrider:e2e_request_latency_seconds_count 1.0" in metrics
        page = live.get("/")
        assert page.status == 200
        assert page.headers["Content-Security-Policy"].startswith("default-src 'self'")


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (InvalidArgument("is wrong", field="sampling.top_p"), 400, "invalid_request_error", None),
        (PromptTooLong("too long", field="open.prompt"), 400, "invalid_request_error", "context_length_exceeded"),
        (UnknownToken("is none", field="sampling.stop_tokens"), 400, "invalid_request_error", None),
        (ResourceExhausted("full", retry_after_s=2.5), 429, "rate_limit_error", "rate_limit_exceeded"),
        (Unavailable("away"), 503, "server_error", "unavailable"),
        (Unauthenticated("the daemon's own key"), 503, "server_error", "unavailable"),
        (TokenizerMismatch("another"), 503, "server_error", "unavailable"),
        (DeadlineExceeded("over"), 504, "server_error", "deadline_exceeded"),
        (DataLoss("broken"), 500, "server_error", "internal_error"),
    ],
)
def test_an_error_before_the_first_token_has_its_status_streamed_or_not(live, error, status, kind, code) -> None:
    live.client.pieces, live.client.error = [], error
    for stream in (False, True):
        reply = live.complete(stream=stream)
        assert (reply.status, reply.error["type"], reply.error["code"]) == (status, kind, code)
        assert ("Retry-After" in reply.headers) == (status in (429, 503))
    assert live.client.running == 0


def test_the_field_at_fault_is_named_as_the_api_names_it(live) -> None:
    live.client.pieces = []
    for field, param in (("sampling.stop_tokens", "stop_token_ids"), ("sampling.bias_tokens", "logit_bias")):
        live.client.error = InvalidArgument("is wrong", field=field)
        assert live.complete().error["param"] == param


def test_an_error_in_midstream_is_an_event_of_its_own_and_the_last(live) -> None:
    live.client.error = Unavailable("the cloud is gone")
    *chunks, last = live.complete(stream=True).events
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hello, world"
    assert last["error"]["type"] == "server_error"
    assert "the cloud is gone" in last["error"]["message"]


def test_a_defect_is_a_500_that_reveals_nothing(live) -> None:
    live.client.pieces, live.client.error = [], ZeroDivisionError("secret")
    reply = live.complete()
    assert reply.status == 500
    assert "secret" not in reply.error["message"]
    live.client.error = None
    assert live.complete().status == 200


def test_paths_methods_types_and_lengths_are_refused_with_their_statuses(live) -> None:
    assert live.get("/v2/models").error["code"] == "not_found"
    wrong_method = live.get("/v1/completions")
    assert wrong_method.status == 405
    assert wrong_method.headers["Allow"] == "POST"
    assert wrong_method.error["code"] == "method_not_allowed"
    assert live.request("POST", "/v1/completions", b"prompt=x").status == 415
    assert live.post("/v1/completions", b'{"prompt":"' + b"x" * (9 << 20) + b'"}').status == 413
    assert live.complete(model="gpt-5").error["code"] == "model_not_found"


def test_a_body_of_undeclared_length_is_measured_as_it_comes(live) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=30)
    pieces = (b'{"prompt":"', *(b"x" * (1 << 20) for _ in range(9)), b'"}')
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Transfer-Encoding", "chunked")
    connection.endheaders()
    for piece in (*pieces, b""):
        connection.send(b"%x\r\n%s\r\n" % (len(piece), piece))
    assert connection.getresponse().status == 413
    connection.close()


def test_bodies_that_take_too_much_together_are_refused_for_now(start, monkeypatch) -> None:
    monkeypatch.setattr("outrider.edge.daemon.api_access.MAX_BODIES_BYTES", 100_000)
    with start() as live:
        with live.held(lambda: live.complete(user="x" * 70_000)):
            refused = live.complete(user="x" * 70_000)
            assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
            assert int(refused.headers["Retry-After"]) >= 1
            live.client.hold = False
        assert live.complete(user="x" * 70_000).status == 200
        live.until(lambda: live.daemon.limiter.body_bytes == 0)


def test_no_key_takes_more_than_its_share_of_places_and_bytes_beside_others(start, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("outrider.edge.daemon.api_access.MAX_BODIES_BYTES", 100_000)
    secrets = {name: new_secret() for name in ("alice", "bob")}
    made = [Key(name, secret_sha256(secret)) for name, secret in secrets.items()]
    keys = write_keys(tmp_path / "keys.toml", *made)

    def post(name: str, size: int = 1) -> int:
        body = {"model": "tiny", "prompt": "x", "user": "x" * size}
        return live.post("/v1/completions", body, X_Api_Key=secrets[name]).status

    with start(api_keys=keys, max_requests=2) as live:
        with live.held(lambda: post("alice")):
            assert post("alice") == 429
            assert post("bob", 60_000) == 429, "it has a place, and half of the bytes"
            with live.held(lambda: post("bob"), 2):
                live.client.hold = False
        assert post("alice", 40_000) == 200
        write_keys(keys, made[0])
        assert post("alice", 60_000) == 200, "nobody else is there"
        live.until(lambda: live.daemon.limiter.body_bytes == 0)


def test_a_prompt_that_no_context_can_hold_is_a_400_by_name(live) -> None:
    for reply, param in (
        (live.complete(prompt="x" * (5 << 20)), "prompt"),
        (live.chat(messages=[{"role": "user", "content": "x" * (5 << 20)}]), "messages"),
    ):
        assert (reply.status, reply.error["param"]) == (400, param)
        assert "shorten" in reply.error["message"]
    assert live.complete().status == 200


def test_a_sane_request_id_comes_back_and_another_is_replaced(live) -> None:
    reply = live.complete()
    fresh = reply.headers["X-Request-Id"]
    assert len(fresh) == 32
    given = live.post("/v1/completions", {"model": "tiny", "prompt": "x"}, X_Request_Id="mine-1_A")
    assert given.headers["X-Request-Id"] == "mine-1_A"
    assert given.json["id"] == "cmpl-mine-1_A"
    assert live.client.asked[-1][2]["request_id"] == "mine-1_A"
    for bad in ("x" * 65, "a b", "../../etc", "é".encode().decode("latin-1")):
        assert live.get("/health", X_Request_Id=bad).headers["X-Request-Id"] != bad
    assert live.get("/nowhere", X_Request_Id="lost").headers["X-Request-Id"] == "lost"


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Origin": "https://evil.example"}, "origin_not_allowed"),
        ({"Origin": "null"}, "origin_not_allowed"),
        ({"Origin": "http://127.0.0.1:1"}, "origin_not_allowed"),
        ({"Origin": "http://[::1"}, "origin_not_allowed"),
        ({"Sec_Fetch_Site": "cross-site"}, "origin_not_allowed"),
        ({"Host": "evil.example"}, "host_not_allowed"),
        ({"Host": "127.0.0.1.evil.example"}, "host_not_allowed"),
    ],
)
def test_pages_from_elsewhere_and_rebound_names_are_refused(live, headers, code) -> None:
    for path in ("/v1/models", "/drafters", "/metrics"):
        reply = live.get(path, **headers)
        assert (reply.status, reply.error["code"]) == (403, code)


def test_the_daemons_own_page_and_names_of_this_machine_are_let_in(live) -> None:
    host = f"127.0.0.1:{live.port}"
    assert live.get("/v1/models", Host=host, Origin=f"http://{host}", Sec_Fetch_Site="same-origin").status == 200
    for name in (f"localhost:{live.port}", "[::1]:80", "box.localhost"):
        assert live.get("/v1/models", Host=name).status == 200
    assert live.get("/", Sec_Fetch_Site="cross-site").status == 200  # a link to the page


@pytest.mark.parametrize(
    ("listen", "allowed", "refused"),
    [
        (
            "0.0.0.0:0",
            ("edge:8080", "EDGE", "box.lan", "127.0.0.1", "192.168.1.5:80", "[fe80::1]:80", "localhost"),
            ("evil.example", "edge.evil.example", "evil.example:8080", "192.168.1.5.evil.example", "[evil]:1", "1.2.3"),
        ),
        ("127.0.0.1:0", ("edge:8080", "127.0.0.1"), ("evil.example", "192.168.1.5")),
    ],
)
def test_without_keys_a_rebound_name_is_refused_wherever_the_daemon_listens(start, listen, allowed, refused) -> None:
    with start(listen=listen, insecure_listen=True, allow_host=("edge", "box.lan")) as live:
        for host in allowed:
            assert live.get("/v1/models", Host=host).status == 200, host
        for host in refused:
            reply = live.get("/v1/models", Host=host)
            assert (reply.status, reply.error["code"]) == (403, "host_not_allowed"), host
            assert "--allow-host" in reply.error["message"]


@pytest.mark.parametrize("wrong", ["", "http://edge", "edge:80", "edge/v1", "*"])
def test_what_is_no_name_of_a_host_cannot_be_allowed(wrong) -> None:
    with pytest.raises(ConfigError, match="without scheme, port or path") as caught:
        DaemonConfig(allow_host=(wrong,))
    assert caught.value.field == "allow_host"


def test_keys_are_asked_for_where_there_are_any_and_hold_their_limits(start, tmp_path) -> None:
    secret, slow = new_secret(), new_secret()
    alice, bob = Key("alice", secret_sha256(secret)), Key("bob", secret_sha256(slow), tokens_per_minute=2)
    keys = write_keys(tmp_path / "keys.toml", alice, bob)
    with start(api_keys=keys) as live:
        assert live.get("/health").status == 200
        missing = live.complete()
        assert (missing.status, missing.error["code"]) == (401, "missing_api_key")
        assert missing.headers["WWW-Authenticate"] == "Bearer"
        body = {"model": "tiny", "prompt": "x"}
        wrong = live.post("/v1/completions", body, Authorization="Bearer otr_wrong")
        assert (wrong.status, wrong.error["code"]) == (401, "invalid_api_key")
        assert live.post("/v1/completions", body, Authorization=f"Bearer {secret}").status == 200
        assert live.post("/v1/completions", body, Authorization=f"bearer {slow}").status == 200
        spent = live.post("/v1/completions", body, Authorization=f"Bearer {slow}")
        assert (spent.status, spent.error["code"]) == (429, "rate_limit_exceeded")
        assert int(spent.headers["Retry-After"]) > 1
        assert live.get("/v1/models", Host="daemon.example", Authorization=f"Bearer {secret}").status == 200
        assert live.get("/v1/models", X_Api_Key=secret).status == 200, "as Anthropic's clients send it"
        assert live.get("/v1/models", X_Api_Key="otr_wrong").error["code"] == "invalid_api_key"
        assert live.get("/v1/models", X_Api_Key=secret, Authorization="Bearer otr_wrong").status == 401


def test_who_shows_no_key_sees_the_page_the_release_and_the_bare_status(start, scripted, tmp_path) -> None:
    secret = new_secret()
    keys = write_keys(tmp_path / "keys.toml", Key("alice", secret_sha256(secret)))
    client = scripted()
    client.away = Unavailable("verifier-0 at 10.0.0.7:50051 refuses")
    shown = {"/", "/health", "/version"}
    with start(client, api_keys=keys) as live:
        live.until(lambda: "verifier-0" in live.get("/health", X_Api_Key=secret).json["reason"])
        for header in ({}, {"X_Api_Key": "otr_wrong"}):
            hidden = {
                path for path in (*ROUTES, "/other") if live.get(path, Host="evil.example", **header).status == 401
            }
            assert hidden == {*ROUTES, "/other"} - shown
            assert "verifier-0" not in live.get("/health", **header).body.decode()
        for path in ("/metrics", "/drafters"):
            assert live.get(path, X_Api_Key=secret).status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_ends_soon_after_its_key_is_revoked_and_health_says_so(start, tmp_path, stream) -> None:
    secret = new_secret()
    keys = write_keys(tmp_path / "keys.toml", Key("alice", secret_sha256(secret)))
    with start(api_keys=keys) as live:
        body = {"model": "tiny", "prompt": "x", "stream": stream}
        bearer = f"Bearer {secret}"
        with live.held(lambda: live.post("/v1/completions", body, Authorization=bearer)) as replies:
            keys.write_text("")
        error = replies[0].events[-1]["error"] if stream else replies[0].error
        assert error["code"] == "invalid_api_key"
        assert replies[0].status == (200 if stream else 401)
        live.until(lambda: live.client.running == 0)
        health = live.get("/health")
        assert (health.status, "file of keys is unusable" in health.json["reason"]) == (503, True)
        refused = live.post("/v1/completions", body, Authorization=bearer)
        assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")


def test_sessions_of_a_key_count_every_choice_and_come_back(start, tmp_path) -> None:
    secret = new_secret()
    keys = write_keys(tmp_path / "keys.toml", Key("alice", secret_sha256(secret), max_sessions=2))
    with start(api_keys=keys) as live:
        for n, status in ((3, 429), (2, 200), (2, 200)):
            body = {"model": "tiny", "prompt": "x", "n": n}
            assert live.post("/v1/completions", body, Authorization=f"Bearer {secret}").status == status


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_texts(live, stream) -> None:
    live.client.hold = True
    body = json.dumps({"model": "tiny", "prompt": "x", "n": 2, "stream": stream}).encode()
    connection = socket.create_connection(("127.0.0.1", live.port))
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    live.until(lambda: live.client.running == 2)
    connection.close()
    live.until(lambda: live.client.running == 0)


def test_it_serves_before_the_cloud_is_there_and_finds_it_later(start, scripted) -> None:
    client = scripted()
    client.away = Unavailable("no verifier is ready", retry_after_s=1)
    with start(client) as live:
        live.until(lambda: "no verifier is ready" in live.get("/health").json["reason"])
        health = live.get("/health")
        assert (health.status, health.json["status"]) == (503, "unavailable")
        assert live.get("/version").status == 200
        for reply in (live.get("/v1/models"), live.complete()):
            assert (reply.status, reply.error["code"]) == (503, "unavailable")
            assert int(reply.headers["Retry-After"]) >= 1
        client.away = None
        live.until(lambda: live.get("/health").status == 200)
        assert live.complete().status == 200
        client.away = Unavailable("gone again")
        live.until(lambda: live.get("/health").status == 503)
        assert live.complete().status == 503


def test_a_text_that_waits_for_a_lost_cloud_is_given_up(start, scripted, monkeypatch) -> None:
    monkeypatch.setattr("outrider.edge.daemon.cloud.WAIT_FOR_CLOUD_S", 0.2)
    client = scripted()
    with start(client) as live:
        client.pieces = []
        with live.held(live.complete) as replies:
            client.away = Unavailable("the verifiers are gone")
        assert replies[0].status == 503
        assert "the verifiers are gone" in replies[0].error["message"]
        assert client.running == 0


def test_at_the_daemons_end_running_streams_end_or_are_cut_with_an_error(start) -> None:
    with start(grace_s=0.3) as live:
        with live.held(lambda: live.complete(stream=True)) as replies:
            ending = threading.Thread(target=lambda: live.run(live.daemon.limiter.drain(0.3)))
            ending.start()
            live.until(lambda: live.daemon.limiter.draining)
            refused = live.complete()
            assert (refused.status, refused.headers["Retry-After"]) == (503, "5")
            assert live.get("/health").status == 503
            ending.join()
        assert "shutting down" in replies[0].events[-1]["error"]["message"]


def test_a_taken_port_is_one_sentence(live, scripted) -> None:
    async def start() -> None:
        await Daemon(DaemonConfig(listen=f"127.0.0.1:{live.port}"), scripted()).start()

    with pytest.raises(ConfigError, match="the port is taken"):
        live.run(start())


def test_plain_text_beyond_loopback_must_be_asked_for(tmp_path) -> None:
    with pytest.raises(ConfigError, match="--tls-cert") as caught:
        DaemonConfig(listen="0.0.0.0:8080")
    assert caught.value.field == "listen"
    assert DaemonConfig(listen="0.0.0.0:8080", insecure_listen=True).listen == "0.0.0.0:8080"
    for field, value in (("max_requests", 0), ("request_timeout_s", float("nan")), ("grace_s", -1.0)):
        with pytest.raises(ConfigError):
            DaemonConfig(**{field: value})


# --- pages of other sites: allowed by --allow-origin, as browsers ask for it, and refused otherwise ---

APP = "https://app.example.com"
HEADERS = "authorization,x-stainless-os"
BODY = {"model": "tiny", "prompt": "x"}


def preflight(live, origin: str, **more: str):
    headers = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": HEADERS}
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


# --- nothing that the daemon has to say waits: no bytes held back by TCP, no pieces by the daemon ---


@pytest.mark.parametrize(("listen", "encrypted"), [("127.0.0.1:0", True), ("[::1]:0", False)])
def test_accepted_sockets_send_without_waiting_for_acknowledgements(
    start, scripted, tmp_path, monkeypatch, listen, encrypted
) -> None:
    options = []

    def connection_made(protocol, transport) -> None:
        accepted = transport.get_extra_info("socket")
        options.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        made(protocol, transport)

    made = HttpProtocol.connection_made
    monkeypatch.setattr(HttpProtocol, "connection_made", connection_made)
    client = scripted()
    client.away = Unavailable("not looked for")
    cert, key = certify(tmp_path, "server", 1)
    with start(client, listen=listen, **({"tls": ServerTls(cert, key)} if encrypted else {})) as live:
        host = listen.rpartition(":")[0].strip("[]")
        connection: socket.socket = socket.create_connection((host, live.port), timeout=20)
        if encrypted:
            connection = ssl._create_unverified_context().wrap_socket(connection)
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        connection.close()
    assert options
    assert all(options)


def test_each_piece_of_a_stream_is_sent_before_the_next_is_there(live) -> None:
    live.client.hold = True  # the text does not end before its pieces were read
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=20)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    deltas = []
    while len(deltas) < 1 + len(live.client.pieces):
        if line := answer.readline().strip():
            deltas.append(json.loads(line.removeprefix(b"data: "))["choices"][0]["delta"])
    assert deltas == [{"role": "assistant", "content": ""}, *({"content": piece} for piece in live.client.pieces)]
    assert live.client.running == 1
    connection.close()
    live.until(lambda: live.client.running == 0)


# --- it says when the cloud is away and when it is back, and is soon there itself ---

SILENT = Unavailable("the coordinator at 127.0.0.1:1 does not answer", field="coordinator")


async def looks(cloud: Cloud, *errors: OutriderError | None) -> None:
    """Let a cloud look once for each of these, which it finds."""
    client: Any = cloud.client
    for client.away in errors:
        await cloud._look()


def test_a_cloud_that_was_away_is_as_loud_when_it_is_back(scripted, caplog) -> None:
    caplog.set_level(logging.INFO, "outrider.edge.daemon.cloud")

    async def scenario() -> None:
        cloud = Cloud(scripted())
        await looks(cloud, None)
        assert [record.levelname for record in caplog.records] == ["INFO"], "nobody has heard that it was away"
        assert cloud.found.is_set()
        caplog.clear()
        await looks(cloud, SILENT, SILENT, None, None)
        await cloud.close()

    asyncio.run(scenario())
    away, back = caplog.records
    assert (away.levelname, back.levelname) == ("WARNING", "WARNING")
    assert "does not answer" in away.getMessage()
    assert back.getMessage().startswith("the cloud is there, after ")


@pytest.mark.parametrize(
    ("silent", "status"), [(("a",), "ok"), (("a", "b"), "ok"), (("a", "b", "c", "d"), "unavailable")]
)
def test_a_silent_verifier_refuses_no_text_while_another_answers(silent, status, scripted) -> None:
    async def scenario() -> str:
        cloud = Cloud(scripted())
        cloud.client.silent = silent  # type: ignore[attr-defined]
        await looks(cloud, None)
        await cloud.close()
        return cloud.health.status

    assert asyncio.run(scenario()) == status


@pytest.mark.parametrize(
    ("error", "pause_s"),
    [(None, LOOK_EVERY_S), (SILENT, LOOK_SOON_S), (Unavailable("no verifier"), LOOK_EVERY_S), (ConfigError("no"), 2.0)],
    ids=["there", "nobody at the address", "nothing to give", "refused"],
)
def test_only_a_coordinator_that_does_not_answer_is_looked_for_more_often(error, pause_s, scripted) -> None:
    async def scenario() -> float:
        cloud = Cloud(scripted())
        await looks(cloud, error)
        await cloud.close()
        return cloud._pause_s

    assert asyncio.run(scenario()) == pause_s


def test_a_refused_connection_is_put_plainly_and_other_words_stay() -> None:
    grpc = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Connection refused"
    assert _plain(grpc).startswith("nothing listens there")
    assert _plain("Deadline Exceeded") == "Deadline Exceeded"


@pytest.mark.parametrize(("asked_s", "pause_s"), [(0.0, LOOK_EVERY_S), (30.0, 30.0), (1e9, LOOK_WITHIN_S)])
@pytest.mark.parametrize("busy", [False, True])
def test_a_daemon_looks_as_seldom_as_its_coordinator_asks(asked_s, pause_s, busy, scripted) -> None:
    async def scenario() -> tuple[float, str]:
        cloud = Cloud(scripted())
        cloud.client.ask_again_s = asked_s  # type: ignore[attr-defined]
        await looks(cloud, None, *([ResourceExhausted("full", retry_after_s=asked_s)] if busy else []))
        await cloud.close()
        return cloud._pause_s, cloud.health.status

    assert asyncio.run(scenario()) == (pause_s, "ok")


def test_a_request_while_the_cloud_is_away_has_it_looked_for_once_a_while(scripted) -> None:
    async def scenario() -> list[bool]:
        cloud, wanted = Cloud(scripted()), []
        await looks(cloud, None, Unavailable("no verifier", retry_after_s=100.0))
        assert cloud._pause_s == 100.0
        for looked_s_ago in (0.0, LOOK_EVERY_S + 1):
            cloud._looked_at = time.monotonic() - looked_s_ago
            with pytest.raises(ApiError):
                cloud.serving()
            wanted.append(cloud._look_now.is_set())
        await cloud.close()
        return wanted

    assert asyncio.run(scenario()) == [False, True]
