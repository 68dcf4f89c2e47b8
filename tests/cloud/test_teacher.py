"""A teacher's folder: what the target writes and reads, how it goes on, and that drafters learn from it alone."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import BYTE_LLAMA, save_with_byte_tokenizer
from safetensors.torch import load_file
from transformers import MistralConfig, MistralForCausalLM

from outrider.cloud.models.family_index import load_tokenizer
from outrider.cloud.testing import tiny_llama
from outrider.cloud.training.drafter_training import train_drafter
from outrider.cloud.training.teacher import BestTokens, TeacherFolder, TeacherRows, kl_of_best
from outrider.cloud.training.teacher_writing import Opening, read_rows, write_rows, write_teacher
from outrider.cloud.training.training_settings import DrafterShape, DrafterTraining, TeacherWriting
from outrider.proto.errors import Cancelled, InvalidArgument

BOS, EOS = 0, 1
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<assistant>{% endif %}"
SHAPE = DrafterShape(hidden=64, layers=1, heads=2, kv_heads=1, head_dim=16, mlp=48, context=64)


def save_target(folder: Path, seed: int = 4) -> Path:
    model = tiny_llama(seed=seed, **BYTE_LLAMA | {"num_hidden_layers": 2}, tie_word_embeddings=True)
    save_with_byte_tokenizer(model, folder)
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("texts")
    lines: list[dict[str, Any]] = [{"prompt": f"What is {i} times {i}?"} for i in range(9)]
    answered = [{"role": "user", "content": "Say A."}, {"role": "assistant", "content": "AAAA"}]
    lines += [{"messages": answered}, {"messages": answered[:1]}, {"text": "A document. " * 9}]
    (folder / "asked.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "plain.txt").write_text("one two three four five six\n" * 40)
    return folder / "asked.jsonl", folder / "plain.txt"


@pytest.fixture(scope="module")
def written(target: Path, texts: tuple[Path, ...], tmp_path_factory: pytest.TempPathFactory) -> TeacherWriting:
    """Settings of a small folder, which is written already."""
    writing = TeacherWriting(
        target=str(target),
        texts=texts,
        output=tmp_path_factory.mktemp("written") / "teacher",
        tokens=700,
        own_questions=0.2,
        rows=8,
        new_tokens=20,
        longest=40,
        threads=1,
        dtype="float32",
    )
    write_teacher(writing)
    return writing


@pytest.fixture
def writing(written: TeacherWriting, tmp_path: Path) -> TeacherWriting:
    return replace(written, output=tmp_path / "teacher")


@pytest.fixture(scope="module")
def teacher(target: Path, texts: tuple[Path, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of some thousand tokens of the target's."""
    folder = tmp_path_factory.mktemp("teacher") / "folder"
    write_teacher(
        TeacherWriting(
            target=str(target), texts=texts, output=folder, tokens=5000, rows=32, new_tokens=24, longest=40, threads=1
        )
    )
    return folder


def batches(folder: Path) -> list[dict[str, torch.Tensor]]:
    return [load_file(path) for path in sorted(folder.glob("part-*.safetensors"))]


def same(one: list[dict[str, torch.Tensor]], other: list[dict[str, torch.Tensor]]) -> bool:
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("stopped_at", [1, 15, 40])
def test_a_folder_that_was_stopped_anywhere_goes_on_to_the_rows_of_one_that_was_not(written, writing, stopped_at):
    kept = sum(TeacherFolder(written.output).counts())
    assert kept >= writing.tokens
    asked: list[None] = []

    def stopping() -> bool:
        asked.append(None)
        return len(asked) > stopped_at

    with pytest.raises(Cancelled, match=r"[\d,]+ tokens are kept, and the same command goes on"):
        write_teacher(writing, stopping=stopping)
    (writing.output / "part-000000.safetensors.unfinished").write_bytes(b"cut off")
    assert write_teacher(writing) == kept
    assert same(batches(written.output), batches(writing.output))
    assert write_teacher(writing) == kept, "or what is finished is written again"


