"""`outrider up`, `outrider coordinator` and `outrider verifier`: processes that run until a signal ends them."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider.cloud.learning.trainer_settings import TrainerSettings
from outrider.cloud.models.family_index import find_target
from outrider.cloud.verifier_config import AUTO, PROBES, VerifierConfig
from outrider.coordinator.coordinator_config import CoordinatorConfig, StaticVerifier
from outrider.deploy.arguments import Given, split_pair
from outrider.deploy.commands.serving_options import (
    ActorSettings,
    ConditionSettings,
    FixedVerifierSettings,
    SecretSettings,
    TrainerActorSettings,
)
from outrider.deploy.credentials import lease_secret, serving_tls
from outrider.deploy.local.local_cluster import catalogue_folders, check_ports, local_cluster
from outrider.deploy.process.descendants import descendants, kill, until_gone
from outrider.deploy.process.progress import waiting
from outrider.deploy.process.termination import set_when_asked_to_end
from outrider.deploy.targets import with_target
from outrider.drafters.packages import FAMILY, find_package
from outrider.edge.daemon import DaemonConfig
from outrider.proto.address import is_local_address, is_loopback, join_address, split_address
from outrider.proto.errors import ConfigError, Unavailable
from outrider.proto.plumbing.files import read_text
from outrider.proto.plumbing.loop_watch import LoopWatch, end_process
from outrider.proto.plumbing.tls import ClientTls, ServerTls
from outrider.proto.tokenizer import tokenizer_hash

logger = logging.getLogger(__name__)

STOPPED_WITHIN_S = 30.0  # of a step that runs, and of whoever still learns
END_WITHIN_S = STOPPED_WITHIN_S + 5.0  # of a process that has failed
VOTES_A_DAY = 1000  # of one edge: those of a local cluster are mostly its owner's, and few
EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - recognised, not bound
ASKED = '{"model": "%s", "temperature": 0, "messages": [{"role": "user", "content": "What is 2 + 3?"}]}'
PLACEMENT = {"pack": "DEFAULT", "spread": "SPREAD"}  # Ray's names of the strategies


def up(given: Given) -> int:
    """Run `outrider up`."""
    return asyncio.run(_up(given))


async def _up(given: Given) -> int:
    asked = given.fields(CoordinatorConfig)
    conditions = given(ConditionSettings)
    config = given(
        VerifierConfig,
        metrics_listen="127.0.0.1:0" if asked["metrics_listen"] else "",
        min_step_s=conditions.pace / 1e3,
        **given.logging,
    )
    learning = given(TrainerSettings) if config.learn else None
    if learning is not None and config.target == AUTO:
        config = replace(config, target=find_package(learning.drafter).target)
    config = with_target(config)
    tls = serving_tls(given)
    if not (asked["relay"] or is_local_address(asked["listen"], "listen")):
        logger.warning("the verifiers listen on 127.0.0.1: edges on other machines need --relay")
    if learning is not None and not asked["api_keys"]:
        learning = replace(learning, min_keys=1, key_share=1.0)  # all texts are one key's, and all edges are
    async with local_cluster(
        config,
        verifiers=conditions.verifiers,
        coordinator=asked | {"tls": tls, "votes_a_day": VOTES_A_DAY},
        trainer=learning,
        link=conditions.link,
    ) as running:
        stop = set_when_asked_to_end()
        print(
            f"coordinator on {running.coordinator}, {conditions.verifiers} verifier(s) of {config.target}", flush=True
        )
        if conditions.pace or conditions.link:
            print(f"{conditions.words}: emulated, to show what a larger and a farther target is like", flush=True)
        for name, address in running.metrics_addresses.items():
            _print_metrics(name, address)
        if learning is not None:
            print(f"edges with --share-texts teach {learning.drafter}; versions in {learning.folder}", flush=True)
        print(*next_steps(running.coordinator, config.model_id, f"{config.name}-0", given), sep="\n", flush=True)
        with LoopWatch("the coordinator", _end_with_cluster):
            lost = await _stopped_or_lost(stop)
        if lost:
            kill(descendants())  # at once: Ray itself ends this process a minute later, and leaves some of them
    if lost:
        message = "Ray's head process (gcs_server) has ended, and the cluster with it; start this again"
        raise Unavailable(message, code="OUT-502")
    return 0


def next_steps(coordinator: str, model: str, verifier: str, given: Given) -> Iterator[str]:
    """Yield what to type to use a cluster that `given` options have started, with one of its verifiers to drain."""
    place, elsewhere = _reached(coordinator)
    needed = f"--coordinator {place}{_credentials(given)}"
    page = f"http://{DaemonConfig().listen}"
    yield "next, in another terminal:"
    yield f"  outrider edge {needed.replace(' --tls-', ' --cloud-tls-')}"
    yield f"      the page: {page}/   OpenAI's API: {page}/v1"
    yield f"      curl {page}/v1/chat/completions -H 'Content-Type: application/json' -d '{ASKED % model}'"
    yield f"  outrider chat {needed}"
    yield f"  outrider run {needed} 'Once upon a time'"
    yield f"  outrider status {needed}"
    yield f"  outrider drain {verifier} {needed}"
    if elsewhere:
        yield "HOST is a name or address of this machine."
    yield "Ctrl-C ends the cluster."


def _reached(coordinator: str) -> tuple[str, bool]:
    """Return where edges find the coordinator, and whether a name of this machine must be put in."""
    host, port = split_address(coordinator, "listen")
    return (f"HOST:{port}", True) if host in EVERYWHERE else (join_address(host, port), False)


def _credentials(given: Given) -> str:
    """Return the options by which an edge passes the coordinator's checks."""
    asked, tls = given.fields(CoordinatorConfig), given.fields(ServerTls)
    words = []
    if tls["cert"] is not None:
        words.append("--tls-ca FILE")
    if tls["client_ca"] is not None:
        words.append("--tls-cert FILE --tls-key FILE")
    if asked["api_keys"] is not None:
        words.append("--api-key-file FILE")
        if tls["cert"] is None and not is_loopback(split_address(asked["listen"], "listen")[0]):
            words.append("--plaintext")
    return "".join(f" {word}" for word in words)


