"""Faults of a cluster's nodes and networks under texts, and what each costs the texts: a row of the table."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from outrider.deploy.built_in_prompts import DOMAINS, held_out
from outrider.proto.errors import Unavailable
from research.cluster.nodes import GATE, Nodes, until

TOKENS = 96  # of a text: seconds
PER_DOMAIN = 1
QUESTIONS = PER_DOMAIN * len(DOMAINS) + 1
QUIET_S = 20.0
CALM_S = 5.0  # of texts before a fault
DRAFTING = ("--drafter", "general")
LONG = -1  # question of many packets


@dataclass(frozen=True, slots=True)
class Row:
    """One fault, and its cost to the texts that it met.

    Attributes:
        fault: in words.
        texts: that were asked for before its end and ended after its beginning.
        right: of these, equal to what the target writes undisturbed.
        lost: that ended early or with an error.
        gap_s: longest time without a piece of a text, from its request to its end.
        back_s: seconds from the fault until all verifiers served again; None: none went.
        said: what else is to be known.
        needs: what to set, where texts are lost without; empty: nothing.
        failed: whether it could not be tried.
    """

    fault: str
    texts: int
    right: int
    lost: int
    gap_s: float
    back_s: float | None = None
    said: str = ""
    needs: str = ""
    failed: bool = False

    @property
    def holds(self) -> bool:
        """Whether every text is whole and right, or it is known what they need."""
        return not self.failed and (bool(self.needs) or (self.texts == self.right and self.lost == 0))


class Texts:
    """Texts that every edge asks for, one after the other, and what they should be."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._folder = nodes.folder
        prompts = [prompt.text for prompt in held_out(PER_DOMAIN)]
        self.questions = [
            {"prompt": text, "max_tokens": TOKENS, "temperature": (0.0, 0.8)[number % 2], "seed": number}
            for number, text in enumerate(prompts)
        ]
        self.questions.append({**self.questions[0], "prompt": " ".join(prompt.text for prompt in held_out(2))})
        (self._folder / "questions.json").write_text(json.dumps(self.questions), encoding="utf-8")
        self._expected: list[str] = []
        self._asking: dict[str, subprocess.Popen[str]] = {}

    def learn(self, edge: str) -> None:
        """Take down what the target writes, by one edge that drafts nothing."""
        self._start(edge, 0, len(self.questions), "expected").wait()
        answers = self._answers(edge, "expected")
        if any(answer["error"] for answer in answers):
            raise Unavailable(f"the target does not write undisturbed: {answers}")
        self._expected = [answer["text"] for answer in answers]

    def _start(self, edge: str, first: int, number: int, name: str) -> subprocess.Popen[str]:
        output = self._folder / f"{edge}-{name}.jsonl"
        retries = 0 if number == 1 else 5
        words = [str(self._folder / "questions.json"), str(first), str(number), str(output), str(retries)]
        return self._nodes.start(edge, "asking", sys.executable, "-m", "research.cluster.asking", *words)

    def _answers(self, edge: str, name: str = "texts") -> list[dict[str, Any]]:
        path = self._folder / f"{edge}-{name}.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def begin(self, edges: Sequence[str]) -> None:
        """Let these edges ask until `end`."""
        for number, edge in enumerate(edges):
            self._asking[edge] = self._start(edge, number * 5, 0, "texts")

    def end(self) -> None:
        """Ask no more."""
        for asking in self._asking.values():
            asking.terminate()
            asking.wait()
        self._asking.clear()

    def through(self, fault: str, happen: Callable[[], float | None], said: Callable[[], str] = str) -> Row:
        """Let something happen under texts that run everywhere, and count what became of them.

        Args:
            fault: its name in the table.
            happen: what happens; it returns when it is over, with the time that verifiers took to be back.
            said: a remark, asked for afterwards.
        """
        time.sleep(CALM_S)
        began = time.time()
        back_s = happen()
        over = time.time()
        until(lambda: all(self._later(edge, over) for edge in self._asking), 180, f"texts after {fault}")
        met = [
            answer
            for edge in self._asking
            for answer in self._answers(edge)
            if answer["times"][-1] >= began and answer["times"][0] <= over
        ]
        return cost(fault, met, self._expected, since=began, back_s=back_s, said=said)

    def _later(self, edge: str, moment: float) -> bool:
        return any(answer["times"][0] > moment and not answer["error"] for answer in self._answers(edge))

    def once(self, edge: str, fault: str, question: int = 0) -> Row:
        """Ask for one text by an edge that asks for none, and return its row."""
        before = len(self._answers(edge))
        began = time.time()
        self._start(edge, question % len(self.questions), 1, "texts").wait()
        return cost(fault, self._answers(edge)[before:], self._expected, since=began)


