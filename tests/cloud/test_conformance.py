"""Our own backend passes the conformance suite, and backends with a defect each fail it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from branch_conformance import BRANCH_CHECKS
from conformance import CHECKS
from conformance_oracle import Oracle, save_conformance_target
from conformance_suites import suite_of

from outrider.cloud.target.backend import Handle, StepOutput, StepRow
from outrider.cloud.target.transformers_backend import TransformersBackend
from outrider.proto.errors import ResourceExhausted
from outrider.proto.token_counts import TokenCounts
from outrider.proto.types import token_ids


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_conformance_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


@pytest.mark.parametrize("check", CHECKS)
def test_the_own_backend_conforms(check, folder, oracle) -> None:
    CHECKS[check](suite_of(folder, oracle, page_size=4))


@pytest.mark.parametrize("check", ["pages", "what_is_shared", "anything_in_any_order"])
def test_it_conforms_on_larger_pages(check, folder, oracle) -> None:
    CHECKS[check](suite_of(folder, oracle))


@pytest.mark.parametrize("check", BRANCH_CHECKS)
def test_the_own_backend_verifies_branches(check, folder, oracle) -> None:
    suite = suite_of(folder, oracle, page_size=4)
    assert suite.backend.facts.verifies_branches
    BRANCH_CHECKS[check](suite)


@pytest.mark.parametrize("check", BRANCH_CHECKS)
def test_it_verifies_branches_in_tiles(check, folder, oracle) -> None:
    BRANCH_CHECKS[check](suite_of(folder, oracle, exact="tiles"))


@pytest.mark.parametrize("check", ["texts_are_those_of_the_rule", "anything_in_any_order"])
def test_it_conforms_in_tiles(check, folder, oracle) -> None:
    CHECKS[check](suite_of(folder, oracle, exact="tiles"))


@pytest.mark.gpu
@pytest.mark.parametrize("check", [*CHECKS, *BRANCH_CHECKS])
def test_it_conforms_on_a_gpu(check, folder, oracle) -> None:
    (CHECKS | BRANCH_CHECKS)[check](suite_of(folder, oracle, page_size=4, device="cuda"))


class Defective(TransformersBackend):
    """A backend whose every row goes through `change` first."""

    def change(self, row: StepRow) -> StepRow:
        return row

    def step(self, rows: Sequence[StepRow]) -> StepOutput:
        return super().step([self.change(row) for row in rows])


class IgnoresMasks(Defective):
    def change(self, row: StepRow) -> StepRow:
        return row if row.verification is None else replace(row, verification=replace(row.verification, allowed=None))


class IgnoresSeeds(Defective):
    def change(self, row: StepRow) -> StepRow:
        if row.verification is None:
            return row
        sampling = replace(row.verification.sampling, seed=1)
        return replace(row, verification=replace(row.verification, sampling=sampling))


class TakesEveryDraft(Defective):
    def step(self, rows: Sequence[StepRow]) -> StepOutput:
        output = super().step(rows)
        sampled = []
        for row, result in zip(rows, output.sampled, strict=True):
            if result is not None and row.verification is not None and row.verification.block:
                draft = row.verification.block[0].id
                result = replace(result, tokens=(result.tokens[0]._replace(id=draft), *result.tokens[1:]))
            sampled.append(result)
        return replace(output, sampled=sampled)


class ForgetsTooLittle(Defective):
    """A backend in whose cache the first wrong draft stays."""

    def truncate(self, handle: Handle, length: int) -> None:
        super().truncate(handle, min(handle.length, length + 1))


class TapsAnotherRow(Defective):
    def step(self, rows: Sequence[StepRow]) -> StepOutput:
        output = super().step(rows)
        return output if output.taps is None else replace(output, taps=output.taps.roll(1, 0))


class LeaksAPage(Defective):
    def release(self, handle: Handle) -> None:
        self.reserve(self.open(), 1)
        super().release(handle)


class GrowsOnFailure(Defective):
    def step(self, rows: Sequence[StepRow]) -> StepOutput:
        try:
            return super().step(rows)
        except RuntimeError:
            rows[0].handle.extend([0])  # type: ignore[attr-defined]
            raise


class MakesTextOfAnything(Defective):
    """A backend that samples what numbers there are."""

    def step(self, rows: Sequence[StepRow]) -> StepOutput:
        forward = self.target.forward
        self.target.forward = lambda batch: forward(batch).nan_to_num()  # type: ignore[method-assign]
        try:
            return super().step(rows)
        finally:
            del self.target.__dict__["forward"]


class TellsOfOthers(Defective):
    """A prompt that anybody has sent counts as computed."""

    seen: set[tuple[int, ...]]

    def open(self, tokens: Sequence[int] = (), isolation: str = "") -> Any:
        seen = self.__dict__.setdefault("seen", set())
        handle = super().open(tokens, isolation)
        if tokens and tuple(tokens) in seen:
            self.reserve(handle, len(tokens))
            self.step([StepRow(handle, tuple(tokens[:-1]), None)])
        seen.add(tuple(tokens))
        return handle


class ShowsRejectedDrafts(Defective):
    """A backend whose cache lets others find what a step has computed, whether or not it becomes text."""

    def truncate(self, handle: Handle, length: int) -> None:
        self.target.pool.register(handle, handle.length)  # type: ignore[arg-type]
        super().truncate(handle, length)


@pytest.mark.parametrize(
    ("defective", "check"),
    [
        (IgnoresMasks, "masks"),
        (IgnoresSeeds, "texts_are_those_of_the_rule"),
        (IgnoresSeeds, "texts_follow_the_law"),
        (TakesEveryDraft, "texts_are_those_of_the_rule"),
        (TakesEveryDraft, "every_block_of_drafts"),
        (ForgetsTooLittle, "ragged_company"),
        (ForgetsTooLittle, "rollback"),
        (TapsAnotherRow, "taps"),
        (LeaksAPage, "pages"),
        (LeaksAPage, "anything_in_any_order"),
        (GrowsOnFailure, "a_failed_step"),
        (MakesTextOfAnything, "no_numbers"),
        (TellsOfOthers, "what_is_shared"),
        (ShowsRejectedDrafts, "rejected_drafts"),
    ],
)
def test_a_backend_with_a_defect_fails(defective, check, folder, oracle) -> None:
    with pytest.raises((AssertionError, ResourceExhausted)):
        CHECKS[check](suite_of(folder, oracle, defective))


class JudgesByTheBrother(Defective):
    """A backend that counts the block's draft beside a branch as if it came before it."""

    def change(self, row: StepRow) -> StepRow:
        branches = []
        for branch in row.branches:
            whole, judged = row.verification, branch.verification
            if whole is not None and branch.index < len(whole.block):
                brother = whole.block[branch.index].id
                counts = TokenCounts(judged.prompt_length, judged.transcript).followed_by((brother,))
                judged = replace(judged, counts=counts)
            branches.append(replace(branch, verification=judged))
        return replace(row, branches=tuple(branches))


