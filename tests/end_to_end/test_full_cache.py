"""More texts at once than the KV cache holds: all of them end, unchanged."""

from __future__ import annotations

import asyncio

from outrider.proto.session import RetryRules

PROMPTS = ("def main(argv):", "Once upon a time", "The sum of 3 and 4 is", "# Title", "import os")


async def test_texts_that_do_not_fit_together_wait_or_move_and_are_the_same(serving, edge) -> None:
    async def ask(**limits) -> tuple[list[tuple[int, ...]], int]:
        async with (
            serving(**limits) as address,
            edge(address, drafter="ngram", retry=RetryRules(abandon_after_s=30.0)) as client,
        ):
            texts = await asyncio.gather(
                *(
                    client.complete(prompt, max_tokens=64, ignore_eos=True, temperature=1.0, seed=seed)
                    for seed, prompt in enumerate(PROMPTS)
                )
            )
        return [text.ids for text in texts], sum(text.statistics.resumes for text in texts)

    expected, resumes = await ask(kv_tokens=4096)
    assert resumes == 0
    found, resumes = await ask(kv_tokens=144)
    assert resumes > 0, "no text was sent away"
    assert found == expected
