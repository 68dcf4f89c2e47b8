"""Fixtures of all tests: one loaded verifier of the embedded target, and one thread for torch."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Generator, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil
import pytest
from default_signals import default_signals_for_children
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

# What is embedded serves most tests; commands of these would fetch another target.
for command in ("RUN", "UP", "DEMO"):
    os.environ.setdefault(f"OUTRIDER_{command}_TARGET", "reference")

# Tests' own clients reach servers of this machine past any proxy.
for name in ("no_proxy", "NO_PROXY"):
    os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1", "localhost", "::1")))

settings.load_profile("ci")  # the same examples every time, however slow the machine; `--hypothesis-profile` has others

ROOT = Path(__file__).parent.parent
STOLEN_SHARE = 0.05  # of the cores' time; a virtual machine that lacks more cannot be measured on


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests that are coroutines in a loop of their own, and skip those marked gpu where there is none."""
    import torch

    for item in items:
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            item.obj = _in_a_loop(item.obj)

    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch's build for it"))


def _in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    return lambda **fixtures: asyncio.run(test(**fixtures))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Add what was skipped, and why, to the list that `make test` shows at its end."""
    if (listed := os.environ.get("SKIPPED")) and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(listed, "a", encoding="utf-8") as file:
            for report in terminalreporter.stats.get("skipped", ()):
                reason = report.longrepr[2].removeprefix("Skipped: ")
                file.write(f"{report.nodeid.partition('::')[0]}: {reason}\n")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """A test that measures time and fails is skipped where the host gave this machine's cores to others meanwhile."""
    if not pyfuncitem.get_closest_marker("alone"):
        return (yield)
    before = psutil.cpu_times()
    try:
        return (yield)
    except AssertionError as error:
        after = psutil.cpu_times()
        stolen = (after.steal - before.steal) / max(1e-9, sum(after) - sum(before))
        if stolen < STOLEN_SHARE:
            raise
        pytest.skip(f"nothing can be measured: the host took {stolen:.0%} of the cores' time ({error})")


@pytest.fixture(autouse=True, scope="session")
def _signals_reach_what_tests_start() -> Iterator[None]:
    """Have what tests start heed signals where `nohup make test &` does not; pytest itself still ignores them."""
    with default_signals_for_children():
        yield


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    import torch

    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)  # training takes all cores


@pytest.fixture(autouse=True, scope="session")
def _no_progress() -> None:
    """Have commands of this process say nothing about what they wait for, however slow the machine is."""
    from outrider.deploy.process import progress

    progress.SILENT_S = 3600.0


@lru_cache(maxsize=4)
def _loaded(target: str, exact: str, device: str, dtype: str) -> tuple[Any, str, dict[str, Any]]:
    """Return model, tokenizer and what loading has found out, which does not depend on the size of the KV cache."""
    from outrider.cloud.target.target_loading import load_target

    first = load_target(target, exact=exact, device=device, dtype=dtype, kv_tokens=4096)
    return first.model, first.tokenizer_json, {name: getattr(first, name) for name in ("passes", "packing", "straight")}


def _shared_target(
    target: str = "reference", *, exact: str = "auto", device: str = "cpu", dtype: str = "float32", **sizes: int
) -> Any:
    from outrider.cloud.target.target import Target

    model, tokenizer, parts = _loaded(target, exact, device, dtype)
    return Target(model, tokenizer, **{"kv_tokens": 4096, "page_size": 16, **sizes}, **parts)


@pytest.fixture(scope="session")
def shared_target() -> Callable[..., Any]:
    """Load and check an embedded target once for all tests of this process; each gets a KV cache of its own.

    Tests of loading, and those that change the model, call `load_target` itself.
    """
    return _shared_target


@pytest.fixture(autouse=True, scope="session")
def _verifiers_share_the_embedded_target() -> Iterator[None]:
    """Let verifiers of this process have the shared target."""
    backends = sys.modules.get("outrider.cloud.serving.backends")
    if backends is None:  # no collected test has verifiers
        yield
        return
    from outrider.cloud.models.family_index import embedded_targets
    from outrider.cloud.target.target_loading import load_target

    def load(target: str, **options: Any) -> Any:
        return (_shared_target if target in embedded_targets() else load_target)(target, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "load_target", load)
        yield


@pytest.fixture(autouse=True)
def _no_core_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let verifiers of this process leave the drafting to edges, which most tests are about, unless they say more."""
    monkeypatch.setattr("outrider.cloud.serving.local_source.spare_cores", lambda config, target: 0)


@pytest.fixture(autouse=True)
def _logs_stay_as_they_were() -> Iterator[None]:
    """Fail the test that leaves the log of the whole process changed, rather than a later one that reads it."""
    logger = logging.getLogger("outrider")
    before = _log_state(logger)
    yield
    after = _log_state(logger)
    logger.level, logger.propagate, logger.disabled, logger.handlers[:] = before
    assert after == before


def _log_state(logger: logging.Logger) -> tuple[int, bool, bool, list[logging.Handler]]:
    return logger.level, logger.propagate, logger.disabled, logger.handlers[:]


@pytest.fixture
def all_drafts_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every received draft is verified and credit stays: else both follow what steps were measured to cost.

    On a busy machine rows can look so dear that no draft is verified at all. Drafts can still come too late there: a
    test that needs some to be accepted gives its session patience too.
    """
    monkeypatch.setattr("outrider.proto.session.verifier.best_block", lambda view: view.max_drafts)
    monkeypatch.setattr("outrider.proto.session.verifier.overtakes", lambda view: True)


@pytest.fixture(scope="session")
def tokenizer_file() -> Path:
    """`tokenizer.json` of the embedded target."""
    from outrider.cloud.models.family_index import target_folder, tokenizer_file

    return tokenizer_file(target_folder("reference"))
