"""The command line's options: each with help, a key in the config file and an environment variable.

`outrider run --max-tokens 64`, `max-tokens = 64` under `[run]` in the file named by `--config` or
`$OUTRIDER_CONFIG`, and `OUTRIDER_RUN_MAX_TOKENS=64` mean the same. The command line wins over the environment, that
over the file, and that over the default.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import stat
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import configargparse

from outrider.proto.errors import ConfigError, OutriderError
from outrider.proto.plumbing.tls import ClientTls, ServerTls
from outrider.proto.types import Grammar, GrammarKind, Patience

if TYPE_CHECKING:
    from outrider.edge.security import Security

logger = logging.getLogger(__name__)

DTYPES = ("float32", "bfloat16", "float16")


class Parser(configargparse.ArgumentParser):
    """Says in one line what is wrong, and where help is."""

    def error(self, message: str) -> NoReturn:
        """End with status 2."""
        sys.stderr.write(f"{self.prog}: {message} (see {self.prog} --help)\n")
        sys.exit(2)


def add_command(
    commands: Any, name: str, help_text: str, run: Callable[[argparse.Namespace], int], *, table: str = ""
) -> Parser:
    """A subcommand whose options also come from `[table]` (`name`) of the config file and from the environment."""
    table = table or name
    parser: Parser = commands.add_parser(
        name,
        help=help_text,
        description=help_text[0].upper() + help_text[1:] + ".",
        auto_env_var_prefix=f"OUTRIDER_{table.upper()}_",
        config_file_parser_class=configargparse.TomlConfigParser([table]),
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
        help=f"TOML file whose [{table}] table sets options",
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


def add_steering(parser: Any) -> None:
    """Whose steering codes a target can make."""
    parser.add_argument(
        "--steering",
        type=Path,
        action="append",
        default=[],
        metavar="PATH",
        help="projection for steered drafters: a file or a folder that `outrider train steer` wrote; repeatable",
    )


def add_writing(parser: Parser) -> None:
    """A target that writes texts on its own, and after which prompts."""
    parser.add_argument("--target", default="reference", metavar="NAME", help="embedded name, folder, or hub name")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the target")
    parser.add_argument("--device", default="cpu", metavar="DEVICE", help="of the target: cpu, cuda, cuda:1")
    parser.add_argument("--threads", type=at_least(0), default=0, metavar="N", help="torch threads; 0: torch's choice")
    parser.add_argument(
        "--prompts", type=Path, default=None, metavar="PATH", help="file, or folder of DOMAIN.jsonl; not set: built-in"
    )
    parser.add_argument("--per-domain", type=at_least(1), default=10, metavar="N", help="prompts a domain, at most")
    parser.add_argument("--max-tokens", type=at_least(1), default=128, metavar="N", help="of a text, at most")


def add_links(parser: Parser, rtts: str) -> None:
    """A list of emulated links; `rtts`: what `--rtt` is by default."""
    numbers: dict[str, Any] = {"type": comma_list(number(0)), "metavar": "LIST"}
    parser.add_argument("--rtt", default=rtts, **numbers, help="round trips, ms; 0: no link")
    parser.add_argument("--up", default="20", **numbers, help="Mbit/s from the edge, one or one a round trip")
    parser.add_argument("--down", default="100", **numbers, help="Mbit/s to the edge")
    parser.add_argument("--jitter", default="0", **numbers, help="ms added each way, at most; uniform")
    parser.add_argument(
        "--trace", type=comma_list(str), default="", metavar="LIST", help="more links: built-in traces, or CSV files"
    )


def add_training(parser: Parser) -> None:
    """Whose words are learnt, from which text, for how long."""
    parser.add_argument("--target", default="reference", metavar="NAME", help="embedded name, folder, or hub name")
    parser.add_argument(
        "--corpus", type=Path, nargs="+", required=True, metavar="FILE", help='.jsonl of {"id","text"}, or text files'
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="drafter, checkpoints and caches")
    parser.add_argument("--minutes", type=number(0), default=None, metavar="M", help="budget in time; or")
    parser.add_argument("--steps", type=at_least(1), default=None, metavar="N", help="budget in steps")
    parser.add_argument(
        "--patience", type=at_least(0), default=0, metavar="N", help="end after N measurements without gain; 0: never"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    parser.add_argument("--self-text", type=at_least(0), default=1_000_000, metavar="N", help="tokens by the target")
    parser.add_argument(
        "--self-text-greedy", type=number(0, 1), default=0.5, metavar="X", help="share of these written at T = 0"
    )
    parser.add_argument("--threads", type=at_least(0), default=0, metavar="N", help="torch threads; 0: torch's choice")
    parser.add_argument("--device", default="cpu", metavar="DEVICE", help="of torch")
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="N", help="of everything random")


def add_grammar(parser: Parser) -> None:
    """What the texts may be."""
    group = parser.add_argument_group("grammar (texts follow it and end where it does; give one)")
    one = group.add_mutually_exclusive_group()
    one.add_argument("--json-schema", type=Path, default=None, metavar="FILE", help="JSON that the schema allows")
    one.add_argument("--grammar-file", type=Path, default=None, metavar="FILE", help="grammar in llguidance's Lark")


def grammar(options: argparse.Namespace) -> Grammar | None:
    """The grammar that the options of `add_grammar` name; None: texts are free.

    Raises:
        ConfigError: the file cannot be read.
        InvalidArgument: it is empty or too large; whether it is right is for the verifier to say.
    """
    kinds = {"json_schema": GrammarKind.JSON_SCHEMA, "grammar_file": GrammarKind.LARK}
    for name, kind in kinds.items():
        path = getattr(options, name)
        if path is not None:
            try:
                return Grammar(kind, path.expanduser().read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError) as error:
                why = getattr(error, "strerror", None) or "it is not UTF-8"
                raise ConfigError(f"cannot read {path}: {why}", field=name.replace("_", "-")) from error
    return None


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
        "--keep",
        type=number(0),
        default=300.0,
        metavar="S",
        help="keep an idle conversation's KV cache so long at most, while nobody else needs it; 0: never",
    )
    group.add_argument(
        "--patience",
        type=patience,
        default=None,
        metavar="MS[,DRAFTS]",
        help="wait so long (ms, or inf) for so many drafts before a step; 0 runs ahead; not set: planned",
    )
    add_steering(group)
    group.add_argument(
        "--goal", choices=("latency", "efficiency"), default="latency", help="soonest tokens, or fewest target steps"
    )


def add_drafting(parser: Parser) -> None:
    """The drafters and their window; `drafting` is what the options say of the former."""
    group = parser.add_argument_group("drafting")
    group.add_argument(
        "--drafter",
        default="auto",
        metavar="LIST",
        help="name, package folder, auto, ngram, or none; several with commas, or all that fit: one is selected "
        "wherever drafts begin anew",
    )
    group.add_argument(
        "--selector",
        type=selector,
        default="leader",
        metavar="RULE",
        help="that chooses among several: leader, static, random, metasd-bd, metasd-be, exp3, thompson, halving, "
        "discounted, sliding, hedge, or routing",
    )
    group.add_argument(
        "--drafter-memory", type=number(0.1), default=256, metavar="MB", help="for several drafters; the rest waits"
    )
    group.add_argument(
        "--window",
        type=window,
        default=None,
        metavar="N|RULE",
        help="unverified tokens at most, or a rule: survival, fixed:N, threshold[:X], specdec++[:X][@FILE], "
        "speckv[@FILE], flexspec[:X], aimd, FILE of `outrider train policy`; not set: survival",
    )
    group.add_argument("--drafter-threads", type=at_least(1), default=1, metavar="N", help="of ONNX Runtime")
    group.add_argument(
        "--steer",
        choices=("auto", "on", "off"),
        default="auto",
        help="a steered drafter by the target's states: as often as pays on the downlink, every commit, or never",
    )


def drafting(options: argparse.Namespace) -> dict[str, Any]:
    """Fields of `EdgeConfig` about which drafters there are and how they run."""
    return {
        "drafter": options.drafter,
        "selector": options.selector,
        "drafter_memory_mb": options.drafter_memory,
        "threads": options.drafter_threads,
        "steering": options.steer,
    }


def add_listening(parser: Parser, default: str) -> None:
    """Where a server listens."""
    parser.add_argument("--listen", default=default, metavar="HOST:PORT", help="port 0 takes a free one")
    parser.add_argument(
        "--insecure-listen", action="store_true", help="allow an address beyond loopback without TLS: all can be read"
    )


def add_metrics(parser: Parser) -> None:
    """Figures for Prometheus, of a server that has no HTTP of its own."""
    group = parser.add_argument_group("metrics")
    group.add_argument("--metrics-listen", default="", metavar="HOST:PORT", help="serve /metrics there; empty: nowhere")
    group.add_argument(
        "--insecure-metrics", action="store_true", help="allow that beyond loopback: figures in plain text, no login"
    )


def metrics(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of a server's config that the options of `add_metrics` set."""
    return {"metrics_listen": options.metrics_listen, "insecure_metrics": options.insecure_metrics}


