"""Commands that operate a deployment: status, drain, scale, certs, key, link, submit, explain."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from outrider.deploy.arguments import Command, part
from outrider.deploy.commands.edge_options import KeySettings
from outrider.edge.edge_config import CONNECTION, EdgeConfig
from outrider.proto.address import without_http
from outrider.proto.settings import REQUIRED, Settings, at_least, option
from outrider.proto.types import ServiceGoal

ADDRESS = "HOST:PORT"


def job_server() -> str:
    """Return the address of the job server that Ray's own commands use if it is HTTP, or else the local one."""
    named = [os.environ.get(name, "") for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")]
    return next((address for address in named if address.startswith("http")), "http://127.0.0.1:8265")


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusSettings(Settings):
    """Output of a deployment's status."""

    json: bool = option(False, "print one JSON object")
    watch: float | None = option(None, "refresh every S seconds", metavar="S", check=at_least(0.1))


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainSettings(Settings):
    """The verifier to drain."""

    name: str = option(REQUIRED, "name of the verifier", metavar="NAME", positional=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleSettings(Settings):
    """Size of a Ray cluster's fleet of verifiers."""

    count: int = option(REQUIRED, "number of verifiers", positional=True, check=at_least(0))
    ray_address: str = option("auto", "address of the Ray cluster", metavar="ADDRESS")
    model: str = option("", "target; empty: the only one in the cluster", metavar="NAME")
    drain_grace_s: float = option(30.0, "time for sessions to move to other verifiers", check=at_least(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class CertsSettings(Settings):
    """Certificates to make."""

    folder: Path = option(REQUIRED, "folder to write to; no file is overwritten", metavar="DIR", positional=True)
    host: tuple[str, ...] = option((), "name or IP address of the servers", metavar="NAME")
    days: int = option(90, "validity of the certificates in days", check=at_least(1))


@dataclass(frozen=True, slots=True, kw_only=True)
class NewKeySettings(Settings):
    """Holder and limits of a new API key, or the holder whose texts nothing more is to be learned from."""

    name: str = option(
        REQUIRED, "holder of the key; empty, with --forget: texts without one", metavar="NAME", positional=True
    )
    max_sessions: int | None = option(None, "limit of sessions at once; not set: none", check=at_least(1))
    tokens_per_minute: int | None = option(None, "limit of tokens per minute; not set: none", check=at_least(1))
    admin: bool = option(False, "allow `outrider status` and `outrider drain`")
    learning: bool = option(False, "allow learning from its texts, where its edges share them too (--share-texts)")
    service: ServiceGoal | None = option(
        None,
        "service of texts that ask for none: interactive, batch, or figures, '{\"gap_ms\": 75}'; not set: none",
        metavar="CLASS|JSON",
        parse=ServiceGoal.parse,
    )
    append: Path | None = option(None, "keys file to append the key to; not set: its table is printed")
    forget: bool = option(False, "make no key: drop this one's texts that drafters of a Ray cluster would learn from")
    ray_address: str = option("auto", "with --forget: address of the Ray cluster", metavar="ADDRESS")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings(Settings):
    """An emulated link and its ends."""

    to: str = option(REQUIRED, "address of a verifier, or of any TCP server", metavar=ADDRESS, parse=without_http)
    listen: str = option(
        "127.0.0.1:0", "loopback address to listen on; port 0 takes a free one", metavar=ADDRESS, parse=without_http
    )
    rtt: float | None = option(None, "round trip time; not set: no delay", metavar="MS", check=at_least(0))
    jitter: float = option(0.0, "maximum random delay added each way, uniform", metavar="MS", check=at_least(0))
    up: float | None = option(
        None, "rate from the edge; 0: outage; not set: no limit", metavar="MBIT/S", check=at_least(0)
    )
    down: float | None = option(
        None, "rate to the edge; 0: outage; not set: no limit", metavar="MBIT/S", check=at_least(0)
    )
    trace: str | None = option(None, "round trip and rates over time: built-in, or a CSV file", metavar="NAME|FILE")
    seed: int = option(0, "seed of all chances", check=at_least(0))
    radio: bool = option(False, "let the edge's radio sleep after 10 s of silence; it takes 0.3 to 1 s to wake")


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitSettings(Settings):
    """A command to run as a job, and its cluster, inputs and output."""

    address: str = option(REQUIRED, "address of the cluster's job server", metavar="URL")
    name: str = option("", "id of the job; empty: a generated one", metavar="ID")
    input: tuple[str, ...] = option((), "file or folder that the command reads", metavar="FILE")
    output: str = option(
        "",
        "place for the files that it writes: a folder that the nodes share, or a URL such as s3://BUCKET/FOLDER; "
        "not set: ./ID",
        metavar="PLACE",
    )
    no_wait: bool = option(False, "do not follow the job")
    cpus: float | None = option(None, "CPUs that Ray reserves for the command", metavar="N", check=at_least(0))
    gpus: float | None = option(None, "GPUs that Ray reserves for the command", metavar="N", check=at_least(0))
    installed: bool = option(False, "run the Outrider that the nodes have installed, rather than send this one")
    env: tuple[str, ...] = option((), "environment variable of the command", metavar="NAME=VALUE")
    arguments: tuple[str, ...] = option(
        (), "command of outrider with its options", metavar="-- COMMAND", positional=True, many="rest"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainSettings(Settings):
    """An error to explain."""

    code: str = option("", "code at the end of an error, OUT-…; empty: list all", metavar="CODE", positional=True)


CONNECTED = (part(EdgeConfig, "coordinator", CONNECTION, required=("coordinator",)), part(KeySettings))
STATUS = Command("outrider.deploy.status:status", (*CONNECTED, part(StatusSettings)))
DRAIN = Command("outrider.deploy.status:drain", (part(DrainSettings), *CONNECTED))
SCALE = Command("outrider.deploy.local.fleet:scale", (part(ScaleSettings),))
CERTS = Command("outrider.deploy.certs:certs", (part(CertsSettings),))
KEY = Command("outrider.deploy.certs:key", (part(NewKeySettings),))
LINK = Command("outrider.deploy.link_command:link", (part(LinkSettings),))
SUBMIT = Command("outrider.deploy.submit:submit", (part(SubmitSettings, defaults={"address": job_server}),))
EXPLAIN = Command("outrider.deploy.explain:explain", (part(ExplainSettings),))
