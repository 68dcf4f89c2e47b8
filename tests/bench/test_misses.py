"""Why a draft misses, by its text."""

from __future__ import annotations

import pytest

from outrider.bench.misses import Cause, cause_of

PIECES = [b"", b" the", b" there", b"re", b" man", b" th", b"e"]
THE, THERE, RE, MAN, TH, E = range(1, 7)


@pytest.mark.parametrize(
    ("drafts", "text", "cause"),
    [
        ([THE, MAN], [THE, RE], Cause.HIT),
        ([MAN], [THE, MAN], Cause.TEXT),
        ([THERE], [THE, MAN], Cause.TEXT),
        ([THERE], [THE, RE], Cause.DIVISION),
        ([TH, E, MAN], [THE, MAN], Cause.DIVISION),
        ([TH, RE], [THE, MAN], Cause.TEXT),
        ([TH], [THE, MAN], Cause.SHORT),
        ([], [THE, MAN], Cause.SHORT),
        ([THE], [0], Cause.SPECIAL),
    ],
)
def test_a_miss_is_of_the_text_of_its_division_or_of_a_draft_too_short(drafts, text, cause: Cause) -> None:
    assert cause_of(drafts, text, PIECES.__getitem__) is cause
