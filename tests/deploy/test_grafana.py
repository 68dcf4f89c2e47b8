"""The dashboard: every metric, label and rate of its queries exists in running processes."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from alert_rules import rules, shape_faults
from command_processes import Command, free_port
from prometheus_client.parser import text_string_to_metric_families

from outrider.deploy.metrics_table import Described, metrics_by_part, table
from outrider.proto.plumbing.logs import JsonLines

GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
SELECTOR = re.compile(r"([a-zA-Z_][a-zA-Z0-9_:]*)\s*(\{[^}]*\})?\s*(\[[^\]]*\])?(\s*\()?")
MATCHER = re.compile(r'([a-zA-Z_]\w*)\s*(?:=~|!~|!=|=)\s*"(?:[^"\\]|\\.)*"')
WORDS = {"and", "or", "unless", "offset", "bool", "inf", "nan"}
OVER_TIME = ("rate", "increase")
SECRET = b"0123456789abcdef"
PROMPT = " ".join(["alpha beta"] * 10)  # long enough for placement to recognise
VARIABLES = {"model_name", "drafter", "verifier"}
# Counters by error, which begin with the first one.
AFTER_ERRORS = ("edge_stream_losses", "verifier_refused_sessions", "verifier_failed_sessions")


@dataclass(frozen=True)
class Known:
    """A series that a process shows: its labels, and whether it only ever rises."""

    labels: frozenset[str]
    rises: bool


def known_series() -> dict[str, Known]:
    """Return the series by their names in queries; several parts may show the same name."""
    found: dict[str, Known] = {}

    def add(name: str, labels: frozenset[str], rises: bool) -> None:
        before = found.get(name)
        found[name] = Known(labels | (before.labels if before else frozenset()), rises)

    for metrics in metrics_by_part().values():
        for metric in metrics:
            labels = frozenset(metric.labels)
            if metric.kind == "histogram":
                add(f"{metric.name}_bucket", labels | {"le"}, True)
                add(f"{metric.name}_count", labels, True)
                add(f"{metric.name}_sum", labels, True)
            else:
                add(metric.shown_name, labels, metric.kind == "counter")
    return found


def queries(dashboard: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (panel, expression) of every target, including those in rows."""
    for panel in dashboard["panels"]:
        for inner in (panel, *panel.get("panels", ())):
            for target in inner.get("targets", ()):
                yield inner["title"], target["expr"]


def faults(expression: str, series: dict[str, Known]) -> list[str]:
    """Return the faults of a query; empty: none."""
    found = []
    if expression.count("(") != expression.count(")") or expression.count("{") != expression.count("}"):
        found.append("brackets are not balanced")
    grouped = {label.strip() for group in GROUPING.findall(expression) for label in group.split(",") if label.strip()}
    plain = GROUPING.sub(" ", expression)
    named: list[str] = []
    stack: list[str] = []
    position = 0
    while position < len(plain):
        match = SELECTOR.match(plain, position)
        if match is None:
            if plain[position] == "(":
                stack.append("")
            elif plain[position] == ")" and stack:
                stack.pop()
            position += 1
            continue
        name, braces, over, called = match.groups()
        position = match.end()
        if called:
            stack.append(name)
            continue
        if name.lower() in WORDS:
            continue
        known = series.get(name)
        if known is None:
            found.append(f"no process shows {name}")
            continue
        named.append(name)
        unknown = [label for label in MATCHER.findall(braces or "") if label not in known.labels]
        found += [f"{name} has no label {label}" for label in unknown]
        function = stack[-1] if stack else ""
        if known.rises and not (over and function in OVER_TIME):
            found.append(f"{name} only rises and is not under rate()")
        if not known.rises and over:
            found.append(f"{name} is a gauge and stands under {function}()")
        if name.endswith("_bucket") and not ("histogram_quantile" in stack and "le" in grouped):
            found.append(f"{name} is not under histogram_quantile() by le")
        strange = [label for label in grouped - {"le"} if not any(label in series[other].labels for other in named)]
        found += [f"{name} has no label {label} to group by" for label in strange]
    if not named:
        found.append("names no metric")
    return found


def dashboard_of(root) -> dict[str, Any]:
    return json.loads((root / "deploy" / "grafana" / "outrider.json").read_text(encoding="utf-8"))


def test_every_query_names_metrics_and_labels_that_exist(root) -> None:
    series = known_series()
    asked = list(queries(dashboard_of(root)))
    assert len(asked) > 60
    assert {title: wrong for title, query in asked if (wrong := faults(query, series))} == {}


