"""A verifier knows whose drafts it judges, at the price of a name once a stream."""

from __future__ import annotations

from checked_simulation import open_frame, rules
from hand_driven import HandDrivenEdge, committed, frames

from outrider.proto import codec
from outrider.proto.errors import Unavailable
from outrider.proto.policy import Window
from outrider.proto.policy.selector import StaticSelector
from outrider.proto.session import Selection
from outrider.proto.session.verifier import Verified, VerifierSession
from outrider.proto.types import Commit, CommittedToken, Continue, Draft, DraftToken, FinishReason, Opened, Sampling

OPENED = Opened(0, 16, 40, "v", 512, vocab_size=8, keep_s=9.0)


class Chosen(StaticSelector):
    """Chooses the drafter that a test says."""

    arm = 0

    def choose(self, view):
        return self.arm


def edge_of(*names, versions=("v1", "v2")):
    selector = Chosen()
    selection = Selection(selector, names, versions=versions[: len(names)])
    edge = HandDrivenEdge(open_frame(keep_s=9.0), Window(3), selection=selection).opened(OPENED)
    return edge, selector


def draft(edge, *tokens):
    return frames(edge.on_drafted(edge.next_job(len(tokens)), tokens, (), 0.001, 0.01), Draft)


def said(messages):
    return [(message.drafter, message.drafter_version) for message in messages]


def test_the_first_message_of_a_stream_names_the_drafter_and_later_chains_do_not() -> None:
    edge, _ = edge_of("general")
    assert said(draft(edge, 1, 2, 3)) == [("general", "v1")]
    edge.on_commit(Commit(3, committed(7), 0, 16), 0.1)
    second = draft(edge, 1, 2)
    assert [message.chain for message in second] == [1]
    assert said(second) == [("", "")]


def test_the_drafter_is_named_again_where_another_goes_on() -> None:
    edge, selector = edge_of("general", "code")
    assert said(draft(edge, 1, 2, 3)) == [("general", "v1")]
    selector.arm = 1
    edge.on_commit(Commit(3, committed(7), 0, 16), 0.1)
    assert said(draft(edge, 1, 2)) == [("code", "v2")]
    assert said(draft(edge, 4)) == [("", "")]
    selector.arm = 0
    edge.on_commit(Commit(4, committed(5), 0, 16), 0.2)
    assert said(draft(edge, 1, 2)) == [("general", "v1")]


def test_a_new_streams_verifier_is_told_again() -> None:
    edge, _ = edge_of("general")
    draft(edge, 1, 2, 3)
    edge.on_disconnected(Unavailable("gone"), 0.2)
    edge.open_frame(b"new", 0.3)
    assert said(frames(edge.on_opened(OPENED, 0.4), Draft)) == [("general", "v1")]


def test_a_verifier_knows_the_drafter_of_what_it_judges() -> None:
    edge, selector = edge_of("general", "code")
    verifier = VerifierSession(open_frame(keep_s=9.0), rules(eos_tokens=frozenset({0})), 0.0)
    assert verifier.drafter == ("", "")

    def receive(messages) -> None:
        for message in messages:
            verifier.on_draft(codec.decode_edge_frame(codec.encode_edge_frame(message)), 0.0)

    receive(draft(edge, 1, 2, 3))
    assert verifier.drafter == ("general", "v1")
    selector.arm = 1
    edge.on_commit(Commit(3, committed(7), 0, 16), 0.1)
    verifier.transcript.append(7)
    receive(draft(edge, 1, 2))
    receive(draft(edge, 4))
    assert verifier.drafter == ("code", "v2")
    verifier.on_draft(Draft(0, 4, (DraftToken(5),)), 0.2)
    assert verifier.drafter == ("code", "v2"), "a late message of an older chain changes nothing"


def test_a_kept_session_keeps_the_name_over_turns() -> None:
    edge, _ = edge_of("general")
    verifier = VerifierSession(open_frame(keep_s=9.0), rules(eos_tokens=frozenset({0})), 0.0)
    for message in draft(edge, 1, 2, 3):
        verifier.on_draft(message, 0.0)
    edge.on_commit(Commit(3, committed(7), 0, 16, finish=FinishReason.EOS), 0.1)
    verifier.on_verified(Verified((), (CommittedToken(7),)), 0.1)
    verifier.on_cancel()
    edge.on_turn(4, (6,), Sampling(max_tokens=40), 0.4)
    verifier = verifier.continued(Continue(4, (6,), Sampling(max_tokens=40), chain=1), 0.5)
    assert said(draft(edge, 1, 2)) == [("", "")]
    assert verifier.drafter == ("general", "v1")
