"""llama-server of llama.cpp by its own door, /completion: a prompt for each row, for no token of one is scored."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from outrider.cloud.probes.http_door import HttpDoor, Json, understood
from outrider.cloud.probes.scoring import ListedRow, Probe, ServerFacts, StreamedToken
from outrider.proto.errors import ConfigError, Internal, Unavailable

SLOTS = 9  # of probes with 8 drafts
TEXT_TOKENS = 12  # of a greedy text that is to come again
SAME_LOGP = 0.01  # by which its rows may differ; .7 was seen of a model of four bits, 1.5e-5 in float32
GREEDY = {"temperature": 0, "samplers": ["temperature"], "mirostat": 0, "ignore_eos": False, "logit_bias": []}
# A token that ends within a character is told of neither in answers nor in streams. Rows are the model's own whatever
# is sampled, and what a probe samples is thrown away: so it always samples this letter.
LETTER = [["a", 10_000]]
FIELDS = ["model", "timings/cache_n", "completion_probabilities", "generation_settings/speculative.types"]
NO_SLOTS = f"-np {SLOTS}: each prompt of a probe finds its text in a slot"
NO_SAME = "--no-repack without --kv-unified, or all in f32 (-ctk, -ctv): rows depend on nothing computed beside them"

Ids = Sequence[int]
Told = AsyncGenerator[StreamedToken, None]


async def examine_llama(door: HttpDoor, model: str, vocab_of: Callable[[str], int]) -> LlamaServer | None:
    """Return the server ready to score the tokens of `model`, empty: whatever it has; None: it is another kind.

    Raises:
        ConfigError: it has another model.
        Unavailable: nothing answers.
    """
    try:
        props = await door.ask("/props", within_s=0)
    except Internal:  # no such path, or another kind's answer
        return None
    if "build_info" not in props or "total_slots" not in props:
        return None
    with understood():
        (card,) = (await door.ask("/v1/models"))["data"]
        name, path, known, slots = card["id"], props["model_path"], card["meta"]["n_vocab"], props["total_slots"]
        facts = ServerFacts(
            kind=f"llama-server {props['build_info']}, {props.get('model_ftype', '')}, {slots} slots",
            model=name,
            root=path,
            context_length=props["default_generation_settings"]["n_ctx"] - 1,
            block_size=1,
            max_list=known,
            names=False,
            names_in_rows=False,
            tells_cached=True,
            door="prompts",
            drafts_itself=False,
            repeatable=False,
            apart=True,
        )
    if model not in ("", name, path):
        raise ConfigError(f"{door.address.url} has no model {model!r}; it serves {name}", field="target_model")
    if known < (vocab := vocab_of(path)):
        message = f"{name} at {door.address.url} has {known} tokens, and the tokenizer {vocab}"
        raise ConfigError(message, field="target_model")
    server = LlamaServer(door, facts)
    text = list(range(vocab // 4, vocab // 4 + 8))
    (first,) = await server.answers([text], 1)
    repeatable = await _repeats(server, text)
    server.facts = replace(
        facts,
        drafts_itself=first.get("generation_settings/speculative.types", "none") != "none",
        repeatable=repeatable,
        lacking=(NO_SLOTS,) * (slots < SLOTS) + (NO_SAME,) * (not repeatable),
    )
    return server


async def _repeats(server: LlamaServer, text: Ids) -> bool:
    """Whether a text's rows come again alike by a probe, and beside other texts."""

    async def write(first: int) -> list[ListedRow]:
        told = server.stream([first, *text], TEXT_TOKENS, frozenset(), 2)
        return [each.row async for each in told if each.row is not None]

    alone = await write(text[0])
    probe = await server.probe([text[0], *text], [int(row.tokens[0]) for row in alone[:-1]], 2)
    beside = (await asyncio.gather(*(write(token) for token in text[:4])))[0]
    return all(
        mine.tokens[0] == row.tokens[0] and abs(mine.logp[0] - row.logp[0]) < SAME_LOGP
        for rows in (probe.rows, beside)
        for mine, row in zip(alone, rows, strict=True)
    )


