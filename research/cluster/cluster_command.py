"""A Ray cluster of several nodes under texts and faults: `python -m research cluster`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial

from rich.console import Console

from outrider.bench.environment import environment
from outrider.bench.table import UNKNOWN, Grid, draw
from outrider.cloud.verifier_config import VerifierConfig
from outrider.deploy.arguments import Given
from outrider.proto.errors import OutriderError
from research.cluster import trials
from research.cluster.hosts import check_rights
from research.cluster.nodes import EDGES, Nodes
from research.cluster.trials import DRAFTING, Row, Texts
from research.research_settings import ClusterSettings

ROAMING, FEW = "e4", ("e1", "e4", "e5")  # edges


def cluster(given: Given) -> int:
    """Run the command; return 0 where every text is whole and right."""
    options = given(ClusterSettings)
    check_rights()
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    edges = FEW if options.short else tuple(EDGES)
    nodes = Nodes(options.folder.resolve(), delay_ms=options.rtt / 2, loss=options.loss / 100, edges=edges)
    console, rows = Console(width=100, highlight=False), list[Row]()
    try:
        for row in _rows(nodes, edges, short=options.short):
            console.print(f"{row.fault}: {row.right} of {row.texts} right, longest gap {row.gap_s:g} s. {row.said}")
            rows.append(row)
    finally:
        nodes.end()
    console.print(draw([_table(rows)]))
    if options.json is not None:
        dtype, prompts = rows[0].said.partition("; ")[0], trials.QUESTIONS
        drawn = {"drafter": DRAFTING[1], "drafter_version": None, "drafter_threads": 1, "prompts": prompts}
        made = environment(VerifierConfig(threads=1), dtype, **drawn, max_tokens=trials.TOKENS, seed=0)
        record = {"environment": asdict(made), "rtt_ms": options.rtt, "loss_percent": options.loss}
        options.json.write_text(json.dumps({**record, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    return 0 if all(row.holds for row in rows) else 1


def _rows(nodes: Nodes, edges: Sequence[str], *, short: bool) -> Iterator[Row]:
    """Yield the row of each trial; one that cannot be made has a row too, and those after it go on."""
    addresses = nodes.start_cluster()
    texts = Texts(nodes)
    nodes.start_daemon("e1", "--drafter", "none", "--drafts-here", "0")
    texts.learn("e1")
    nodes.stop_daemon("e1")
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda edge: nodes.start_daemon(edge, *DRAFTING), edges))
    texts.begin(edges)
    places = len({address.rpartition(":")[0] for address in addresses.values()})
    yield texts.through("none", trials.wait, lambda: f"{nodes.precision()}; three verifiers on {places} nodes")
    running = [
        partial(trials.roamed, nodes, texts, ROAMING),
        partial(trials.node_cut, nodes, texts, 5),
        partial(trials.raylet_killed, nodes, texts),
    ]
    if not short:
        running += [
            partial(trials.node_cut, nodes, texts, 30),
            partial(trials.node_cut, nodes, texts, 90),
            partial(trials.coordinator_killed, nodes, texts),
            partial(trials.head_restarted, nodes, texts),
            partial(trials.scaled, nodes, texts),
        ]
    for trial in running:
        yield _made(trial)
    texts.end()
    yield _made(partial(trials.roamed_idle, nodes, texts, ROAMING))
    if short:
        return
    yield _made(partial(trials.forgotten, nodes, texts, "e1", 60, 150))
    yield _made(partial(trials.forgotten, nodes, texts, "e1", 10, 45))
    yield _made(partial(trials.small_packets, nodes, texts, "e5", said=True))
    yield _made(partial(trials.small_packets, nodes, texts, "e6", said=False))
    yield _made(partial(trials.small_packets, nodes, texts, "e8", said=False, clamped=True))
    nodes.stop_coordinator()
    nodes.start_coordinator("--relay", "--verifier-tls-ca", f"{nodes.folder}/certs/ca.pem")
    nodes.until_ready(3)
    yield _made(partial(trials.six_only, nodes, texts, "e6"))
    yield _made(partial(trials.proxied, nodes, texts, "e7", 15))
    yield _made(partial(trials.autoscaled, nodes, "spare"))


def _made(trial: partial[Row]) -> Row:
    """Return the row of a trial, also of one that could not be made."""
    try:
        return trial()
    except OutriderError as error:
        return Row(trial.func.__name__, 0, 0, 0, 0.0, None, f"{error}"[-400:], failed=True)


def _table(rows: Sequence[Row]) -> Grid:
    cells = [
        (
            row.fault,
            f"{row.right} of {row.texts}",
            str(row.lost),
            f"{row.gap_s:.1f}",
            UNKNOWN if row.back_s is None else f"{row.back_s:.0f}",
        )
        for row in rows
    ]
    headings = ("fault", "right", "lost", "longest gap, s", "back after, s")
    return Grid(
        "A cluster of several nodes",
        headings,
        1,
        [cells],
        "\n".join(f"{row.fault}: {row.said}" for row in rows if row.said),
    )
