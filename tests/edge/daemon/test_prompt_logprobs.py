"""Log probabilities of prompts in OpenAI's form, with `echo`, and in vLLM's."""

from __future__ import annotations

import pytest

PROMPT = "Hello, world"


def ids(live, text: str = PROMPT) -> list[int]:
    return live.client.ready.tokenizer.encode(text).ids


def of_choice(live, **fields):
    reply = live.complete(**{"prompt": PROMPT, "echo": True, "max_tokens": 3, **fields})
    assert reply.status == 200, reply.body
    (choice,) = reply.json["choices"]
    return choice


@pytest.mark.parametrize("prompt", ["text", "tokens"])
def test_an_echoed_prompt_has_log_probabilities_before_those_of_the_text(live, prompt) -> None:
    tokens = ids(live)
    choice = of_choice(live, logprobs=2, prompt=tokens if prompt == "tokens" else PROMPT)
    said = choice["logprobs"]
    own, written = len(tokens), len(live.client.pieces)
    assert live.client.asked[-1][2]["prompt_logprobs"] == 2
    assert {len(entries) for entries in said.values()} == {own + written}
    assert said["token_logprobs"] == [None, *(-float(i) for i in range(1, own)), *[-0.5] * written]
    name = live.daemon.cloud.served.tokens.text
    assert said["tokens"][:own] == [name(token) for token in tokens]
    assert said["top_logprobs"][0] is None
    assert said["top_logprobs"][1] == {name(50): -0.1, name(51): -0.2, name(tokens[1]): -1.0}
    assert choice["text"] == PROMPT + "".join(live.client.pieces)
    offsets = said["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[own] == len(PROMPT)
    assert choice["text"][offsets[own - 1] : offsets[own]] == name(tokens[-1])


def test_a_stream_begins_with_the_prompt_and_has_the_same_in_all(live) -> None:
    whole = of_choice(live, logprobs=1)
    events = live.complete(prompt=PROMPT, echo=True, max_tokens=3, logprobs=1, stream=True).events[:-1]
    choices = [choice for event in events for choice in event["choices"]]
    assert choices[0]["text"].startswith(PROMPT)
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    for name, entries in whole["logprobs"].items():
        assert [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"][name]] == entries


def test_no_token_of_text_is_shown_where_none_is_asked_for(live) -> None:
    for stream in (False, True):
        reply = live.complete(prompt=PROMPT, echo=True, max_tokens=0, logprobs=1, stream=stream)
        assert live.client.asked[-1][1].max_tokens == 1, "a verifier decodes one at least"
        choices = [c for e in reply.events[:-1] for c in e["choices"]] if stream else reply.json["choices"]
        assert "".join(choice["text"] for choice in choices) == PROMPT
        assert len(choices[0]["logprobs"]["tokens"]) == len(ids(live))
        assert choices[-1]["finish_reason"] == "length"
    plain = live.complete(prompt=PROMPT, echo=True, max_tokens=0).json
    assert (plain["choices"][0]["text"], plain["usage"]["completion_tokens"]) == (PROMPT, 0)
    assert live.client.asked[-1][2]["prompt_logprobs"] is None, "nobody asked for them"


def test_a_prompt_of_one_token_has_nothing_to_say(live) -> None:
    said = of_choice(live, prompt=[7], logprobs=1, max_tokens=0)["logprobs"]
    assert (said["token_logprobs"], said["top_logprobs"], said["text_offset"]) == ([None], [None], [0])


def test_vllms_field_names_tokens_by_id_with_their_ranks(live) -> None:
    tokens = ids(live)
    name = live.daemon.cloud.served.tokens.text
    completion = live.complete(prompt=PROMPT, prompt_logprobs=1, n=2).json
    for choice in completion["choices"]:
        first, second, *others = choice["prompt_logprobs"]
        assert first is None
        assert second == {
            "50": {"logprob": -0.1, "rank": 1, "decoded_token": name(50)},
            str(tokens[1]): {"logprob": -1.0, "rank": 3, "decoded_token": name(tokens[1])},
        }
        assert len(others) == len(tokens) - 2
        assert choice["logprobs"] is None
    chat = live.chat(prompt_logprobs=0).json
    prompt, _, options = live.client.asked[-1]
    assert options["prompt_logprobs"] == 0
    assert [entry and list(entry) for entry in chat["prompt_logprobs"]] == [None, *([str(t)] for t in prompt[1:])]
    assert "prompt_logprobs" not in live.chat().json


def test_each_field_gets_as_many_of_the_likeliest_as_it_asks_for(live) -> None:
    choice = of_choice(live, logprobs=1, prompt_logprobs=3)
    assert live.client.asked[-1][2]["prompt_logprobs"] == 3
    assert len(choice["logprobs"]["top_logprobs"][1]) == 2, "one and the token itself"
    assert len(choice["prompt_logprobs"][1]) == 4
