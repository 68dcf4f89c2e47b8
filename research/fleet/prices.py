"""Prices of verifiers and of edges: seconds of steps and drafts, cards, and watts, with where each is from.

A step of a verifier takes `step_s` and `row_s` for each of its rows. Published latencies between tokens by the number
of requests at once give both: the first is that of one request, the second the slope from 1 to 100.
"""

from __future__ import annotations

from dataclasses import dataclass

PASS_S = 0.0015  # of a drafter of 1 B on such a card, assumed: its 2.5 GB are read in 0.75 ms at 3.35 TB/s
_NIM = "NVIDIA NIM for LLMs, Performance (docs.nvidia.com/nim/benchmarking/llm/1.0.0/performance)"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierPrices:
    """Seconds of a verifier's work, and its cards.

    Attributes:
        name: name in tables.
        step_s: seconds of a target step without its rows.
        row_s: seconds of each row.
        min_step_s: seconds of the shortest step.
        pass_s: seconds that a token of a drafter adds to a step which drafts on the target's own device, for all
            sessions together; 0: its drafter has cores of its own, one session after the other.
        threads: cores that draft beside the target.
        cards: cards of one verifier, each of which costs the hour of one.
        source: where the figures are from.
    """

    name: str
    step_s: float
    row_s: float
    min_step_s: float = 0.0
    pass_s: float = 0.0
    threads: int = 1
    cards: int = 1
    source: str


VERIFIERS = {
    prices.name: prices
    for prices in (
        VerifierPrices(
            name="here",
            step_s=0.0239,
            row_s=0.00011,
            min_step_s=0.030,
            source="the reference target on two cores, at least 30 ms a step (docs/figures/mixed.json)",
        ),
        VerifierPrices(
            name="8b",
            step_s=0.0046,
            row_s=0.00003,
            pass_s=PASS_S,
            threads=8,
            source=f"{_NIM}: Llama 3.1 8B Instruct, NIM 1.8.0, the page's first table; between tokens 4.63 ms with 1 "
            "request, 5.91 with 50, 7.57 with 100",
        ),
        VerifierPrices(
            name="70b",
            step_s=0.0186,
            row_s=0.0001,
            pass_s=PASS_S,
            threads=8,
            cards=2,
            source=f"{_NIM}: Llama 3.3 70B Instruct, NIM 1.8.0, two H100, FP8: 18.6 ms with 1 request of 5,000 tokens; "
            "the row from Llama 3.1 70B, NIM 1.3.0, short prompts: 13.2 ms with 1 request, 23.3 with 100",
        ),
        VerifierPrices(
            name="70b-8b",
            step_s=0.0186,
            row_s=0.0001,
            pass_s=0.0046,
            threads=8,
            cards=2,
            source="as 70b, with the 8 B above as the drafter on its cards",
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Device:
    """An edge's machine.

    Attributes:
        name: name in tables.
        drafting_s: seconds of a drafted token.
        watts: power while it drafts, assumed; the vendor's limit of such a device.
    """

    name: str
    drafting_s: float
    watts: float


DEVICES = (
    Device("desktop GPU", 0.0005, 160.0),
    Device("laptop", 0.002, 28.0),
    Device("phone", 0.008, 6.0),
    Device("small board", 0.020, 12.0),
)