class CountsRowsForDepth(Defective):
    """A backend that draws a branch's tokens with the noise of positions after the block."""

    def change(self, row: StepRow) -> StepRow:
        whole = row.verification
        branches = []
        for branch in row.branches:
            after = range(len(whole.transcript) + len(whole.block) + 1)
            branches.append(replace(branch, verification=replace(branch.verification, transcript=after)))
        return replace(row, branches=tuple(branches))


class FollowsInTextAlone(Defective):
    """A backend in whose cache the block stays where a branch was followed."""

    def step(self, rows: Sequence[StepRow]) -> StepOutput:
        ends = [row.handle.length + len(row.tokens) for row in rows]
        output = super().step(rows)
        for i in output.followed:
            cache, block = rows[i].handle, rows[i].verification.block  # type: ignore[union-attr]
            text = list(cache.tokens)  # type: ignore[attr-defined]
            self.truncate(cache, ends[i])
            super().step([StepRow(cache, token_ids(block) or (0,), None)])
            self.truncate(cache, ends[i])
            cache.extend(text[ends[i] :])  # type: ignore[attr-defined]
        return output


class TellsNothingOfBranches(Defective):
    def step(self, rows: Sequence[StepRow]) -> StepOutput:
        return replace(super().step(rows), followed={})


@pytest.mark.parametrize(
    ("defective", "check"),
    [
        (JudgesByTheBrother, "every_tree_of_drafts"),
        (CountsRowsForDepth, "trees_in_ragged_company"),
        (CountsRowsForDepth, "every_tree_of_drafts"),
        (FollowsInTextAlone, "trees_in_ragged_company"),
        (TellsNothingOfBranches, "every_tree_of_drafts"),
        (LeaksAPage, "trees_in_ragged_company"),
        (TapsAnotherRow, "trees_in_ragged_company"),
    ],
)
def test_a_backend_with_a_defect_in_its_branches_fails(defective, check, folder, oracle) -> None:
    with pytest.raises((AssertionError, ResourceExhausted)):
        BRANCH_CHECKS[check](suite_of(folder, oracle, defective))
