"""The first minutes with a command: what it says while it works, what it refuses at once, and what to type next."""

from __future__ import annotations

import errno
import io
import json
import logging
import re
import shlex
import socket
import time
from collections.abc import Callable
from contextlib import nullcontext

import pytest

from outrider.cloud.verifier_config import VerifierConfig
from outrider.deploy import targets
from outrider.deploy.cli import main, parse
from outrider.deploy.local.local_cluster import check_port
from outrider.deploy.local.servers import next_steps
from outrider.deploy.process import progress
from outrider.deploy.targets import with_target
from outrider.proto.errors import ConfigError, NotFound
from outrider.proto.plumbing.logs import STAGES, JsonLines, StandardError

LOADING = "outrider.cloud.target.target_loading"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def until(holds: Callable[[], object]) -> None:
    """Wait until that holds."""
    give_up = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.01)


@pytest.fixture
def taken() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("command", ["up", "coordinator", "verifier"])
@pytest.mark.parametrize("option", ["listen", "metrics-listen"])
def test_a_taken_port_is_refused_before_anything_starts(command, option, taken, tmp_path, monkeypatch, capfd) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s" * 64)
    more = ["--lease-secret-file", str(secret), "--ray-address", ""] if command == "coordinator" else []
    monkeypatch.setattr("outrider.deploy.local.local_cluster._join_or_start_ray", lambda: pytest.fail("Ray starts"))
    monkeypatch.setattr(
        "outrider.cloud.target.target_loading.load_target", lambda *_, **__: pytest.fail("the target loads")
    )
    if option != "listen":
        more += ["--listen", "127.0.0.1:0"]
    assert main([command, f"--{option}", taken, *more]) == 1
    line = capfd.readouterr().err
    port = taken.rpartition(":")[2]
    assert line.startswith(f"outrider {command}: {option}: port {port} of 127.0.0.1 is taken")
    assert len(line.splitlines()) == 1


def test_a_port_that_is_free_or_chosen_later_may_be_used(taken) -> None:
    check_port("", "listen")
    check_port("127.0.0.1:0", "listen")
    with socket.create_server(("127.0.0.1", 0)) as server:
        was_taken = f"127.0.0.1:{server.getsockname()[1]}"
    check_port(was_taken, "listen")


@pytest.mark.parametrize("address", ["no-such-host.invalid:1", "192.0.2.1:50050"])
def test_an_address_of_another_machine_is_refused(address) -> None:
    with pytest.raises(ConfigError) as refused:
        check_port(address, "listen")
    assert refused.value.field == "listen"


@pytest.mark.parametrize("command", ["run", "up", "demo", "verifier"])
def test_an_unknown_target_is_refused_before_anything_loads(command, monkeypatch, capfd) -> None:
    monkeypatch.setattr("outrider.deploy.local.local_cluster._join_or_start_ray", lambda: pytest.fail("Ray starts"))
    monkeypatch.setattr(
        "outrider.cloud.target.target_loading.load_target", lambda *_, **__: pytest.fail("the target loads")
    )
    assert main([command, "--target", "nosuch", *(["text"] if command == "run" else [])]) == 1
    line = capfd.readouterr().err
    assert "target: there is no target 'nosuch'" in line
    assert "reference" in line
    assert "Qwen/Qwen3-8B" in line


@pytest.mark.parametrize("there", [True, False])
def test_without_a_named_target_smollm2_serves_or_a_line_says_why_not(there, monkeypatch, caplog) -> None:
    def find(target: str) -> str:
        if there or target != "smollm2":
            return target
        raise NotFound("smollm2 is not on this machine, and there is no network", field="target")

    monkeypatch.setattr(targets, "find_target", find)
    for command in ("RUN", "UP", "DEMO"):
        monkeypatch.delenv(f"OUTRIDER_{command}_TARGET", raising=False)
        words = [command.lower(), *(["text"] if command == "RUN" else [])]
        found = with_target(parse(words)(VerifierConfig))
        assert found.target == ("smollm2" if there else "reference")
    lines = [record.getMessage() for record in caplog.records]
    line = "going on with the embedded target reference: smollm2 is not on this machine, and there is no network"
    assert lines == ([] if there else [line] * 3)
    named = parse(["up", "--target", "smollm2"])(VerifierConfig)
    with nullcontext() if there else pytest.raises(NotFound):
        assert with_target(named) == named


def test_a_log_has_a_line_for_what_takes_long_and_none_for_what_does_not(monkeypatch, capfd) -> None:
    monkeypatch.setattr(progress, "SILENT_S", 0.05)
    said: list[str] = []
    with progress.waiting("loading this"):
        until(lambda: said.append(capfd.readouterr().err) or any(said))
    assert "".join(said) == "loading this …\n"
    monkeypatch.setattr(progress, "SILENT_S", 30.0)
    with progress.waiting("loading that"):
        pass
    assert capfd.readouterr().err == ""


