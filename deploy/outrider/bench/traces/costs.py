"""What the machines of a recording took, as it is kept beside the traces: `FILE.jsonl` has `FILE.costs.json`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from outrider.bench.replay.costs import Costs
from outrider.proto.errors import ConfigError

FORMAT = "outrider-trace-costs/1"
SUFFIX = ".jsonl"


@dataclass(frozen=True, slots=True)
class TargetCosts:
    """Seconds: of a step beside its rows, of each row, of each row of a prompt."""

    step_s: float
    row_s: float
    prefill_row_s: float


@dataclass(frozen=True, slots=True)
class DrafterCosts:
    """Seconds: of a token that the drafter drafts, of one that it reads."""

    drafting_s: float
    catch_up_s: float


@dataclass(frozen=True, slots=True)
class CostSheet:
    """All of a recording.

    Attributes:
        target: that wrote the texts.
        drafters: by the names that the traces call them.
        environment: on what and by which command it was recorded; for people.
    """

    target: TargetCosts
    drafters: Mapping[str, DrafterCosts]
    environment: Mapping[str, Any] = field(default_factory=dict)

    def of(self, drafter: str, *, pace_s: float = 0.0) -> Costs:
        """For a replay; what only a network shows is as in `Costs`.

        Args:
            drafter: that drafts.
            pace_s: a step takes at least so long.
        """
        return Costs(pace_s=pace_s, **asdict(self.target), **asdict(self.drafters[drafter]))


def costs_path(traces: Path, field_name: str) -> Path:
    """Where the costs of these traces are.

    Raises:
        ConfigError: the name that `field_name` gives does not end in .jsonl.
    """
    if traces.suffix != SUFFIX:
        raise ConfigError(f"{traces} does not end in {SUFFIX}; call it {traces.stem}{SUFFIX}", field=field_name)
    return traces.with_suffix(".costs.json")


def save_costs(sheet: CostSheet, path: Path) -> None:
    """Write the JSON file; OSError where that fails."""
    path.write_text(json.dumps({"format": FORMAT} | asdict(sheet), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def load_costs(path: Path) -> CostSheet:
    """What `save_costs` wrote.

    Raises:
        ConfigError: the file cannot be read, or a field is missing, unknown or wrong; the field is named.
    """
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}, which `outrider traces record` writes beside the traces: {error.strerror}",
            field="costs",
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}", field="costs") from error
    if not isinstance(parsed, dict) or parsed.get("format") != FORMAT:
        raise ConfigError(f"{path} is not of the format {FORMAT}; record the traces again", field="costs.format")
    drafters = _object(parsed.get("drafters"), "costs.drafters")
    return CostSheet(
        _record(TargetCosts, parsed.get("target"), "costs.target"),
        {name: _record(DrafterCosts, value, f"costs.drafters.{name}") for name, value in drafters.items()},
        _object(parsed.get("environment", {}), "costs.environment"),
    )


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError("must be a JSON object; record the traces again", field=where)
    return value


def _record(kind: Any, value: Any, where: str) -> Any:
    """A `kind` whose fields are all seconds."""
    values, names = _object(value, where), kind.__dataclass_fields__
    for name in sorted(values.keys() - names.keys()):
        raise ConfigError("is not a cost; remove it", field=f"{where}.{name}")
    for name in names:
        seconds = values.get(name)
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
            raise ConfigError("must be seconds, 0 or more", field=f"{where}.{name}")
    return kind(**values)
