"""Start of a text's choice of drafter: this edge's own texts, and the fleet's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.edge.features import (
    MAX_KEPT,
    MIN_TRIALS,
    FleetPrior,
    FleetPriors,
    OwnTexts,
    PromptClass,
    TextFeatures,
    TextKind,
)
from outrider.edge.link.routes import DirectRoute
from outrider.proto.session import DrafterCounts
from outrider.proto.types import DrafterPrior, DraftingPrior, Lease, LeaseRequest

CODE, PROSE = TextKind(3, True), TextKind(1, True)
FAMILY = [("general", "1"), ("code", "1"), ("new", "1")]


def counts(hits: int, compared: int) -> DrafterCounts:
    return DrafterCounts(hits=hits, compared=compared)


def test_nothing_is_known_before_the_first_text() -> None:
    assert OwnTexts().acceptances(CODE, FAMILY, {}) == ()


def test_a_drafter_with_too_few_counts_is_assumed_to_be_as_good_as_the_others() -> None:
    own = OwnTexts()
    own.learn(CODE, {"general": counts(60, 100), "code": counts(80, 100), "new": counts(1, int(MIN_TRIALS) - 1)})
    assert own.acceptances(CODE, FAMILY, {}) == pytest.approx((0.6, 0.8, 0.7))


def test_texts_of_one_kind_say_nothing_about_another() -> None:
    own = OwnTexts()
    own.learn(CODE, {"code": counts(80, 100)})
    assert own.acceptances(PROSE, FAMILY, {}) == ()
    assert own.acceptances(TextKind(CODE.prompt_class, False), FAMILY, {}) == (), "nor greedy texts about drawn ones"


def test_newer_texts_count_for_more_and_the_fleets_add_to_them() -> None:
    own = OwnTexts()
    for hits in (100, 0):
        own.learn(CODE, {"code": counts(hits, 100)})
    assert own.acceptances(CODE, FAMILY[1:2], {}) == pytest.approx((95 / 195,))
    said = {"code": 0.9, "general": 0.5}
    fleet = {(name, "1"): DrafterPrior(name, "1", share, 64.0) for name, share in said.items()}
    assert own.acceptances(CODE, FAMILY[:2], fleet) == pytest.approx((0.5, (95 + 0.9 * 64) / (195 + 64)))
    assert own.acceptances(CODE, [("code", "2")], fleet) == pytest.approx((95 / 195,)), "another version is unknown"


# --- the fleet ---

LEASE = Lease(token=b"", verifier="v", address="v:1", expires_in_s=60.0, model="tiny", tokenizer_sha256="")
ANY = LeaseRequest(model="tiny", session="s")
CODE_TEXT = TextFeatures(PromptClass.CODE, 3)


def lease_with(acceptance: float, drafter: str = "general", trials: float = 500.0) -> Lease:
    return replace(LEASE, prior=DraftingPrior(drafters=(DrafterPrior(drafter, "1", acceptance, trials),)))


def request_for(features: TextFeatures) -> LeaseRequest:
    return replace(ANY, prompt_class=features.prompt_class, link_class=features.link_class)


def acceptance(prior: FleetPrior, version: str = "1") -> float:
    return prior["general", version].acceptance


def test_the_newest_lease_of_a_kind_of_text_counts_and_others_stand_in_before_it() -> None:
    priors = FleetPriors()
    assert priors.of("tiny", CODE_TEXT) == {}
    priors.learn(ANY, lease_with(0.5))
    assert acceptance(priors.of("tiny", CODE_TEXT)) == 0.5, "the prior of any text"
    priors.learn(request_for(TextFeatures(PromptClass.CODE, 1)), lease_with(0.6))
    assert acceptance(priors.of("tiny", CODE_TEXT)) == 0.6, "the prior of such texts on another link"
    priors.learn(request_for(CODE_TEXT), lease_with(0.7))
    priors.learn(request_for(CODE_TEXT), lease_with(0.8))
    priors.learn(request_for(CODE_TEXT), LEASE)
    assert acceptance(priors.of("tiny", CODE_TEXT)) == 0.8
    prose = TextFeatures(PromptClass.PROSE, 3)
    assert acceptance(priors.of("tiny", prose)) == 0.5, "code says nothing about prose"
    assert priors.of("another", CODE_TEXT) == {}


def test_the_number_of_kept_priors_is_bounded() -> None:
    priors = FleetPriors()
    for i in range(MAX_KEPT + 5):
        priors.learn(ANY, replace(lease_with(0.5), model=f"m{i}"))
    assert len(priors._newest) == MAX_KEPT
    assert priors.of("m0", CODE_TEXT) == {}


def test_without_a_coordinator_nothing_is_reported_and_nothing_is_known() -> None:
    route = DirectRoute(("v:1",), "tiny", "")
    assert route.about(CODE_TEXT) is route
    assert route.prior(CODE_TEXT) == {}
