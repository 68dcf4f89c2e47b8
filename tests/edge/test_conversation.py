"""Parts of conversations: another rule on the same prefix, events of a turn, and the synchronous client."""

from __future__ import annotations

import asyncio

import pytest
from scripted_cloud import EOS, scripted_client

from outrider.drafters import NgramDrafter, ProposalRule
from outrider.drafters.onnx import OnnxDrafter
from outrider.drafters.packages import find_package
from outrider.edge import Client, Conversation, EdgeConfig, SyncConversation, Tokens, Transcript
from outrider.edge.decoding import Decoding
from outrider.proto.errors import DeadlineExceeded, InvalidArgument
from outrider.proto.types import CommittedToken, FinishReason, Provenance, Sampling, token_ids

TEXT = tuple(range(300, 340)) * 3
GREEDY = Sampling()
DRAWN = Sampling(temperature=1.0, seed=9)
PENALISED = Sampling(temperature=0.7, seed=9, repetition_penalty=1.3, frequency_penalty=0.5)


@pytest.fixture(scope="module")
def general() -> OnnxDrafter:
    return OnnxDrafter(find_package("general"))


# === drafters ===================================================================================================


@pytest.mark.parametrize("name", ["onnx", "n-gram"])
@pytest.mark.parametrize(("first", "second"), [(GREEDY, DRAWN), (DRAWN, GREEDY), (DRAWN, PENALISED)])
def test_a_state_that_follows_another_rule_proposes_as_one_that_was_opened_with_it(general, name, first, second):
    drafter = general if name == "onnx" else NgramDrafter()
    state = drafter.open(ProposalRule(first, prompt_length=10))
    state.extend(TEXT)
    state.propose(4)
    state.truncate(len(TEXT) - 3)
    rule = ProposalRule(second, prompt_length=60)
    state.follow(rule)
    opened = drafter.open(rule)
    opened.extend(TEXT[:-3])
    got, wanted = state.propose(6), opened.propose(6)
    assert token_ids(got) == token_ids(wanted)
    confidence = [draft.confidence for draft in wanted]
    assert [draft.confidence for draft in got] == pytest.approx(confidence, rel=1e-3)
    assert len(got) > 0


def test_the_onnx_drafter_keeps_its_cache_when_the_rule_changes(general):
    state = general.open(ProposalRule(GREEDY))
    state.extend(TEXT)
    state.propose(1)
    runs: list[int] = []
    run = state._run
    state._run = lambda n, binding: (runs.append(n), run(n, binding))[1]
    state.follow(ProposalRule(DRAWN))
    state.extend((7, 8))
    state.propose(1)
    assert runs == [3], "the two new tokens, and its own that it had not read yet"


# === events =====================================================================================================


@pytest.fixture(scope="module")
def tokenizer(tokenizer_file):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(tokenizer_file))


async def test_a_completion_has_its_prompts_length_its_provenance_and_its_end(tokenizer, tokenizer_file):
    tokens = tuple(tokenizer.encode("one two three").ids)
    client, channels = scripted_client(tokenizer_file)
    channels.script = lambda _: [CommittedToken(token) for token in (*tokens, EOS)]
    channels.sizes = (1, len(tokens))
    async with client:
        completion = await client.complete((3, 4, 5, 6))
    assert completion.prompt_tokens == 4
    assert (completion.text, completion.ids) == ("one two three", (*tokens, EOS))
    assert completion.provenance[:2] == (Provenance.TARGET, Provenance.DRAFT)
    assert completion.finish_reason is FinishReason.EOS


async def test_a_deadline_ends_a_text_that_is_there_but_is_taken_too_late(tokenizer_file):
    client, channels = scripted_client(tokenizer_file)
    channels.script, channels.paced = lambda _: [CommittedToken(10)] * 40, False

    async def read() -> None:
        async for _ in client.generate([3], max_tokens=30, deadline_s=0.3):
            await asyncio.sleep(0.1)

    async with client:
        with pytest.raises(DeadlineExceeded):
            await read()


async def test_a_defect_of_the_loop_ends_the_text_and_every_turn_after_it(tokenizer_file, monkeypatch):
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    client, channels = scripted_client(tokenizer_file)
    channels.script = lambda _: [CommittedToken(10)] * 9
    async with client, client.conversation(max_tokens=4) as talk:
        monkeypatch.setattr(Decoding, "_receive", broken)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                await talk.complete([3, 4])


async def test_a_turn_or_text_that_begins_inside_a_character_shows_the_whole_of_it(tokenizer, tokenizer_file):
    ids = tuple(tokenizer.encode("a🦊b", add_special_tokens=False).ids)
    cut = next(n for n in range(1, len(ids)) if tokenizer.decode(ids[:n]).endswith("\N{REPLACEMENT CHARACTER}"))
    client, channels = scripted_client(tokenizer_file)
    channels.script = lambda frame: [CommittedToken(token) for token in (*ids[len(frame.prompt) - 1 :], EOS)]
    async with client, client.conversation() as talk:
        assert (await talk.complete([300], max_tokens=cut)).text == "a\N{REPLACEMENT CHARACTER}"
        assert (await talk.complete(max_tokens=9)).text == "🦊b"
        assert (await client.complete([300, *ids[:cut]], max_tokens=9)).text == "🦊b"
        assert talk.transcript.text == tokenizer.decode([300]) + "a🦊b"


# === conversations without a verifier ===========================================================================


def lone(**options) -> Conversation:
    client = Client(EdgeConfig(verifier="127.0.0.1:1", model="m", drafter="none"))
    return client.conversation(**options)


async def test_options_of_a_conversation_are_checked_when_it_is_made():
    for options, field in [
        ({"keep_s": -1.0}, "keep_s"),
        ({"keep_s": float("nan")}, "keep_s"),
        ({"stop": [""]}, "stop"),
        ({"warmth": 1}, "sampling"),
        ({"top_p": 0.0}, "sampling.top_p"),
    ]:
        with pytest.raises(InvalidArgument) as caught:
            lone(**options)
        assert caught.value.field == field


async def test_a_conversation_that_never_spoke_can_be_closed_and_says_so_afterwards():
    talk = lone()
    await talk.close()
    await talk.close()
    with pytest.raises(InvalidArgument, match="conversation: is closed"):
        await talk.complete("a")
    assert talk.transcript == Transcript((), "")


def test_the_synchronous_twin_takes_events_on_demand_and_closes_what_it_leaves():
    import threading

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    made: list[int] = []
    closed: list[bool] = []

    class Talk:
        async def say(self, prompt, sampling=None, **options):
            try:
                for position in range(9):
                    made.append(position)
                    yield Tokens(position, (CommittedToken(1),), (Provenance.TARGET,), ("x",))
            finally:
                closed.append(True)

    twin = SyncConversation(loop, Talk())  # type: ignore[arg-type]
    events = twin.say("a")
    assert next(events).position == 0
    assert made == [0], "no event is made before it is asked for"
    events.close()
    assert closed == [True]
    assert [event.position for event in twin.say("b")] == list(range(9))
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
