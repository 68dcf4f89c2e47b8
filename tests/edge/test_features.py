"""An edge reports the kinds of a text and its link, and counts of hits; nothing else, and nothing about short texts."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from outrider.edge.features import (
    MAX_KEPT,
    MIN_COMPARED,
    MIN_TRIALS,
    FleetPrior,
    FleetPriors,
    OwnTexts,
    PromptClass,
    TextFeatures,
    TextKind,
    link_class,
    prompt_class,
    reported_hits,
)
from outrider.edge.link.routes import DirectRoute
from outrider.proto.drafter_format import trial_name
from outrider.proto.policy import Measurements
from outrider.proto.session import DrafterCounts
from outrider.proto.types import (
    LINK_CLASSES,
    MAX_REPORTED_DRAFTERS,
    PROMPT_CLASSES,
    DrafterHits,
    DrafterPrior,
    DraftingPrior,
    Lease,
    LeaseRequest,
)

CODE = [
    """    def __init__(self, path, *, mode="r"):
        self.path = path
        self._lines = []
        with open(path, mode) as file:
            for number, line in enumerate(file):
                if not line.strip():
                    continue
                self._lines.append((number, line.rstrip()))

    def __len__(self):
""",
    """SELECT customer.id, sum(item.price) AS total
  FROM customer
  JOIN item ON item.customer_id = customer.id
 WHERE item.returned = 0 AND customer.country IN ('AT', 'CH')
 GROUP BY customer.id
HAVING total > 100;
""",
]
DOCS = [
    """.. function:: walk(top, onerror=None)

   Generate the file names in a tree by walking it from the top down.  For each
   folder in the tree it yields a tuple of three, the folder's path first.

   If *onerror* is given, it is called with one argument, an :exc:`OSError`
   instance.  See also :func:`scan`.

""",
    """NAME
       cut - remove sections from each line of files

DESCRIPTION
       Print selected parts of lines from each file to standard output. With
       no file, or when the file is named by a dash, read standard input.

       Mandatory arguments to long options are mandatory for short options
       too.
