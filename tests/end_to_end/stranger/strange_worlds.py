"""Random worlds: a target, its verifiers, an edge, what goes wrong among them, and the texts that are asked for."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from plain_texts import PlainModel
from random_models import SMALL, save_random_model
from vocabularies import EOS, VOCABULARIES, Vocabulary

from outrider.proto.types import Grammar, GrammarKind, Patience

WORLDS = 36  # that are played
CONTEXT = 160
THEMES = ("plain", "twins", "bytes", "slow reading", "contexts", "states", "failing steps", "extremes", "turns")
# Architectures whose layers keep keys and values alone, and some that keep a state.
KEYS_AND_VALUES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma2": {"head_dim": 8, "sliding_window": 16},
    "gpt_neox": {},
}
DELTA_RULE = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "tie_word_embeddings": False,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
STATES: dict[str, dict[str, Any]] = {"qwen3_5_text": DELTA_RULE, "olmo_hybrid": DELTA_RULE | {"hidden_size": 32}}
# Languages as grammars and as plain patterns. More than one byte may follow everywhere: where only one may, the product
# spells as the tokenizer would.
LETTERS = "(a(?<!aa)|b(?<!bb)|c(?<!cc)|d(?<!dd))+"  # none twice in a row
GRAMMARS = {
    LETTERS: Grammar(
        GrammarKind.LARK,
        """start: a | b | c | d
           a: "a" (b | c | d)?
           b: "b" (a | c | d)?
           c: "c" (a | b | d)?
           d: "d" (a | b | c)?""",
    ),
    "[a-z ,.]{5,40}": Grammar(GrammarKind.REGEX, "[a-z ,.]{5,40}"),
    "-?(0|[1-9][0-9]*)": Grammar(GrammarKind.JSON_SCHEMA, '{"type": "integer"}'),
    "[xyz]{1,3}([,;][xyz]{1,3}){0,3}": Grammar(
        GrammarKind.LARK, "start: WORD (MARK WORD)~0..3\nWORD: /[xyz]{1,3}/\nMARK: /[,;]/"
    ),
}
HUGE = (100.0, 1000.0, -100.0, 1e30, 3.4e38, 1e39, 1e308, -1e30, -3.4e38, -1e39, -1e308)


@dataclass(frozen=True)
class World:
    """Everything but the texts.

    Attributes:
        vocabulary: name of the tokenizer.
        model: architecture of the target.
        contexts: context of each verifier.
        reads: prompt tokens in a step beside other texts; 0: as many as the verifier likes.
        hits: chance of each drafter of the edge to be right; empty: n-grams of the text.
        own_hits: chance of the verifier's own drafter; None: it has none.
        own_token_s: time that a token takes there, in seconds.
        selector: rule that selects among the drafters of the edge.
        window: tokens that the edge drafts ahead; None: as many as pay.
        losses: how often the streams, or a verifier, are lost.
        pays: whether rows cost nothing, so that all that could help is verified.
        at_once: texts that run at the same time.
        fails: whether steps that several texts share fail now and then after their pass.
    """

    seed: int
    theme: str
    vocabulary: str
    model: str
    dtype: str
    contexts: tuple[int, ...]
    kv_tokens: int
    min_step_s: float
    reads: int
    hits: tuple[float, ...]
    own_hits: float | None
    own_token_s: float
    selector: str
    window: int | None
    chains: bool
    patience: Patience | None
    drafts_here: int | None
    losses: int
    pays: bool
    fails: bool
    texts: int
    at_once: int

    @classmethod
    def drawn(cls, seed: int) -> World:
        """Return the world of a seed."""
        rng, theme = random.Random(f"world {seed}"), THEMES[seed % len(THEMES)]
        several, small = rng.random() < 0.3, rng.choice(("byte level", "byte fallback"))
        drawn: dict[str, Any] = {
            "vocabulary": rng.choice(list(VOCABULARIES)),
            "model": "llama",
            "dtype": "float32",
            "contexts": (CONTEXT,) * (1 + several),
            "kv_tokens": rng.choice((8192, 1024, 480)),
            "min_step_s": rng.choice((0.0, 0.0, 0.002, 0.01)),
            "reads": rng.choice((0, 0, 16)),
            "hits": rng.choice(((), (0.9,), (0.6,), (0.3,), (0.8, 0.5))),
            "own_hits": rng.choice((None, 0.8, 0.4)),
            "chains": rng.random() < 0.2,
            "patience": rng.choice((None, None, Patience(0.0), Patience(0.05, 4))),
            "own_token_s": 0.0,
            "window": rng.choice((None, None, 8)),
            "selector": rng.choice(("leader", "static")),
            "drafts_here": rng.choice((None, None, 3)),
            "losses": rng.choice((0, 0, 6)),
            "pays": rng.random() < 0.7,
            "fails": False,
            "texts": 8,
            "at_once": 6,
        }
        drawn |= {
            "plain": {
                "vocabulary": small,
                "model": rng.choice(list(KEYS_AND_VALUES)),
                "dtype": rng.choice(("float32", "bfloat16")),
            },
            "twins": {
                "vocabulary": small,
                "hits": (0.45,),
                "own_hits": 0.75,
                "own_token_s": 0.004,
                "chains": False,
                "patience": None,
                "pays": True,
                "min_step_s": 0.0,
                "drafts_here": 3,
                "window": 8,
                "at_once": 2,
                "losses": 0,
                "kv_tokens": 8192,
            },
            "bytes": {"vocabulary": rng.choice([name for name in VOCABULARIES if "fallback" in name])},
            "slow reading": {"reads": 4, "min_step_s": 0.01, "losses": 12, "kv_tokens": 1024},
            "contexts": {"contexts": (CONTEXT, CONTEXT - 64), "losses": 12, "min_step_s": 0.01},
            "states": {"vocabulary": small, "model": rng.choice(list(STATES))},
            "failing steps": {"fails": True, "min_step_s": 0.02, "reads": 4},
            "extremes": {},
            "turns": {},
        }[theme]
        return cls(seed=seed, theme=theme, **drawn)


@lru_cache
def target(base: Path, vocabulary: str, model: str, dtype: str) -> tuple[Path, PlainModel]:
    """Return the folder of a target below `base`, and the same model for a stranger."""
    words = VOCABULARIES[vocabulary]()
    folder = base / f"{vocabulary} {model}".replace(" ", "-").replace(",", "")
    if not folder.exists():
        shape = SMALL | {"vocab_size": words.size, "max_position_embeddings": CONTEXT, "eos_token_id": EOS}
        if model in STATES:
            _save_with_state(folder, model, shape | STATES[model])
        else:
            save_random_model(folder, model, **shape | KEYS_AND_VALUES[model])
        (folder / "tokenizer.json").write_text(words.json, encoding="utf-8")
    return folder, PlainModel(folder, words, dtype)


def _save_with_state(folder: Path, architecture: str, shape: dict[str, Any]) -> None:
    """Save a random model whose state tells in its texts."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **shape))
    with torch.no_grad():
        made.get_output_embeddings().weight.mul_(20)
    made.save_pretrained(folder)