def cost(
    fault: str,
    met: Sequence[Mapping[str, Any]],
    expected: Sequence[str],
    *,
    since: float,
    back_s: float | None = None,
    said: Callable[[], str] = str,
) -> Row:
    """Return the row of the answers that a fault met, whose gaps count from `since`."""
    if not met:
        raise Unavailable(f"{fault} met no text")
    right = sum(answer["text"] == expected[answer["question"]] for answer in met)
    lost = [answer for answer in met if answer["error"] or not answer["finish"]]
    gaps = [b - max(a, since) for answer in met for a, b in pairwise(answer["times"]) if b > since]
    remarks = [*sorted({answer["error"][:200] for answer in lost}), said()]
    back_s = None if back_s is None else round(back_s, 1)
    return Row(fault, len(met), right, len(lost), round(max(gaps), 2), back_s, "; ".join(filter(None, remarks)))


# === what happens to nodes ==========================================================================================


def wait() -> None:
    """Let nothing happen, for comparison."""
    time.sleep(QUIET_S)


def raylet_killed(nodes: Nodes, texts: Texts) -> Row:
    """Kill the raylet of a worker node; Ray's command is started again, as systemd does."""

    def happen() -> float:
        nodes.run("w2", "pkill", "-9", "raylet")
        time.sleep(3)
        return 3 + nodes.until_ready(3)

    return texts.through("a raylet is killed", happen)


def node_cut(nodes: Nodes, texts: Texts, seconds: float) -> Row:
    """Cut a worker node with a verifier off for some seconds."""

    def happen() -> float:
        nodes.hosts["core"].ip("link set w1 down")
        time.sleep(seconds)
        nodes.hosts["core"].ip("link set w1 up")
        return seconds + nodes.until_ready(3)

    return texts.through(f"a node is cut off for {seconds:g} s", happen)


def head_restarted(nodes: Nodes, texts: Texts) -> Row:
    """Kill every process of the head, and start it again 5 s later, on the state in Redis."""

    def happen() -> float:
        before = {each["name"]: each["restarts"] for each in nodes.status()["verifiers"]}
        nodes.run("head", "pkill", "-9", "-f", "ray", check=False)
        time.sleep(5)
        nodes.start_head()
        taken = nodes.until_ready(3)
        after = {each["name"]: each["restarts"] for each in nodes.status()["verifiers"]}
        restarts.append(sum(after.values()) - sum(before.values()))
        return 5 + taken

    restarts: list[int] = []
    return texts.through("the head is restarted", happen, lambda: f"{restarts[0]} verifiers were started again")


def coordinator_killed(nodes: Nodes, texts: Texts) -> Row:
    """Kill the coordinator, which is started again."""

    def happen() -> float:
        nodes.run("front", "pkill", "-9", "-f", "bin/outrider --log-level info coordinator")
        return nodes.until_ready(3)

    return texts.through("the coordinator is killed", happen)


