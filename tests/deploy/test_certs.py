"""`outrider certs`, `outrider key`, and the options for their files."""

from __future__ import annotations

import re
import shlex
import stat
from pathlib import Path

import pytest

from outrider.deploy.arguments import Given
from outrider.deploy.certs import Issued, issue
from outrider.deploy.cli import main, parse
from outrider.deploy.credentials import api_key, security, serving_tls
from outrider.edge import EdgeConfig
from outrider.proto.errors import ConfigError
from outrider.proto.plumbing.access import Keys, secret_sha256
from outrider.proto.plumbing.tls import (
    PUBLIC,
    ClientCredentials,
    ClientTls,
    ServerTls,
    name_to_expect,
    server_credentials,
)


def parsed(*arguments: str) -> Given:
    return parse(arguments)


# --- certificates ---


def options_in(said):
    """Return the options of lines for a shell, by name."""
    words = [word for line in said.splitlines() if line.startswith("  --") for word in shlex.split(line)]
    return {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)}


def test_the_files_that_certs_makes_are_those_it_names_and_both_sides_take_them(tmp_path, capsys):
    folder = tmp_path / "the new" / "certs"
    assert main(["certs", str(folder), "--host", "fleet.example", "--host", "10.1.2.3"]) == 0
    said = capsys.readouterr().out
    assert "fleet.example, 10.1.2.3, localhost, 127.0.0.1, ::1" in said
    options = options_in(said.partition("edges, ")[0])
    server_credentials(ServerTls(*(Path(options[name]) for name in ("tls-cert", "tls-key", "tls-client-ca"))))
    ClientCredentials(ClientTls(Path(options["verifier-tls-ca"]), Path(options["tls-cert"]), Path(options["tls-key"])))
    options = options_in(said.partition("edges, ")[2])
    ClientCredentials(ClientTls(*(Path(options[name]) for name in ("tls-ca", "tls-cert", "tls-key"))))


def test_private_keys_are_their_owners_alone(tmp_path):
    issued = issue(tmp_path / "certs", ("localhost",))
    assert {stat.S_IMODE(path.stat().st_mode) for path in issued if path.suffix == ".key"} == {0o600}
    assert stat.S_IMODE((tmp_path / "certs").stat().st_mode) == 0o700


def test_certificates_have_their_hosts_their_purposes_and_their_days(tmp_path):
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID as Purpose

    issued = issue(tmp_path, ("fleet.example", "::1"), days=30, client="robot")
    ca, server, client = (
        x509.load_pem_x509_certificate(path.read_bytes())
        for path in (issued.ca, issued.server_cert, issued.client_cert)
    )
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fleet.example"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["::1"]
    purposes = [set(c.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) for c in (server, client)]
    assert purposes == [{Purpose.CLIENT_AUTH, Purpose.SERVER_AUTH}, {Purpose.CLIENT_AUTH}]
    assert client.subject.rfc4514_string() == "CN=robot"
    assert isinstance(server.public_key().curve, ec.SECP256R1)
    for one in (server, client):
        one.verify_directly_issued_by(ca)
        assert (one.not_valid_after_utc - one.not_valid_before_utc).days == 30
    assert ca.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    with pytest.raises(ValueError, match=r"[Ii]ssuer"):
        ca.verify_directly_issued_by(client)


@pytest.mark.parametrize("there", ["ca.pem", "client.key"])
def test_nothing_is_overwritten(tmp_path, capsys, there):
    (tmp_path / there).write_text("precious")
    assert main(["certs", str(tmp_path)]) == 1
    assert f"{there} is there already" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [there]
    assert (tmp_path / there).read_text() == "precious"


@pytest.mark.parametrize("host", ["https://fleet.example", "fleet.example:50050", "", "flött.example"])
def test_a_host_that_is_none_is_refused_before_anything_is_written(tmp_path, host):
    with pytest.raises(ConfigError) as refusal:
        issue(tmp_path / "certs", (host,))
    assert refusal.value.field == "host"
    assert not (tmp_path / "certs").exists()


def test_a_host_may_be_longer_than_a_common_name(tmp_path):
    host = ".".join(["a-service-with-quite-a-name"] * 4)
    assert name_to_expect(issue(tmp_path, (host,)).server_cert, "elsewhere") == host


# --- API keys ---