def test_every_alert_asks_for_metrics_that_exist_and_names_a_remedy(root) -> None:
    series = known_series()
    found = rules((root / "deploy" / "grafana" / "alerts.yaml").read_text(encoding="utf-8"))
    assert len({rule["alert"] for rule in found}) == len(found) > 5
    assert {
        rule["alert"]: wrong for rule in found if (wrong := [*shape_faults(rule), *faults(rule["expr"], series)])
    } == {}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"expr": "sum(outrider:no_such_total) > 1"}, "no process shows outrider:no_such_total"),
        ({"expr": "sum(outrider:verifier_sheds_total) > 1"}, "outrider:verifier_sheds_total only rises"),
        ({"expr": "sum(rate(outrider:verifier_sheds_total[5m]))"}, "compares with no number"),
        ({"labels": {"severity": "bad"}}, "no severity"),
        ({"annotations": {"summary": "Full."}}, "no remedy"),
        ({"for": "soon"}, "bad duration"),
    ],
)
def test_an_alert_with_a_defect_is_found(change, fault) -> None:
    good = {
        "alert": "OutriderSheds",
        "expr": "sum(rate(outrider:verifier_sheds_total[5m])) > 1",
        "labels": {"severity": "page"},
        "annotations": {"summary": "Full.", "remedy": "Scale."},
    }
    series = known_series()
    assert [*shape_faults(good), *faults(good["expr"], series)] == []
    bad = good | change
    assert any(text.startswith(fault) for text in [*shape_faults(bad), *faults(bad["expr"], series)])


@pytest.mark.parametrize(
    ("query", "fault"),
    [
        ("sum(rate(outrider:made_up_total[1m]))", "no process shows outrider:made_up_total"),
        ("sum(rate(vllm:spec_decode_num_drafts_total[1m]))", "no process shows vllm:spec_decode_num_drafts_total"),
        ('outrider:edge_sessions{session="x"}', "outrider:edge_sessions has no label session"),
        ("sum(outrider:generation_tokens_total)", "outrider:generation_tokens_total only rises"),
        ("rate(outrider:edge_sessions[1m])", "outrider:edge_sessions is a gauge"),
        ("sum by (le) (rate(outrider:edge_window_tokens_bucket[1m]))", "is not under histogram_quantile()"),
        ("histogram_quantile(0.5, rate(outrider:edge_window_tokens_bucket[1m]))", "by le"),
        ("sum by (colour) (outrider:edge_sessions)", "has no label colour to group by"),
        ("sum(outrider:edge_sessions", "brackets"),
        ("1 + 1", "names no metric"),
    ],
)
def test_a_query_that_is_wrong_is_found(query, fault) -> None:
    assert any(fault in found for found in faults(query, known_series())), faults(query, known_series())


def test_vllms_queries_work_after_a_replacement() -> None:
    published = (
        "rate(vllm:spec_decode_num_accepted_tokens_total[$interval]) / "
        "rate(vllm:spec_decode_num_draft_tokens_total[$interval])",
        "1 + rate(vllm:spec_decode_num_accepted_tokens_total[$interval]) / "
        "rate(vllm:spec_decode_num_drafts_total[$interval])",
        "sum by (position) (rate(vllm:spec_decode_num_accepted_tokens_per_pos_total[$interval]))",
        'vllm:num_requests_running{model_name="$model_name"}',
        'vllm:num_requests_waiting{model_name="$model_name"}',
        'vllm:kv_cache_usage_perc{model_name="$model_name"}',
        'rate(vllm:generation_tokens_total{model_name="$model_name"}[$__rate_interval])',
        'sum by(finished_reason) (increase(vllm:request_success_total{model_name="$model_name"}[$__rate_interval]))',
    )
    series = known_series()
    assert [faults(query.replace("vllm:", "outrider:"), series) for query in published] == [[]] * len(published)


