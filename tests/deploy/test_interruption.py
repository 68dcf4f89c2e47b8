"""Ctrl-C, SIGTERM and a closed terminal end a command soon, with one line, its status, and nothing left running."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from command_processes import without_progress
from interrupted import Ending, interrupted

STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


def check(ending: Ending, number: int, command: str) -> None:
    assert ending.status == STATUS[number]
    assert len(ending.lines) == 1, ending.errors
    assert ending.lines[0].startswith(f"{command}: ")
    assert "Traceback" not in ending.output + ending.errors
    assert not ending.survivors


@pytest.mark.parametrize("number", STATUS)
@pytest.mark.parametrize("event", ["argparse", "outrider.edge.edge_config"])
def test_a_signal_while_the_command_line_is_read_is_one_line(event: str, number: int) -> None:
    ending = interrupted(["run", "--coordinator", "127.0.0.1:1", "x"], event=event, number=number)
    check(ending, number, "outrider")


@pytest.mark.parametrize(
    ("command", "options", "event"),
    [
        ("run", "--coordinator 127.0.0.1:1 x", "grpc"),
        ("edge", "--coordinator 127.0.0.1:1", "uvicorn"),
        ("run", "x", "numpy"),
        ("train drafter", "--teacher x --output x", "torch"),
        ("submit", "-- run x", "ray"),
    ],
)
def test_a_signal_during_imports_is_one_line(command: str, options: str, event: str) -> None:
    check(interrupted(f"{command} {options}".split(), event=event), signal.SIGINT, f"outrider {command}")


@pytest.mark.parametrize(
    ("words", "number"),
    [
        *(("run --coordinator {} x", number) for number in STATUS),
        ("submit --address http://{} -- run x", signal.SIGINT),
    ],
)
def test_a_signal_while_a_server_is_silent_is_one_line(words: str, number: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = "{}:{}".format(*silent.getsockname())
        command = [sys.executable, "-m", "outrider.deploy", *words.format(address).split()]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        ) as process:
            connection, _ = silent.accept()  # the command waits from now on
            with connection:
                os.killpg(process.pid, number)
                output, errors = process.communicate(timeout=60)
    assert process.returncode == STATUS[number]
    assert output == ""
    (line,) = without_progress(errors)
    assert line.startswith(f"outrider {words.split()[0]}: ")


# Two moments at which Ray starts, and two at which processes of ours do; both commands start them by the same code.
UP, DEMO = ["up", "--listen", "127.0.0.1:0"], ["demo", "--per-domain", "1"]
STARTING = [
    (UP, "ray", 1, signal.SIGINT),
    (DEMO, "subprocess.Popen", 1, signal.SIGTERM),
    (UP, "subprocess.Popen", 3, signal.SIGTERM),
    (DEMO, "subprocess.Popen", 5, signal.SIGINT),
]


@pytest.mark.soak
@pytest.mark.ray
@pytest.mark.parametrize(("words", "event", "nth", "number"), STARTING)
def test_a_signal_while_ray_starts_leaves_one_line_and_no_process(
    words: list[str], event: str, nth: int, number: int
) -> None:
    ending = interrupted(words, event=event, nth=nth, number=number)
    assert ending.status == STATUS[number]
    assert [line for line in ending.lines if line.startswith(f"outrider {words[0]}: ")] == ending.lines[-1:]
    assert "Traceback" not in ending.output + ending.errors
    assert not ending.survivors


def test_what_a_command_has_started_ends_with_it() -> None:
    words = ["link", "--to", "127.0.0.1:1"]
    program = (
        "import subprocess, sys\n"
        "import outrider.deploy.link_command as command\n"
        "def link(given):\n"
        "    subprocess.Popen(['/bin/sh', '-c', 'sleep 600 & sleep 600 & wait'], start_new_session=True)\n"
        "    print('started', flush=True)\n"
        "    while True: pass\n"
        "command.link = link\n"
    )
    ending = interrupted(words, after="started", before=program)
    check(ending, signal.SIGINT, "outrider link")


def test_a_main_thread_that_does_not_listen_is_ended_without_it() -> None:
    program = (
        "import outrider.deploy.link_command as command\n"
        "def link(given):\n"
        "    print('deaf', flush=True)\n"
        "    while True:\n"
        "        try:\n"
        "            while True: pass\n"
        "        except BaseException: pass\n"
        "command.link = link\n"
    )
    check(interrupted(["link", "--to", "127.0.0.1:1"], after="deaf", before=program), signal.SIGINT, "outrider link")


def test_a_handler_of_rays_that_is_quicker_than_the_watch_is_no_end_of_its_own() -> None:
    program = (
        "import signal, sys, time\n"
        "import outrider.deploy.link_command as command\n"
        "from outrider.deploy.process.termination import EndWatch\n"
        "seen = EndWatch._seen\n"
        "EndWatch._seen = lambda watch, number: (time.sleep(0.1), seen(watch, number))  # the thread is late\n"
        "def link(given):\n"
        "    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))\n"
        "    print('started', flush=True)\n"
        "    while True: pass\n"
        "command.link = link\n"
    )
    ending = interrupted(["link", "--to", "127.0.0.1:1"], after="started", before=program, number=signal.SIGTERM)
    check(ending, signal.SIGTERM, "outrider link")


def test_a_server_ends_in_order_at_the_first_signal() -> None:
    ending = interrupted(["link", "--to", "127.0.0.1:1"], after="link to")
    assert ending.status == 0
    assert ending.errors == ""
    assert "0 connection(s)" in ending.output


def test_a_server_that_a_script_starts_beside_itself_leaves_ctrl_c_to_others() -> None:
    command = [sys.executable, "-m", "outrider.deploy", "link", "--to", "127.0.0.1:1"]
    script = ["sh", "-c", '"$@" & echo $!; wait $!', "sh", *command]
    with subprocess.Popen(script, stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        server = int(shell.stdout.readline())
        assert "link to" in shell.stdout.readline()
        mask = re.search(r"^SigIgn:\s*(\w+)", Path(f"/proc/{server}/status").read_text(), re.MULTILINE)
        os.kill(server, signal.SIGINT)
        os.kill(server, signal.SIGTERM)
        output, _ = shell.communicate(timeout=60)
    assert mask is not None
    assert int(mask[1], 16) & 1 << signal.SIGINT - 1
    assert "0 connection(s)" in output
    assert shell.returncode == 0


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "outrider.deploy", "key", "alice"]
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert ended.stderr == ""
    assert ended.returncode == 141


def test_a_teacher_that_is_stopped_says_what_is_kept_and_that_the_command_goes_on(tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text('{"text": "One two three four."}')
    words = ["train", "teacher", "--texts", str(tmp_path / "texts.jsonl"), "--output", str(tmp_path / "says")]
    ending = interrupted(words, after="^teacher", number=signal.SIGTERM)
    assert ending.lines == ["outrider train teacher: stopped; 0 tokens are kept, and the same command goes on"]
    assert not ending.survivors
