"""`outrider compare`: results add up, and the command writes them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from outrider.bench.comparison.record import Variant, in_front
from outrider.bench.comparison.rounds import Rounds
from outrider.bench.comparison.summary import Summary, Trial
from outrider.cloud.text_writer import TextRequest, WrittenText
from outrider.deploy.cli import main
from outrider.deploy.prompts import choose_prompts
from outrider.edge.testing import tiny_drafter
from outrider.proto.errors import ConfigError
from outrider.proto.types import (
    Sampling,
)

GREEDY = Sampling(temperature=0.0, max_tokens=40)

# --- results ---


def trial_of(by_variant: dict[Variant, list[tuple[int, int]]], domains: str) -> Trial:
    """Return a trial from (tokens, steps) of each text."""
    texts = [
        WrittenText(TextRequest((1,), GREEDY, str(i), domain), (1, *range(tokens)), tokens)
        for i, (domain, (tokens, _)) in enumerate(zip(domains, next(iter(by_variant.values())), strict=True))
    ]
    rounds = {
        variant: [Rounds(tokens, steps, tokens - steps, tokens, (0.001, 0.003), (0.004,)) for tokens, steps in counts]
        for variant, counts in by_variant.items()
    }
    return Trial(1.0, texts, rounds)


SLOW, FAST = Variant("slow"), Variant("fast", "int8", 0)


def test_block_efficiency_is_all_tokens_over_all_steps() -> None:
    trial = trial_of({SLOW: [(10, 10), (30, 10), (20, 4)], FAST: [(10, 5), (30, 5), (20, 4)]}, "aab")
    found = {(f.domain, f.variant): f for f in Summary(trial, seed=0).results()}
    assert set(found) == {(domain, variant) for domain in ("a", "b", None) for variant in (SLOW, FAST)}
    assert found["a", SLOW].block_efficiency == 40 / 20
    assert found["b", SLOW].block_efficiency == 20 / 4
    assert found[None, SLOW].block_efficiency == 60 / 24
    assert (found[None, FAST].texts, found[None, FAST].tokens, found[None, FAST].steps) == (3, 60, 14)
    assert found[None, SLOW].acceptance == (60 - 24) / 60
    assert (found[None, SLOW].first_ms, found[None, SLOW].next_ms) == (pytest.approx(2.0), pytest.approx(4.0))
    assert found["b", SLOW].interval is None  # a single prompt has no interval
    assert found[None, SLOW].interval is None


def test_ratios_are_paired_so_a_constant_one_has_no_width() -> None:
    rng = random.Random(1)
    counts = [(2 * rng.randint(20, 90), 2 * rng.randint(5, 20)) for _ in range(40)]
    trial = trial_of({SLOW: counts, FAST: [(tokens, steps // 2) for tokens, steps in counts]}, "ab" * 20)
    summary = Summary(trial, seed=0)
    for ratio in [*summary.ratios(FAST, [SLOW]), *summary.mean_ratios(FAST, [SLOW])]:
        assert ratio.ratio == pytest.approx(2.0)
        assert (ratio.interval.low, ratio.interval.high) == pytest.approx((2.0, 2.0))
    for result in summary.results():
        assert result.interval.low < result.block_efficiency < result.interval.high


def test_the_mean_of_the_domains_ratios_counts_each_domain_once() -> None:
    slow = [(60, 60)] * 30 + [(60, 30)] * 2
    fast = [(60, 30)] * 30 + [(60, 30)] * 2
    summary = Summary(trial_of({SLOW: slow, FAST: fast}, "a" * 30 + "b" * 2), seed=0)
    by_domain = {ratio.domain: ratio.ratio for ratio in summary.ratios(FAST, [SLOW])}
    assert by_domain == {"a": 2.0, "b": 1.0, None: pytest.approx((60 * 30 + 30 * 2) / (32 * 30))}
    (mean,) = summary.mean_ratios(FAST, [SLOW])
    assert mean.ratio == 1.5
    alone = Summary(trial_of({SLOW: slow, FAST: fast}, "a" * 32), seed=0)
    assert alone.mean_ratios(FAST, [SLOW]) == []
    assert [result.domain for result in alone.results()] == [None, None]


def test_an_interval_holds_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(2)
    inside = 0
    for trial in range(60):
        steps = rng.geometric(0.1, 40) + 4
        found = Summary(trial_of({SLOW: [(60, int(count)) for count in steps]}, "a" * 40), seed=trial).results()[0]
        inside += found.interval.low < 60 / (1 / 0.1 + 4) < found.interval.high
    assert 51 <= inside <= 60  # 95 % of them, less a little for so few prompts


def test_variants_in_front_have_the_first_age_or_none() -> None:
    variants = [Variant("a"), *(Variant("b", p, age) for p in ("int8", "float16") for age in (2, 0)), Variant("b")]
    assert in_front(variants) == [variants[0], variants[1], variants[3], variants[5]]


# --- prompts ---


def test_prompts_come_from_a_file_or_a_folder_and_are_limited_in_each_domain(tmp_path) -> None:
    def lines(*domains: str) -> str:
        return "".join(json.dumps({"id": i, "prompt": "x", "domain": d}) + "\n" for i, d in enumerate(domains))

    (tmp_path / "b.jsonl").write_text(lines("", "", ""))
    (tmp_path / "a.jsonl").write_text(lines("c", "c", "c"))
    (tmp_path / "other.txt").write_text("not read")
    found = [(prompt.domain, prompt.id) for prompt in choose_prompts(tmp_path, 2)]
    assert found == [("c", "0"), ("c", "1"), ("b", "0"), ("b", "1")]
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text(lines("x", "y", "x", "x", "y"))
    assert [(p.domain, p.id) for p in choose_prompts(mixed, 2)] == [("x", "0"), ("x", "2"), ("y", "1"), ("y", "4")]
    assert {prompt.domain for prompt in choose_prompts(None, 1)} == {"code", "docs", "prose", "math"}
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty holds no DOMAIN\.jsonl"):
        choose_prompts(tmp_path / "empty", 1)


# --- the command ---


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(9)
    path = tmp_path_factory.mktemp("prompts") / "words.jsonl"
    records = [
        {
            "id": str(i),
            "domain": f"d{i % 2}",
            "prompt": " ".join(f"w{rng.randrange(2, tiny_drafter.VOCAB)}" for _ in range(6)),
        }
        for i in range(6)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_the_command_compares_every_variant_and_writes_the_results(family, prompt_file, tmp_path, capsys) -> None:
    arguments = [
        "compare", f"plain={family.plain}", f"steered={family.steered}", "--steering", str(family.projection),
        "--target", str(family.target), "--prompts", str(prompt_file), "--max-tokens", "20", "--drafts", "4",
        "--age", "0,3", "--precision", "int8,float16,none", "--json", str(tmp_path / "c.json"),
        "--plot", str(tmp_path / "c.png"), "--threads", "1",
    ]  # fmt: skip
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    record = json.loads((tmp_path / "c.json").read_text())
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    names = [(v["drafter"], v["vectors"], v["age"]) for v in record["variants"]]
    steered = [("steered", vectors, age) for vectors in ("int8", "float16") for age in (0, 3)]
    assert names == [("plain", "none", None), *steered, ("steered", "none", None)]
    assert len(record["results"]) == 2 * 3 * 6  # temperatures, domains and all, variants
    assert len(record["texts"]) == 2 * 6
    for result in record["results"]:
        own = [t for t in record["texts"] if t["temperature"] == result["temperature"]]
        own = [t for t in own if result["domain"] in (t["domain"], None)]
        at = record["variants"].index(result["variant"])
        assert result["tokens"] == sum(t["tokens"] for t in own)
        assert result["steps"] == sum(t["steps"][at] for t in own)
        assert result["block_efficiency"] == result["tokens"] / result["steps"]
        assert result["first_ms"] > 0
        without = {(f["temperature"], f["domain"]): f for f in record["results"] if f["variant"]["drafter"] == "plain"}
        if result["variant"]["vectors"] == "none":  # both drafters are the same but for the vectors
            assert result["steps"] == without[result["temperature"], result["domain"]]["steps"]
    front = [("plain", "none"), ("steered", "float16"), ("steered", "none")]
    for ratio in record["ratios"]:
        assert ratio["variant"] == {"drafter": "steered", "vectors": "int8", "age": 0}
        assert (ratio["against"]["drafter"], ratio["against"]["vectors"]) in front
    assert len(record["ratios"]) == 2 * 3 * 3
    assert len(record["mean_ratios"]) == 2 * 3
    assert [d["rank"] for d in record["drafters"]] == [None, tiny_drafter.RANK]
    assert record["environment"]["target"] == str(family.target)
    assert record["environment"]["dtype"] == "float32", "a record that does not follow the processor"
    assert record["drafts"] == 4
    assert [step["rows"] for step in record["steps"]] == [1, 5, 9]
    for step in record["steps"]:
        assert step["projection"] == record["drafters"][1]["projection"]
        assert step["plain_ms"] > 0
        assert 0 < step["low"] <= step["ratio"] <= step["high"]
    for said in (
        "A verifier's step",
        "T = 0, 4 drafts a round",
        "/ plain",
        "mean of domains",
        "By age of the vectors",
        "float16",
    ):
        assert said in out
    assert max(map(len, out.splitlines())) <= 100
    assert "12 texts" not in err
    assert "6 texts of" in err


def test_without_vectors_no_projection_is_needed(family, prompt_file, capsys) -> None:
    arguments = ["compare", str(family.steered), "--target", str(family.target), "--prompts", str(prompt_file)]
    small = ["--max-tokens", "4", "--temperature", "0", "--per-domain", "1", "--threads", "1"]
    assert main([*arguments, *small, "--precision", "none"]) == 0
    out, _ = capsys.readouterr()
    assert "over that of others" not in out  # there is no other
    assert "A verifier's step" not in out
    assert main([*arguments, *small]) == 1
    _, err = capsys.readouterr()
    said = err.splitlines()[-1]
    assert said.startswith("outrider compare: steering: none is projection ")
    assert said.endswith(
        "whose vectors 'steered' takes; name its projection.safetensors, or compare it with --precision none"
    )


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["general", "general"], 1, "package: two drafters are called 'general'; name them by NAME=FOLDER"),
        (["=general"], 1, "package: '=general' has no name before the =; write NAME=FOLDER"),
        (["nowhere"], 1, "no drafter 'nowhere': give a folder with a manifest.json"),
        (["general", "--temperature", "0,0"], 1, "temperature: names 0.0 twice; once is enough"),
        (["general", "--age", ""], 1, "age: must name something"),
        (["general", "--precision", "int4"], 2, "--precision: 'int4' is none of int8, float16, none"),
        (["general", "--plot", "plot.doc"], 1, "plot: plot.doc does not end in .png, .pdf, .svg"),
        (["general", "--prompts", "nowhere"], 1, "prompts: cannot read nowhere"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_is_one_clear_line(arguments, status, says, capfd) -> None:
    try:
        got = main(["compare", *arguments])
    except SystemExit as ended:
        got = int(ended.code or 0)
    out, err = capfd.readouterr()
    assert got == status
    mistakes = [line for line in err.splitlines() if line.startswith("outrider compare: ")]
    assert len(mistakes) == 1
    assert says in mistakes[0]
    assert out == ""


def test_a_drafter_with_another_tokenizer_is_refused_where_the_targets_loses_text(family, capfd) -> None:
    assert main(["compare", f"tiny={family.plain}", "g=general", "--target", str(family.target), "--threads", "1"]) == 1
    assert "package: 'general' cannot draft by text: of the target's tokenizer" in capfd.readouterr().err
