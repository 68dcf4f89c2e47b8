"""Policies of edge and verifier: pure functions of what each has measured, none of which can change a token."""

from __future__ import annotations

from outrider.proto.policy.measurements import Line, Measurements, Smoothed
from outrider.proto.policy.window import Window

__all__ = ["Line", "Measurements", "Smoothed", "Window"]