def add_trace_endpoint(parser: Parser) -> None:
    """Where spans go."""
    parser.add_argument(
        "--trace-endpoint", default="", metavar="URL", help="OpenTelemetry collector, http://HOST:4317; empty: no spans"
    )


def add_tracing(parser: Parser) -> None:
    """Where spans go, and of how many sessions; who begins a trace decides."""
    add_trace_endpoint(parser)
    parser.add_argument(
        "--trace-ratio", type=number(0, 1), default=1.0, metavar="X", help="share of the sessions that are traced"
    )


def add_tls(parser: Parser) -> None:
    """A server's certificates."""
    group = parser.add_argument_group("TLS (`outrider certs` makes certificates for tests)")
    group.add_argument("--tls-cert", type=Path, default=None, metavar="FILE", help="certificate chain, PEM")
    group.add_argument("--tls-key", type=Path, default=None, metavar="FILE", help="its private key, PEM")
    group.add_argument(
        "--tls-client-ca", type=Path, default=None, metavar="FILE", help="take only clients with its certificates"
    )


def add_access(parser: Parser) -> None:
    """Whom a coordinator serves, and whether it relays."""
    group = parser.add_argument_group("access")
    group.add_argument(
        "--api-keys", type=Path, default=None, metavar="FILE", help="of the keys that callers must have: outrider key"
    )
    group.add_argument(
        "--remote-drain", action="store_true", help="without API keys, let other machines drain verifiers"
    )
    group.add_argument(
        "--relay", action="store_true", help="pass decoding streams on, for edges that cannot reach the verifiers"
    )
    group.add_argument(
        "--relay-streams", type=at_least(1), default=256, metavar="N", help="with --relay: at once, at most"
    )


