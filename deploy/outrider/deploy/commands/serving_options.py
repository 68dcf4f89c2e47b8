"""Commands that serve in the cloud: up, coordinator, verifier."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.cloud.learning.trainer_settings import TrainerSettings
from outrider.cloud.verifier_config import (
    AUTO,
    ENGINE,
    HERE,
    LEARNING,
    PROBES,
    SERVING,
    TARGET,
    VerifierConfig,
)
from outrider.coordinator.coordinator_config import ACCESS, CoordinatorConfig
from outrider.deploy.arguments import Command, Part, part
from outrider.deploy.link.shape import LinkShape
from outrider.proto.errors import ConfigError
from outrider.proto.plumbing.tls import ServerTls
from outrider.proto.settings import Settings, at_least, option

NO_CERTIFICATE = {"cert": None, "key": None}
TEACHING = ("drafter", "cpu_share", "max_load", "folder", "rehearsal", "min_keys")
LISTENING = ("listen", "insecure_listen", "connections_per_address", "metrics")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionSettings(Settings):
    """Size of a local cluster, the price of its target, and the link to it."""

    verifiers: int = option(1, "number of verifiers", check=at_least(1))
    pace: float = option(
        0.0, "minimum time of a target step, in place of a larger target; 0: its own", metavar="MS", check=at_least(0)
    )
    link: LinkShape = option(
        LinkShape(),
        "emulated link between edges and this cluster: round trip, and rates from and to the edge in Mbit/s; 0: none",
        metavar="MS[,UP,DOWN]",
        parse=LinkShape.parse,
    )

    @property
    def words(self) -> str:
        """Price and link in outputs, such as `target paced at 30 ms, link 20 ms`."""
        paced = f"target paced at {self.pace:g} ms" if self.pace else "target at its own speed"
        return f"{paced}, {self.link.words}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretSettings(Settings):
    """The secret of coordinator and verifiers."""

    lease_secret_file: Path | None = option(None, "secret that coordinator and verifiers share")


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedVerifierSettings(Settings):
    """Verifiers at fixed addresses, and the properties that Ray would report."""

    verifier: tuple[str, ...] = option((), "verifier at a fixed address, instead of Ray", metavar="NAME=HOST:PORT")
    model: str = option("reference", "target of the fixed verifiers", metavar="NAME")
    tokenizer: Path | None = option(None, "tokenizer.json of that target")
    chat_template: Path | None = option(None, "chat template of that target, or its tokenizer_config.json")
    verifier_tls_ca: Path | None = option(None, "certificate of the verifiers' authority; set: they speak TLS")
    verifier_tls_name: str = option("", "name in the certificates of fixed verifiers", metavar="NAME")

    def check_together(self) -> None:
        """Refuse fixed verifiers without a tokenizer."""
        if self.verifier and self.tokenizer is None:
            raise ConfigError("is missing; fixed verifiers need the target's tokenizer.json", field="tokenizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorSettings(Settings):
    """Resources that a verifier actor needs from Ray."""

    ray_address: str = option("", "start a detached actor in this Ray cluster, and exit", metavar="ADDRESS")
    cpus: float = option(1.0, "CPUs that Ray reserves for the actor", metavar="N", check=at_least(0))
    gpus: float = option(0.0, "GPUs that Ray reserves for the actor", metavar="N", check=at_least(0))
    resource: tuple[str, ...] = option((), "custom resource that Ray reserves for the actor", metavar="NAME=N")
    placement: str = option("pack", "pack: on few nodes of the cluster; spread: on many", choices=("pack", "spread"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerActorSettings(Settings):
    """The Ray cluster of a trainer, and what it needs there."""

    ray_address: str = option("auto", "Ray cluster of the verifiers", metavar="ADDRESS")
    cpus: float = option(1.0, "CPUs that Ray reserves for the trainer", metavar="N", check=at_least(0))


def found_target(*names: str) -> Part:
    """Choose the settings of a verifier whose target is found (`outrider.deploy.targets`) unless it is named."""
    words = "target: known name, folder, GGUF file or hub name; auto: smollm2, or reference where that cannot be had"
    return part(VerifierConfig, *names, defaults={"target": AUTO}, helps={"target": words})


UP = Command(
    "outrider.deploy.local.servers:up",
    (
        part(
            CoordinatorConfig,
            *LISTENING,
            *("drafters", "state"),
            ACCESS,
        ),
        part(ServerTls, defaults=NO_CERTIFICATE),
        part(ConditionSettings),
        found_target(TARGET, SERVING, ENGINE, HERE, LEARNING),
        part(TrainerSettings, *TEACHING),
    ),
)
TRAINER = Command(
    "outrider.deploy.local.servers:trainer", (part(TrainerSettings, *TEACHING), part(TrainerActorSettings))
)
COORDINATOR = Command(
    "outrider.deploy.local.servers:coordinator",
    (
        part(
            CoordinatorConfig,
            *LISTENING,
            *("drafters", "ray_address", "state"),
            ACCESS,
            defaults={"ray_address": "auto"},
        ),
        part(ServerTls, defaults=NO_CERTIFICATE),
        part(FixedVerifierSettings),
        part(SecretSettings),
    ),
)
VERIFIER = Command(
    "outrider.deploy.local.servers:verifier",
    (
        part(VerifierConfig, *LISTENING, "advertise", "name", "min_step_s", "drain_grace_s", "trace_endpoint"),
        part(VerifierConfig, TARGET, SERVING, ENGINE, PROBES, HERE, LEARNING),
        part(ServerTls, defaults=NO_CERTIFICATE),
        part(ActorSettings),
        part(SecretSettings),
    ),
)