def test_a_log_of_json_objects_has_no_plain_lines(monkeypatch, capfd) -> None:
    handler = StandardError()
    handler.setFormatter(JsonLines())
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    monkeypatch.setattr(progress, "SILENT_S", 0.0)
    with progress.stage("loading this"):
        time.sleep(0.05)  # longer than a line would take to come
    progress.say("ready")
    logging.getLogger().warning("a line")
    (line,) = capfd.readouterr().err.splitlines()
    assert json.loads(line)["message"] == "a line"


def test_a_terminal_shows_what_goes_on_and_keeps_how_long_it_took(monkeypatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "SHOWN_AFTER_S", 0.0)
    with progress.stage("starting Ray"):
        until(lambda: "starting Ray" in terminal.getvalue())
    shown = terminal.getvalue()
    assert re.search(r"starting Ray … \d+ s", shown)
    assert re.search(r"starting Ray: \d+\.\d s\n$", shown)


def test_a_terminal_shows_the_stage_of_what_loads_which_the_log_leaves_out(monkeypatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "SHOWN_AFTER_S", 0.0)
    handler = StandardError()
    logging.getLogger().addHandler(handler)
    try:
        with progress.waiting("loading this"):
            logging.getLogger(STAGES).info("reading weights")
            until(lambda: "loading this: reading weights …" in terminal.getvalue())
    finally:
        logging.getLogger().removeHandler(handler)
    assert "reading weights\n" not in terminal.getvalue().replace("\r", "")
    assert not logging.getLogger(STAGES).isEnabledFor(logging.INFO)


def test_a_failure_leaves_no_line_that_says_it_was_done(monkeypatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with pytest.raises(KeyError), progress.stage("starting Ray"):
        raise KeyError
    assert "starting Ray: " not in terminal.getvalue()


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ([], "--coordinator 127.0.0.1:7000"),
        (["--tls-cert", "c", "--tls-key", "k"], "--coordinator 127.0.0.1:7000 --tls-ca FILE"),
        (
            ["--tls-cert", "c", "--tls-key", "k", "--tls-client-ca", "a", "--api-keys", "keys"],
            "--coordinator 127.0.0.1:7000 --tls-ca FILE --tls-cert FILE --tls-key FILE --api-key-file FILE",
        ),
        (["--api-keys", "keys"], "--coordinator 127.0.0.1:7000 --api-key-file FILE"),
        (
            ["--api-keys", "keys", "--listen", "0.0.0.0:7000", "--insecure-listen"],
            "--coordinator HOST:7000 --api-key-file FILE --plaintext",
        ),
    ],
    ids=["plain", "TLS", "everything", "keys", "everywhere"],
)
def test_what_to_type_next_fits_the_options_and_is_understood(options, needed) -> None:
    address = "0.0.0.0:7000" if "--listen" in options else "127.0.0.1:7000"
    lines = list(next_steps(address, "reference", "verifier-0", parse(["up", *options])))
    typed = [shlex.split(line) for line in lines if line.startswith("  outrider")]
    assert [words[1] for words in typed] == ["edge", "chat", "run", "status", "drain"]
    assert f"  outrider run {needed} 'Once upon a time'" in lines
    assert f"  outrider drain verifier-0 {needed}" in lines
    assert f"  outrider edge {needed.replace('--tls-', '--cloud-tls-')}" in lines
    for words in typed:
        parse(words[1:])
    assert any(line.startswith("HOST is") for line in lines) == ("HOST" in needed)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "too little memory"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
            "too little memory",
        ),
        (OSError(errno.ENOSPC, "No space left on device", "/a/file"), "No space left on device: /a/file"),
    ],
    ids=["memory", "memory in torch", "space"],
)
def test_what_a_machine_lacks_is_one_line(error, words, monkeypatch, capfd) -> None:
    def fail(_: object) -> int:
        raise error

    monkeypatch.setattr("outrider.deploy.local.servers.up", fail)
    assert main(["up"]) == 1
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("outrider up: ")
    assert words in lines[0]


@pytest.mark.parametrize("error", [RuntimeError("a defect"), BrokenPipeError(errno.EPIPE, "Broken pipe")])
def test_a_defect_keeps_its_traceback(error, monkeypatch) -> None:
    def fail(_: object) -> int:
        raise error

    monkeypatch.setattr("outrider.deploy.local.servers.up", fail)
    with pytest.raises(type(error)):
        main(["up"])


def test_a_line_of_the_log_is_above_what_the_terminal_shows(monkeypatch) -> None:
    terminal = Terminal()
    log = logging.getLogger("of this test")
    handler = StandardError()
    log.addHandler(handler)
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    try:
        monkeypatch.setattr(progress, "SHOWN_AFTER_S", 0.0)
        with progress.waiting("loading this"):
            until(lambda: "loading this" in terminal.getvalue())
            log.warning("something")
    finally:
        log.removeHandler(handler)
    assert "something\n" in terminal.getvalue().replace("\r", "")