def test_the_probabilities_kept_are_those_of_the_targets_own_pass_over_each_row(written: TeacherWriting) -> None:
    folder = TeacherFolder(written.output)
    rows, best = folder.rows(), folder.best()
    slots = rows.slots()
    model = tiny_llama(seed=4, **BYTE_LLAMA | {"num_hidden_layers": 2}, tie_word_embeddings=True).eval()
    assert (slots[slots >= 0] == torch.arange(len(best))).all()
    for index in range(len(rows)):
        tokens, first = rows[index].long(), int(rows.firsts[index])
        with torch.no_grad():
            logprobs = model(input_ids=tokens[None]).logits[0].log_softmax(-1)
        kept = slots[rows.starts[index] : rows.starts[index + 1]][first:]
        expected = logprobs[first - 1 : -1].gather(1, best.tokens[kept].long())
        torch.testing.assert_close(best.logprobs[kept].float(), expected, atol=0.01, rtol=0)
        assert (best.logprobs[kept].diff(dim=1) <= 0).all()
        if rows.greedy[index]:
            assert torch.equal(best.tokens[kept][:, 0], rows[index][first:])


def test_prompts_are_answered_and_answers_read_in_the_chat_template(writing: TeacherWriting, target: Path) -> None:
    asked = replace(writing, texts=writing.texts[:1], own_questions=0.0)
    write_teacher(asked)
    rows, tokenizer = TeacherFolder(asked.output).rows(), load_tokenizer(str(target))
    before = [tokenizer.decode(rows[i][: rows.firsts[i]]) for i in range(len(rows))]
    after = [tokenizer.decode(rows[i][rows.firsts[i] :]) for i in range(len(rows))]
    assert any(text.endswith("times 3?<eos><assistant>") for text in before)
    read = [index for index, text in enumerate(after) if text == "AAAA<eos>"]
    assert read
    assert {before[index] for index in read} == {"<user>Say A.<eos><assistant>"}
    assert not rows.greedy[read].any()
    documents = [index for index in range(len(rows)) if rows[index][0] == BOS]
    assert documents
    assert all("document" in before[index] + after[index] for index in documents)


def test_a_folder_of_other_settings_texts_or_target_is_not_gone_on_with(writing, tmp_path) -> None:
    write_teacher(replace(writing, tokens=50))
    changed = tmp_path / "asked.jsonl"
    changed.write_text('{"prompt": "Another?"}')
    other = save_target(tmp_path / "target", seed=5)
    shutil.copytree(other, tmp_path / "other" / Path(writing.target).name)
    for field, change in (
        ("seed", {"seed": 1}),
        ("texts", {"texts": (changed, writing.texts[1])}),
        ("mark", {"target": str(tmp_path / "other" / Path(writing.target).name)}),
    ):
        with pytest.raises(InvalidArgument, match="go on with that, or choose another folder") as refused:
            write_teacher(replace(writing, **change))
        assert refused.value.field == field


@pytest.mark.parametrize(
    ("line", "why"),
    [("{}", "line 2: give"), ("[1]", "line 2: give"), ('{"prompt": ""}', "line 2: give"), ("{", "line 2: ")],
)
def test_a_line_that_is_no_text_is_refused_with_its_number(writing, tmp_path, line, why) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text(f"\n{line}\n")
    with pytest.raises(InvalidArgument, match=why) as refused:
        write_teacher(replace(writing, texts=(bad,)))
    assert refused.value.field == "texts"


@pytest.mark.parametrize("window", [None, 6])
def test_the_target_continues_rows_exactly_as_its_plain_forward_would(window: int | None) -> None:
    """Greedy rows are the plain argmax, whatever other rows do, and rows that end are cut at their end."""
    torch.manual_seed(1)
    model = MistralForCausalLM(
        MistralConfig(
            vocab_size=20,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=4,
            intermediate_size=24,
            initializer_range=0.4,
            sliding_window=window,
            bos_token_id=BOS,
            eos_token_id=EOS,
        )
    ).eval()
    openings = [[BOS, *torch.randint(2, 20, (2 + index % 3,)).tolist()] for index in range(12)]
    greedy = torch.arange(12) % 2 == 0
    rows, best = write_rows(model, openings, greedy, new_tokens=20, ends=[EOS], generator=torch.Generator())
    assert best.tokens.shape == (len(best), 20), "of 20 tokens no 64 are the best"
    for index, opening in enumerate(openings):
        text = rows[index].tolist()
        assert text[: len(opening)] == opening
        assert EOS not in text[len(opening) : -1]
        assert len(text) == len(opening) + 20 or text[-1] == EOS
        if greedy[index]:
            chosen = model(input_ids=torch.tensor([text])).logits[0].argmax(-1)
            assert chosen[len(opening) - 1 : -1].tolist() == text[len(opening) :]
    assert len(set(map(len, rows.tokens.split(rows.starts.diff().tolist())))) > 1


