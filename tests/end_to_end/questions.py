"""Prompts for the tiny target with the texts that must follow them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from decoded_by_hand import decode_by_hand

from outrider.cloud.testing import VOCAB
from outrider.proto.testing import word

_FIRST_WORD = 3  # 0 to 2 are special to the model
_MIN_MARGIN = 1e-4  # float32 may round otherwise in another batch, by a hundredth of that at most


@dataclass(frozen=True)
class Question:
    """A prompt with its seed, and the text that follows it at temperature 1: no other prompt's is like it."""

    prompt: str
    seed: int
    text: str

    def asks(self, model: str) -> dict[str, object]:
        """The body of a streamed completion."""
        return {
            "model": model,
            "prompt": self.prompt,
            "seed": self.seed,
            "max_tokens": len(self.text.split()),
            "temperature": 1.0,
            "ignore_eos": True,
            "stream": True,
        }


def questions(folder: Path, count: int, tokens: int) -> list[Question]:
    """`count` prompts with texts of `tokens` tokens in float32, decoded without any part of Outrider but its noise."""
    candidates = count + count // 4 + 8
    prompts = [_prompt(i) for i in range(candidates)]
    seeds = [1000 + i for i in range(candidates)]
    texts, margins = decode_by_hand(folder, prompts, seeds, tokens)
    sure = [i for i in range(candidates) if margins[i] > _MIN_MARGIN][:count]
    assert len(sure) == count, "too many texts hang on the last bit of a float"
    made = [Question(_say(prompts[i]), seeds[i], _say(texts[i])) for i in sure]
    assert len({question.text for question in made}) == count
    return made


def _prompt(index: int) -> list[int]:
    words = VOCAB - _FIRST_WORD
    return [_FIRST_WORD + digit for digit in (index % words, index // words, 7 * index % words, 11)]


def _say(tokens: list[int]) -> str:
    return " ".join(map(word, tokens))
