"""`outrider learn-bench`: a stream written once, arms that learn from it, and curves that say how fast."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from outrider.bench.learning.arms import regret, thinned
from outrider.bench.learning.hits import TextHits, hits_of
from outrider.bench.learning.stream import StreamPlan, StreamWriter
from outrider.cloud.learning.adapted import AdaptedDrafter
from outrider.cloud.learning.parent import load_parent
from outrider.deploy.cli import main
from outrider.drafters import find_package
from outrider.drafters.onnx import OnnxDrafter
from outrider.drafters.proposals import ProposalRule
from outrider.proto.noise import gumbel


def corpus(folder: Path, name: str) -> Path:
    """A file of one domain: sums in words, or sentences."""
    path = folder / f"train.{name}.jsonl"
    random = np.random.default_rng(len(name))
    words = ["the", "price", "of", "apples", "is", "twelve", "and", "pears", "are", "nine", "so", "we", "pay"]
    lines = [{"id": str(i), "text": " ".join(random.choice(words, 120))} for i in range(60)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_a_stream_is_the_targets_own_text_and_is_written_once(tmp_path: Path) -> None:
    path, said = corpus(tmp_path, "sums"), []
    writer = StreamWriter("reference", tmp_path)
    plan = StreamPlan(4, held_out=False, seed=0, prompt=8, length=12)
    records = writer.stream(path, plan, 1, said.append)
    assert sorted(record.sampling.temperature for record in records) == [0, 0, 1, 1]
    for record in records:
        top, rest = np.exp(record.top_logp.astype(float)).sum(1), np.exp(record.rest_logp)
        assert top + rest == pytest.approx(1, abs=2e-2)
        for row, (position, target) in enumerate(zip(record.positions, record.targets, strict=True)):
            ids = record.top_ids[row].astype(np.int64)
            noise = gumbel(record.sampling.seed, int(position), ids) if record.sampling.temperature else 0
            best = ids[(record.top_logp[row].astype(float) + noise).argmax()]
            assert target == best or target not in ids or record.sampling.temperature == 0
    again = writer.stream(path, plan, 1, said.append)
    assert [record.encode() for record in again] == [record.encode() for record in records]
    assert len(list(tmp_path.glob("*.lessons"))) == 1
    other = writer.stream(path, StreamPlan(4, held_out=True, seed=0, prompt=8, length=12), 1, said.append)
    assert {record.tokens[:8].tobytes() for record in other}.isdisjoint(
        record.tokens[:8].tobytes() for record in records
    )


def test_hits_in_training_are_those_of_the_drafter_at_the_edge(tmp_path: Path) -> None:
    """But for the 8-bit activations there, which move a proposal now and then."""
    records = StreamWriter("reference", tmp_path).stream(
        corpus(tmp_path, "sums"), StreamPlan(8, held_out=False, seed=0, prompt=16, length=32), 1, lambda _: None
    )
    package = find_package("general")
    found = hits_of(AdaptedDrafter(load_parent(package)), records).shares()
    edge = OnnxDrafter(package, threads=1)
    hits: dict[float, list[bool]] = {0.0: [], 1.0: []}
    for record in records:
        state = edge.open(ProposalRule(record.sampling, prompt_length=record.first_generated))
        state.extend(record.tokens[: record.first_generated].tolist())
        generated = record.tokens[record.first_generated :].tolist()
        proposed = [draft.id for draft in state.propose_forced(generated)]
        hits[record.sampling.temperature] += [a == b for a, b in zip(proposed, generated, strict=True)]
        state.close()
    assert found.greedy == pytest.approx(np.mean(hits[0.0]), abs=0.03)
    assert found.sampled == pytest.approx(np.mean(hits[1.0]), abs=0.03)
    assert found.greedy > 0.2


def test_the_error_of_a_change_is_that_of_texts_drawn_again() -> None:
    random = np.random.default_rng(0)

    def drawn(texts: int) -> tuple[TextHits, TextHits]:
        positions = random.integers(20, 97, 2 * texts)
        rate = random.beta(4, 4, 2 * texts)
        before = random.binomial(positions, rate)
        after = np.minimum(positions, before + random.binomial(positions, 0.2 * rate))
        greedy = np.arange(2 * texts) < texts
        return TextHits(before, positions, greedy), TextHits(after, positions, greedy)

    samples = [drawn(100) for _ in range(400)]
    changes = np.array([after.shares().greedy - before.shares().greedy for before, after in samples])
    errors = [after.errors_of_change(before) for before, after in samples]
    assert np.mean([error.greedy for error in errors]) == pytest.approx(changes.std(), rel=0.1)
    assert np.mean([error.sampled for error in errors]) == pytest.approx(changes.std(), rel=0.1)
    same = drawn(100)[0]
    assert same.errors_of_change(same).greedy == 0
    one = TextHits(np.array([3]), np.array([9]), np.array([True]))
    assert (one.shares().greedy, one.shares().sampled, one.share()) == (0.3333, 0, pytest.approx(0.1667, abs=1e-4))
    assert one.errors_of_change(one).greedy == 0


def test_the_regret_of_a_gain_that_comes_early_grows_slower_than_the_tokens() -> None:
    tokens = np.arange(1, 101) * 500
    early = [(int(t), 400, 400 * (0.7 - 0.2 * (500 / t) ** 0.5)) for t in tokens]
    never = [(int(t), 400, 400 * 0.5) for t in tokens]
    exponent, half = regret(early, 0.5, 0.7)
    assert exponent == pytest.approx(0.5, abs=0.1)
    assert 500 <= half <= 12_000
    late_exponent, late_half = regret(never, 0.5, 0.7)
    assert late_exponent == pytest.approx(1.0, abs=0.01)
    assert late_half is None
    assert regret(early, 0.7, 0.7) == (None, None)
    points = thinned(early)
    assert len(points) == 16
    assert points[-1][0] == 50_000
    assert points[0][1] < points[-1][1] < 0.7


def test_the_command_runs_each_arm_once_and_goes_on_where_it_ended(tmp_path: Path, capsys, monkeypatch) -> None:
    import outrider.bench.learning.command as learning

    monkeypatch.setattr(learning, "TEXT_TOKENS", 1000)  # ten texts
    monkeypatch.setattr(learning, "REHEARSED_TEXTS", 2)
    monkeypatch.setattr(learning, "StreamPlan", partial(StreamPlan, prompt=16, length=24))
    sums, talk, record = corpus(tmp_path, "sums"), corpus(tmp_path, "talk"), tmp_path / "record.json"
    line = ["learn-bench", str(sums), "--kept", str(talk), "--output", str(tmp_path / "out"), "--tokens", "10000"]
    line += ["--fresh", "4", "--seeds", "1", "--json", str(record), "--plot", str(tmp_path / "curves.png")]
    assert main([*line, "--losses", "kl"]) == 0
    (run,) = json.loads(record.read_text())["runs"]
    assert (run["arm"], run["start"], run["steps"]) == ("kl", "warm", 1)
    assert [point[0] for point in run["curve"]] == [192]
    assert set(run["kept_after"]) == set(run["kept_errors"]) == {"talk"}
    assert (tmp_path / "curves.png").stat().st_size > 5000
    assert main([*line, "--losses", "kl,ce"]) == 0
    runs = json.loads(record.read_text())["runs"]
    assert [each["arm"] for each in runs] == ["kl", "ce"]
    assert runs[0] == run
    assert main([*line, "--losses", "kl", "--here"]) == 0
    own, same = json.loads(record.read_text())["runs"]
    assert same == run
    assert (own["arm"], own["rehearsed"], own["steps"]) == ("here", 0.0, 1)
    assert own["after"] == own["before"] == run["before"], "nothing has proved better yet"
    shown = capsys.readouterr().out
    assert "share of hits" in shown
    assert shown.splitlines()[2].count("regret") == 1
    assert main([*line, "--losses", "kl,kl"]) == 1
    assert main([*line[:2], str(corpus(tmp_path, "rules")), *line[2:], "--losses", "kl"]) == 0
    runs = json.loads(record.read_text())["runs"]
    assert [each["stream"] for each in runs] == ["sums", "rules"]
    assert runs[0] == run
