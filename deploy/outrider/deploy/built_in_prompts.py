"""Prompts from a file, and those that are built in."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from outrider.proto.errors import ConfigError
from outrider.proto.plumbing.files import read_text

HELD_OUT = Path(__file__).parent / "heldout"
DOMAINS = ("code", "docs", "prose", "math")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt with its id and domain in outputs."""

    id: str
    text: str
    domain: str = ""


def held_out(per_domain: int) -> list[Prompt]:
    """Return `per_domain` built-in prompts of each domain, on which no model of the family was trained."""
    return [prompt for domain in DOMAINS for prompt in read_prompts(HELD_OUT / f"{domain}.jsonl", per_domain)]


def choose_prompts(path: Path | None, per_domain: int) -> list[Prompt]:
    """Return up to `per_domain` prompts of each domain, from a file (see `read_prompts`) or built in."""
    if path is None:
        return held_out(per_domain)
    by_domain: dict[str, list[Prompt]] = {}
    for prompt in read_prompts(path):
        by_domain.setdefault(prompt.domain, []).append(prompt)
    return [prompt for prompts in by_domain.values() for prompt in prompts[:per_domain]]


def read_prompts(path: Path, limit: int = 0) -> list[Prompt]:
    """Read the first `limit` prompts (0: all) of a `.jsonl` file of {"id", "prompt", "domain"}, or the lines of a text.

    Raises:
        ConfigError: the file cannot be read, a line is malformed, or there is no prompt.
    """
    lines = read_text(path, "prompts").splitlines()
    parse = _parse_json if path.suffix == ".jsonl" else lambda line, number: Prompt(str(number), line)
    prompts = [parse(line, number) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ConfigError(f"{path} holds no prompt", field="prompts")
    return prompts[:limit] if limit else prompts


def _parse_json(line: str, number: int) -> Prompt:
    try:
        parsed = json.loads(line)
        return Prompt(str(parsed.get("id", number)), str(parsed["prompt"]), str(parsed.get("domain", "")))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f'line {number} is not a JSON object with "prompt"', field="prompts") from error