def test_the_dashboard_has_a_row_for_every_kind_of_process_and_no_panel_twice(root) -> None:
    dashboard = dashboard_of(root)
    rows = [panel["title"] for panel in dashboard["panels"] if panel["type"] == "row"]
    assert {"Edge", "Verifier", "Coordinator"} <= set(rows)
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in dashboard["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in dashboard["panels"])


def test_the_dashboards_variables_exist_and_are_all_defined(root) -> None:
    dashboard, series = dashboard_of(root), known_series()
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", " ".join(query for _, query in queries(dashboard)))) - {"__rate_interval"}
    assert used == VARIABLES == set(variables) - {"datasource"}
    for name in VARIABLES:
        metric, label = re.fullmatch(r"label_values\(([\w:]+), (\w+)\)", variables[name]["definition"]).groups()
        assert label == name
        assert label in series[metric].labels


def test_the_table_of_metrics_is_that_of_the_code(root) -> None:
    written = (root / "deploy" / "grafana" / "METRICS.md").read_text(encoding="utf-8")
    assert written == table(), "python -m outrider.deploy.metrics_table"


def test_names_are_unique_within_a_process_and_say_their_unit() -> None:
    parts = metrics_by_part()
    for metrics in (parts["Edge"] + parts["Edge daemon's HTTP"], parts["Verifier"], parts["Coordinator"]):
        names = [metric.name for metric in metrics]
        assert len(set(names)) == len(names)
    for metrics in parts.values():
        for metric in metrics:
            assert re.fullmatch(r"outrider:[a-z][a-z0-9_]*", metric.name)
            assert metric.meaning.endswith(".")
            assert not {"session", "request", "request_id", "edge", "prompt"} & set(metric.labels)


def test_running_processes_export_what_the_dashboard_queries_with_its_labels(root, decoded) -> None:
    scrapes, _ = decoded
    declared: dict[str, list[Described]] = {}
    for metrics in metrics_by_part().values():
        for metric in metrics:
            declared.setdefault(metric.name, []).append(metric)
    shown, with_values = set(), set()
    for scrape in scrapes:
        for family in text_string_to_metric_families(scrape):
            name = family.name
            assert name in declared, f"{name} is in no table"
            shown |= {metric.shown_name for metric in declared[name]}
            for sample in family.samples:
                with_values.add(sample.name)
                labels = set(sample.labels) - {"le"}
                assert labels in [set(metric.labels) for metric in declared[name]], f"{sample.name} {labels}"
    asked = {name for _, query in queries(dashboard_of(root)) for name in re.findall(r"outrider:\w+", query)}
    http = {metric.shown_name for metric in metrics_by_part()["Edge daemon's HTTP"]}
    base = {re.sub(r"_(bucket|count|sum)$", "", name) for name in asked}
    assert base - http <= shown
    only_when_it_happens = ("loss", "refused", "failed", "relay_", "speedup", "link_seconds", "lessons_", "trainer_")
    silent = {name for name in asked - with_values if not any(part in name for part in only_when_it_happens)}
    assert silent - {name for name in asked if re.sub(r"_(bucket|count|sum)$", "", name) in http} == set()


def test_logs_of_a_whole_decoding_tell_its_session_and_no_secret(decoded) -> None:
    _, lines = decoded
    logged = [json.loads(line) for line in lines.splitlines()]
    by_logger = {line["logger"]: line for line in logged if line.get("session")}
    assert {"outrider.coordinator.service", "outrider.cloud.serving.engine"} <= set(by_logger)
    assert len({line["session"] for line in by_logger.values()}) == 1
    assert {line["verifier"] for line in by_logger.values()} == {"verifier"}
    for secret in (SECRET.decode(), SECRET.hex(), PROMPT, "lease.token", "token="):
        assert secret not in lines


def prometheus(name: str) -> str:
    """Return the path of a program of Prometheus; skip the test without it."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"needs {name}: apt-get install prometheus, or prometheus.io")
    return found


def test_prometheus_sees_each_alert_silent_and_then_firing(root) -> None:
    folder = root / "deploy" / "grafana"
    named = re.findall(r'alertname="(\w+)"', (folder / "alerts_test.yaml").read_text(encoding="utf-8"))
    assert named == [rule["alert"] for rule in rules((folder / "alerts.yaml").read_text(encoding="utf-8"))]
    command = [prometheus("promtool"), "test", "rules", "alerts_test.yaml"]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.ray
@pytest.mark.soak
def test_a_real_prometheus_has_data_for_every_panel(root, tmp_path) -> None:
    program = prometheus("prometheus")
    coordinator, daemon, here = (f"127.0.0.1:{free_port()}" for _ in range(3))
    scraped = ["--listen", coordinator, "--metrics-listen", f"127.0.0.1:{free_port()}"]
    learning = ["--learn", "--learn-folder", str(tmp_path / "learned")]
    up = Command("up", "--target", "reference", *scraped, "--relay", *learning, log=tmp_path / "up.log")
    edge = Command("edge", "--coordinator", coordinator, "--listen", daemon, "--share-texts", log=tmp_path / "edge.log")
    server = None
    try:
        up.start()
        lines = [up.line() for _ in range(3)]
        addresses = [daemon, *re.findall(r"^metrics of \S+ on http://(\S+)/metrics$", "\n".join(lines), re.MULTILINE)]
        assert len(addresses) == 3, lines
        settings = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(root / "deploy" / "grafana" / "alerts.yaml")],
            "scrape_configs": [{"job_name": "outrider", "static_configs": [{"targets": addresses}]}],
        }
        (tmp_path / "prometheus.yml").write_text(json.dumps(settings))
        options = [f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
        edge.start()
        assert edge.line() == f"edge daemon on http://{daemon}"
        began = time.time()
        with (tmp_path / "prometheus.log").open("w") as log:
            server = subprocess.Popen([program, *options, f"--web.listen-address={here}"], stderr=log)
        until = time.monotonic() + 60
        while "ready:" not in edge.errors and time.monotonic() < until:
            time.sleep(0.2)

        def asked(path: str, **query: object) -> Any:
            reply = json.loads(_get(f"http://{here}/api/v1/{path}?{urllib.parse.urlencode(query)}"))
            return reply["data"]

        for number in (1, 2, 3, 4, 4, 4):
            _chat(daemon, f"{'The bear and the fox went to the lake. ' * 40}{number}")
            time.sleep(1.5)  # a rate needs scrapes between
        for number in range(40):  # until a scrape falls into a text whose link is measured
            links = asked("query_range", query="outrider:edge_link_seconds", start=began, end=time.time(), step=1)
            if any(value != "NaN" for series in links["result"] for _, value in series["values"]):
                break
            _chat(daemon, f"{number} more")
        subprocess.run(
            [sys.executable, "-m", "outrider.deploy", "drain", "verifier-0", "--coordinator", coordinator], check=True
        )
        with pytest.raises(urllib.error.HTTPError):
            _chat(daemon, PROMPT)
        time.sleep(5)

        empty = []
        for title, query in queries(dashboard_of(root)):
            plain = query.replace("$__rate_interval", "10s")
            for variable in VARIABLES:
                plain = plain.replace(f"${variable}", ".*")
            found = asked("query_range", query=plain, start=began, end=time.time(), step=1)["result"]
            if not any(value != "NaN" for series in found for _, value in series["values"]):
                empty.append((title, plain))
        assert [(title, query) for title, query in empty if not any(name in query for name in AFTER_ERRORS)] == []
        states = {rule["name"]: (rule["health"], rule["state"]) for rule in asked("rules")["groups"][0]["rules"]}
        assert {health for health, _ in states.values()} == {"ok"}
        assert states["OutriderNoVerifier"][1] == "pending"
    finally:
        for command in (edge, up):
            command.end()
        if server is not None:
            server.terminate()
            server.wait(20)


def _chat(daemon: str, prompt: str) -> None:
    body = {"model": "reference", "max_tokens": 40, "messages": [{"role": "user", "content": prompt}]}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://{daemon}/v1/chat/completions", json.dumps(body).encode(), headers)
    urllib.request.urlopen(request, timeout=60).close()


@pytest.fixture(scope="module")
def decoded(tokenizer_file, tmp_path_factory) -> tuple[list[str], str]:
    """Decode a text through a coordinator and a verifier; return the metrics of all parts, and the log."""
    stream, root_logger = io.StringIO(), logging.getLogger()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    before = root_logger.level
    root_logger.addHandler(handler)
    root_logger.setLevel(logging.DEBUG)
    try:
        return asyncio.run(_decode_and_scrape(tokenizer_file, tmp_path_factory.mktemp("cache"))), stream.getvalue()
    finally:
        root_logger.removeHandler(handler)
        root_logger.setLevel(before)


async def _decode_and_scrape(tokenizer_file, cache: Path) -> list[str]:
    from outrider.cloud.serving.verifier_server import VerifierServer
    from outrider.cloud.verifier_config import VerifierConfig
    from outrider.coordinator.coordinator_config import CoordinatorConfig, StaticVerifier
    from outrider.coordinator.coordinator_server import CoordinatorServer
    from outrider.drafters.packages import FAMILY
    from outrider.edge import Client, EdgeConfig
    from outrider.edge.edge_metrics import EdgeMetrics

    metrics = EdgeMetrics()
    verifier = VerifierServer(VerifierConfig(threads=1, metrics_listen="127.0.0.1:0", draft_here="on"), SECRET)
    address = await verifier.start()
    fixed = StaticVerifier("verifier", address, "reference", tokenizer_file.read_text(encoding="utf-8"))
    config = CoordinatorConfig(
        lease_secret=SECRET,
        listen="127.0.0.1:0",
        verifiers=(fixed,),
        drafters=(FAMILY,),
        metrics_listen="127.0.0.1:0",
        relay=True,
    )
    coordinator = CoordinatorServer(config)
    try:
        edge = EdgeConfig(coordinator=await coordinator.start(), drafter="ngram", cache=cache)
        async with Client(edge) as client:
            events = client.generate(PROMPT, max_tokens=12, observer=metrics.observer())
            [_ async for _ in events]
        addresses = (verifier.metrics_address, coordinator.metrics_address)
        there = [await asyncio.to_thread(_get, f"http://{address}/metrics") for address in addresses]
        return [metrics.exposition()[0].decode(), *there]
    finally:
        await coordinator.stop(0.1)
        await verifier.stop(0.1)


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as reply:
        return str(reply.read().decode())
