"""Choice and loading of a verifier's own drafter, by its settings and the machine."""

from __future__ import annotations

import logging

import torch

from outrider.cloud.drafting.draft_threads import DraftThreads
from outrider.cloud.drafting.drafted_text import OwnDrafter
from outrider.cloud.serving.local_source import LocalSource
from outrider.cloud.target.backend import TargetFacts
from outrider.cloud.verifier_config import VerifierConfig
from outrider.drafters import NgramDrafter, embedded_packages, find_package
from outrider.drafters.packages import FAMILY, read_manifest
from outrider.drafters.search import NGRAM
from outrider.proto.errors import ConfigError, OutriderError, TokenizerMismatch
from outrider.proto.plumbing.cores import available_cores
from outrider.proto.plumbing.logs import about

log = logging.getLogger(__name__)


def local_source(config: VerifierConfig, target: TargetFacts) -> LocalSource | None:
    """Return the source of drafts beside the target that the settings ask for; None: there is none.

    Raises:
        ConfigError: `--draft-here on` finds no drafter for this target, or no core for it; the remedy is named.
    """
    if config.draft_here == "off":
        return None
    threads = config.draft_threads or spare_cores(config, target)
    if not threads:
        if config.draft_here == "auto":
            return None
        threads = 1  # it was asked for: the two then share a core
    try:
        own = load_own_drafter(config.draft_with, target)
    except (OutriderError, OSError, ImportError) as error:
        reason = error.message if isinstance(error, OutriderError) else error
        if config.draft_here == "on":
            remedy = "name one that reads its tokens by --draft-with, or leave --draft-here at auto"
            raise ConfigError(f"finds no drafter for this target: {reason}; {remedy}", field="draft_here") from error
        level = logging.WARNING if config.draft_with else logging.INFO  # one that was named is missed
        log.log(level, "no drafts are made beside the target: %s", reason, extra=about(verifier=config.name))
        return None
    line = "verifier %s drafts beside its target with %s in %d threads; a position of a text takes up to %d bytes"
    log.info(line, config.name, own.name, threads, own.position_bytes, extra=about(verifier=config.name))
    return LocalSource(own, DraftThreads(threads), config.draft_price)


def load_own_drafter(name: str, target: TargetFacts) -> OwnDrafter:
    """Return the drafter `name`, `ngram`, or where that is empty the first embedded one of the target, hashes checked.

    Raises:
        NotFound, DataLoss, InvalidArgument, ModelRefused: it cannot be had; ONNX Runtime may be missing (ImportError).
        TokenizerMismatch: it was made for another tokenizer than the target's.
    """
    if name == NGRAM:
        return OwnDrafter(NgramDrafter(vocab_size=target.vocab_size), target.vocab_size)
    package = find_package(name or _embedded_for(target))
    if package.tokenizer_sha256 != target.tokenizer_sha256:
        raise TokenizerMismatch(
            f"{package.name!r} was made for another tokenizer, and only edges draft by text", field="draft_with"
        )
    from outrider.drafters.onnx import OnnxDrafter

    drafter = OnnxDrafter(package, threads=1)
    return OwnDrafter(drafter, target.vocab_size, package.reach, package.cache.bytes_of(1))


def _embedded_for(target: TargetFacts) -> str:
    """Return the name of the first embedded drafter that reads the target's tokens, or else of the first of all."""
    names = embedded_packages()
    fitting = (name for name in names if read_manifest(FAMILY / name).tokenizer_sha256 == target.tokenizer_sha256)
    return next(fitting, names[0])


def spare_cores(config: VerifierConfig, target: TargetFacts) -> int:
    """Return how many cores of this machine the target's threads leave."""
    used = (config.threads or torch.get_num_threads()) if target.device.type == "cpu" else config.tensor_parallel
    return max(0, available_cores() - used)
