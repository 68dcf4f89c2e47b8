"""The command line's options: each with help, a key in the config file and an environment variable.

`outrider run --max-tokens 64`, `max-tokens = 64` under `[run]` in the file named by `--config` or
`$OUTRIDER_CONFIG`, and `OUTRIDER_RUN_MAX_TOKENS=64` mean the same. The command line wins over the environment, that
over the file, and that over the default.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import configargparse

from outrider.proto.errors import ConfigError
from outrider.proto.types import Patience

DTYPES = ("float32", "bfloat16", "float16")


class Parser(configargparse.ArgumentParser):
    """Says in one line what is wrong, and where help is."""

    def error(self, message: str) -> NoReturn:
        """End with status 2."""
        sys.stderr.write(f"{self.prog}: {message} (see {self.prog} --help)\n")
        sys.exit(2)


def add_command(commands: Any, name: str, help_text: str, run: Callable[[argparse.Namespace], int]) -> Parser:
    """A subcommand whose options also come from `[name]` of the config file and from the environment."""
    parser: Parser = commands.add_parser(
        name,
        help=help_text,
        description=help_text[0].upper() + help_text[1:] + ".",
        auto_env_var_prefix=f"OUTRIDER_{name.upper()}_",
        config_file_parser_class=configargparse.TomlConfigParser([name]),
        ignore_unknown_config_file_keys=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        add_config_file_help=False,
        add_env_var_help=True,
    )
    parser.add_argument(
        "--config",
        is_config_file_arg=True,
        env_var="OUTRIDER_CONFIG",
        metavar="FILE",
        help=f"TOML file whose [{name}] table sets options",
    )
    parser.set_defaults(run_command=run)
    return parser


def add_sampling(parser: Parser) -> None:
    """How the target's distribution is processed."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=at_least(1), default=128, metavar="N", help="tokens to generate at most")
    group.add_argument("--temperature", type=number(0), default=0.0, metavar="T", help="0 is greedy")
    group.add_argument("--top-p", type=number(0, 1), default=1.0, metavar="P", help="nucleus; 1 is off")
    group.add_argument("--top-k", type=at_least(0), default=0, metavar="K", help="most likely tokens kept; 0 is off")
    group.add_argument("--min-p", type=number(0, 1), default=0.0, metavar="P", help="least probability, relative")
    group.add_argument("--repetition-penalty", type=number(0), default=1.0, metavar="X", help="1 is off")
    group.add_argument("--presence-penalty", type=number(), default=0.0, metavar="X", help="0 is off")
    group.add_argument("--frequency-penalty", type=number(), default=0.0, metavar="X", help="0 is off")
    group.add_argument("--seed", type=at_least(0), default=0, metavar="N", help="of the noise; same seed, same text")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends the text; may be repeated")


def add_target(parser: Parser) -> None:
    """The target and where it runs."""
    group = parser.add_argument_group("target")
    group.add_argument("--target", default="reference", metavar="NAME", help="embedded name, folder, or hub name")
    group.add_argument("--dtype", choices=DTYPES, default="float32", help="float32 keeps the text bit for bit")
    group.add_argument("--device", default="cpu", metavar="DEVICE", help="of torch: cpu, cuda, cuda:1")
    group.add_argument("--target-threads", type=at_least(0), default=0, metavar="N", help="torch threads; 0: torch's")
    group.add_argument("--kv-tokens", type=at_least(16), default=32768, metavar="N", help="positions in the KV cache")
    group.add_argument(
        "--context-length", type=at_least(0), default=0, metavar="N", help="positions a session; 0: the target's"
    )
    group.add_argument(
        "--batch-invariant", action="store_true", help="same bytes whatever shares a step, in bfloat16 too; slower"
    )
    group.add_argument(
        "--max-sessions", type=at_least(1), default=32, metavar="N", help="texts that a verifier decodes at once"
    )
    group.add_argument(
        "--patience",
        type=patience,
        default=None,
        metavar="MS[,DRAFTS]",
        help="wait so long (ms, or inf) for so many drafts before a step; 0 runs ahead; not set: planned",
    )
    group.add_argument(
        "--goal", choices=("latency", "efficiency"), default="latency", help="soonest tokens, or fewest target steps"
    )


def add_drafting(parser: Parser) -> None:
    """The drafter and its window."""
    group = parser.add_argument_group("drafting")
    group.add_argument("--drafter", default="auto", metavar="NAME", help="name, package folder, auto, ngram, or none")
    group.add_argument(
        "--window", type=at_least(1), default=None, metavar="N", help="unverified tokens at most; not set: measured"
    )
    group.add_argument("--drafter-threads", type=at_least(1), default=1, metavar="N", help="of ONNX Runtime")


def add_listening(parser: Parser, default: str) -> None:
    """Where a server listens."""
    parser.add_argument("--listen", default=default, metavar="HOST:PORT", help="port 0 takes a free one")
    parser.add_argument(
        "--insecure-listen", action="store_true", help="allow an address beyond loopback, in plain text"
    )


def at_least(minimum: int) -> Callable[[str], int]:
    """An integer from `minimum` on."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{value} is below {minimum}")
        return value

    return parse


def comma_list(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Entries with commas between them."""
    return lambda text: [parse(entry.strip()) for entry in text.split(",")] if text.strip() else []


def one_of(*names: str) -> Callable[[str], str]:
    """One of a few words."""

    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(names)}")
        return text

    return parse


def number(low: float = -math.inf, high: float = math.inf) -> Callable[[str], float]:
    """A finite number from `low` to `high`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not (math.isfinite(value) and low <= value <= high):
            raise argparse.ArgumentTypeError(f"{text} is not in {low:g}..{high:g}")
        return value

    return parse


def patience(text: str) -> Patience:
    """`MS` or `MS,DRAFTS`; `inf` waits for ever."""
    milliseconds, _, drafts = text.partition(",")
    try:
        return Patience(float(milliseconds) / 1000, int(drafts or 1))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not MS or MS,DRAFTS: {error}") from None


def lease_secret(path: Path | None) -> bytes:
    """The content of the file that coordinator and verifiers share; empty without one."""
    if path is None:
        return b""
    try:
        return path.expanduser().read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", field="lease-secret-file") from error
