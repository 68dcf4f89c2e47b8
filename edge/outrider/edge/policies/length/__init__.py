"""How far ahead the edge drafts: rules behind `WindowPolicy`, one a file. None of them can change a token.

threshold  draft while the last draft is sure enough (assisted generation, Kangaroo)
specdec    draft while the trained head sees a chance that all drafts are right (SpecDec++)
speckv     draft to the length where a small network on entropy and confidence sees most tokens a second (SpecKV)
flexspec   draft to the length of most tokens for time and energy together (FlexSpec)
aimd       widen with every window of hits, narrow with every miss
(`fixed` and `survival`, the default, are in `outrider.proto.policy.window`)

rounds     cost and yield of a round, for several rules
features   inputs of the trained rules
network    their network
trained    their weights, in a file
names      rules by the names that options give
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