class LlamaServer:
    """One model of a llama-server, tried with llama.cpp of llama-cpp-python 0.3.36.

    Each prompt of a probe takes a slot, and slots share nothing: K + 1 of them read a new text. (Completions of one
    prompt, `n_cmpl`, do share it, but their slots are emptied afterwards.) The cache knows no salts. Log probabilities
    of a row are all off by one little number (1.5e-4 was seen), for the server adds up in float32.
    """

    def __init__(self, door: HttpDoor, facts: ServerFacts) -> None:
        self.facts = facts
        self.door = door

    async def probe(self, text: Ids, drafts: Ids, width: int, named: Sequence[Ids] = (), salt: str = "") -> Probe:  # noqa: ARG002
        """Return the rows after `text` and after each draft."""
        prompts = [[*text, *drafts[:count]] for count in range(len(drafts) + 1)]
        answers = await self.answers(prompts, width)
        with understood():
            cached = min(answer["timings/cache_n"] for answer in answers)
            return Probe(tuple(self._told(answer)[1] for answer in answers), cached)

    async def name(self, *_: Any, **__: Any) -> Mapping[int, float]:
        """Refuse: rows of the whole vocabulary are what this server has instead."""
        raise Internal("this server tells no tokens by name")

    async def stream(self, text: Ids, max_tokens: int, ends: frozenset[int], width: int, salt: str = "") -> Told:  # noqa: ARG002
        """Yield the server's own greedy tokens after `text`; to close the generator ends the request."""
        written = list(text)
        goal = min(len(text) + max_tokens, self.facts.context_length)
        while len(written) < goal and not (len(written) > len(text) and written[-1] in ends):
            before = len(written)
            body = self._body(written, goal - before, max(1, width)) | {"stream": True}
            await self._be_sure()
            async with aclosing(self.door.stream("/completion", body, tokens=before)) as events:
                async for event in events:
                    if "error" in event:
                        raise Unavailable(f"the server broke off a text: {event['error']}", field="target_url")
                    with understood():
                        left_out = event.get("tokens_predicted") != len(written) - before + 1
                        each = None if left_out else StreamedToken(*self._told(event))
                    if each is None:  # one or more that ended within a character, or the text has ended
                        break
                    written.append(each.token)
                    yield each
                    if each.token in ends or len(written) == goal:
                        return
            (row,) = (await self.probe(written, (), max(1, width))).rows
            written.append(int(row.tokens[0]))
            yield StreamedToken(written[-1], row)

    async def chat(self, messages: Sequence[Mapping[str, str]]) -> Sequence[int]:
        """Return the tokens that the server's own template makes of a chat; none: it has none."""
        try:
            text = (await self.door.ask("/apply-template", {"messages": list(messages)}))["prompt"]
            asked = {"content": text, "add_special": False, "parse_special": True}
            tokens: list[int] = (await self.door.ask("/tokenize", asked))["tokens"]
        except (Internal, KeyError):
            return []
        return tokens

    async def close(self) -> None:
        """Close the connections."""
        await self.door.close()

    async def answers(self, prompts: Sequence[Ids], width: int) -> list[Json]:
        """Return the server's word on the token after each prompt."""
        body = self._body([list(prompt) for prompt in prompts], 1, width) | {"logit_bias": LETTER}
        await self._be_sure()
        raw = await self.door.read("/completion", body, tokens=sum(map(len, prompts)))
        with understood():
            told = json.loads(raw)
            answers: list[Json] = told if isinstance(told, list) else [told]  # of one prompt
            models = {answer["model"] for answer in answers}
        if len(answers) != len(prompts):
            raise Internal(f"the server answers {len(answers)} of {len(prompts)} prompts")
        if models != {self.facts.model}:
            raise self.door.changed(self.facts.model, f"answers come from {sorted(models)}")
        await self._be_sure()  # a connection may have broken meanwhile
        return answers

    def _body(self, prompt: Sequence[Any], count: int, width: int) -> Json:
        ask = {"model": self.facts.model, "prompt": prompt, "n_predict": count, "cache_prompt": True}
        return ask | GREEDY | {"n_probs": min(width, self.facts.max_list), "response_fields": FIELDS}

    async def _be_sure(self) -> None:
        await self.door.be_sure(self.facts.model, self._how_changed)

    async def _how_changed(self) -> str:
        path = (await self.door.ask("/props")).get("model_path")
        return "" if path == self.facts.root else f"it is {path!r} now"

    def _told(self, answer: Json) -> tuple[int, ListedRow]:
        (told,) = answer["completion_probabilities"]
        logp = {each["id"]: math.nan if each["logprob"] is None else each["logprob"] for each in told["top_logprobs"]}
        return told["id"], ListedRow.of_float32(logp, self.facts.max_list)
