"""A Ray cluster of a head, a coordinator's node and three workers, and edges behind two routers.

    e1 to e4 ── router a, which translates addresses ── wire ─┐
                                                             core ── head, front, store, spare, w1 to w3
    e5 to e8 ── router b, which does not ────────────── wire ─┘

The coordinator is on `front`, Ray's Redis on `store`, verifiers are on `w1` to `w3`.

Every part is started by the command that docs/several-machines.md gives for it. Connections are by TLS.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from outrider.proto.errors import Unavailable
from research.cluster.hosts import Host

CLOUD = {"head": 1, "front": 2, "store": 3, "spare": 4, "w1": 11, "w2": 12, "w3": 13}
WORKERS = ("w1", "w2", "w3")
ROUTERS = {"a": 1, "b": 2}
EDGES = {"e1": "a", "e2": "a", "e3": "a", "e4": "a", "e5": "b", "e6": "b", "e7": "b", "e8": "b"}
GATE = 254  # last number of the address of whatever leads out of a network
_PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")


def until(holds: Callable[[], bool], within_s: float, what: str, every_s: float = 0.5) -> float:
    """Wait, and return the seconds that it took; raises `Unavailable` with `what` where it takes longer."""
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > within_s:
            raise Unavailable(f"{what}: not within {within_s:g} s")
        time.sleep(every_s)
    return time.monotonic() - began


class Nodes:
    """All hosts, from the first wire to the last edge.

    Args:
        folder: an empty one, for logs, keys and caches.
        delay_ms: of a wire, one way.
        loss: share of packets that a wire loses.
        edges: names of `EDGES` that there are.
    """

    def __init__(self, folder: Path, *, delay_ms: float, loss: float, edges: Sequence[str] = tuple(EDGES)) -> None:
        self.folder = folder
        self._wires: list[subprocess.Popen[str]] = []
        names = [f"10.77.0.{number} {name}\nfd77::{number} {name}" for name, number in CLOUD.items()]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", "::1 localhost", *names, ""]))
        (folder / "token").write_text(secrets.token_hex(32))
        (folder / "secret").write_text(secrets.token_hex(32))
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        token = f"RAY_AUTH_TOKEN_PATH={folder / 'token'}"
        unset = [word for name in _PROXIES for word in ("-u", name, "-u", name.upper())]
        self._environment = ["env", *unset, f"PATH={path}", "OMP_NUM_THREADS=1", "RAY_AUTH_MODE=token", token]
        self.hosts = {name: Host(name, folder) for name in ("core", *ROUTERS, *CLOUD, *edges)}
        self._lay_cloud()
        for router, number in ROUTERS.items():
            self._lay_router(router, number, delay_ms, loss)
        for edge in edges:
            self.plug(edge, EDGES[edge], "eth0")

    def _lay_cloud(self) -> None:
        core = self.hosts["core"]
        core.ip("link add cloud type bridge")
        core.ip(f"addr add 10.77.0.{GATE}/24 dev cloud")
        core.ip("addr add fd77::fe/64 dev cloud")
        core.ip("link set cloud up")
        core.net("sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
        for name, number in CLOUD.items():
            host = self.hosts[name]
            core.ip(f"link add {name} type veth peer name eth0 netns {host.pid}")
            core.ip(f"link set {name} master cloud up")
            host.ip(f"addr add 10.77.0.{number}/24 dev eth0")
            host.ip(f"addr add fd77::{number}/64 dev eth0")
            host.ip("link set eth0 up")
            host.ip(f"route add default via 10.77.0.{GATE}")
            host.ip("-6 route add default via fd77::fe")

    def _lay_router(self, name: str, number: int, delay_ms: float, loss: float) -> None:
        core, router = self.hosts["core"], self.hosts[name]
        words = [sys.executable, "-m", "research.cluster.packet_wire", f"wan{name}", str(core.pid)]
        faults = ["--delay", str(delay_ms), "--loss", str(loss)]
        wire = subprocess.Popen(  # noqa: S603 - fixed words
            router.net_words(*words, *faults), stdout=subprocess.PIPE, text=True
        )
        self._wires.append(wire)
        if wire.stdout is None or wire.stdout.readline() != "carries\n":
            raise Unavailable("no TUN device can be made: load the module tun")
        for host, own, other in ((router, 1, 2), (core, 2, 1)):
            host.ip(f"addr add 10.77.{number}.{own} peer 10.77.{number}.{other} dev wan{name}")
            host.ip(f"addr add fd77:{number}::{own} peer fd77:{number}::{other} dev wan{name}")
            host.ip(f"link set wan{name} up")
        router.net("sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
        router.ip(f"route add default dev wan{name}")
        router.ip(f"-6 route add default dev wan{name}")
        router.ip("link add lan type bridge")
        router.ip(f"addr add 10.78.{number}.{GATE}/24 dev lan")
        router.ip(f"addr add fd78:{number}::fe/64 dev lan")
        router.ip("link set lan up")
        core.ip(f"-6 route add fd78:{number}::/64 dev wan{name}")
        if name == "a":
            router.net("nft", f"add table ip nat; add chain ip nat out {{ type nat hook postrouting priority 100; }}; "
                       f"add rule ip nat out oifname wan{name} masquerade")  # fmt: skip
        else:
            core.ip(f"route add 10.78.{number}.0/24 dev wan{name}")

    def plug(self, edge: str, router: str, device: str) -> None:
        """Give an edge a device in a router's network, with addresses and the way out."""
        host, lan, number = self.hosts[edge], self.hosts[router], ROUTERS[router]
        last = 10 + int(edge[1:])
        lan.ip(f"link add {edge} type veth peer name {device} netns {host.pid}")
        lan.ip(f"link set {edge} master lan up")
        host.ip(f"addr add 10.78.{number}.{last}/24 dev {device}")
        host.ip(f"addr add fd78:{number}::{last}/64 dev {device}")
        host.ip(f"link set {device} up")
        host.ip(f"route add default via 10.78.{number}.{GATE}")
        host.ip(f"-6 route add default via fd78:{number}::fe")

    def unplug(self, edge: str, router: str) -> None:
        """Take an edge out of a router's network, as a laptop that leaves does: its addresses go, unsaid."""
        self.hosts[router].ip(f"link del {edge}")

    # === commands of the documentation ==============================================================================

    def run(self, name: str, *command: str, within_s: float = 300, check: bool = True) -> str:
        """Run a command on a host."""
        return self.hosts[name].run(*self._environment, *command, within_s=within_s, check=check)

    def start(self, name: str, log: str, *command: str) -> subprocess.Popen[str]:
        """Start a command that goes on."""
        return self.hosts[name].start(log, *self._environment, *command)

    def keep(self, name: str, log: str, command: str) -> subprocess.Popen[str]:
        """Start a command that is started again whenever it ends, as systemd does."""
        return self.start(name, log, "bash", "-c", f"while :; do {command}; sleep 1; done")

    def start_store(self) -> None:
        """Start the Redis in which Ray's head keeps its state."""
        self.start("store", "redis", *["redis-server", "--bind", "10.77.0.3", "--protected-mode", "no", "--save"], "")

    def start_head(self) -> None:
        """Start the head, and wait for it."""
        ray = "ray start --head --node-ip-address 10.77.0.1 --port 6379 --num-cpus 0 --include-dashboard false"
        self.start("head", "ray", "env", "RAY_REDIS_ADDRESS=10.77.0.3:6379", *ray.split(), "--block")
        until(lambda: bool(self.run("head", "ray", "status", check=False)), 120, "the head answers")

    def start_worker(self, name: str) -> None:
        """Start a node that joins the head; the coordinator's has no room for verifiers."""
        cpus = 2 if name in WORKERS else 0
        address = f"--address 10.77.0.1:6379 --node-ip-address 10.77.0.{CLOUD[name]}"
        self.keep(name, "ray", f"ray start {address} --num-cpus {cpus} --block")

    def start_coordinator(self, *options: str) -> None:
        """Start the coordinator on its node; `until_ready` waits for it."""
        serving = f"--listen [::]:50050 --lease-secret-file {self.folder}/secret --state {self.folder}/state.json"
        command = f"outrider --log-level info coordinator {serving} {self._tls} --ray-address auto {' '.join(options)}"
        self.keep("front", "coordinator", command)

    def stop_coordinator(self) -> None:
        """End the coordinator, and what would start it again."""
        self.run("front", "pkill", "-9", "-f", "outrider --log-level info coordinator")

    def stop_daemon(self, edge: str) -> None:
        """End an edge's daemon."""
        self.run(edge, "pkill", "-9", "-f", "outrider --log-level info edge")

    def start_daemon(self, edge: str, *options: str, coordinator: str = "front:50050") -> None:
        """Start an edge's daemon, and wait until it has its drafter and a verifier."""
        cache = f"--cache {self.folder}/cache-{edge}"
        calling = f"--coordinator {coordinator} --cloud-tls-ca {self.folder}/certs/ca.pem {cache}"
        command = f"outrider --log-level info edge {calling} --listen 127.0.0.1:8080"
        self.start(edge, "daemon", *command.split(), *options)
        healthy = ("curl", "-sf", "http://127.0.0.1:8080/health")
        until(lambda: '"ok"' in self.run(edge, *healthy, check=False), 120, f"the daemon of {edge} is well")

    @property
    def _tls(self) -> str:
        return f"--tls-cert {self.folder}/certs/server.pem --tls-key {self.folder}/certs/server.key"

    def start_cluster(self) -> dict[str, str]:
        """Start everything in the cloud, with three verifiers; return the address of each."""
        names = [word for name, number in CLOUD.items() for word in ("--host", name, "--host", f"10.77.0.{number}")]
        self.run("front", "outrider", "certs", str(self.folder / "certs"), *names, "--host", "fd77::2")
        self.start_store()
        self.start_head()
        for name in ("front", *WORKERS):
            self.start_worker(name)
        until(lambda: self.alive() == len(WORKERS) + 2, 120, "the nodes join")
        self.start_coordinator()
        common = f"--lease-secret-file {self.folder}/secret --listen 0.0.0.0:0 {self._tls} --target-threads 1"
        verifier = f"outrider verifier --name v-0 --ray-address auto --placement spread --min-step 0.1 {common}"
        self.run("head", *verifier.split())
        self.run("head", "outrider", "scale", "3")
        self.until_ready(3)
        return {each["name"]: each["address"] for each in self.status()["verifiers"]}

    def alive(self, host: str = "head") -> int:
        """Return the number of nodes that Ray's head there believes alive."""
        listed = "import ray; ray.init('auto', log_to_driver=False); print(sum(n['Alive'] for n in ray.nodes()))"
        return int(self.run(host, "python", "-c", listed, check=False) or 0)

    def status(self) -> dict[str, Any]:
        """Return what `outrider status` says."""
        calling = f"--coordinator front:50050 --tls-ca {self.folder}/certs/ca.pem --json"
        return dict(json.loads(self.run("front", "outrider", "status", *calling.split(), check=False) or "{}"))

    def precision(self) -> str:
        """Return the type in which the verifiers compute."""
        return str(self.status()["verifiers"][0]["precision"])

    def until_ready(self, number: int, within_s: float = 240) -> float:
        """Wait until so many verifiers are ready and no more; return the seconds."""
        return until(lambda: self._states() == ["ready"] * number, within_s, f"{number} verifiers are ready")

    def _states(self) -> list[str]:
        return [each["state"] for each in self.status().get("verifiers", ())]

    def end(self) -> None:
        """End all hosts, with all that runs there."""
        for wire in self._wires:
            wire.kill()
            wire.wait()
        for host in self.hosts.values():
            host.end()
