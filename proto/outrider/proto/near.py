"""The word that somebody may have meant."""

from __future__ import annotations

from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown word: `; did you mean NAME?`, or nothing where none is near."""
    import difflib  # here, since most words are known

    near = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""
