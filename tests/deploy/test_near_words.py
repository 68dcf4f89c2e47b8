"""Mistakes at the command line name what may have been meant; addresses may be written as URLs."""

from __future__ import annotations

import pytest

from outrider.deploy.cli import main, parse
from outrider.edge import EdgeConfig
from outrider.proto.errors import ConfigError
from outrider.proto.release import release


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("verfier", "there is no command 'verfier'; did you mean verifier? (see outrider --help)"),
        ("train stear", "there is no command 'stear'; did you mean steer?"),
        ("xyzzy", "there is no command 'xyzzy' (see outrider --help)"),
        ("run --coordinater a:1 x", "did you mean --coordinator? (see outrider run --help)"),
        ("run --coordinator a:1 x --max-token=3x", "'3x' is not a whole number"),
        ("bench --selector leadr", "did you mean leader?"),
        ("verifier --goal latencie", "did you mean latency?"),
        ("run x --drafter genral", "did you mean general?"),
    ],
)
def test_a_mistake_is_one_line_that_names_a_near_word(line: str, says: str, capfd) -> None:
    try:
        status = main(line.split())
    except SystemExit as ended:
        status = int(ended.code or 0)
    assert status in (1, 2)
    error = capfd.readouterr().err.splitlines()[-1]
    assert says in error


def test_the_release_is_an_option(capsys) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"outrider {release()}\n"


@pytest.mark.parametrize("written", ["127.0.0.1:5", "http://127.0.0.1:5", "http://127.0.0.1:5/", "127.0.0.1:5/"])
@pytest.mark.parametrize("command", ["run x --coordinator", "edge --coordinator", "doctor --coordinator"])
def test_an_address_may_be_written_as_a_url(written: str, command: str) -> None:
    assert parse([*command.split(), written])(EdgeConfig).coordinator == "127.0.0.1:5"


def test_an_address_of_python_may_be_written_as_a_url() -> None:
    assert EdgeConfig(coordinator="http://127.0.0.1:5/").coordinator == "127.0.0.1:5"
    assert EdgeConfig(verifier="http://[::1]:5/", model="m").verifier == "[::1]:5"


def test_an_address_to_listen_on_may_be_written_as_a_url() -> None:
    assert parse(["edge", "--listen", "http://127.0.0.1:8080/"]).values["listen"] == "127.0.0.1:8080"
    assert parse(["link", "--to", "http://127.0.0.1:8080"]).values["to"] == "127.0.0.1:8080"


def test_https_needs_tls_and_says_how(tmp_path, capsys) -> None:
    with pytest.raises(ConfigError, match="is for TLS, which is not set up; give the authority's certificate"):
        EdgeConfig(coordinator="https://c.example:5")
    authority = tmp_path / "ca.pem"
    authority.touch()
    assert EdgeConfig(coordinator="https://c.example:5/", tls_ca=authority).coordinator == "c.example:5"
    assert main(["status", "--coordinator", "https://c.example:5"]) == 1
    assert capsys.readouterr().err.startswith("outrider status: coordinator: 'https://c.example:5' is for TLS")
