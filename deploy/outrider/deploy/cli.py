"""The command line, `outrider`."""

from __future__ import annotations

import argparse
import errno
import importlib
import logging
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from outrider.deploy.arguments import Command, Given, Parser, fill, part, resolve
from outrider.deploy.process.progress import waiting
from outrider.deploy.process.termination import WATCH, handlers_restored
from outrider.proto.error_codes import coded
from outrider.proto.errors import ConfigError, OutriderError
from outrider.proto.plumbing.extras import lacking
from outrider.proto.plumbing.logs import FORMATS, LEVELS, configure
from outrider.proto.release import release
from outrider.proto.settings import Settings, option


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of the list of commands.

    Attributes:
        help: sentence without capital and full stop.
        declared: `module:name` of the `Command`; empty: a group of commands.
        table: name in config files and environment variables; empty: the command's own.
    """

    help: str
    declared: str = ""
    table: str = ""

    def load(self) -> Command:
        """Import the command's declaration."""
        module, _, name = self.declared.partition(":")
        command: Command = getattr(importlib.import_module(module), name)
        return command


ON_EDGES = ("chat", "edge", "doctor", "status", "drain")  # need less than the others
EDGE = "outrider.deploy.commands.edge_options"
DECODING = "outrider.deploy.commands.decode_options"
SERVING = "outrider.deploy.commands.serving_options"
TRAINING = "outrider.deploy.commands.training_options"
OPERATING = "outrider.deploy.commands.operating"

COMMANDS = {
    "run": Entry("decode prompts, on a running cluster or all in this process", f"{DECODING}:RUN"),
    "up": Entry("run a local Ray cluster with verifiers and a coordinator", f"{SERVING}:UP"),
    "coordinator": Entry("serve leases and drafters for a fleet of verifiers", f"{SERVING}:COORDINATOR"),
    "verifier": Entry("serve a target, here or as an actor in a Ray cluster", f"{SERVING}:VERIFIER"),
    "trainer": Entry("train a drafter on what verifiers log, as an actor in their Ray cluster", f"{SERVING}:TRAINER"),
    "chat": Entry("chat with a running cluster in this terminal", f"{EDGE}:CHAT"),
    "edge": Entry("serve OpenAI's HTTP API on this machine", f"{EDGE}:EDGE"),
    "train": Entry("train drafters"),
    "train teacher": Entry("write what a target says, for its drafters to learn", f"{TRAINING}:TRAIN_TEACHER", "train"),
    "train drafter": Entry("distil a small drafter from a target", f"{TRAINING}:TRAIN_DRAFTER", "train"),
    "train steer": Entry(
        "teach a drafter to take vectors of the target's hidden states (SD2)", f"{TRAINING}:TRAIN_STEER", "steer"
    ),
    "export": Entry("write a drafter as a checked ONNX package", f"{TRAINING}:EXPORT"),
    "submit": Entry("run a command as a job on a Ray cluster, and follow it", f"{OPERATING}:SUBMIT"),
    "scale": Entry("start or drain verifiers of a Ray cluster until it has N", f"{OPERATING}:SCALE"),
    "status": Entry("show verifiers, drafters, leases and links", f"{OPERATING}:STATUS"),
    "drain": Entry("move a verifier's sessions to other verifiers", f"{OPERATING}:DRAIN"),
    "certs": Entry("make certificates for tests and closed networks", f"{OPERATING}:CERTS"),
    "key": Entry("make an API key, or forget what one has taught", f"{OPERATING}:KEY"),
    "doctor": Entry("check everything between here and the target", f"{EDGE}:DOCTOR"),
    "explain": Entry("explain an error by its code", f"{OPERATING}:EXPLAIN"),
    "demo": Entry("compare with cloud streaming on a local Ray cluster", f"{DECODING}:DEMO"),
    "link": Entry("run an emulated network link in front of a server", f"{OPERATING}:LINK"),
    "bench": Entry("measure ways of decoding over emulated links", "outrider.bench.bench_settings:BENCH"),
}


@dataclass(frozen=True, slots=True)
class Program:
    """A command line: its name, the sentence that describes it, and its commands."""

    name: str
    description: str
    commands: Mapping[str, Entry]


