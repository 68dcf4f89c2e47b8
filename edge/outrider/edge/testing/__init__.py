"""Drafters for the tests of whoever builds on Outrider's edge; pytest is not needed.

scripted_drafters  drafters that need no model: `ScriptedDrafter`, `GarbageDrafter`, `FailingDrafter`
tiny_drafter       an ONNX drafter whose every logit can be computed by hand, and its package; needs onnx
"""

from __future__ import annotations

from outrider.edge.testing.scripted_drafters import FailingDrafter, GarbageDrafter, ScriptedDrafter

__all__ = ["FailingDrafter", "GarbageDrafter", "ScriptedDrafter"]