def scaled(nodes: Nodes, texts: Texts) -> Row:
    """Have `outrider scale` take two verifiers away and bring them back."""

    def happen() -> float:
        nodes.run("head", "outrider", "scale", "1")
        nodes.until_ready(1)
        began = time.monotonic()
        nodes.run("head", "outrider", "scale", "3")
        nodes.until_ready(3)
        return time.monotonic() - began

    def where() -> str:
        hosts = {each["address"].rpartition(":")[0] for each in nodes.status()["verifiers"]}
        return f"three verifiers on {len(hosts)} nodes"

    return texts.through("scaled to 1, then 3", happen, where)


# === what happens to edges ==========================================================================================


def roamed(nodes: Nodes, texts: Texts, edge: str) -> Row:
    """Let an edge change its network in mid-text, to and fro."""

    def happen() -> None:
        for old, new in (("a", "b"), ("b", "a")):
            nodes.unplug(edge, old)
            nodes.plug(edge, new, f"eth{new}")
            time.sleep(10)

    return texts.through("an edge changes its network, twice", happen)


def roamed_idle(nodes: Nodes, texts: Texts, edge: str) -> Row:
    """Let an edge change its network between two texts."""
    nodes.unplug(edge, "a")
    nodes.plug(edge, "b", "ethb")
    return texts.once(edge, "an idle edge changes its network, and asks at once")


def forgotten(nodes: Nodes, texts: Texts, edge: str, after_s: int, idle_s: float) -> Row:
    """Let the router drop every flow that has been idle for `after_s`, while an edge is idle for longer."""
    router = nodes.hosts["a"]
    strict = f"net.netfilter.nf_conntrack_tcp_timeout_established={after_s} net.netfilter.nf_conntrack_tcp_loose=0"
    router.net("sysctl", "-qw", *strict.split())
    router.net("nft", f"{_chain('strict', 'forward')} add rule inet strict on ct state invalid drop")
    time.sleep(idle_s)
    row = texts.once(edge, f"a router forgets flows after {after_s} s, and an edge idles for {idle_s:g} s")
    router.net("nft", "delete table inet strict")
    return row


def small_packets(nodes: Nodes, texts: Texts, edge: str, *, said: bool, clamped: bool = False) -> Row:
    """Let the link take packets of 1,280 bytes, under a prompt of several.

    The hosts at its ends say so or not; the router may clamp what TCP's two ends agree on.
    """
    ends = [nodes.hosts[name] for name in ("b", "core")]
    mute = "add rule inet mute on meta l4proto icmp drop; add rule inet mute on icmpv6 type packet-too-big drop"
    for end in ends:
        end.ip("link set wanb mtu 1280")
        if not said:
            end.net("nft", f"{_chain('mute', 'output')} {mute}")
    if clamped:
        clamp = "add rule inet clamp on tcp flags syn tcp option maxseg size set 1220"
        nodes.hosts["b"].net("nft", f"{_chain('clamp', 'forward')} {clamp}")
        nodes.stop_daemon(edge)  # its connections are older than that
        nodes.start_daemon(edge, *DRAFTING)
    words = "" if said else ", which no router says" + (", segments clamped" if clamped else "")
    row = texts.once(edge, f"packets of 1,280 bytes{words}", LONG)
    for end in ends:
        end.ip("link set wanb mtu 1500")
        if not said:
            end.net("nft", "delete table inet mute")
    if clamped:
        nodes.hosts["b"].net("nft", "delete table inet clamp")
    return row if said or clamped else replace(row, needs="clamped segments at the router, as in the next row")


def _chain(table: str, hook: str) -> str:
    return f"add table inet {table}; add chain inet {table} on {{ type filter hook {hook} priority 0; }};"


def six_only(nodes: Nodes, texts: Texts, edge: str) -> Row:
    """Let an edge have IPv6 alone: it reaches verifiers through a coordinator that relays."""
    nodes.stop_daemon(edge)
    nodes.hosts[edge].ip("-4 addr flush dev eth0")
    nodes.start_daemon(edge, *DRAFTING, coordinator="[fd77::2]:50050")
    return texts.once(edge, "an edge with IPv6 alone, relayed")