def add_connection(parser: Parser, prefix: str = "") -> None:
    """How a client reaches a coordinator; `prefix` sets the TLS options apart from those of a server in one command."""
    group = parser.add_argument_group("connection")
    group.add_argument(
        f"--{prefix}tls-ca",
        type=Path,
        default=None,
        metavar="FILE",
        help="speak TLS and trust this authority; `public`: those that everybody trusts",
    )
    group.add_argument(
        f"--{prefix}tls-cert", type=Path, default=None, metavar="FILE", help="own certificate, where one is asked for"
    )
    group.add_argument(f"--{prefix}tls-key", type=Path, default=None, metavar="FILE", help="its private key")
    group.add_argument(
        f"--{prefix}tls-server-name", default="", metavar="NAME", help="that the server's certificate must have"
    )
    group.add_argument(
        "--api-key-file", type=Path, default=None, metavar="FILE", help="holds the key; else OUTRIDER_API_KEY does"
    )
    group.add_argument("--plaintext", action="store_true", help="allow key and text to cross a network unencrypted")


def connection(options: argparse.Namespace, prefix: str = "") -> dict[str, Any]:
    """The fields of `EdgeConfig` that the options of `add_connection` set."""
    given, before = vars(options), prefix.replace("-", "_")
    tls = {name: given[before + name] for name in ("tls_ca", "tls_cert", "tls_key", "tls_server_name")}
    return tls | {"api_key": api_key(options.api_key_file), "plaintext": options.plaintext}


def security(options: argparse.Namespace) -> Security:
    """The same for a client of the coordinator alone."""
    from outrider.edge.security import Security  # here, since it brings the whole edge along

    tls = ClientTls.from_options(options.tls_ca, options.tls_cert, options.tls_key, options.tls_server_name)
    return Security(tls, api_key(options.api_key_file), options.plaintext)


def serving_tls(options: argparse.Namespace) -> ServerTls | None:
    """What the options of `add_tls` say of certificates."""
    return ServerTls.from_options(options.tls_cert, options.tls_key, options.tls_client_ca)


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


def window(text: str) -> int | str:
    """`N`, or a length rule's name."""
    from outrider.edge.policies.length import rule_by_name  # here, since it brings numpy along

    try:
        if text.lstrip("+-").isdecimal():
            return at_least(1)(text)
        rule_by_name(text)
    except OutriderError as error:
        raise argparse.ArgumentTypeError(error.message) from None
    return text


def selector(text: str) -> str:
    """The name of a rule that selects among drafters."""
    from outrider.edge.policies.selection import selector_named  # here, since it brings numpy along

    try:
        selector_named(text)
    except OutriderError as error:
        raise argparse.ArgumentTypeError(error.message) from None
    return text


def api_key(path: Path | None) -> str:
    """The content of the file; without one, the environment variable OUTRIDER_API_KEY; empty without either."""
    if path is None:
        return os.environ.get("OUTRIDER_API_KEY", "").strip()
    try:
        text = path.expanduser().read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", field="api-key-file") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not text", field="api-key-file") from error
    if not text:
        raise ConfigError(f"{path} is empty", field="api-key-file")
    if path.expanduser().stat().st_mode & stat.S_IROTH:
        logger.warning("anybody on this machine may read the API key in %s; chmod 600 it", path)
    return text


def lease_secret(path: Path | None) -> bytes:
    """The content of the file that coordinator and verifiers share; empty without one."""
    if path is None:
        return b""
    try:
        return path.expanduser().read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", field="lease-secret-file") from error


def check_once(entries: Sequence[object], field: str) -> None:
    """Refuse a list that names something twice."""
    if len(set(entries)) != len(entries):
        raise ConfigError("names something twice; once is enough", field=field)
