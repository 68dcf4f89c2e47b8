"""Questions by which a server shows at start what it is and, if it is vLLM, what it can do: some ten of a few tokens.

Its version does not tell: runner, doors and limits come from flags, from the environment and from the model.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from outrider.cloud.probes.http_door import HttpDoor, Refusal, ServerAddress
from outrider.cloud.probes.llama_server import examine_llama
from outrider.cloud.probes.scoring import ScoringServer, ServerFacts
from outrider.cloud.probes.sglang_server import examine_sglang
from outrider.cloud.probes.vllm_server import PROMPTS, VllmServer, cached_tokens, canary_text, is_v2, model_cards
from outrider.proto.errors import ConfigError, Internal, Unavailable, did_you_mean

TEXT_TOKENS = 12  # of a greedy text that is to come again


async def examine(address: ServerAddress, model: str, vocab_of: Callable[[str], int]) -> ScoringServer:
    """Return the server at an address, ready to score the tokens of `model`; empty: of the only one.

    `vocab_of` returns how many tokens a model has, given the folder or hub name that the server says its weights have.

    Raises:
        Unavailable: nothing answers there.
        ConfigError: it refuses the key, has no such model, or cannot score; `field` names the option at fault.
    """
    door = HttpDoor(address)
    try:
        of_others = await examine_llama(door, model, vocab_of) or await examine_sglang(door, model, vocab_of)
        return of_others or await _examine(door, model, vocab_of)
    except BaseException as error:
        await door.close()
        if isinstance(error, Unavailable | Internal) and not error.retry_after_s:
            raise ConfigError(error.message, field=error.field or "target_url") from error
        if isinstance(error, FloatingPointError):
            message = f"{error}; start the server with --logprobs-mode raw_logprobs"
            raise ConfigError(message, field="target_url") from error
        raise


async def _examine(door: HttpDoor, model: str, vocab_of: Callable[[str], int]) -> VllmServer:
    name, root, context = await _chosen_model(door, model)
    vocab, version, metrics = vocab_of(root), "", ""
    with suppress(Refusal, Internal):
        version = f" {(await door.ask('/version'))['version']}"
    with suppress(Refusal, Unavailable):
        metrics = (await door.read("/metrics")).decode(errors="replace")
    block = re.search(r'^vllm:cache_config_info\{.*\bblock_size="(\d+)"', metrics, re.MULTILINE)
    text = canary_text(7, 8, vocab)

    async def limit(pattern: str, headers: dict[str, str], **settings: Any) -> int:
        """Ask for more than there can be, and return what the refusal names."""
        try:
            await door.ask(PROMPTS, {"model": name, "prompt": text, "max_tokens": 1, **settings}, headers=headers)
        except Refusal as refusal:
            if refusal.http_status == 400 and (found := re.search(pattern, refusal.message)):
                return int(found[1])
        return 0

    most = await limit(r"max allowed: (\d+)", {}, logprobs=10**9)
    ranks = await limit(r"rank \d+ is out of range \[0, (\d+)\)", {"X-data-parallel-rank": str(10**6)})
    if not most:
        raise ConfigError(f"{door.address.url} tells no log probabilities of tokens", field="target_url")
    facts = ServerFacts(
        kind=f"vLLM{version}",
        model=name,
        root=root,
        context_length=context,
        block_size=int(block[1]) if block else 0,
        max_list=min(most, vocab),
        names=False,
        names_in_rows=False,
        tells_cached=False,
        door="prompts",
        drafts_itself="vllm:spec_decode" in metrics,
        repeatable=False,
    )
    server, lacking = VllmServer(door, facts, vocab, ranks or 1), []
    try:
        answers, is_open = await server.ask_twice(), True
    except Refusal as refusal:
        if refusal.http_status not in (403, 404, 405):
            raise
        lacking.append("--enable-scale-out: a probe is one prompt, not one for each draft")
        answers, is_open = [], False
    tells = (await server.probe(text, text[:2], min(2, most))).cached_tokens is not None
    v2, found = is_v2(answers), cached_tokens(answers[1]) if answers else None
    rest = answers[1]["usage"]["prompt_tokens"] - found if found else 0  # at most a block
    if not tells:
        lacking.append("--enable-prompt-tokens-details: rows that were cached can be told from others")
    if most <= 20 < vocab:
        lacking.append("--max-logprobs -1: rows are as long as a rule needs")
    if 'enable_prefix_caching="False"' in metrics:
        lacking.append("--enable-prefix-caching: no probe reads the whole text again")
    runner = (", V2" if v2 else ", V1") if is_open else ""
    server.facts = facts = replace(
        facts,
        kind=facts.kind + runner,
        block_size=facts.block_size or rest,
        names=v2,
        names_in_rows=v2,
        tells_cached=tells,
        door="rows" if is_open and (v2 or tells) else "prompts",
        lacking=tuple(lacking),
    )
    await server.probe(text, text[:2], min(2, most))
    first = await _greedy_text(server, 7)
    again = await asyncio.gather(*(_greedy_text(server, seed) for seed in (7, 8, 9, 10)))
    server.facts = replace(facts, repeatable=first == again[0])
    return server


async def _chosen_model(door: HttpDoor, model: str) -> tuple[str, str, int]:
    """Return name, root and context of a model."""
    url = door.address.url
    try:
        cards = await model_cards(door, within_s=0)
    except Refusal as refusal:
        raise ConfigError(f"{refusal.message}; is {url} the root of a server's API?", field="target_url") from refusal
    owners = {str(card.get("owned_by")) for card in cards.values()}
    if owners != {"vllm"}:
        message = f"{url} is no vLLM server: its models are owned by {sorted(owners)}"
        raise ConfigError(message, field="target_url", code="OUT-503")
    names = ", ".join(sorted(cards))
    whole = [each for each, card in cards.items() if not card.get("parent")]
    if not model and len({cards[each]["root"] for each in whole}) != 1:
        raise ConfigError(f"{url} serves several models; choose one of {names}", field="target_model")
    name = model or whole[0]
    if name not in cards:
        said = f"{url} has no model {name!r}{did_you_mean(name, cards)}; it serves {names}"
        raise ConfigError(said, field="target_model")
    card = cards[name]
    if not isinstance(card["max_model_len"], int):
        raise ConfigError(f"{url} does not tell the context length of {name!r}", field="target_url")
    return name, card["root"], card["max_model_len"]


async def _greedy_text(server: VllmServer, seed: int) -> list[int]:
    text = canary_text(seed, 8, server.vocab)
    return [each.token async for each in server.stream(text, TEXT_TOKENS, frozenset(), 1)]
