"""The command line, `outrider`."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

from outrider.cloud.training.settings import ARMS, STEERED
from outrider.deploy.options import (
    Parser,
    add_access,
    add_command,
    add_connection,
    add_drafting,
    add_grammar,
    add_links,
    add_listening,
    add_metrics,
    add_sampling,
    add_steering,
    add_target,
    add_tls,
    add_trace_endpoint,
    add_tracing,
    add_training,
    add_writing,
    at_least,
    comma_list,
    number,
    one_of,
)
from outrider.deploy.termination import STATUS, Terminated, sigterm_unwinds
from outrider.proto.errors import ConfigError, OutriderError
from outrider.proto.plumbing.logs import FORMATS, LEVELS, configure


def main(argv: list[str] | None = None) -> int:
    """Run one command; its exit status. A mistake or a failure is one line on standard error."""
    options = build_parser().parse_args(argv)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it warns of each retry; our error says it once
    configure(options.log_level, options.log_format)
    try:
        with sigterm_unwinds():
            return int(options.run_command(options))
    except OutriderError as error:
        option = error.field.rpartition(".")[2].replace("_", "-")
        print(f"outrider {options.command}: {f'{option}: ' if option else ''}{error.message}", file=sys.stderr)
        return 1
    except Terminated:
        return STATUS
    except KeyboardInterrupt:
        return 130


def _in(module: str, function: str, *, room: str = "deploy") -> Callable[[argparse.Namespace], int]:
    """The command's function, imported when it runs: `outrider generate` must not load torch."""

    def run(options: argparse.Namespace) -> int:
        try:
            return int(getattr(importlib.import_module(f"outrider.{room}.{module}"), function)(options))
        except ModuleNotFoundError as error:
            if error.name is None or error.name.startswith("outrider"):
                raise
            raise ConfigError(f"needs the package {error.name}; pip install 'outrider[all]'") from error

    return run


def build_parser() -> Parser:
    """All commands and options."""
    parser = Parser(prog="outrider", description="Edge-cloud speculative decoding; the text is exactly the target's.")
    parser.add_argument("--log-level", default="warning", choices=LEVELS)
    parser.add_argument("--log-format", default="text", choices=FORMATS, help="json: one object a line")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    _add_run(commands)
    _add_up(commands)
    _add_coordinator(commands)
    _add_verifier(commands)
    _add_generate(commands)
    _add_edge(commands)
    _add_train(commands)
    _add_export(commands)
    _add_submit(commands)
    models = add_command(commands, "models", "list the embedded targets and drafters", _in("models", "models"))
    models.add_argument("--memory", action="store_true", help="load every drafter, and show the memory that it takes")
    _add_drain(commands)
    _add_scale(commands)
    _add_status(commands)
    _add_certs(commands)
    _add_key(commands)
    _add_doctor(commands)
    _add_demo(commands)
    _add_link(commands)
    _add_bench(commands)
    _add_compare(commands)
    _add_traces(commands)
    return parser


def _add_prompts(parser: Parser) -> None:
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="text to continue; - reads standard input")
    parser.add_argument("--prompts", type=Path, default=None, metavar="FILE", help='.jsonl of {"id","prompt"}, or text')
    parser.add_argument("--limit", type=at_least(0), default=0, metavar="N", help="first N of --prompts; 0: all")
    parser.add_argument("--json", action="store_true", help="one JSON object a prompt")
    parser.add_argument("--sessions", type=at_least(1), default=1, metavar="N", help="with --json: decoded at once")


