"""Time the turns of a chat whose session is kept, beside texts that begin anew on the pages that the last one left.

    outrider verifier --target smollm2 --listen 127.0.0.1:7001 --target-threads 1    # and one at 7003
    outrider link --listen 127.0.0.1:7002 --to 127.0.0.1:7001 --rtt 30               # and one at 7004, to 7003
    python research/kept_turns.py --verifiers 127.0.0.1:7002 127.0.0.1:7004 --target smollm2 --drafter smol,ngram

Each turn is asked both ways, in an order that changes from turn to turn, and must give the same tokens. Each way has a
verifier of its own: on one, whichever came second would find what the first has read.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from typing import NamedTuple

from outrider.cloud.models.family_index import find_target, load_tokenizer, tokenizer_file
from outrider.edge import Client, EdgeConfig, Event, Finished, Tokens

QUESTION = "Part {turn}. Say more about the point before, and then answer this: what follows from it, and why? " * 3


class Turn(NamedTuple):
    """One turn: seconds to its first token and in all, bytes sent up, and its tokens."""

    first_s: float
    seconds: float
    sent: int
    tokens: list[int]


async def timed(events: AsyncIterator[Event]) -> Turn:
    """Take all of a turn, and time it."""
    began, first_s, sent = time.perf_counter(), 0.0, 0
    tokens: list[int] = []
    async for event in events:
        if isinstance(event, Tokens):
            first_s = first_s or time.perf_counter() - began
            tokens += event.ids
        elif isinstance(event, Finished):
            sent = event.statistics.uplink_bytes
    return Turn(first_s, time.perf_counter() - began, sent, tokens)


async def measure(options: argparse.Namespace) -> None:
    """Hold the chats, and print a table of their turns."""
    found = find_target(options.target)
    tokenizer = load_tokenizer(found)
    kept_at, anew_at = (
        Client(
            EdgeConfig(
                verifier=verifier, model=options.target, tokenizer=tokenizer_file(found), drafter=options.drafter
            )
        )
        for verifier in options.verifiers
    )
    turns: list[list[tuple[float, ...]]] = [[] for _ in range(options.turns)]
    async with kept_at, anew_at:
        for chat in range(options.chats):
            async with kept_at.conversation(max_tokens=options.max_tokens) as talk:
                for turn in range(options.turns):
                    asked = {"role": "user", "content": f"Chat {chat}. {QUESTION.format(turn=turn + 1)}"}
                    said = tokenizer.apply_chat_template([asked], tokenize=False, add_generation_prompt=True)
                    new = tokenizer(said, add_special_tokens=False)["input_ids"]
                    whole = (*talk.transcript.tokens, *new)
                    results = {}
                    for keeps in (True, False) if turn % 2 else (False, True):
                        results[keeps] = await timed(
                            talk.say(new) if keeps else anew_at.generate(whole, max_tokens=options.max_tokens)
                        )
                    kept, anew = results[True], results[False]
                    if kept.tokens != anew.tokens:
                        raise SystemExit(f"turn {turn + 1} of chat {chat}: the texts differ")
                    times = kept.first_s, anew.first_s, kept.seconds, anew.seconds
                    turns[turn].append((len(whole), *times, kept.sent, anew.sent))
    print("| turn | tokens | first token, ms: kept | anew | whole turn, ms: kept | anew | sent up, B: kept | anew |")
    print("|---|---|---|---|---|---|---|---|")
    for number, of_turn in enumerate(turns, 1):
        median = [statistics.median(column) for column in zip(*of_turn, strict=True)]
        milliseconds = [f"{1e3 * seconds:.0f}" for seconds in median[1:5]]
        print("|", " | ".join([str(number), f"{median[0]:.0f}", *milliseconds, *(f"{b:.0f}" for b in median[5:])]), "|")
    print(f"medians of {options.chats} chats; all texts equal")


def main() -> None:
    """Read the options, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verifiers", nargs=2, required=True)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--chats", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=48)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
