"""The edge's systemd unit: its command takes its options and config file, and is sandboxed."""

from __future__ import annotations

import contextlib
import io
import shlex
import shutil
import subprocess
import tomllib

import pytest
from manifest_documents import ROOT

from outrider.deploy.cli import parse

UNIT = ROOT / "deploy" / "systemd" / "outrider-edge.service"
CONFIG = ROOT / "deploy" / "systemd" / "edge.toml"
# Exposure by `systemd-analyze security`, 0 to 100; without network, which an edge needs, it would be 7.
MAX_EXPOSURE = 15


def unit() -> dict[str, list[str]]:
    """Return the settings of all sections; repeated ones have several values."""
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith(("#", "[")):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def arguments() -> list[str]:
    """Return the arguments of `outrider`, with the config file of the checkout."""
    (line,) = unit()["ExecStart"]
    program, *words = shlex.split(line.replace("%d", "/run/credentials/outrider-edge.service"))
    assert program == "/opt/outrider/bin/outrider"
    return [str(CONFIG) if word == "/etc/outrider/edge.toml" else word for word in words]


def test_the_daemon_takes_its_options_and_every_key_of_the_config_file(monkeypatch) -> None:
    monkeypatch.delenv("OUTRIDER_CONFIG", raising=False)
    options = parse(arguments())
    table = tomllib.loads(CONFIG.read_text(encoding="utf-8"))["edge"]
    assert options.command == "edge"
    for key, value in table.items():
        assert str(options.values[key.replace("-", "_")]) == str(value)
    assert options.values["listen"].startswith("127.0.0.1:")
    assert options.values["cloud_tls_ca"] is not None


def test_an_unknown_key_of_the_config_file_is_refused(tmp_path) -> None:
    wrong = tmp_path / "edge.toml"
    wrong.write_text(CONFIG.read_text(encoding="utf-8") + "drafters = 2\n")
    said = io.StringIO()
    with pytest.raises(SystemExit), contextlib.redirect_stderr(said):
        parse([str(wrong) if word == str(CONFIG) else word for word in arguments()])
    assert "drafters" in said.getvalue()


def test_the_key_comes_as_a_credential_and_is_in_no_file_of_ours() -> None:
    (credential,) = unit()["LoadCredential"]
    name, _, path = credential.partition(":")
    assert path == "/etc/outrider/api-key"
    assert f"--api-key-file %d/{name}" in unit()["ExecStart"][0]
    assert not [v for name in ("Environment", "ExecStart") for v in unit()[name] if "otr_" in v]


def test_the_unit_is_locked_in() -> None:
    for name, value in {
        "DynamicUser": "yes",
        "ProtectSystem": "strict",
        "NoNewPrivileges": "yes",
        "PrivateTmp": "yes",
        "MemoryDenyWriteExecute": "yes",
        "CapabilityBoundingSet": "",
        "RestrictAddressFamilies": "AF_INET AF_INET6 AF_UNIX",
        "Restart": "on-failure",
    }.items():
        assert unit()[name] == [value], name


def test_it_has_time_to_let_answers_end() -> None:
    options = parse(arguments()).values
    assert float(unit()["TimeoutStopSec"][0].removesuffix("s")) > 2 * options["grace"]


def test_systemd_finds_nothing_wrong_with_it(tmp_path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("needs systemd-analyze: apt-get install systemd")
    run = [analyze, "security", "--offline=yes", f"--threshold={MAX_EXPOSURE}", "--no-pager", str(UNIT)]
    analysed = subprocess.run(run, capture_output=True, text=True, check=False)
    assert analysed.returncode == 0, analysed.stdout + analysed.stderr
    # The unit as installed, but with a program that exists here.
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text(encoding="utf-8").replace("/opt/outrider/bin/outrider", shutil.which("true") or ""))
    verified = subprocess.run([analyze, "verify", str(copy)], capture_output=True, text=True, check=False)
    assert UNIT.name not in verified.stderr, verified.stderr