_PROXY = """
daemon off; master_process off; error_log stderr; pid {folder}/nginx.pid;
events {{}}
http {{
  access_log off; client_body_temp_path {folder}/body;
  server {{
    listen 10.78.2.254:50050 ssl http2;
    ssl_certificate {folder}/certs/server.pem; ssl_certificate_key {folder}/certs/server.key;
    client_body_timeout {idle}; client_max_body_size 0;
    location / {{ grpc_pass grpcs://10.77.0.2:50050; grpc_read_timeout {idle}; grpc_send_timeout {idle}; }}
  }}
}}
"""


def proxied(nodes: Nodes, texts: Texts, edge: str, idle_s: int) -> Row:
    """Let an edge come through nginx, which ends streams without a frame for some seconds, after such a time."""
    nodes.stop_daemon(edge)
    (nodes.folder / "nginx.conf").write_text(_PROXY.format(folder=nodes.folder, idle=f"{idle_s}s"), encoding="utf-8")
    nodes.start("b", "nginx", "nginx", "-c", str(nodes.folder / "nginx.conf"))
    calling = ("--cloud-tls-server-name", "front")
    nodes.start_daemon(edge, *DRAFTING, *calling, coordinator=f"10.78.2.{GATE}:50050")
    time.sleep(2 * idle_s)
    return texts.once(edge, f"through nginx, which ends streams that are idle for {idle_s} s")


# === a fleet that grows by itself ===================================================================================

_KIND = {"resources": {"CPU": 2}, "node_config": {}, "min_workers": 0, "max_workers": 2}
_HEAD = {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}
_PROVIDER = {  # nodes that are processes of the head's machine, for tests of Ray
    "type": "fake_multinode",
    "head_node_id": "f" * 51 + "00000",
    "use_node_id_as_ip": True,
    "disable_node_updaters": True,
    "disable_launch_config_check": True,
}
_NOTHING = "initialization setup head_setup worker_setup head_start_ray worker_start_ray"
_SCALING = {
    **{f"{name}_commands": [] for name in _NOTHING.split()},
    **{name: [] for name in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
    **{name: {} for name in ("auth", "docker", "file_mounts")},
    "cluster_name": "grows",
    "max_workers": 4,
    "idle_timeout_minutes": 0.2,
    "file_mounts_sync_continuously": False,
    "provider": _PROVIDER,
    "available_node_types": {"ray.head.default": _HEAD, "verifiers": _KIND},
    "head_node_type": "ray.head.default",
}


def autoscaled(nodes: Nodes, host: str) -> Row:
    """Let Ray's autoscaler start a node for each verifier that has no room, and end one that idles after its drain."""
    (nodes.folder / "scaling.json").write_text(json.dumps(_SCALING), encoding="utf-8")
    head = f"ray start --head --num-cpus 0 --include-dashboard false --autoscaling-config {nodes.folder}/scaling.json"
    nodes.run(host, "env", "AUTOSCALER_UPDATE_INTERVAL_S=1", "RAY_FAKE_CLUSTER=1", *head.split())
    common = f"--lease-secret-file {nodes.folder}/secret --target-threads 1 --cpus 2"
    began, numbers = time.monotonic(), [nodes.alive(host)]
    nodes.run(host, *f"outrider verifier --name a-0 --ray-address auto {common}".split())
    first_s = time.monotonic() - began
    numbers.append(nodes.alive(host))
    nodes.run(host, "outrider", "scale", "2")
    numbers.append(nodes.alive(host))
    nodes.run(host, "outrider", "scale", "1")
    gone_s = until(lambda: nodes.alive(host) == numbers[1], 120, "the idle node ends")
    said = f"{', '.join(map(str, numbers))}, {numbers[1]} nodes; a verifier on a new one after {first_s:.0f} s, "
    return Row("Ray's autoscaler", 0, 0, 0, 0.0, None, f"{said}an idle one gone {gone_s:.0f} s after its drain")
