"""Commands that load a target compute with the threads that their help promises."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.cloud import verifier_config
from research.commands import main


class Asked(Exception):
    """The threads that a command has asked for, in place of the command."""


@pytest.mark.parametrize(
    ("command", "threads"),
    [
        (["traces", "record", "--output", "traces.jsonl"], 5),
        (["traces", "record", "--output", "traces.jsonl", "--threads", "2"], 2),
    ],
)
def test_where_nobody_names_threads_there_is_one_fewer_than_cores(
    command: list[str], threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(number: int) -> None:
        raise Asked(number)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verifier_config, "computing_cores", lambda: 5)
    monkeypatch.setattr(torch, "set_num_threads", asked)
    with pytest.raises(Asked, match=str(threads)):
        main(command)
