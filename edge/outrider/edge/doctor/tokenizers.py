"""Whether the edge's tokenizer is the target's."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from outrider.edge.control import file_fetcher
from outrider.edge.doctor.finding import Finding, failed, ok
from outrider.edge.doctor.remedies import failed_by
from outrider.edge.doctor.visit import Visit
from outrider.edge.drafters import DrafterCache, find_package
from outrider.proto.errors import ConfigError, OutriderError
from outrider.proto.tokenizer import tokenizer_hash
from outrider.proto.types import Lease

NO_PACKAGE = ("auto", "ngram", "none")


async def compare(visit: Visit) -> Finding:
    """Its hash: against the lease's, or found for the verifier to compare where there is no coordinator."""
    try:
        path = await asyncio.to_thread(_find, visit)
        found = tokenizer_hash(path.read_text(encoding="utf-8"))
    except OutriderError as error:
        return failed_by(error)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, AttributeError) as error:
        return failed(f"the tokenizer cannot be read: {error}", "give --tokenizer the target's tokenizer.json")
    visit.tokenizer = path
    if visit.lease is None:
        return ok(f"{path} has the hash {found[:12]}…; the verifier compares it below", sha256=found)
    wanted = visit.lease.tokenizer_sha256
    if found != wanted:
        return failed(
            f"{path} has the hash {found[:12]}…, the target's tokenizer {wanted[:12]}…",
            "leave out --tokenizer: the coordinator has the right one",
            sha256=found,
        )
    return ok(f"the same on both sides, {found[:12]}…", sha256=found)


def _find(visit: Visit) -> Path:
    config, lease = visit.config, visit.lease
    if config.tokenizer is not None:
        return config.tokenizer.expanduser()
    if lease is not None:
        return _fetched(visit, lease)
    if config.drafter in NO_PACKAGE:
        raise ConfigError(
            "is needed where there is no coordinator: give the target's tokenizer.json, or --drafter PACKAGE",
            field="tokenizer",
        )
    return find_package(config.drafter).tokenizer_path


def _fetched(visit: Visit, lease: Lease) -> Path:
    if lease.tokenizer is None:
        raise ConfigError("is needed: the coordinator does not serve the target's", field="tokenizer")
    config = visit.config
    return DrafterCache(config.cache).ensure_file(
        lease.tokenizer, file_fetcher(config.coordinator, security=config.security)
    )