def _add_run(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = add_command(commands, "run", "decode prompts with verifier and edge in this process", _in("decode", "run"))
    _add_prompts(parser)
    add_sampling(parser)
    add_grammar(parser)
    add_drafting(parser)
    add_target(parser)


def _add_generate(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = add_command(commands, "generate", "decode prompts on a running cluster", _in("decode", "generate"))
    _add_coordinator_address(parser)
    parser.add_argument("--model", default="", metavar="NAME", help="target; empty: what the coordinator has")
    parser.add_argument("--cache", type=Path, default=_cache(), metavar="DIR", help="of downloaded drafters")
    _add_prompts(parser)
    add_sampling(parser)
    add_grammar(parser)
    add_drafting(parser)


def _add_edge(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = add_command(commands, "edge", "serve OpenAI's HTTP API on this machine", _in("daemon", "edge"))
    parser.add_argument("--coordinator", default="", metavar="HOST:PORT", help="to ask for a verifier; or")
    parser.add_argument("--verifier", default="", metavar="HOST:PORT", help="fixed, without a coordinator")
    parser.add_argument("--model", default="", metavar="NAME", help="target; empty: what the coordinator has")
    parser.add_argument("--cache", type=Path, default=_cache(), metavar="DIR", help="of downloaded drafters")
    parser.add_argument("--tokenizer", type=Path, default=None, metavar="FILE", help="with --verifier: tokenizer.json")
    parser.add_argument(
        "--chat-template", type=Path, default=None, metavar="FILE", help="a template, or tokenizer_config.json"
    )
    add_listening(parser, "127.0.0.1:8080")
    parser.add_argument("--api-keys", type=Path, default=None, metavar="FILE", help="of which requests must show one")
    parser.add_argument("--max-requests", type=at_least(1), default=256, metavar="N", help="for texts, at once")
    parser.add_argument("--request-timeout", type=number(0), default=600.0, metavar="S", help="for a whole answer")
    parser.add_argument("--grace", type=number(0), default=10.0, metavar="S", help="for running answers to end on exit")
    add_drafting(parser)
    parser.add_argument(
        "--battery",
        type=number(0, 1),
        default=None,
        metavar="X",
        help="share that is left, for --window flexspec; not set: as this machine says, 1 on mains",
    )
    add_tls(parser)
    add_connection(parser, "cloud-")
    add_tracing(parser)


def _add_up(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = add_command(
        commands, "up", "start a local Ray with verifiers and a coordinator, and stay", _in("servers", "up")
    )
    add_listening(parser, "127.0.0.1:50050")
    add_tls(parser)
    parser.add_argument("--verifiers", type=at_least(1), default=1, metavar="N", help="actors of the same target")
    _add_lease_options(parser)
    add_access(parser)
    add_metrics(parser)
    add_target(parser)


def _add_coordinator(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = add_command(
        commands, "coordinator", "serve leases and drafters for a Ray cluster", _in("servers", "coordinator")
    )
    add_listening(parser, "127.0.0.1:50050")
    add_tls(parser)
    add_access(parser)
    parser.add_argument(
        "--verifier-tls-ca", type=Path, default=None, metavar="FILE", help="speak TLS to verifiers; their authority"
    )
    parser.add_argument(
        "--verifier-tls-name", default="", metavar="NAME", help="that the certificates of fixed verifiers have"
    )
    parser.add_argument("--ray-address", default="auto", metavar="ADDRESS", help="of the Ray cluster")
    parser.add_argument(
        "--verifier", action="append", default=[], metavar="NAME=HOST:PORT", help="fixed, instead of Ray; repeatable"
    )
    parser.add_argument("--model", default="reference", metavar="NAME", help="target of fixed verifiers")
    parser.add_argument("--tokenizer", type=Path, default=None, metavar="FILE", help="tokenizer.json of that target")
    parser.add_argument(
        "--chat-template", type=Path, default=None, metavar="FILE", help="of that target, or its tokenizer_config.json"
    )
    parser.add_argument("--state", type=Path, default=None, metavar="FILE", help="keeps fleet statistics on restart")
    _add_lease_options(parser)
    _add_secret(parser)
    add_metrics(parser)


def _add_verifier(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = add_command(
        commands, "verifier", "serve one target, here or as an actor in a Ray cluster", _in("servers", "verifier")
    )
    add_listening(parser, "127.0.0.1:0")
    add_tls(parser)
    parser.add_argument("--advertise", default="", metavar="HOST", help="by which edges reach it; empty: as it listens")
    parser.add_argument("--name", default="verifier", metavar="NAME", help="unique in the cluster")
    parser.add_argument(
        "--ray-address", default="", metavar="ADDRESS", help="start as a detached actor there and leave"
    )
    parser.add_argument("--cpus", type=number(0), default=1.0, metavar="N", help="that Ray reserves for it")
    parser.add_argument("--gpus", type=number(0), default=0.0, metavar="N", help="that Ray reserves for it")
    parser.add_argument(
        "--resource", action="append", default=[], metavar="NAME=N", help="of your own, that Ray reserves; repeatable"
    )
    parser.add_argument(
        "--placement", choices=("pack", "spread"), default="pack", help="on few nodes of the cluster, or on many"
    )
    parser.add_argument("--drain-grace", type=number(0), default=10.0, metavar="S", help="for sessions to move away")
    _add_secret(parser)
    add_metrics(parser)
    add_trace_endpoint(parser)
    add_target(parser)


def _add_train(commands: argparse._SubParsersAction[Parser]) -> None:
    help_text = "train drafters for a target, or rules that say how far ahead to draft"
    train = commands.add_parser("train", help=help_text, description=f"{help_text[0].upper()}{help_text[1:]}.")
    trained = train.add_subparsers(dest="what", metavar="WHAT", required=True, parser_class=Parser)
    _add_train_drafter(trained)
    _add_train_steer(trained)
    _add_train_policy(trained)


def _add_train_drafter(trained: argparse._SubParsersAction[Parser]) -> None:
    help_text = "distil a small drafter from a target"
    parser = add_command(trained, "drafter", help_text, _in("training", "train_drafter"), table="train")
    add_training(parser)
    parser.add_argument("--start", type=Path, default=None, metavar="DIR", help="go on from this drafter")
    parser.add_argument("--rate", type=number(0), default=1.0, metavar="X", help="factor of both learning rates")
    parser.add_argument("--hidden", type=at_least(8), default=192, metavar="N", help="width of the drafter")
    parser.add_argument("--layers", type=at_least(1), default=3, metavar="N", help="depth of the drafter")
    parser.add_argument("--mlp", type=at_least(8), default=512, metavar="N", help="width of its MLP")
    parser.add_argument("--window", type=at_least(1), default=None, metavar="N", help="positions it sees; default all")


def _add_train_steer(trained: argparse._SubParsersAction[Parser]) -> None:
    help_text = "teach a drafter to take codes of the target's hidden states (SD2)"
    parser = add_command(trained, "steer", help_text, _in("training", "train_steer"))
    add_training(parser)
    parser.add_argument("--drafter", type=Path, required=True, metavar="DIR", help="what `train drafter` wrote")
    parser.add_argument(
        "--arms",
        type=comma_list(one_of(*ARMS)),
        default=STEERED,
        metavar="A,B",
        help=f"trained side by side on the same text, each into a folder of its name: {', '.join(ARMS)}",
    )
    parser.add_argument("--rank", type=at_least(1), default=64, metavar="N", help="numbers in a code")
    parser.add_argument(
        "--tap-layers",
        type=comma_list(at_least(0)),
        default="",
        metavar="A,B",
        help="of the target, whose input is tapped; none named: 3, L/2 and L-3",
    )
    parser.add_argument(
        "--oldest", type=at_least(1), default=8, metavar="N", help="most positions that a code may be old"
    )


def _add_train_policy(trained: argparse._SubParsersAction[Parser]) -> None:
    help_text = "train the length rules specdec++ and speckv on recorded traces"
    parser = add_command(
        trained, "policy", help_text, _in("length_training.command", "train_policy", room="bench"), table="train_policy"
    )
    parser.add_argument("traces", type=Path, nargs="+", metavar="FILE", help="what `traces record` wrote")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON of weights, for --window")
    parser.add_argument("--hidden", type=at_least(1), default=16, metavar="N", help="units of each network")
    parser.add_argument("--steps", type=at_least(1), default=4000, metavar="N", help="of training, 256 rows each")
    parser.add_argument(
        "--held-out", type=number(0, 1), default=0.2, metavar="X", help="share of the prompts kept for judging"
    )
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="N", help="of everything random")


def _add_export(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = add_command(commands, "export", "write a drafter as a checked ONNX package", _in("training", "export"))
    parser.add_argument(
        "source",
        type=Path,
        metavar="FOLDER",
        help="a transformers model, such as train wrote; with steering.safetensors and projection.safetensors in it, "
        "such as train steer wrote, the package is of a steered drafter",
    )
    parser.add_argument("output", type=Path, metavar="PACKAGE", help="folder to make")
    parser.add_argument("--name", required=True, metavar="NAME", help="under which edges ask for it")
    parser.add_argument("--target", default="reference", metavar="NAME", help="the model that it drafts for")
    parser.add_argument("--precision", choices=("float32", "int8"), default="float32", help="of the weights")
    parser.add_argument(
        "--candidates", type=at_least(1), default=64, metavar="K", help="most likely tokens it gives out"
    )


def _add_submit(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = add_command(
        commands,
        "submit",
        "run a command as a job on a Ray cluster and follow it; what it writes goes to an output place",
        _in("submit.command", "submit"),
    )
    parser.add_argument("--address", default=_job_server(), metavar="URL", help="of the cluster's job server")
    parser.add_argument("--name", default="", metavar="ID", help="of the job; empty: a new one")
    parser.add_argument(
        "--input", action="append", default=[], metavar="FILE", help="file or folder that the command reads; repeatable"
    )
    parser.add_argument(
        "--output",
        default="",
        metavar="PLACE",
        help="for what it writes: a folder that the nodes share, or a URL such as s3://BUCKET/FOLDER; not set: ./ID",
    )
    parser.add_argument("--no-wait", action="store_true", help="do not follow the job")
    parser.add_argument("--cpus", type=number(0), default=None, metavar="N", help="that Ray reserves for the command")
    parser.add_argument("--gpus", type=number(0), default=None, metavar="N", help="that Ray reserves for the command")
    parser.add_argument("--wheel", default="auto", metavar="FILE", help="auto: of this checkout; none: the cluster's")
    parser.add_argument(
        "--install",
        choices=("modules", "pip"),
        default="modules",
        help="the wheel alone, where the cluster has its dependencies; or with them, from a package index",
    )
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="for the command; repeatable")
    parser.add_argument("--follow", default="", metavar="ID", help="a job that runs, or has ended: show its log")
    parser.add_argument("--stop", default="", metavar="ID", help="ask a job to stop")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="and its options")


def _add_scale(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = add_command(
        commands, "scale", "start or drain verifiers of a Ray cluster until there are N", _in("fleet", "scale")
    )
    parser.add_argument("count", type=at_least(0), metavar="N", help="verifiers to have")
    parser.add_argument("--ray-address", default="auto", metavar="ADDRESS", help="of the Ray cluster")
    parser.add_argument("--model", default="", metavar="NAME", help="target; empty: the only one there is")
    parser.add_argument("--drain-grace", type=number(0), default=30.0, metavar="S", help="for sessions to move away")


def _add_drain(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = add_command(commands, "drain", "send a verifier's sessions elsewhere", _in("control", "drain"))
    parser.add_argument("name", metavar="NAME", help="of the verifier")
    _add_coordinator_address(parser)


def _add_status(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = add_command(
        commands, "status", "show verifiers, drafters, leases and the edges' links", _in("control", "status")
    )
    _add_coordinator_address(parser)
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parser.add_argument("--watch", type=number(0.1), default=None, metavar="S", help="again every S seconds")


def _add_doctor(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = add_command(
        commands, "doctor", "check everything between here and the target, and say what to do", _in("doctor", "doctor")
    )
    parser.add_argument("--coordinator", default="", metavar="HOST:PORT", help="to ask for a verifier; or")
    parser.add_argument("--verifier", default="", metavar="HOST:PORT", help="fixed, without a coordinator")
    parser.add_argument("--model", default="", metavar="NAME", help="target; empty: what the coordinator has")
    parser.add_argument("--cache", type=Path, default=_cache(), metavar="DIR", help="of downloaded drafters")
    parser.add_argument("--tokenizer", type=Path, default=None, metavar="FILE", help="with --verifier: tokenizer.json")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    add_connection(parser)
    add_drafting(parser)


def _add_certs(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = add_command(
        commands, "certs", "make an authority and certificates for tests and closed networks", _in("certs", "certs")
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="to make; nothing in it is overwritten")
    parser.add_argument(
        "--host", action="append", default=[], metavar="NAME", help="or IP by which servers are reached; repeatable"
    )
    parser.add_argument("--days", type=at_least(1), default=90, metavar="N", help="that the certificates are valid")
    parser.add_argument("--client", default="edge", metavar="NAME", help="of the client's certificate")


def _add_key(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = add_command(commands, "key", "make an API key: its secret, shown once, and its table", _in("certs", "key"))
    parser.add_argument("name", metavar="NAME", help="of whoever gets it")
    parser.add_argument("--max-sessions", type=at_least(1), default=None, metavar="N", help="texts at once, at most")
    parser.add_argument(
        "--tokens-per-minute", type=at_least(1), default=None, metavar="N", help="generated, on average, at most"
    )
    parser.add_argument("--admin", action="store_true", help="may ask for the status and drain verifiers")
    parser.add_argument("--append", type=Path, default=None, metavar="FILE", help="append the table to this keys file")


def _add_demo(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = add_command(
        commands, "demo", "decode prompts of four domains on a local Ray, against cloud streaming", _in("demo", "demo")
    )
    parser.add_argument("--prompts", type=Path, default=None, metavar="FILE", help="others than the built-in ones")
    parser.add_argument("--per-domain", type=at_least(1), default=2, metavar="N", help="built-in prompts a domain")
    parser.add_argument("--quiet", action="store_true", help="the table only")
    parser.add_argument("--cache", type=Path, default=_cache(), metavar="DIR", help="of downloaded drafters")
    parser.add_argument("--verifiers", type=at_least(1), default=1, metavar="N", help="actors of the same target")
    add_sampling(parser)
    add_drafting(parser)
    add_target(parser)


def _add_link(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = add_command(
        commands, "link", "put an emulated network link in front of a server, and stay", _in("link.command", "link")
    )
    parser.add_argument("--to", required=True, metavar="HOST:PORT", help="a verifier, or any TCP server")
    parser.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="on loopback; port 0: a free one")
    parser.add_argument("--rtt", type=number(0), default=None, metavar="MS", help="round trip; not set: nothing added")
    parser.add_argument("--jitter", type=number(0), default=0.0, metavar="MS", help="added each way, at most; uniform")
    parser.add_argument(
        "--up", type=number(0), default=None, metavar="MBIT", help="Mbit/s; 0: outage; not set: no limit"
    )
    parser.add_argument("--down", type=number(0), default=None, metavar="MBIT", help="the same, to the edge")
    parser.add_argument("--queue", type=number(3), default=256.0, metavar="KIB", help="before each bottleneck")
    parser.add_argument(
        "--trace", default=None, metavar="NAME|FILE", help="round trip and rates over time: built-in, or CSV"
    )
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="N", help="of the jitter")


def _add_bench(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = add_command(
        commands,
        "bench",
        "measure ways of decoding side by side over emulated links",
        _in("benchmark.command", "bench", room="bench"),
    )
    add_links(parser, "2,30,120")
    parser.add_argument("--prompts", type=Path, default=None, metavar="FILE", help="others than the built-in ones")
    parser.add_argument("--per-domain", type=at_least(1), default=2, metavar="N", help="built-in prompts a domain")
    parser.add_argument("--sessions", type=at_least(1), default=1, metavar="N", help="decoded at once")
    parser.add_argument("--mixed", action="store_true", help="deal the sessions out among all links at once")
    parser.add_argument(
        "--pace",
        type=number(0),
        default=0.0,
        metavar="MS",
        help="each target step takes at least that: a larger target",
    )
    parser.add_argument(
        "--modes",
        type=comma_list(one_of("cloud", "sync", "outrider", "optimum", "hf-generate", "hf-assisted")),
        default=["cloud", "sync", "outrider", "optimum", "hf-generate", "hf-assisted"],
        metavar="LIST",
        help="ways of decoding; those of transformers (hf-) run only where --rtt has a 0 and there is no --pace",
    )
    parser.add_argument(
        "--sync-length", type=at_least(0), default=0, metavar="N", help="draft tokens a round; 0: the best by replay"
    )
    parser.add_argument("--hf-drafter", type=Path, default=None, metavar="DIR", help="the drafter for hf-assisted")
    parser.add_argument("--no-logprobs", action="store_true", help="commits without log probabilities")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the record")
    parser.add_argument("--report", type=Path, default=None, metavar="DIR", help="write plots and an HTML page")
    add_sampling(parser)
    add_drafting(parser)
    add_target(parser)


def _add_compare(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = add_command(
        commands,
        "compare",
        "measure drafters' block efficiency side by side: tokens a target step in synchronous rounds",
        _in("comparison.command", "compare", room="bench"),
    )
    parser.add_argument(
        "package", nargs="+", metavar="PACKAGE", help="of a drafter: an embedded name, FOLDER, or NAME=FOLDER"
    )
    add_steering(parser)
    add_writing(parser)
    parser.add_argument("--drafts", type=at_least(1), default=8, metavar="K", help="in a round, at most")
    parser.add_argument("--temperature", type=comma_list(number(0)), default="0,1", metavar="LIST", help="0 is greedy")
    parser.add_argument(
        "--age",
        type=comma_list(at_least(0)),
        default="0",
        metavar="LIST",
        help="positions by which codes are older than the freshest; of several, the first counts for the ratios",
    )
    parser.add_argument(
        "--precision",
        type=comma_list(one_of("int8", "float16", "none")),
        default="int8",
        metavar="LIST",
        help="how codes travel: int8, float16, none at all; of several, the first counts for the ratios",
    )
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="N", help="of the noise, and of the resampling")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write all figures")
    parser.add_argument("--plot", type=Path, default=None, metavar="FILE", help="draw them: .png, .pdf or .svg")


def _add_traces(commands: argparse._SubParsersAction[Parser]) -> None:
    help_text = "record where drafters hit, and replay that over any link with any window"
    traces = commands.add_parser("traces", help=help_text, description=f"{help_text[0].upper()}{help_text[1:]}.")
    subcommands = traces.add_subparsers(dest="what", metavar="WHAT", required=True, parser_class=Parser)
    _add_traces_record(subcommands)
    _add_traces_replay(subcommands)


def _add_traces_record(subcommands: argparse._SubParsersAction[Parser]) -> None:
    parser = add_command(
        subcommands,
        "record",
        "write a target's own texts, and where drafters would have said the same",
        _in("traces.record", "record", room="bench"),
        table="traces_record",
    )
    add_writing(parser)
    parser.add_argument(
        "--drafter",
        type=comma_list(str),
        default="general,ngram",
        metavar="LIST",
        help="whose hits: embedded names, package folders, NAME=FOLDER, or ngram; steered ones get no codes",
    )
    parser.add_argument("--temperature", type=number(0), default=0.0, metavar="T", help="0 is greedy")
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="N", help="of the noise; same seed, same text")
    parser.add_argument(
        "--seeds", type=at_least(0), default=0, metavar="N", help="texts a prompt, by seeds 1 to N; 0: one, by --seed"
    )
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help=".jsonl of a trace a line; what the machines took is written beside it, to .costs.json",
    )


def _add_traces_replay(subcommands: argparse._SubParsersAction[Parser]) -> None:
    parser = add_command(
        subcommands,
        "replay",
        "compute what recorded drafters give over any link with any window, on a virtual clock",
        _in("traces.replay", "replay", room="bench"),
        table="traces_replay",
    )
    parser.add_argument("traces", type=Path, metavar="FILE", help="what `traces record` wrote")
    add_links(parser, "2,10,60,200")
    parser.add_argument(
        "--window",
        type=comma_list(str),
        default="adaptive,4,8,16",
        metavar="LIST",
        help="adaptive, N unverified tokens at most, syncN: rounds of N drafts that wait for the verdict, or a rule: "
        "threshold[:X], specdec++[:X][@FILE], speckv[@FILE], flexspec[:X], aimd",
    )
    parser.add_argument(
        "--goal", choices=("latency", "efficiency"), default="latency", help="soonest tokens, or fewest target steps"
    )
    parser.add_argument(
        "--pace",
        type=number(0),
        default=0.0,
        metavar="MS",
        help="each target step takes at least that: a larger target",
    )
    parser.add_argument(
        "--drafter", type=comma_list(str), default="", metavar="LIST", help="of the recorded ones; none named: all"
    )
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="N", help="of the jitter")
    group = parser.add_argument_group("selectors (the recorded drafters are one pool then, and windows are left out)")
    group.add_argument(
        "--selector",
        type=comma_list(str),
        default="",
        metavar="LIST",
        help="static (each drafter alone), random, metasd-bd, metasd-be, exp3, thompson, halving, discounted, sliding, "
        "hedge, leader, routing; none named: windows as above",
    )
    group.add_argument(
        "--play",
        choices=("rounds", "stream"),
        default="rounds",
        help="rounds: draft, wait for the verdict, begin again; stream: the session, with the first --window",
    )
    group.add_argument("--rounds", type=at_least(1), default=6, metavar="K", help="drafts of a round")
    group.add_argument("--seeds", type=at_least(1), default=20, metavar="N", help="runs, by orders and draws of chance")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write all figures")
    parser.add_argument("--plot", type=Path, default=None, metavar="DIR", help="draw them: PNG files")


def _add_lease_options(parser: Parser) -> None:
    parser.add_argument("--lease-seconds", type=number(1), default=600.0, metavar="S", help="how long a lease lasts")
    parser.add_argument(
        "--drafters", type=Path, action="append", default=[], metavar="DIR", help="more drafter packages; repeatable"
    )


def _add_secret(parser: Parser) -> None:
    parser.add_argument(
        "--lease-secret-file", type=Path, default=None, metavar="FILE", help="shared by coordinator and verifiers"
    )


def _add_coordinator_address(parser: Parser) -> None:
    parser.add_argument("--coordinator", required=True, metavar="HOST:PORT", help="to ask for a verifier")
    add_connection(parser)


def _job_server() -> str:
    """Where Ray's own commands would go, if that is an HTTP address."""
    named = [os.environ.get(name, "") for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")]
    return next((address for address in named if address.startswith("http")), "http://127.0.0.1:8265")


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "outrider"


if __name__ == "__main__":
    sys.exit(main())
