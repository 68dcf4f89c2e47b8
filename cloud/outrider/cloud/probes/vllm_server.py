"""A stock vLLM server as a server that scores tokens.

`/inference/v1/generate` scores a whole probe as one prompt, with the prefix cache read ("rows"). A row is made with
the token before it, so none is made where that token was cached: Model Runner V2 leaves such rows out, and V1 returns
memory that nobody has written. `/v1/completions` needs no flag and has no such hazard: a prompt a row ("prompts").
"""

from __future__ import annotations

import asyncio
import base64
import io
import math
import zlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing

import numpy as np

from outrider.cloud.probes.http_door import HttpDoor, Json, Refusal, understood
from outrider.cloud.probes.scoring import ListedRow, Probe, ServerFacts, StreamedToken
from outrider.proto.errors import Internal, Unavailable

ROWS, PROMPTS = "/inference/v1/generate", "/v1/completions"
# A model's generation_config.json sets defaults for /v1/completions, and a penalty would make another text.
GREEDY = {"temperature": 0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 1, "ignore_eos": True}
NO_PENALTY = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
BY_IDS = {"return_tokens_as_token_ids": True, "return_token_ids": True}
NOT_JSON = "Out of range float"  # V1's unwritten rows happened to hold no number
MINUS_INFINITY = -9999.0  # as vLLM writes it
MAX_NAMES = 128  # vLLM's own limit, a request
TRIES = 4  # for a row that other people's requests can spoil

Answer = tuple[list[ListedRow | None], int | None, list[dict[int, float]] | None]


