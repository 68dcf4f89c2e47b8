"""What leases say of drafters is kept by kind of text, and asked for by name and version."""

from __future__ import annotations

from dataclasses import replace

from outrider.edge.features import PromptClass, TextFeatures
from outrider.edge.routes import DirectRoute
from outrider.edge.warm_start import MAX_KEPT, NOT_KNOWN, FleetPrior, FleetPriors
from outrider.proto.types import DrafterPrior, DraftingPrior, Lease, LeaseRequest

LEASE = Lease(token=b"", verifier="v", address="v:1", expires_in_s=60.0, model="tiny", tokenizer_sha256="")
ANY = LeaseRequest(model="tiny", session="s")
CODE = TextFeatures(PromptClass.CODE, 3)


def saying(acceptance: float, drafter: str = "general", trials: float = 500.0) -> Lease:
    return replace(LEASE, prior=DraftingPrior(drafters=(DrafterPrior(drafter, "1", acceptance, trials),)))


def asking(features: TextFeatures) -> LeaseRequest:
    return replace(ANY, prompt_class=features.prompt_class, link_class=features.link_class)


def test_a_drafter_is_known_by_name_and_version():
    prior = FleetPrior((DrafterPrior("general", "1", 0.7, 90.0), DrafterPrior("code", "1", 0.8, 40.0)))
    assert prior.acceptance_of("code", "1") == (0.8, 40.0)
    assert prior.acceptance_of("code", "2") is None
    assert NOT_KNOWN.acceptance_of("code", "1") is None


def test_the_newest_lease_of_a_kind_of_text_counts_and_others_stand_in_before_it():
    priors = FleetPriors()
    assert priors.of("tiny", CODE) is NOT_KNOWN
    priors.learn(ANY, saying(0.5))
    assert priors.of("tiny", CODE).acceptance_of("general", "1") == (0.5, 500.0), "what is said of any text"
    priors.learn(asking(TextFeatures(PromptClass.CODE, 1)), saying(0.6))
    assert priors.of("tiny", CODE).acceptance_of("general", "1") == (0.6, 500.0), "of such texts on another link"
    priors.learn(asking(CODE), saying(0.7))
    priors.learn(asking(CODE), saying(0.8))
    priors.learn(asking(CODE), LEASE)
    assert priors.of("tiny", CODE).acceptance_of("general", "1") == (0.8, 500.0)
    prose = TextFeatures(PromptClass.PROSE, 3)
    assert priors.of("tiny", prose).acceptance_of("general", "1") == (0.5, 500.0), "what is said of code says nothing"
    assert priors.of("another", CODE) is NOT_KNOWN


def test_what_is_kept_is_bounded():
    priors = FleetPriors()
    for i in range(MAX_KEPT + 5):
        priors.learn(ANY, replace(saying(0.5), model=f"m{i}"))
    assert len(priors._newest) == MAX_KEPT
    assert priors.of("m0", CODE) is NOT_KNOWN


def test_without_a_coordinator_nobody_is_told_and_nothing_is_known():
    route = DirectRoute(("v:1",), "tiny", "")
    assert route.about(CODE) is route
    assert route.prior(CODE) is NOT_KNOWN