OUTRIDER = Program("outrider", "Edge-cloud speculative decoding; the text is exactly the target's.", COMMANDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings(Settings):
    """Settings of every command's log on standard error."""

    log_level: str = option("warning", "least severe messages to log", choices=LEVELS)
    log_format: str = option("text", "json: one object a line", choices=FORMATS)


LOGS = part(LogSettings)
MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
NO_MEMORY = ("can't allocate memory", "out of memory", "unable to mmap", "cannot allocate memory")


def main(argv: Sequence[str] | None = None, program: Program = OUTRIDER) -> int:
    """Run one command and return its exit status; a mistake or a failure is one line on standard error."""
    if "_ARGCOMPLETE" in os.environ:
        _complete()
    given = parse(sys.argv[1:] if argv is None else argv, program)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it warns of each retry; our error says it once
    logs = given(LogSettings)
    configure(logs.log_level, logs.log_format)
    WATCH.command = words = f"{program.name} {given.command}"
    try:
        with handlers_restored():
            return _run(given)
    except OutriderError as error:
        option = given.flag_of(error.field)
        line = f"{option}: {error.message}" if option else error.message
    except (MemoryError, OSError, RuntimeError) as error:
        line = _machine_failure(error)
        if not line:
            raise
        logging.getLogger(__name__).debug("the failure", exc_info=True)
    line = re.sub(r"\((OUT-\d{3})\)", r"(`outrider explain \1`)", line)
    print(f"{words}: {line}", file=sys.stderr)
    return 1


def _machine_failure(error: BaseException) -> str:
    """Return one line that says what this machine lacks; empty: it is something else, which a traceback explains."""
    words = " ".join(str(error).split())
    if isinstance(error, MemoryError) or any(sign in words.lower() for sign in NO_MEMORY):
        message = "there is too little memory here: take a smaller target, fewer verifiers, or a smaller --kv-tokens"
        return coded("OUT-404", message)
    if isinstance(error, OSError) and error.errno in MACHINE:
        return f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror)
    return ""


def parse(argv: Sequence[str], program: Program = OUTRIDER) -> Given:
    """Parse a command line, with environment and config file; a mistake ends the process with status 2."""
    line = build_parser(argv, program).parse_args(argv)
    command, values = resolve(line, os.environ)
    logs = {argument.name: getattr(line, argument.name, argument.value) for argument in LOGS}
    return Given(line.command, command.run, (*command.arguments, *LOGS), values | logs, parse)


def build_parser(words: Iterable[str], program: Program = OUTRIDER) -> Parser:
    """Return the parser of all commands, with the arguments of those alone whose names are among `words`."""
    words = set(words)
    parser = Parser(
        prog=program.name,
        usage=f"{program.name} [OPTION ...] COMMAND ...",
        description=program.description,
        epilog=f"`{program.name} COMMAND --help` shows the options of a command.",
    )
    for argument in LOGS:
        argument.add_to(parser)
    parser.add_argument("--version", action="version", version=f"outrider {release()}", help="print the release")
    groups = {"": _subcommands(parser, "COMMAND", "command")}
    for name, entry in program.commands.items():
        group, _, last = name.rpartition(" ")
        sentence = f"{entry.help[0].upper()}{entry.help[1:]}."
        sub = groups[group].add_parser(last, help=entry.help, description=sentence)
        if not entry.declared:
            groups[name] = _subcommands(sub, "WHAT", "what")
        elif words.issuperset(name.split()):
            fill(sub, entry.load(), entry.table or name)
            sub.set_defaults(command=name)
    return parser


def _subcommands(parser: Parser, metavar: str, name: str) -> argparse._SubParsersAction[Parser]:
    return parser.add_subparsers(
        title="commands", dest=name, metavar=metavar, required=True, parser_class=Parser, prog=parser.prog
    )


def _run(given: Given) -> int:
    # Imported now, since `outrider chat` must not load torch.
    module, _, function = given.run.partition(":")
    try:
        with waiting("starting"):
            run = getattr(importlib.import_module(module), function)
        return int(run(given))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("outrider"):
            raise
        on_edge = given.command in ON_EDGES or (given.command == "run" and given.values["coordinator"])
        extra = "jobs" if given.command == "submit" else "edge" if on_edge else "all"
        extra = "server" if given.values.get("server") else extra
        raise ConfigError(lacking(extra, error.name)) from error


def _complete() -> None:
    """Answer a shell that completes a line, and end the process."""
    import argcomplete

    argcomplete.autocomplete(build_parser(os.environ["COMP_LINE"].split()))
