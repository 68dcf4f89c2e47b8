"""How far ahead the edge drafts: rules behind `WindowPolicy`, one a file. None of them can change a token.

threshold  while the last draft is sure enough (assisted generation, Kangaroo)
specdec    while the trained head sees a chance that all drafts are right (SpecDec++)
speckv     to the length where a small network on entropy and confidence sees most tokens a second (SpecKV)
flexspec   to the length of most tokens for time and energy together (FlexSpec)
aimd       wider with every window of hits, narrower with every miss
(`fixed` and `survival`, the default, are in `outrider.proto.policy.window`)

rounds     what a round of so many drafts takes and gives, as several rules reckon it
features   what the trained rules look at
network    what they reckon with
trained    their weights, in a file
names      rules by name, as options give them
"""

from __future__ import annotations

from outrider.edge.policies.length.aimd import AimdWindow
from outrider.edge.policies.length.flexspec import FlexSpecWindow
from outrider.edge.policies.length.names import RULES, rule_by_name
from outrider.edge.policies.length.network import Network
from outrider.edge.policies.length.specdec import SpecDecWindow
from outrider.edge.policies.length.speckv import SpecKvWindow
from outrider.edge.policies.length.threshold import ThresholdWindow
from outrider.edge.policies.length.trained import Trained, load_trained, save_trained, shipped

__all__ = [
    "RULES",
    "AimdWindow",
    "FlexSpecWindow",
    "Network",
    "SpecDecWindow",
    "SpecKvWindow",
    "ThresholdWindow",
    "Trained",
    "load_trained",
    "rule_by_name",
    "save_trained",
    "shipped",
]