def test_sampled_rows_follow_the_targets_distribution_and_no_other(target: Path) -> None:
    model: Any = tiny_llama(seed=4, **BYTE_LLAMA | {"num_hidden_layers": 2}, tie_word_embeddings=True).eval()
    count, opening = 4000, [BOS, 7, 9]
    sampled = torch.zeros(count, dtype=torch.bool)
    rows, _ = write_rows(model, [opening] * count, sampled, new_tokens=1, ends=[EOS], generator=torch.Generator())
    counts = rows.tokens.view(count, 4)[:, 3].bincount(minlength=258) / count
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([opening])).logits[0, -1]

    def follow(p: torch.Tensor) -> bool:
        return bool(0.5 * (counts - p).abs().sum() < 0.5 * (2 * p * (1 - p) / torch.pi / count).sqrt().sum() * 1.5)

    assert follow(logits.softmax(-1))
    assert not follow((logits / 1.5).softmax(-1)), "or so few rows show nothing"


def test_slots_number_the_tokens_from_each_rows_first_on() -> None:
    rows = TeacherRows.of(
        [torch.arange(4, dtype=torch.int32), torch.arange(3, dtype=torch.int32)], [2, 3], torch.zeros(2)
    )
    assert TeacherRows.joined([rows, rows]).slots().tolist() == [-1, -1, 0, 1, -1, -1, -1, -1, -1, 2, 3, -1, -1, -1]


def test_read_rows_are_those_of_each_text_alone(target: Path) -> None:
    model: Any = tiny_llama(seed=4, **BYTE_LLAMA, tie_word_embeddings=True).eval()
    openings = [Opening([BOS, *range(2, 2 + length)], 1, reads=True) for length in (30, 1, 7)]
    rows, together = read_rows(model, openings)
    alone = BestTokens.joined(
        [read_rows(model, [opening])[1] for opening in sorted(openings, key=lambda o: len(o.tokens))]
    )
    assert rows.starts.tolist() == [0, 2, 10, 41]
    torch.testing.assert_close(together.logprobs.float(), alone.logprobs.float(), atol=1e-2, rtol=0)


# --- the loss ---


