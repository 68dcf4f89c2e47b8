"""Base of all parts of a request, and how a validator says why one is refused."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError


class Strict(BaseModel):
    """No conversions, no NaN, and no unknown fields: `checking` takes them out first where they are ignored."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True, protected_namespaces=())


def refuse(message: str) -> PydanticCustomError:
    """Return the error of a value that is refused, for pydantic's validators; `message` goes on after the field."""
    return PydanticCustomError("refused", "{why}", {"why": message})
