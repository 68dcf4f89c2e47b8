"""Values of wrong types in a caller's request: each is refused by name, and none gets as far as a frame."""

from __future__ import annotations

import dataclasses
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from scripted_cloud import ScriptedStream, scripted_client

from outrider.edge import Client
from outrider.proto import codec
from outrider.proto.errors import InvalidArgument
from outrider.proto.types import CommittedToken, EdgeFrame, Sampling

WRONG = ("a\ud800b", "\udc00", 1.5, -1, 1 << 70, float("nan"), 1j, Decimal("0.5"), b"ab", [1.5], [True], ["x"], [None])
WRONG = (*WRONG, [[1]], {1: 2}, [1, 2.0], [1 << 40], [(1, "x")], [(1, 2, 3)], {5}, object(), np.array([1.5]))
NUMBERS = {field.name for field in dataclasses.fields(Sampling) if isinstance(field.default, float)}
RIGHT = {"stop": (["x"],), **dict.fromkeys(NUMBERS, (1.5, -1))}  # what a setting may have of these, or may not
SETTINGS = ["prompt", "prediction", "stop", "top_logprobs", "prompt_logprobs", "request_id"]
SETTINGS += [field.name for field in dataclasses.fields(Sampling)]
FIELDS = {"prompt": "open.prompt", "logit_bias": "sampling.bias"}  # beginnings of their names in errors


@pytest.fixture
def sent(monkeypatch) -> list[EdgeFrame]:
    """Return the list of the frames that are sent, which the wire can carry."""
    frames: list[EdgeFrame] = []
    send = ScriptedStream.send

    def encoded(self: ScriptedStream, frame: EdgeFrame) -> None:
        codec.encode_edge_frame(frame)
        frames.append(frame)
        send(self, frame)

    monkeypatch.setattr(ScriptedStream, "send", encoded)
    return frames


def client_of(tokenizer: Path) -> Client:
    client, channels = scripted_client(tokenizer, drafter="ngram")
    channels.script = lambda _: [CommittedToken(5)] * 200
    return client


@pytest.mark.parametrize("setting", SETTINGS)
async def test_a_value_that_a_setting_cannot_have_is_refused_by_its_name(tokenizer_file, sent, setting) -> None:
    async with client_of(tokenizer_file) as client:
        for value in WRONG:
            if repr(value) in map(repr, RIGHT.get(setting, ())):
                continue
            with pytest.raises(InvalidArgument) as caught:
                await client.complete(**{"prompt": [3, 4], "max_tokens": 3, setting: value})
            field = str(caught.value.field)
            assert field.startswith((setting, f"sampling.{setting}", FIELDS.get(setting, setting))), value
    assert sent == []


@pytest.mark.parametrize("tokens", [np.array([3, 4]), [np.int64(3), np.uint32(4)], range(3, 5), (3, 4)])
async def test_ids_may_be_whole_numbers_of_any_kind(tokenizer_file, sent, tokens) -> None:
    async with client_of(tokenizer_file) as client:
        whole = await client.complete(tokens, prediction=tokens, stop_tokens=(np.int64(9),), max_tokens=3)
    assert whole.ids == (5, 5, 5)
    assert sent[0].prompt == (3, 4)  # type: ignore[union-attr]