def scene(vocab: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """States [9, 6] and head [vocab, 6] of a drafter, and a target's log probabilities [9, vocab]."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(9, 6, generator=generator, requires_grad=True)
    head = torch.randn(vocab, 6, generator=generator, requires_grad=True)
    return hidden, head, torch.randn(9, vocab, generator=generator).log_softmax(-1)


def whole_kl(hidden: torch.Tensor, head: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    log_q = (hidden @ head.T).log_softmax(-1)
    return torch.nn.functional.kl_div(log_q, logprobs, log_target=True, reduction="batchmean")


def gradients(loss: torch.Tensor, *of: torch.Tensor) -> list[torch.Tensor]:
    return [*torch.autograd.grad(loss, of)]


def test_with_all_tokens_among_the_best_the_loss_is_the_exact_divergence() -> None:
    hidden, head, logprobs = scene(40)
    best = logprobs.topk(40)
    ours = kl_of_best(hidden, head, best.indices, best.values, positions_per_chunk=4)
    exact = whole_kl(hidden, head, logprobs)
    torch.testing.assert_close(ours, exact, atol=1e-5, rtol=1e-5)
    for one, other in zip(gradients(ours, hidden, head), gradients(exact, hidden, head), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    rounded = BestTokens.of(logprobs)
    ours = kl_of_best(hidden, head, rounded.tokens.long(), rounded.logprobs, positions_per_chunk=4)
    torch.testing.assert_close(ours, exact, atol=5e-3, rtol=0)


def test_tokens_beyond_the_best_are_one_class_and_unknown_ones_are_left_out() -> None:
    hidden, head, logprobs = scene(40)
    best = logprobs.topk(5)
    ours = kl_of_best(hidden, head, best.indices, best.values, positions_per_chunk=100)
    log_q = (hidden @ head.T).log_softmax(-1)

    def coarse(log: torch.Tensor) -> torch.Tensor:
        p = log.exp().gather(1, best.indices)
        return torch.cat([p, 1 - p.sum(1, keepdim=True)], 1)

    p, q = coarse(logprobs), coarse(log_q)
    torch.testing.assert_close(ours, (p * (p / q).log()).sum(1).mean(), atol=1e-5, rtol=1e-5)
    assert ours < whole_kl(hidden, head, logprobs)

    known = torch.arange(0, 40, 2)
    row_of = torch.full((40,), -1)
    row_of[known] = torch.arange(20)
    best = logprobs.topk(40)
    of_known = kl_of_best(hidden, head[known], row_of[best.indices], best.values, positions_per_chunk=100)
    exact = whole_kl(hidden, head[known], logprobs[:, known].log_softmax(-1))
    torch.testing.assert_close(of_known, exact, atol=1e-5, rtol=1e-5)


def test_where_the_drafter_knows_nothing_of_the_target_the_loss_is_zero() -> None:
    hidden, head, _ = scene(40)
    certain, unknown = torch.zeros(9, 1), torch.full((9, 1), -1)
    loss = kl_of_best(hidden, head, unknown, certain, positions_per_chunk=4)
    assert float(loss.detach()) == 0
    assert all(gradient.isfinite().all() for gradient in gradients(loss, hidden, head))
    empty = kl_of_best(hidden[:0], head, unknown[:0], certain[:0], positions_per_chunk=4)
    assert float(empty.detach()) == 0


# --- what learns from a folder ---


def drafter_of(target: Path, teacher: Path, output: Path, **changes: Any) -> DrafterTraining:
    values = {
        "steps": 60,
        "block": 32,
        "positions_per_chunk": 64,
        "warm_up_steps": 2,
        "vocabulary": 200,
        "shape": SHAPE,
    }
    return DrafterTraining(target=str(target), teacher=teacher, output=output, **values | changes)


def test_a_drafter_of_a_few_tokens_learns_from_the_folder_and_can_be_trimmed_on(target, teacher, tmp_path) -> None:
    config = drafter_of(target, teacher, tmp_path / "drafter")
    result = train_drafter(config)
    before = train_drafter(replace(config, steps=1, output=tmp_path / "before", other_lr=1e-9, matrix_lr=1e-9))
    assert result.acceptance["drafter"].kl < 0.9 * before.acceptance["drafter"].kl
    weights = load_file(result.folder / "model.safetensors")
    assert weights["lm_head.up.weight"].shape == (200, 64)
    assert not any("embed_tokens.weight" in name for name in weights)

    on = replace(config, start=str(result.folder), vocabulary=150, steps=1, output=tmp_path / "on", other_lr=1e-9)
    trimmed = load_file(train_drafter(on).folder / "model.safetensors")
    kept = trimmed["lm_head.tokens"]
    assert len(kept) == 150
    assert {BOS, EOS} <= set(kept.tolist()) <= set(weights["lm_head.tokens"].tolist())
    rows = weights["model.embed_tokens.rows"][kept].long()
    torch.testing.assert_close(trimmed["lm_head.up.weight"], weights["lm_head.up.weight"][rows], atol=1e-4, rtol=0)
    with pytest.raises(InvalidArgument, match="saves nothing of a vocabulary of 200") as refused:
        train_drafter(replace(on, vocabulary=200, output=tmp_path / "more"))
    assert refused.value.field == "vocabulary"


def test_a_resumed_run_on_a_folder_is_the_same_run(target: Path, teacher: Path, tmp_path: Path) -> None:
    config = drafter_of(target, teacher, tmp_path / "whole", steps=6)
    whole = load_file(train_drafter(config).folder / "model.safetensors")
    broken = replace(config, output=tmp_path / "broken")
    steps: list[int] = []
    with pytest.raises(Cancelled):
        train_drafter(broken, on_step=steps.append, stopping=lambda: len(steps) == 3)
    resumed = load_file(train_drafter(replace(broken, resume=True)).folder / "model.safetensors")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_another_targets_folder_and_one_without_rows_are_refused(target: Path, teacher: Path, tmp_path: Path) -> None:
    other = save_target(tmp_path / "other", seed=5)
    with pytest.raises(InvalidArgument, match="not this target") as refused:
        train_drafter(drafter_of(other, teacher, tmp_path / "out"))
    assert refused.value.field == "teacher"
    shutil.copytree(target, tmp_path / "renamed")
    train_drafter(drafter_of(tmp_path / "renamed", teacher, tmp_path / "out", steps=1))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidArgument, match="has no teacher"):
        train_drafter(drafter_of(target, tmp_path / "empty", tmp_path / "out2"))
    shutil.copy(teacher / "teacher.json", tmp_path / "empty")
    with pytest.raises(InvalidArgument, match="too few rows"):
        train_drafter(drafter_of(target, tmp_path / "empty", tmp_path / "out2"))