def _end_with_cluster() -> None:
    kill(descendants())
    end_process()


async def _stopped_or_lost(stop: asyncio.Event) -> bool:
    """Wait for `stop`, or for the end of the head of Ray where this process has started it; return whether it was."""
    watching = asyncio.create_task(until_gone("gcs_server"))
    watching.add_done_callback(lambda _: stop.set())
    await stop.wait()
    lost = watching.done()
    watching.cancel()
    return lost


def coordinator(given: Given) -> int:
    """Run `outrider coordinator`."""
    return asyncio.run(_coordinator(given))


async def _coordinator(given: Given) -> int:
    from outrider.coordinator.coordinator_server import CoordinatorServer

    config = coordinator_config(given)
    check_ports(config)
    server = CoordinatorServer(config)
    address = await server.start()
    stop = set_when_asked_to_end()
    print(f"coordinator on {address}", flush=True)
    _print_metrics("coordinator", server.metrics_address)
    with LoopWatch("the coordinator", end_process):
        await stop.wait()
        await server.stop()
    return 0


def coordinator_config(given: Given) -> CoordinatorConfig:
    """Return the settings of `outrider coordinator`; raises `ConfigError`."""
    fixed, tls = given(FixedVerifierSettings), serving_tls(given)
    verifiers = tuple(
        StaticVerifier(
            *split_pair(text, "NAME=HOST:PORT; leases are bound to the name", "verifier"),
            fixed.model,
            _tokenizer(fixed.tokenizer) if fixed.tokenizer else "",
            tls=fixed.verifier_tls_ca is not None,
            tls_name=fixed.verifier_tls_name,
            chat_template_json=read_text(fixed.chat_template, "chat_template") if fixed.chat_template else "",
        )
        for text in fixed.verifier
    )
    towards = None
    if fixed.verifier_tls_ca is not None:
        towards = ClientTls(fixed.verifier_tls_ca, tls.cert if tls else None, tls.key if tls else None)
    return given(
        CoordinatorConfig,
        lease_secret=_required_secret(given(SecretSettings).lease_secret_file),
        tls=tls,
        drafters=(FAMILY, *given.fields(CoordinatorConfig)["drafters"]),
        verifiers=verifiers,
        verifier_tls=towards,
        **({"ray_address": ""} if verifiers else {}),
    )


def _tokenizer(path: Path) -> str:
    text = read_text(path, "tokenizer")
    try:
        tokenizer_hash(text)
    except (ValueError, AttributeError) as error:
        raise ConfigError(
            f"{path} holds no object of JSON; give the target's tokenizer.json", field="tokenizer"
        ) from error
    return text


def verifier(given: Given) -> int:
    """Run `outrider verifier`."""
    config = given(VerifierConfig, tls=serving_tls(given))
    secret = lease_secret(given(SecretSettings).lease_secret_file)
    actor = given(ActorSettings)
    if actor.ray_address:
        return _verifier_actor(actor, replace(config, **given.logging), secret)
    return asyncio.run(_verifier(config, secret))


