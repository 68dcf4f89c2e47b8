"""The alert rules, and what is wrong with one."""

from __future__ import annotations

import re
from typing import Any

import yaml

SEVERITIES = {"page", "ticket"}
COMPARISON = re.compile(r"(==|[<>]=?)\s*[\d.]+$")


def rules(text: str) -> list[dict[str, Any]]:
    """Return all rules of a Prometheus rule file."""
    return [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]


def shape_faults(rule: dict[str, Any]) -> list[str]:
    """Return what Prometheus or a reader would miss in a rule; empty: nothing."""
    found = [f"no {key}" for key in ("alert", "expr", "labels", "annotations") if not rule.get(key)]
    found += [f"unknown key {key}" for key in rule.keys() - {"alert", "expr", "for", "labels", "annotations"}]
    if not COMPARISON.search(str(rule.get("expr", "")).strip()):
        found.append("compares with no number")
    if rule.get("labels", {}).get("severity") not in SEVERITIES:
        found.append("no severity")
    found += [f"no {key}" for key in ("summary", "remedy") if not rule.get("annotations", {}).get(key)]
    if "for" in rule and not re.fullmatch(r"\d+[smh]", rule["for"]):
        found.append("bad duration")
    return found
