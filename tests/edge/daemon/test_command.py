"""`outrider edge` as a process: its line, its end, and its mistakes."""

from __future__ import annotations

import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from command_processes import without_progress

EDGE = [sys.executable, "-m", "outrider.deploy", "edge"]


def test_it_says_where_it_listens_serves_without_a_cloud_and_ends_with_0_on_sigterm(tmp_path) -> None:
    command = [*EDGE, "--coordinator", "127.0.0.1:1", "--listen", "127.0.0.1:0", "--cache", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("edge daemon on http://127.0.0.1:")
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(line.split()[-1] + "/health", timeout=20)
        assert caught.value.code == 503
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--coordinator", "a:1", "--listen", "0.0.0.0:8080"], "listen: '0.0.0.0:8080' is not a loopback address"),
        (["--coordinator", "a:1", "--verifier", "b:1"], "coordinator: give either"),
        (["--coordinator", "a:1", "--tls-cert", "x"], "tls-key"),
        (["--coordinator", "127.0.0.1:1", "--api-keys", "/nonexistent"], "api-keys: cannot read"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_option(options, sentence, capsys) -> None:
    from outrider.deploy.cli import main

    assert main(["edge", *options]) == 1
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


def test_a_missing_extra_is_one_line_that_names_it() -> None:
    program = (
        "import sys; sys.modules['starlette.routing'] = None\n"
        "from outrider.deploy.cli import main\n"
        "sys.exit(main(['edge', '--coordinator', '127.0.0.1:1', '--listen', '127.0.0.1:0']))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert "needs the extra [edge], which is not all installed here (missing: starlette.routing)" in ended.stderr
    assert len(without_progress(ended.stderr)) == 1


def test_the_daemon_loads_nothing_heavy_and_no_tracing_that_is_not_asked_for() -> None:
    program = "import sys, outrider.edge.daemon.http_server, outrider.deploy.daemon; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "starlette" in loaded
    assert not {"torch", "ray", "transformers", "opentelemetry", "outrider.cloud"} & set(loaded)