async def _verifier(config: VerifierConfig, secret: bytes) -> int:
    probes = config.engine == PROBES
    if not probes:
        find_target(config.target)
    check_ports(config)
    failed = asyncio.Event()
    loop = asyncio.get_running_loop()
    end = threading.Timer(END_WITHIN_S, end_process)
    end.daemon = True

    def on_failure() -> None:
        loop.call_soon_threadsafe(failed.set)
        end.start()  # the loop itself may stand still

    with waiting(f"asking {config.target_url}" if probes else f"loading the target {config.target}"):
        from outrider.cloud.serving.verifier_actor import other_engine
        from outrider.cloud.serving.verifier_server import VerifierServer

        server = VerifierServer(config, secret, on_failure, engine=await other_engine(config))
    address = await server.start()
    stop = set_when_asked_to_end()
    print(f"verifier {config.name} of {server.rules.model} on {address}", flush=True)
    _print_metrics(config.name, server.metrics_address)
    await _first_of(stop, failed)
    if not failed.is_set():
        await server.drain(config.drain_grace_s)
    try:
        await asyncio.wait_for(server.stop(), STOPPED_WITHIN_S)
    except TimeoutError:
        logger.critical("the engine stands still; the process ends without it")
        end_process()
    finally:
        end.cancel()
    if failed.is_set():
        message = "the verifier has failed: no step succeeds any more; its log says why. Start it again"
        raise Unavailable(message, code="OUT-307")
    return 0


async def _first_of(*events: asyncio.Event) -> None:
    waiting = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()


def _verifier_actor(settings: ActorSettings, config: VerifierConfig, secret: bytes) -> int:
    """Start a detached actor in a running Ray cluster, and leave it there."""
    from outrider.cloud.serving.verifier_actor import start_verifier_actor
    from outrider.coordinator.ray_cluster import connect_ray
    from outrider.deploy.local.local_cluster import wait_until_loaded

    connect_ray(settings.ray_address)
    actor = start_verifier_actor(config.name, config, lease_secret=secret, ray_options=ray_options(settings))
    with waiting(f"loading the target {config.target}"):
        info = wait_until_loaded(config.name, actor)
    print(f"verifier {config.name} of {info['model']} on {info['address']}", flush=True)
    _print_metrics(config.name, info["metrics_address"])
    return 0


def trainer(given: Given) -> int:
    """Run `outrider trainer`: start a detached actor in a running Ray cluster, and leave it there."""
    from outrider.cloud.learning.learner import check_reads_tokens, drafters_folder
    from outrider.cloud.learning.trainer_actor import start_trainer_actor
    from outrider.coordinator.ray_cluster import RayCluster, connect_ray
    from outrider.deploy.local.local_cluster import wait_until_loaded

    settings, cluster = given(TrainerSettings), given(TrainerActorSettings)
    folder = drafters_folder(settings)
    model = find_package(settings.drafter).target
    connect_ray(cluster.ray_address)
    verifiers = asyncio.run(RayCluster().refresh())
    check_reads_tokens(settings, (each.tokenizer_sha256 for each in verifiers if each.model == model))
    rehearsal = tuple([path.expanduser().resolve() for path in settings.rehearsal])  # the actor runs elsewhere
    settings = replace(settings, folder=folder.parent, rehearsal=rehearsal)
    actor = start_trainer_actor(model, settings, ray_options={"num_cpus": cluster.cpus}, **given.logging)
    with waiting(f"loading the trainer of {settings.drafter}"):
        info = wait_until_loaded(f"trainer of {model}", actor)
    print(f"trainer of {info['drafter']} for {model}, after {info['steps']} steps; versions in {folder}", flush=True)
    _, *folders = catalogue_folders((), settings)  # a coordinator has the embedded ones
    print(f"give the coordinator --drafters {' '.join(map(str, folders))}", flush=True)
    return 0


def _print_metrics(name: str, address: str) -> None:
    if address:
        print(f"metrics of {name} on http://{address}/metrics", flush=True)


def _required_secret(path: Path | None) -> bytes:
    if path is None:
        raise ConfigError(
            "is missing; make one with `openssl rand -hex 32 > FILE` and give it to the verifiers too",
            field="lease_secret_file",
        )
    return lease_secret(path)


def ray_options(settings: ActorSettings) -> dict[str, Any]:
    """Return the options of a detached actor; raises `ConfigError`."""
    return {
        "lifetime": "detached",
        "num_cpus": settings.cpus,
        "num_gpus": settings.gpus,
        "resources": dict(map(_resource, settings.resource)),
        "scheduling_strategy": PLACEMENT[settings.placement],
    }


def _resource(text: str) -> tuple[str, float]:
    form = "NAME=AMOUNT, with an amount above 0"
    name, amount = split_pair(text, form, "resource")
    try:
        if (value := float(amount)) > 0:
            return name, value
    except ValueError:
        pass
    raise ConfigError(f"{text!r} is not {form}", field="resource")