class VllmServer:
    """One model of a vLLM server.

    Args:
        door: its connections, which `close` ends.
        facts: what the canary found.
        vocab: tokens of the model. vLLM's engine may die of a larger id, so none may be sent.
        ranks: data-parallel ranks, each of which has a cache of its own; a text stays with one of them.
    """

    def __init__(self, door: HttpDoor, facts: ServerFacts, vocab: int, ranks: int = 1) -> None:
        self.door, self.facts, self.vocab, self._ranks = door, facts, vocab, ranks
        self._answers_as = ""  # the model's first alias, which need not be the one that requests name

    async def probe(
        self,
        text: Sequence[int],
        drafts: Sequence[int],
        width: int,
        named: Sequence[Sequence[int]] = (),
        salt: str = "",
    ) -> Probe:
        """Return the rows after `text` and after each draft; `named` are at most `max_list` a row."""
        prefixes = [[*text, *drafts[:place]] for place in range(len(drafts) + 1)]
        rows, cached, names = await self._answer(prefixes, width, named, salt)
        found = await self._completed(prefixes, rows, width, salt)
        if named:  # vLLM drops the names of all rows where the first was cached
            names = names or await asyncio.gather(
                *(self.name(*each, salt) for each in zip(prefixes, named, strict=True))
            )
            found = [row.with_named(more) for row, more in zip(found, names, strict=True)]
        return Probe(tuple(found), cached, rows.count(None))

    async def name(self, text: Sequence[int], tokens: Sequence[int], salt: str = "") -> dict[int, float]:
        """Return the log probabilities of `tokens` after `text`; V1 would spoil other people's answers."""
        if not self.facts.names:
            raise Internal("this server tells no tokens by name")
        parts = [list(tokens[first : first + MAX_NAMES]) for first in range(0, len(tokens), MAX_NAMES)]
        settings = [{"logprobs": 1, "logprob_token_ids": part} for part in parts]
        answers = await asyncio.gather(*(self._ask(PROMPTS, [text], each, salt) for each in settings))
        with understood():
            told = [answer["choices"][0]["logprobs"]["top_logprobs"][0] for answer in answers]
            pairs = [(token, row[f"token_id:{token}"]) for part, row in zip(parts, told, strict=True) for token in part]
            return {token: _number(logp) for token, logp in pairs}

    async def stream(
        self, text: Sequence[int], max_tokens: int, ends: frozenset[int], width: int, salt: str = ""
    ) -> AsyncGenerator[StreamedToken, None]:
        """Yield the server's own greedy tokens after `text`; to close the generator ends the request."""
        path, written, over = self._path, list(text), False
        goal = min(len(text) + max_tokens, self.facts.context_length)
        while len(written) < goal and not over:
            before, finish = len(written), ""
            settings = {"max_tokens": goal - before, "stop_token_ids": sorted(ends), "logprobs": width or None}
            body = self._body(path, [written], settings, salt) | {"stream": True}
            await self._be_sure()
            events = self.door.stream(path, body, tokens=before, headers=self._headers(text, salt))
            async with aclosing(events):
                async for event in events:
                    with understood():
                        if "error" in event:
                            raise Unavailable(f"the server broke off a text: {event['error']}", field="target_url")
                        (choice,) = event["choices"]
                        tokens, finish = choice["token_ids"], choice["finish_reason"]
                        told = self._sampled(choice["logprobs"], width) if tokens and width else [None] * len(tokens)
                    for token, row in zip(tokens, told, strict=True):
                        if not over:
                            found = row or (await self._rows([written], width, salt))[0] if width else None
                            written.append(token)
                            over = token in ends or len(written) == goal
                            yield StreamedToken(token, found)
            # A text that ends by a token which only the model's own settings name goes on.
            if not over and (finish != "stop" or len(written) == before):
                raise Unavailable(f"the server ended a text early ({finish})", field="target_url", retry_after_s=1.0)

    async def chat(self, messages: Sequence[Mapping[str, str]]) -> Sequence[int]:
        """Return the tokens that the server's own template makes of a chat; none: it has none."""
        body = {"model": self.facts.model, "messages": list(messages), "add_generation_prompt": True}
        try:
            tokens: list[int] = (await self.door.ask("/tokenize", body)).get("tokens", [])
        except Refusal:
            return []
        return tokens

    async def close(self) -> None:
        """Close the connections."""
        await self.door.close()

    async def _completed(
        self, prefixes: Sequence[Sequence[int]], rows: Sequence[ListedRow | None], width: int, salt: str
    ) -> list[ListedRow]:
        """Return the rows, of which those that are None are asked for again.

        A text that ends within a block of the cache is read from the block's beginning, so one request brings all rows
        of a block.
        """
        ends = dict[int, list[int]]()
        for place, row in enumerate(rows):
            if row is None:
                position = len(prefixes[place]) - 1
                ends.setdefault(position // (self.facts.block_size or 1), []).append(place)
        spans = [(places[0], places[-1] + 1) for places in ends.values()]
        asked = await asyncio.gather(*(self._rows(prefixes[first:last], width, salt) for first, last in spans))
        again = {
            first + i: row for (first, _), of_block in zip(spans, asked, strict=True) for i, row in enumerate(of_block)
        }
        return [row or again[place] for place, row in enumerate(rows)]

    async def _rows(self, prefixes: Sequence[Sequence[int]], width: int, salt: str) -> list[ListedRow]:
        """Return the rows after prefixes of one block, by a request of their own."""
        for again in range(1, TRIES + 1):  # wider rows lie in other memory; without the cache all are written
            wider = min(width + 3 * again, self.facts.max_list)
            rows, *_ = await self._answer(prefixes, wider, (), salt, skip=again == TRIES)
            found = [row for row in rows if row is not None]
            if len(found) == len(prefixes):
                return found
        raise FloatingPointError("the server's log probabilities are no numbers")

    async def _answer(
        self,
        prefixes: Sequence[Sequence[int]],
        width: int,
        named: Sequence[Sequence[int]],
        salt: str,
        *,
        skip: bool = False,
    ) -> Answer:
        """Return the rows after each prefix, of which each but the first is a draft longer; None: the row is lost."""
        count, tokens = len(prefixes), list(prefixes[-1])
        if self._path == PROMPTS:
            answer = await self._ask(PROMPTS, prefixes, {"logprobs": width}, salt)
            with understood():
                choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
                return [self._sampled(choice["logprobs"], width)[0] for choice in choices], cached_tokens(answer), None
        named = named if len(tokens) + 1 < self.facts.context_length else ()
        wanted = count - (not named)
        settings: Json = {} if named else {"logprobs": width}
        if named:  # only of tokens within a prompt, so another token follows the last draft
            tokens.append(tokens[-1])
            longest = max(map(len, named))
            settings["prompt_logprob_token_ids"] = [[*ids, *[-1] * (longest - len(ids))] for ids in named]
            settings["prompt_logprob_start"] = len(prefixes[0]) - 1
        if wanted:
            settings |= {"prompt_logprobs": width, "skip_reading_prefix_cache": skip}
        try:
            answer = await self._ask(ROWS, [tokens], settings, salt)
        except Refusal as refusal:
            if NOT_JSON not in refusal.message:
                raise
            return [None] * count, None, None
        with understood():
            scored, cached = (answer.get("prompt_logprobs") or [])[1:], cached_tokens(answer)
            scores = answer.get("prompt_token_id_logprobs")
            made = min(wanted, len(scored))
            if len(scored) == len(tokens) - 1:  # V1, or V2 that found nothing
                told = skip or cached is not None or scores or len(tokens) <= self.facts.block_size
                made = min(made, max(0, len(scored) - (cached or 0))) if told else 0
            rows: list[ListedRow | None] = [None] * (wanted - made)
            rows += [self._scored(scored[place], width) for place in range(-made, 0)]
            if not named:
                return rows + self._sampled(answer["choices"][0]["logprobs"], width), cached, None
            if not scores or made < wanted:
                return rows, cached, None
            values = np.load(io.BytesIO(base64.b64decode(scores)), allow_pickle=False).tolist()
            return rows, cached, [dict(zip(ids, row, strict=False)) for ids, row in zip(named, values, strict=True)]

    def _sampled(self, told: Json, width: int) -> list[ListedRow | None]:
        """Return the rows of sampled tokens; None: another request with tokens by name has spoilt the row.

        On V1 such a request leaves the sampled token, and token 0 without a number, of other rows in its step.
        """
        if "content" in told:
            rows = [
                {each["token_id"]: _number(each["logprob"]) for each in row["top_logprobs"]} for row in told["content"]
            ]
        else:
            each_row = told["top_logprobs"]
            rows = [{int(name[9:]): _number(logp) for name, logp in row.items()} for row in each_row]  # token_id:7
        found: list[ListedRow | None] = []
        for logp in rows:
            known = sum(value > -math.inf for value in logp.values())
            spoilt = len(logp) < min(width, self.vocab) or not known or (len(logp) == 2 and known == 1)
            found.append(None if spoilt else ListedRow.of(logp, self.vocab))
        return found

    def _scored(self, told: Mapping[str, Json], width: int) -> ListedRow:
        """Return the row of a token of the prompt, which comes first and may be none of the likeliest."""
        logp = {int(token): _number(entry["logprob"]) for token, entry in told.items()}
        draft = next(iter(logp))
        apart = {draft: logp.pop(draft)} if len(logp) > width else {}
        return ListedRow.of(logp, self.vocab, apart)

    @property
    def _path(self) -> str:
        return ROWS if self.facts.door == "rows" else PROMPTS

    def _body(self, path: str, prompts: Sequence[Sequence[int]], settings: Json, salt: str) -> Json:
        body: Json = {"model": self.facts.model} | ({"cache_salt": salt} if salt else {})
        settings = GREEDY | NO_PENALTY | settings
        if path == ROWS:
            return body | {"token_ids": list(prompts[0]), "sampling_params": settings | {"detokenize": False}}
        return body | settings | BY_IDS | {"prompt": [list(prompt) for prompt in prompts]}

    def _headers(self, text: Sequence[int], salt: str) -> dict[str, str]:
        rank = zlib.crc32(repr((salt, list(text[:8]))).encode()) % self._ranks
        return {"X-data-parallel-rank": str(rank)} if self._ranks > 1 else {}

    async def _ask(self, path: str, prompts: Sequence[Sequence[int]], settings: Json, salt: str) -> Json:
        body, tokens = self._body(path, prompts, settings, salt), len(prompts[-1])
        headers = self._headers(prompts[-1], salt)
        await self._be_sure()
        names = "logprob_token_ids" in settings
        try:
            # A server that comes up again in between may run V1, which must get no names.
            answer = await self.door.ask(path, body, headers=headers, tokens=tokens, within_s=0 if names else None)
        except Unavailable:
            if not names:
                raise
            await self._be_sure()
            answer = await self.door.ask(path, body, headers=headers, tokens=tokens, within_s=0)
        except Refusal as refusal:
            if refusal.http_status == 404:
                await self._be_sure(doubtful=True)
            raise
        self._answers_as = self._answers_as or str(answer.get("model"))
        if answer.get("model") != self._answers_as:
            raise self.door.changed(self.facts.model, f"answers come from {answer.get('model')!r}")
        await self._be_sure()  # a connection may have broken meanwhile
        return answer

    async def _be_sure(self, doubtful: bool = False) -> None:
        """Ask which model is at the address, where another may have come there since the last answer."""
        await self.door.be_sure(self.facts.model, self._how_changed, doubtful=doubtful)

    async def _how_changed(self) -> str:
        there = (await model_cards(self.door)).get(self.facts.model, {})
        known = {"root": self.facts.root, "max_model_len": self.facts.context_length}
        if {name: there.get(name) for name in known} != known:
            return f"it is {there['root']!r} now" if there else "it is not there"
        # A cache that is full may drop at once what was read.
        if self.facts.names and not any([is_v2(await self.ask_twice()) for _ in range(2)]):
            return "it runs V1 now, which must not be asked for tokens by name"
        return ""

    async def ask_twice(self) -> list[Json]:
        """Return two answers to one scored text of a block and more; none: V1's rows held what JSON cannot say."""
        rng = np.random.default_rng()
        block = self.facts.block_size or 510
        text = canary_text(int(rng.integers(1 << 30)), min(block + 2, self.facts.context_length - 1), self.vocab)
        salt = f"outrider canary {rng.integers(1 << 62)}"
        body = self._body(ROWS, [text], {"prompt_logprobs": 1, "skip_reading_prefix_cache": False}, salt)
        how: Json = {"headers": self._headers(text, ""), "tokens": len(text), "handled": (403,)}
        try:
            return [await self.door.ask(ROWS, body, **how) for _ in range(2)]
        except Refusal as refusal:
            if NOT_JSON not in refusal.message:
                raise
            return []


def is_v2(answers: Sequence[Json]) -> bool:
    """Tell the runner by `ask_twice`: of a text that it has just read, V2 returns the rows of the rest alone."""
    return bool(answers) and len(answers[1]["prompt_logprobs"] or [0]) < answers[1]["usage"]["prompt_tokens"]


def canary_text(seed: int, length: int, vocab: int) -> list[int]:
    """Return ordinary tokens: what is special, or stands for a picture, has the lowest or the highest ids."""
    first, last = (1000, 5000) if vocab > 8000 else (vocab // 4, vocab // 2)
    return np.random.default_rng(seed).integers(first, last, length).tolist()  # type: ignore[no-any-return]


async def model_cards(door: HttpDoor, within_s: float | None = None) -> dict[str, Json]:
    """Return what the server says of each of its models; an adapter's context is that of its model."""
    answer = await door.ask("/v1/models", within_s=within_s)
    with understood():
        cards = {card["id"]: card | {"root": card.get("root") or ""} for card in answer["data"]}
        context = {name: card.get("max_model_len") for name, card in cards.items()}
        whole = {name: context[name] or context.get(card.get("parent")) for name, card in cards.items()}
        return {name: card | {"max_model_len": whole[name]} for name, card in cards.items()}


def cached_tokens(answer: Json) -> int | None:
    """Return how many tokens of a prompt, or of the last one, were cached; None: the server does not tell."""
    found: int | None = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens")
    return found


def _number(logp: float) -> float:
    return logp if logp > MINUS_INFINITY else -math.inf
