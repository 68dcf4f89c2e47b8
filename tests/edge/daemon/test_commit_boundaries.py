"""Answers over HTTP are the same wherever commits are cut: texts, ends, log probabilities and usage, byte for byte."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_thread import LoopThread
from scripted_cloud import EOS, ScriptedChannels, scripted_client
from tokenizers import Tokenizer

from outrider.proto.types import CommittedToken, Open, TokenFacts

WRITTEN = ("one two three", "a bé c🦉 bc", "b" * 6)


class Asked:
    """A daemon over a cloud without a network, and what it answers."""

    def __init__(self, live: Any, channels: ScriptedChannels, tokenizer: Tokenizer) -> None:
        self._live = live
        self._channels = channels
        self._channels.script = self._script
        self._texts = [tokenizer.encode(written, add_special_tokens=False).ids for written in WRITTEN]

    def _script(self, frame: Open) -> list[CommittedToken]:
        """Give each choice a text of its own, by its seed."""
        tokens = [*self._texts[frame.sampling.seed % len(WRITTEN)], EOS]
        top = frame.top_logprobs
        return [
            CommittedToken(token, None, TokenFacts(-0.5 * at, 1, ((token, -0.5 * at), (token + 1, -9.0))[:top]))
            if frame.logprobs
            else CommittedToken(token)
            for at, token in enumerate(tokens)
        ]

    def whole(self, sizes: Sequence[int], paced: bool, path: str, body: dict[str, Any]) -> str:
        """Return the JSON of choices and usage."""
        self._channels.sizes, self._channels.paced = sizes, paced
        answer = self._live.post(path, body).json
        return json.dumps([answer["choices"], answer["usage"]])

    def stop_reasons(self, body: dict[str, Any]) -> list[str]:
        """Return the stop strings that a stream names."""
        *chunks, _ = self._live.post("/v1/completions", {**body, "stream": True}).events
        return [choice["stop_reason"] for chunk in chunks for choice in chunk["choices"] if "stop_reason" in choice]

    def running_usage(self, sizes: Sequence[int], body: dict[str, Any], **more: bool) -> list[dict[str, Any] | None]:
        """Return the usage of each chunk of a stream."""
        self._channels.sizes, self._channels.paced = sizes, True
        options = {"stream": True, "stream_options": {"continuous_usage_stats": True, **more}}
        *chunks, _ = self._live.post("/v1/completions", {**body, **options}).events
        return [chunk.get("usage") for chunk in chunks]

    def streamed(self, sizes: Sequence[int], paced: bool, path: str, body: dict[str, Any]) -> str:
        """Return the same of a stream, whose chunks are joined."""
        self._channels.sizes, self._channels.paced = sizes, paced
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, end = self._live.post(path, {**body, **options}).events
        assert end == "[DONE]"
        joined: dict[int, dict[str, Any]] = {}
        for chunk in chunks:
            for choice in chunk["choices"]:
                made = joined.setdefault(choice["index"], {"text": "", "logprobs": {}, "finish_reason": None})
                assert made["finish_reason"] is None, "nothing follows the end"
                made["finish_reason"] = choice["finish_reason"]
                made["text"] += choice.get("text") or choice.get("delta", {}).get("content") or ""
                for name, values in (choice["logprobs"] or {}).items():
                    made["logprobs"][name] = (made["logprobs"].get(name) or []) + (values or [])
        return json.dumps([sorted(joined.items()), chunks[-1]["usage"]])


@pytest.fixture(scope="module")
def asked(start: Callable[..., Any], tokenizer_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    template = tmp_path_factory.mktemp("template") / "chat_template.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    loop = LoopThread()
    listener = loop.run(asyncio.start_server(lambda *_: None, "127.0.0.1", 0))  # for the daemon's health
    address = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    client, channels = scripted_client(tokenizer_file, verifier=address, chat_template=template)
    client.away = None  # a scripted client has it
    with start(client) as live:
        yield Asked(live, channels, Tokenizer.from_file(str(tokenizer_file)))
    loop.close()


BODIES = st.fixed_dictionaries(
    {
        "n": st.integers(1, 3),
        "seed": st.integers(0, 2),
        "max_tokens": st.integers(1, 14),
        "stop": st.lists(st.sampled_from(["two", "e t", "bc", "c🦉", "é", "bb", "x"]), max_size=2, unique=True),
    }
)


@settings(max_examples=60, deadline=None)
@given(body=BODIES, chat=st.booleans(), logprobs=st.integers(0, 2), cuts=st.lists(st.integers(1, 8), max_size=12))
def test_an_answer_is_the_same_wherever_commits_are_cut(asked, body, chat, logprobs, cuts) -> None:
    path, body = "/v1/completions", {"model": "tiny", "prompt": "a prompt", **body}
    if chat:
        del body["prompt"]
        path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": "hi"}]
        if logprobs:
            body |= {"logprobs": True, "top_logprobs": logprobs}
    elif logprobs:
        body["logprobs"] = logprobs
    for ask in (asked.whole, asked.streamed):
        plain = ask((), True, path, body)
        assert json.loads(plain)[1]["completion_tokens"] <= body["n"] * body["max_tokens"]
        assert ask(cuts, False, path, body) == ask(cuts, True, path, body) == plain


@pytest.mark.parametrize(
    ("options", "reason", "text", "tokens"),
    [
        ({"max_tokens": 20}, "stop", "bbbbbb", None),
        ({"max_tokens": 2}, "length", None, 2),
        ({"max_tokens": 2, "stop": "b"}, "stop", "", 1),
        ({"max_tokens": 1, "stop": "b"}, "stop", "", 1),
    ],
)
def test_an_answer_names_its_end_as_openai_does(asked, options, reason, text, tokens) -> None:
    body = {"model": "tiny", "prompt": "a prompt", "seed": 2, **options}
    (choice,), usage = json.loads(asked.whole((16,), False, "/v1/completions", body))
    assert choice["finish_reason"] == reason
    assert text is None or choice["text"] == text
    assert tokens is None or usage["completion_tokens"] == tokens


def test_the_stop_string_that_ended_a_text_is_named_and_no_other_end(asked) -> None:
    body = {"model": "tiny", "prompt": "a prompt", "seed": 2, "max_tokens": 2}
    assert asked.stop_reasons({**body, "stop": ["x", "b"]}) == ["b"]
    assert asked.stop_reasons({**body, "stop": ["x"]}) == []


def test_every_chunk_has_the_usage_so_far_where_that_is_asked_for(asked) -> None:
    body = {"model": "tiny", "prompt": "a prompt", "seed": 2, "max_tokens": 4}
    usages = asked.running_usage((2,), body, include_usage=True)
    counts = [usage["completion_tokens"] for usage in usages if usage is not None]
    assert len(counts) == len(usages) > 2
    assert counts == sorted(counts)
    assert 0 < counts[0] < counts[-1] == 4
    assert asked.running_usage((2,), body) == [None] * (len(usages) - 1), "as with vLLM, it needs include_usage"
