"""Command lines in manifests, parsed by the parsers that parse them when they run."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import io
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from dockerfile_stages import DOCKERFILE, programs, stages
from manifest_documents import ROOT

from outrider.deploy.cli import COMMANDS, parse

# Variables that are no options: the config file and the API key.
OTHER_NAMES = {"OUTRIDER_CONFIG", "OUTRIDER_API_KEY"}
PREFIX = "OUTRIDER_"
# Default ports of `ray start`; KubeRay sets the last one.
RAY_HEAD_PORTS = {6379, 8265, 10001, 8080}
RAY_WORKER_PORTS = {8080}


@dataclass
class Reading:
    """A parsed command line: complaints, and the options of each `outrider` command in it."""

    complaints: list[str] = field(default_factory=list)
    outrider: list[argparse.Namespace] = field(default_factory=list)
    health_of: list[str] = field(default_factory=list)

    def listening(self) -> set[int]:
        """Return the ports that the commands listen on, without those of verifiers that they start in Ray."""
        here = [options for options in self.outrider if not (options.command == "verifier" and options.ray_address)]
        return {port for options in here for port in ports_of(options)}

    def paths(self) -> set[str]:
        """Return the files that the commands read."""
        return {
            str(value)
            for options in self.outrider
            for name, value in vars(options).items()
            if isinstance(value, Path) and name not in ("cache", "output", "state")
        }


def ports_of(options: argparse.Namespace) -> set[int]:
    """Return the ports that a command's options name."""
    addresses = (getattr(options, "listen", ""), getattr(options, "metrics_listen", ""))
    return {int(address.rpartition(":")[2]) for address in addresses if address}


def read_command(words: Sequence[str], environment: Mapping[str, str], image: str) -> Reading:
    """Read the entry point and arguments of a container of our image `edge`, `coordinator` or `cloud`."""
    return _read_once(tuple(words), tuple(sorted(environment.items())), image)


@functools.cache
def _read_once(words: tuple[str, ...], environment: tuple[tuple[str, str], ...], image: str) -> Reading:
    reading = Reading()
    _read(list(words), dict(environment), image, reading)
    for options in reading.outrider:
        reading.complaints += _listens_safely(options)
    return reading


def _read(words: list[str], environment: Mapping[str, str], image: str, reading: Reading) -> None:
    program, arguments = words[0], words[1:]
    own = _programs(image)
    if program.startswith("outrider-") and program not in own:
        reading.complaints.append(f"{program} is not in the image {image}")
    elif program == "outrider":
        _read_outrider(arguments, environment, reading)
    elif program == "outrider-in-ray":
        if not environment.get("RAY_ADDRESS"):
            reading.complaints.append("outrider-in-ray needs RAY_ADDRESS")
        _read(arguments, environment, image, reading)
    elif program == "outrider-healthy":
        _read_healthy(arguments, reading)
    elif program == "outrider-drain-here":
        if arguments:
            reading.complaints.append("outrider-drain-here takes no options")
    elif program == "outrider-keep-verifiers":
        for line in (ROOT / own[program]).read_text(encoding="utf-8").splitlines():
            if "outrider " in line.partition("#")[0]:
                command = line.strip().removeprefix("if ! ").removesuffix("; then").replace('"$count"', arguments[0])
                _read_outrider(shlex.split(command)[1:], environment, reading)
    elif program == "ray":
        _read_ray(arguments, reading)
    elif program not in ("sleep", "python"):
        reading.complaints.append(f"nothing is known of {program}")


def _read_outrider(arguments: list[str], environment: Mapping[str, str], reading: Reading) -> None:
    said = io.StringIO()
    try:
        with _environment(environment), contextlib.redirect_stderr(said):
            given = parse(arguments)
            reading.outrider.append(argparse.Namespace(command=given.command, **given.values))
    except SystemExit:
        reading.complaints.append(said.getvalue().strip())


def _read_healthy(arguments: list[str], reading: Reading) -> None:
    healthy = _module(ROOT / "deploy" / "docker" / "healthy.py")
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            reading.health_of.append(healthy.build_parser().parse_args(arguments).server)
    except SystemExit:
        reading.complaints.append(said.getvalue().strip())


def _read_ray(arguments: list[str], reading: Reading) -> None:
    import click

    try:
        command = _ray_commands()[arguments[0]]
        command.make_context(arguments[0], arguments[1:])  # parses the options, and runs nothing
    except (KeyError, click.ClickException) as error:
        reading.complaints.append(f"ray {shlex.join(arguments)}: {error}")


def unknown_names(environment: Mapping[str, str], readings: list[Reading]) -> list[str]:
    """Yield complaints about variables of a container that none of its commands reads."""
    commands = {options.command for reading in readings for options in reading.outrider}
    known = OTHER_NAMES | {name for command in commands for name in _option_names(command)}
    ours = [name for name in environment if name.startswith(PREFIX)]
    return [f"{name} is no option of {', '.join(sorted(commands))}" for name in ours if name not in known]


@functools.cache
def _option_names(command: str) -> set[str]:
    entry = COMMANDS[command]
    return {argument.variable(entry.table or command) for argument in entry.load().arguments}


def _listens_safely(options: argparse.Namespace) -> Iterator[str]:
    """Return whether a listener is on loopback, has TLS, or is insecure on purpose."""
    values = vars(options)
    for listen, insecure in (("listen", "insecure_listen"), ("metrics_listen", "insecure_metrics")):
        address = values.get(listen) or "127.0.0.1:0"
        encrypted = listen == "listen" and values.get("tls_cert") and values.get("tls_key")
        if not address.startswith(("127.", "[::1]", "localhost")) and not encrypted and not values[insecure]:
            yield f"{options.command} would refuse to listen on {address}: no TLS, and no {insecure}"


@functools.cache
def _ray_commands() -> dict[str, Any]:
    # Ray's command line works without Ray Serve, whose import takes seconds.
    with mock.patch.dict(sys.modules, {"ray.serve.scripts": None}):
        from ray.scripts.scripts import cli
    commands: dict[str, Any] = cli.commands
    return commands


@functools.cache
def _programs(image: str) -> dict[str, str]:
    return programs(stages(DOCKERFILE.read_text(encoding="utf-8")), image)


@contextlib.contextmanager
def _environment(wanted: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    for name in before:
        if name.startswith(PREFIX):
            del os.environ[name]
    os.environ.update({name: value for name, value in wanted.items() if name.startswith(PREFIX)})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
