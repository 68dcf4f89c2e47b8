"""Rules of how far ahead the edge drafts, by the names of options; none can change a token.

rules     those after papers: threshold, SpecDec++, SpecKV, FlexSpec, AIMD, PEARL (two others: `outrider.proto.policy`)
features  inputs of the trained ones
network   their network, and its weights in a file

An option is `NAME`, `NAME:NUMBER`, and for trained rules `NAME[:NUMBER]@FILE`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.edge.policies.length.network import load_trained
from outrider.edge.policies.length.rules import (
    AimdWindow,
    FlexSpecWindow,
    PearlWindow,
    SpecDecWindow,
    SpecKvWindow,
    ThresholdWindow,
)
from outrider.proto.errors import ConfigError
from outrider.proto.policy.window import FixedWindow, SurvivalWindow, WindowPolicy


@dataclass(frozen=True, slots=True)
class Rule:
    """Recipe for a rule from its name.

    Attributes:
        make: makes the rule from keywords.
        number: keyword that a number after the name sets; empty: it takes none.
        kind: type of the number.
        needs: whether the number is required.
        network: keyword for its network in `Trained`, and the network's name there; empty: it is not trained.
    """

    make: Callable[..., WindowPolicy]
    number: str = ""
    kind: Callable[[str], float] = float
    needs: bool = False
    network: tuple[str, str] = ("", "")

    def usage(self, name: str) -> str:
        """Return how an option spells the rule."""
        number = f":{'N' if self.kind is int else 'X'}" if self.number else ""
        return name + (number if self.needs or not number else f"[{number}]") + ("[@FILE]" if self.network[0] else "")


RULES: Mapping[str, Rule] = {
    "survival": Rule(SurvivalWindow),
    "fixed": Rule(FixedWindow, "tokens", int, needs=True),
    "threshold": Rule(ThresholdWindow, "min_confidence"),
    "specdec++": Rule(SpecDecWindow, "threshold", network=("head", "head")),
    "speckv": Rule(SpecKvWindow, network=("network", "block")),
    "flexspec": Rule(FlexSpecWindow, "joule_s"),
    "aimd": Rule(AimdWindow),
    "pearl": Rule(PearlWindow, "length", int, needs=True),
}
USAGE = ", ".join(rule.usage(name) for name, rule in RULES.items())


def rule_by_name(text: str) -> WindowPolicy:
    """Return a new rule: `fixed:8`, `threshold:0.4`, `specdec++:0.3`, `speckv@my.json`.

    Raises:
        ConfigError: there is no such rule, its number is wrong, or its file is.
    """
    named, _, file = text.partition("@")
    name, colon, number = named.partition(":")
    rule = RULES.get(name)
    if rule is None:
        raise ConfigError(f"{text!r} is none of {USAGE}", field="window")
    if (colon and not rule.number) or (rule.needs and not colon) or (file and not rule.network[0]):
        raise ConfigError(f"{text!r} is not {rule.usage(name)}", field="window")
    given: dict[str, Any] = {}
    if colon:
        try:
            given[rule.number] = rule.kind(number)
        except ValueError:
            raise ConfigError(f"{text!r} is not {rule.usage(name)}: {number!r} is no number", field="window") from None
    if file:
        keyword, network = rule.network
        given[keyword] = getattr(load_trained(Path(file)), network)
    return rule.make(**given)