def settings(rng: random.Random, world: World, words: Vocabulary) -> tuple[dict[str, Any], str]:
    """Return random settings of a text, all but its seed, and the pattern that stands for its grammar."""
    vocab = words.size
    most = rng.choice((1, 2, 5, 20, 40, 60))
    drawn: dict[str, Any] = {
        "temperature": rng.choice((0.0, 0.0, 0.3, 0.7, 1.0, 1.0, 1.5, 1e-6, 3.0)),
        "max_tokens": most,
        "ignore_eos": rng.random() < 0.3,
    }
    for share, name, values in (
        (0.3, "top_k", (1, 2, 20, vocab - 1, vocab, vocab + 5)),
        (0.3, "top_p", (0.3, 0.8, 0.95)),
        (0.25, "min_p", (0.01, 0.2)),
        (0.25, "repetition_penalty", (0.8, 1.3)),
        (0.25, "presence_penalty", (-1.0, 1.5)),
        (0.25, "frequency_penalty", (-0.7, 0.7)),
        (0.25, "min_tokens", range(1, most + 1)),
        (0.2, "stop_tokens", (tuple(rng.sample(range(vocab), vocab // 40)),)),
        (0.15, "allowed_tokens", ((EOS, *rng.sample(range(2, vocab), rng.randrange(1, 30))),)),
        (0.5, "logit_bias", (((EOS, rng.choice((-50.0, 3.0, 6.0, 9.0))), (rng.randrange(2, vocab), 4.0)),)),
    ):
        if rng.random() < share:
            drawn[name] = rng.choice(values)
    pattern = ""
    if world.theme == "twins" or rng.random() < 0.15:
        pattern = LETTERS if world.theme == "twins" else rng.choice(list(GRAMMARS))
        drawn |= {"grammar": GRAMMARS[pattern], "ignore_eos": False, "allowed_tokens": ()}
        if world.theme == "twins":
            drawn |= {"temperature": 1.0, "max_tokens": 40, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "min_tokens": 0}
            drawn |= {
                "logit_bias": tuple((words.token_of(letter), 20.0) for letter in (b"a", b"b", b"c", b"d")),
                "stop_tokens": (),
            }
    elif world.theme in ("bytes", "turns") and rng.random() < 0.6:  # broken characters
        drawn |= {"allowed_tokens": _broken(rng, words), "temperature": 1.0, "max_tokens": 20, "min_tokens": 0}
        drawn |= {"top_k": 0, "logit_bias": (), "stop_tokens": ()}
    if world.theme == "states":
        drawn |= {"max_tokens": 40, "min_tokens": 20, "stop_tokens": (), "allowed_tokens": ()}
    if world.theme == "contexts" and not pattern:
        drawn |= {"max_tokens": rng.choice((60, 10**6)), "ignore_eos": True, "stop_tokens": ()}
    if world.theme == "extremes" and rng.random() < 0.9:
        name = rng.choice(("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "temperature"))
        value = rng.choice(HUGE)
        if name in ("repetition_penalty", "temperature"):
            value = rng.choice((abs(value), 1 / abs(value)))
        drawn[name] = ((rng.randrange(2, vocab), value),) if name == "logit_bias" else value
    return drawn, pattern


def _broken(rng: random.Random, words: Vocabulary) -> tuple[int, ...]:
    """Return tokens of which texts are made that have half characters."""
    some = [token for token, spelling in enumerate(words.bytes_of) if spelling and len(spelling) > 1]
    return (
        EOS,
        *map(words.token_of, (b"\n", b"a", *rng.sample((b"\xe2", b"\xf0", b"\x9f", b"\xc3", b"\x80"), 2))),
        rng.choice(some),
    )