def test_a_key_that_is_appended_works_at_once_and_its_secret_is_in_no_file(tmp_path, capsys):
    path = tmp_path / "keys.toml"
    for name, more in (
        ("alice", ["--max-sessions", "4"]),
        ("bob", ["--tokens-per-minute", "600", "--admin", "--learning", "--service", '{"gap_ms": 75}']),
    ):
        assert main(["key", name, *more, "--append", str(path)]) == 0
        secret = re.findall(r"otr_\S+", capsys.readouterr().out)[0]
        key = Keys.from_file(path).check(secret)
        assert key.name == name
        assert secret not in path.read_text()
        assert secret_sha256(secret) in path.read_text()
    assert (key.max_sessions, key.tokens_per_minute, key.admin, key.learning) == (None, 600, True, True)
    assert str(key.service) == '{"gap_ms": 75}'
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "\n\n[keys.bob]" in path.read_text()


def test_without_a_file_the_table_is_printed_ready_to_append(tmp_path, capsys):
    assert main(["key", "alice.smith", "--max-sessions", "4"]) == 0
    said = capsys.readouterr().out
    path = tmp_path / "keys.toml"
    path.write_text(said[said.index("[keys.") :])
    assert Keys.from_file(path).check(re.findall(r"otr_\S+", said)[0]).max_sessions == 4


def test_a_name_is_taken_once_and_a_bad_one_never(tmp_path, capsys):
    path = tmp_path / "keys.toml"
    assert main(["key", "alice", "--append", str(path)]) == 0
    before = path.read_text()
    assert main(["key", "alice", "--append", str(path)]) == 1
    assert main(["key", "two words", "--append", str(path)]) == 1
    assert path.read_text() == before
    assert "has a key of that name already" in capsys.readouterr().err


# --- options ---


@pytest.fixture(scope="module")
def issued(tmp_path_factory: pytest.TempPathFactory) -> Issued:
    return issue(tmp_path_factory.mktemp("certs"), ("localhost",))


def test_an_edges_options_become_its_config(tmp_path, issued, monkeypatch):
    monkeypatch.delenv("OUTRIDER_API_KEY", raising=False)
    file = tmp_path / "key"
    file.write_text("otr_secret\n")
    tls = ["--tls-ca", str(issued.ca), "--tls-cert", str(issued.client_cert), "--tls-key", str(issued.client_key)]
    options = parsed("run", "--coordinator", "c.example:1", *tls, "--api-key-file", str(file), "x")
    config = options(EdgeConfig, api_key=api_key(options))
    assert config.security.tls == ClientTls(issued.ca, issued.client_cert, issued.client_key)
    assert config.security.metadata == (("authorization", "Bearer otr_secret"),)
    assert security(options) == config.security
    assert "otr_secret" not in repr(config) + repr(config.security)


def test_the_key_comes_from_the_environment_unless_a_file_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_API_KEY", " otr_environment ")
    assert security(parsed("status", "--coordinator", "localhost:1")).api_key == "otr_environment"
    file = tmp_path / "key"
    file.write_text("otr_file")
    named = parsed("status", "--coordinator", "localhost:1", "--api-key-file", str(file))
    assert security(named).api_key == "otr_file"


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe"])
def test_a_key_file_that_holds_none_is_refused_by_its_option(tmp_path, content):
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as refusal:
        security(parsed("status", "--coordinator", "localhost:1", "--api-key-file", str(file)))
    assert refusal.value.field == "api_key_file"


def test_public_authorities_are_named_public():
    options = parsed("drain", "verifier", "--coordinator", "c.example:443", "--tls-ca", "public")
    assert security(options).tls == ClientTls(PUBLIC)


@pytest.mark.parametrize("command", ["up", "coordinator", "verifier"])
def test_every_server_takes_certificates(command, issued):
    files = {"tls-cert": issued.server_cert, "tls-key": issued.server_key, "tls-client-ca": issued.ca}
    options = parsed(command, *(text for name, path in files.items() for text in (f"--{name}", str(path))))
    assert serving_tls(options) == ServerTls(*files.values())
    assert serving_tls(parsed(command)) is None
    with pytest.raises(ConfigError) as refusal:
        serving_tls(parsed(command, "--tls-cert", "x"))
    assert refusal.value.field == "tls_key"