""",
]
PROSE = [
    "The carriage had hardly stopped before the door was opened, and an elderly gentleman with a lantern in his hand "
    'came down the steps. "You are late," he said, "and my sister has gone to bed; but there is a fire in the '
    'library, and something to eat." She thanked him, and followed him into the',
    "It rained all through that night.\n\nIn the morning the river had come up to the orchard wall, and the children "
    "stood upon it in their boots and threw apples at whatever floated by. Nobody called them in. Their mother was "
    "upstairs with the doctor,",
]
MATH = [
    "<|user|>A baker sells 24 loaves in the morning and half as many in the afternoon. Each loaf costs $3. How much "
    "does she earn in a day?<|assistant|>",
    "Solve for x: 3x + 12 = 48. Subtract 12 from both sides: 3x = 36. Divide both sides by 3: x =",
]


@pytest.mark.parametrize(
    ("kind", "snippets"),
    [(PromptClass.CODE, CODE), (PromptClass.DOCS, DOCS), (PromptClass.PROSE, PROSE), (PromptClass.MATH, MATH)],
    ids=["code", "docs", "prose", "math"],
)
def test_snippets_of_each_kind_fall_into_its_class(kind, snippets):
    assert [prompt_class(snippet) for snippet in snippets] == [kind] * len(snippets)


def test_tables_of_numbers_and_other_scripts_have_classes_of_their_own():
    table = "\n".join(f"{day:02d}\t{1017 + day * 3}\t{23.5 + day}" for day in range(9))
    assert prompt_class(table) is PromptClass.NUMBERS
    assert prompt_class("吾輩は猫である 名前はまだ無い どこで生れたかとんと見当がつかぬ") is PromptClass.FOREIGN
    assert prompt_class("Größe ist, wenn man trotzdem lächelt, pflegte der Förster zu sagen") is PromptClass.PROSE


@pytest.mark.parametrize("prompt", ["", "Hi", "x = 1", " \n\t" * 500, "<|user|><|assistant|>" * 20])
def test_a_prompt_of_a_few_characters_has_no_class(prompt):
    assert prompt_class(prompt) is PromptClass.UNKNOWN


def test_the_end_of_a_long_prompt_counts_and_not_how_it_begins():
    assert prompt_class(PROSE[0] * 40 + CODE[0] * 10) is PromptClass.CODE
    assert prompt_class(CODE[0] * 40 + "\n\n" + PROSE[0] * 10) is PromptClass.PROSE


def test_a_class_does_not_depend_on_the_words_and_numbers_of_a_prompt():
    for snippet in (*CODE, *DOCS, *PROSE, *MATH):
        masked = "".join("n" if c.islower() else "N" if c.isupper() else "7" if c.isdigit() else c for c in snippet)
        assert prompt_class(masked) is prompt_class(snippet), "shares of characters are all that is looked at"


@pytest.mark.parametrize(
    ("round_trip_ms", "expected"),
    [
        (0, 0),
        (0.2, 1),
        (3.99, 1),
        (4, 2),
        (15.9, 2),
        (16, 3),
        (63, 3),
        (64, 4),
        (255, 4),
        (256, 5),
        (5000, 5),
        (math.nan, 0),
    ],
)
def test_links_have_classes_by_octaves_of_their_round_trip(round_trip_ms, expected):
    assert link_class(round_trip_ms / 1e3) == expected


def test_classes_fit_what_the_contract_has_room_for():
    assert max(PromptClass) < PROMPT_CLASSES <= 16
    assert link_class(float("inf")) < LINK_CLASSES


def test_counts_of_too_few_tokens_stay_at_the_edge():
    versions = {"general": "1", "code": "2", "ngram": "3"}
    counts = {
        "code": DrafterCounts(hits=MIN_COMPARED, compared=MIN_COMPARED),
        "general": DrafterCounts(hits=40, compared=90),
        "ngram": DrafterCounts(hits=3, compared=MIN_COMPARED - 1),
    }
    measured = Measurements()
    assert reported_hits(counts, versions, measured) == (
        DrafterHits("general", "1", 40, 90),
        DrafterHits("code", "2", 8, 8),
    )
    assert reported_hits({}, versions, measured) == ()


def test_a_version_on_trial_is_reported_under_its_name_with_its_own_speed():
    trial, measured = trial_name("general", "2"), Measurements()
    measured.of("general").drafting_s.add(0.001)
    measured.of(trial).drafting_s.add(0.002)
    counts = {"general": DrafterCounts(hits=40, compared=90), trial: DrafterCounts(hits=50, compared=80)}
    assert reported_hits(counts, {"general": "1", trial: "2"}, measured) == (
        DrafterHits("general", "1", 40, 90, 0.001),
        DrafterHits("general", "2", 50, 80, 0.002),
    )


def test_at_most_the_allowed_number_of_drafters_is_reported_the_most_compared_first():
    counts = {f"d{i}": DrafterCounts(hits=1, compared=10 + i) for i in range(MAX_REPORTED_DRAFTERS + 4)}
    reported = reported_hits(counts, dict.fromkeys(counts, "1"), Measurements())
    assert len(reported) == MAX_REPORTED_DRAFTERS
    assert reported[0].drafter == f"d{MAX_REPORTED_DRAFTERS + 3}"
    unknown = reported_hits({"other": DrafterCounts(hits=1, compared=10)}, {"general": "1"}, Measurements())
    assert unknown == (), "version unknown"


# --- start of a text's choice of drafter: this edge's own texts, and the fleet's ---

CODE_TEXTS, PROSE_TEXTS = TextKind(3, True), TextKind(1, True)
FAMILY = [("general", "1"), ("code", "1"), ("new", "1")]


def counts(hits: int, compared: int) -> DrafterCounts:
    return DrafterCounts(hits=hits, compared=compared)


def test_nothing_is_known_before_the_first_text() -> None:
    assert OwnTexts().acceptances(CODE_TEXTS, FAMILY, {}) == ()


def test_a_drafter_with_too_few_counts_is_assumed_to_be_as_good_as_the_others() -> None:
    own = OwnTexts()
    own.learn(CODE_TEXTS, {"general": counts(60, 100), "code": counts(80, 100), "new": counts(1, int(MIN_TRIALS) - 1)})
    assert own.acceptances(CODE_TEXTS, FAMILY, {}) == pytest.approx((0.6, 0.8, 0.7))


def test_texts_of_one_kind_say_nothing_about_another() -> None:
    own = OwnTexts()
    own.learn(CODE_TEXTS, {"code": counts(80, 100)})
    assert own.acceptances(PROSE_TEXTS, FAMILY, {}) == ()
    assert own.acceptances(TextKind(CODE_TEXTS.prompt_class, False), FAMILY, {}) == (), (
        "nor greedy texts about drawn ones"
    )


def test_newer_texts_count_for_more_and_the_fleets_add_to_them() -> None:
    own = OwnTexts()
    for hits in (100, 0):
        own.learn(CODE_TEXTS, {"code": counts(hits, 100)})
    assert own.acceptances(CODE_TEXTS, FAMILY[1:2], {}) == pytest.approx((95 / 195,))
    said = {"code": 0.9, "general": 0.5}
    fleet = {(name, "1"): DrafterPrior(name, "1", share, 64.0) for name, share in said.items()}
    assert own.acceptances(CODE_TEXTS, FAMILY[:2], fleet) == pytest.approx((0.5, (95 + 0.9 * 64) / (195 + 64)))
    assert own.acceptances(CODE_TEXTS, [("code", "2")], fleet) == pytest.approx((95 / 195,)), (
        "another version is unknown"
    )


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
