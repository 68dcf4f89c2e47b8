"""Base of all parts of a request, and how a validator says why one is refused."""

from __future__ import annotations

from dataclasses import replace

from pydantic import AfterValidator, BaseModel, ConfigDict
from pydantic_core import PydanticCustomError

from outrider.proto.types import BOUNDS


class Strict(BaseModel):
    """No conversions, no NaN, and no unknown fields: `checking` takes them out first where they are ignored."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True, protected_namespaces=())


def refuse(message: str) -> PydanticCustomError:
    """Return the error of a value that is refused, for pydantic's validators; `message` goes on after the field."""
    return PydanticCustomError("refused", "{why}", {"why": message})


def within(name: str, high: float | None = None) -> AfterValidator:
    """Return a validator that keeps a number in the HTTP range of `BOUNDS[name]`, or below `high` where an API's is."""
    bounds = BOUNDS[name].of_http
    if high is not None:
        bounds = replace(bounds, high=high)

    def check(value: float | None) -> float | None:
        if value is not None and not bounds.allows(value):
            raise refuse(f"must be in {bounds}")
        return value

    return AfterValidator(check)
