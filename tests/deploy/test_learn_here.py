"""`outrider edge --learn-here`: what it needs, what waits, and what is never learned from."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.cloud.learning.lesson_record import LessonRecord
from outrider.deploy.cli import parse
from outrider.deploy.daemon import _learning
from outrider.deploy.local import learn_here
from outrider.deploy.local.learn_here import HereTrainer, LearningHere
from outrider.edge import Client, EdgeConfig
from outrider.edge.client import OwnText
from outrider.proto.errors import ConfigError, InvalidArgument
from outrider.proto.types import Grammar, GrammarKind, Sampling

EDGE = ["edge", "--verifier", "127.0.0.1:1", "--model", "m"]


def client() -> Client:
    return Client(EdgeConfig(verifier="127.0.0.1:1", model="m"))


def learner() -> LearningHere:
    parent = SimpleNamespace(target="reference", version="1", tokenizer_sha256="ab" * 32)
    own: Any = SimpleNamespace(learnable=parent, trainer=None)
    return LearningHere(own, cpu_share=0.5, folder=None, logs={})


def text(session: str = "s", tokens: int = 50, **changes: Any) -> OwnText:
    fields = {"sampling": Sampling(temperature=1.0, seed=7), "prompt_class": 3} | changes
    return OwnText(session, tuple(range(tokens)), 4, **fields)


def test_an_edge_learns_only_where_it_is_asked_to() -> None:
    assert _learning(parse(EDGE), client()) is None
    made = client()
    learning = _learning(parse([*EDGE, "--learn-here", "--learn-here-folder", "~/x", "--learn-cpu-share", "0.2"]), made)
    assert learning is not None
    assert made.trainer == learning.take
    assert (learning._folder, learning._cpu_share) == (Path("~/x").expanduser(), 0.2)


def test_what_is_missing_is_named_with_the_extra_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else found(name))
    with pytest.raises(ConfigError, match=r"\[edge,cloud\], .*missing: torch") as refused:
        _learning(parse([*EDGE, "--learn-here"]), client())
    assert refused.value.field == "learn_here"


def test_a_folder_alone_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match="needs --learn-here"):
        _learning(parse([*EDGE, "--learn-here-folder", "x"]), client())


def test_a_text_waits_as_a_record_with_its_seed() -> None:
    learning = learner()
    learning.take(text())
    (waiting,) = learning._waiting
    record = LessonRecord.decode(waiting)
    assert (record.model, record.prompt_class, record.first_generated) == ("reference", 3, 4)
    assert record.tokenizer_sha256 == "ab" * 32
    assert record.sampling.seed == 7
    assert record.tokens.tolist() == list(range(50))
    assert record.top_ids.shape == (46, 0)


def test_the_oldest_texts_give_way_where_too_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1e9)  # so that all records have one size
    learning = learner()
    learning.take(text())
    size = learning._waiting_bytes
    monkeypatch.setattr(learn_here, "MAX_WAITING_BYTES", 3 * size + 10)
    for number in range(5):
        learning.take(text(str(number)))
    assert (len(learning._waiting), learning.dropped, learning._waiting_bytes) == (3, 3, 3 * size)
    assert len(learning._next()) == 3
    assert learning._waiting_bytes == 0


def test_a_text_without_prompt_or_drafter_to_teach_is_passed_over() -> None:
    learning = learner()
    learning.take(OwnText("s", (1, 2, 3), 0, Sampling(), 0))
    learning._client.learnable = None  # type: ignore[misc]
    learning.take(text())
    assert not learning._waiting


def test_the_edge_drafts_with_what_its_trainer_says_or_with_the_parent_again(monkeypatch) -> None:
    said = iter(["1", "v1", "v1", "v2", "1", "1"])

    class Process:
        def __init__(self, begin: dict[str, Any]) -> None:
            assert begin["drafter"] == "parent"
            self.info = {"version": next(said), "folder": "parent"}

        async def __aenter__(self) -> Process:
            return self

        async def __aexit__(self, *_: object) -> None: ...

        async def learn(self, records: list[bytes]) -> None:
            version = next(said, "")
            self.info = {"version": version, "folder": {"1": "parent"}.get(version, f"learned/{version}")}
            if not version:
                own.learnable = None

    drafted: list[str] = []

    async def draft_with(folder: Path) -> None:
        drafted.append(str(folder))

    monkeypatch.setattr(learn_here, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(learn_here, "_TrainerProcess", Process)
    parent = SimpleNamespace(name="general", version="1", folder=Path("parent"))
    own: Any = SimpleNamespace(learnable=parent, trainer=None, draft_with=draft_with)
    learning = LearningHere(own, cpu_share=0.5, folder=Path("learned"), logs={})
    asyncio.run(learning._learn_from(own.learnable, Path("learned")))
    assert drafted == ["learned/v1", "learned/v2", "parent"]


@pytest.mark.parametrize(
    "free",
    [
        {},
        {"grammar": Grammar(GrammarKind.LARK, "start: /a/")},
        {"logit_bias": ((1, 2.0),)},
        {"allowed_tokens": (1,)},
        {"min_tokens": 1},
    ],
)
def test_texts_under_a_grammar_or_bias_are_not_handed_over(free: dict[str, Any]) -> None:
    taken: list[OwnText] = []
    made = client()
    made.trainer = taken.append
    machine: Any = SimpleNamespace(sampling=Sampling(**free), transcript=[1, 2, 3], prompt_length=2)
    made._teach(SimpleNamespace(decode=str), "s", machine)  # type: ignore[arg-type]
    assert [each.tokens for each in taken] == ([] if free else [(1, 2, 3)])


def begin(folder: Path, **changes: Any) -> dict[str, Any]:
    logs = {"log_level": "", "log_format": "text"}
    asked = {"do": "begin", "drafter": "general", "folder": str(folder), "forget": False, "cpu_share": 1.0}
    return asked | logs | changes


@pytest.fixture
def one_here(monkeypatch: pytest.MonkeyPatch):
    """A trainer in this process, which stays as eager as it was."""
    monkeypatch.setattr("os.nice", lambda _: 0)
    made = [HereTrainer(), HereTrainer()]
    yield made
    for each in made:
        each.close()


async def test_a_folder_belongs_to_one_edge_and_is_forgotten_where_that_is_asked(one_here, tmp_path: Path) -> None:
    first, second = one_here
    with pytest.raises(InvalidArgument, match="before begin"):
        await first.answer({"do": "learn", "records": []})
    folder = tmp_path / "a" / "b"
    info = await first.answer(begin(folder, forget=True))
    assert (info["drafter"], info["steps"]) == ("general", 0)
    with pytest.raises(ConfigError, match="another edge's"):
        await second.answer(begin(folder))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        await second.answer(begin(tmp_path / "file" / "x"))
    with pytest.raises(InvalidArgument, match="no request"):
        await second.answer({"do": "dance"})
    assert (await first.answer({"do": "learn", "records": ["AAAA"]}))["pid"] == info["pid"]
    first.close()
    assert not folder.exists()
    await second.answer(begin(folder))
    second.close()
    assert list(folder.glob("checkpoint-*"))
