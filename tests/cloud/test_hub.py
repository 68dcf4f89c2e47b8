"""One question to the hub, in place of a minute of retries; models that ship with Outrider are found by name."""

from __future__ import annotations

from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from tokenizers import Tokenizer

from outrider.cloud.models import family_index
from outrider.cloud.models.family_index import (
    ANSWERS_WITHIN_S,
    find_target,
    load_tokenizer,
    resolve_target,
    tokenizer_file,
)
from outrider.proto.errors import ModelRefused, NotFound

NAME = "somebody/some-model"


class Hub:
    """A hub that answers by an error or not, and what is cached of it."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.cached: str | None = None
        self.asked: list[tuple[str, float]] = []

    def model_info(self, name: str, *, timeout: float) -> None:
        self.asked.append((name, timeout))
        if self.error is not None:
            raise self.error


@pytest.fixture
def hub(monkeypatch) -> Hub:
    made = Hub()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: made)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: made.cached)
    return made


def error_of(kind: type[Exception]) -> Exception:
    """An error of the hub's library, without the response that it would carry."""
    error = kind.__new__(kind)
    error.args = ("of the hub",)
    return error


def test_a_model_that_the_hub_has_is_left_to_its_loader(hub: Hub) -> None:
    assert find_target(NAME) == NAME
    assert hub.asked == [(NAME, ANSWERS_WITHIN_S)]


@pytest.mark.parametrize(
    ("kind", "raised", "remedy"),
    [
        (RepositoryNotFoundError, NotFound, "has no model 'somebody/some-model'"),
        (GatedRepoError, ModelRefused, "accept its terms"),
        (ConnectionError, NotFound, "not on this machine, and .* cannot be reached"),
    ],
)
def test_what_the_hub_does_not_give_is_refused_by_one_question(kind: Any, raised: Any, remedy: str, hub: Hub) -> None:
    hub.error = error_of(kind)
    with pytest.raises(raised, match=remedy) as refused:
        find_target(NAME)
    assert refused.value.field == "target"
    assert len(hub.asked) == 1
    assert "\n" not in str(refused.value)


def test_a_cached_model_is_loaded_without_the_hub_that_does_not_answer(hub: Hub, caplog) -> None:
    hub.error, hub.cached = ConnectionError("no route"), "/a/file"
    assert find_target(NAME) == NAME
    assert "no route" in caplog.text
    assert constants.HF_HUB_OFFLINE, "else its loader asks for every file again"


@pytest.mark.parametrize("cached", [None, "/a/file"])
def test_a_hub_that_is_switched_off_is_not_asked(cached: str | None, hub: Hub, monkeypatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.cached = cached
    if cached is None:
        with pytest.raises(NotFound, match="HF_HUB_OFFLINE"):
            find_target(NAME)
    else:
        assert find_target(NAME) == NAME
    assert hub.asked == []


@pytest.mark.parametrize("name", ["reference", "./folder"])
def test_the_hub_is_not_asked_for_what_is_here(name, hub: Hub, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model.safetensors").touch()
    assert find_target(name) == family_index.resolve_target(name)
    assert hub.asked == []


@pytest.mark.parametrize("name", ["nosuch", "a..b/c--d", "./not-here", "~/no such folder"])
def test_a_name_that_can_be_none_of_the_hub_is_refused_with_what_there_is(name, monkeypatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(NotFound) as refused:
        find_target(name)
    assert refused.value.field == "target"
    assert name in str(refused.value)


def test_the_embedded_target_has_its_tokenizer_and_a_folder_its_own(tmp_path) -> None:
    embedded = resolve_target("reference")
    file = tokenizer_file(embedded)
    assert file is not None
    text = "def main(argv):\n    return 0<|end|>"
    expected = Tokenizer.from_file(str(file)).encode(text).ids
    assert load_tokenizer(embedded).encode(text) == expected
    load_tokenizer(embedded).save_pretrained(tmp_path)
    assert tokenizer_file(tmp_path) == tmp_path / "tokenizer.json"
    assert load_tokenizer(str(tmp_path)).encode(text) == expected
    assert tokenizer_file("hub/name") is None


def test_where_no_target_is_embedded_an_error_names_the_distribution(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(family_index, "_FAMILY", tmp_path)
    with pytest.raises(NotFound, match="`reference` comes with the distribution outrider-models") as caught:
        family_index.resolve_target("reference")
    assert caught.value.field == "target"
