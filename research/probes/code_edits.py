"""Small edits of one function, chosen by rule from the history of a repository."""

from __future__ import annotations

import ast
import subprocess
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import islice
from pathlib import Path

from outrider.proto.errors import ConfigError

FUNCTION_LINES = range(8, 31)
CHANGED_LINES = range(1, 7)
ASK = "Here is a Python function:\n\n```python\n{before}```\n\nChange it: {subject}\n\nAnswer with the whole function."


@dataclass(frozen=True, slots=True)
class CodeEdit:
    """A function `before` a commit, without its indentation, and the question that asks for it after the commit."""

    commit: str
    before: str
    question: str


def code_edits(repository: Path, revision: str, count: int) -> list[CodeEdit]:
    """Return the first `count` edits in git's log from `revision` backwards, without merges.

    An edit is a commit that changes one .py file, and there one function alone, which has `FUNCTION_LINES` before and
    after, in `CHANGED_LINES`; a replaced line counts once. A function that was there in the same form is left out.

    Raises:
        ConfigError: there are fewer edits.
        CalledProcessError: git does not know the repository or the revision, and has said so on standard error.
    """
    found = list(islice(_edits(repository, revision), count))
    if len(found) < count:
        raise ConfigError(f"has {len(found)} edits up to {revision}, and {count} are wanted", field="repository")
    return found


def _edits(repository: Path, revision: str) -> Iterator[CodeEdit]:
    seen = set[str]()
    form = "--no-merges", "--no-renames", "--raw", "--no-abbrev", "--format=%x01%H%x02%s%x02"
    for entry in _git(repository, "log", *form, revision, "--", "*.py").split("\x01")[1:]:
        commit, subject, files = entry.split("\x02")
        (_, _, *blobs, kind, _), *others = (line.split(None, 5) for line in files.strip().splitlines())
        before = None if others or kind != "M" else edited_function(*(_git(repository, "show", it) for it in blobs))
        if before is not None and before not in seen:
            seen.add(before)
            yield CodeEdit(commit, before, ASK.format(before=before, subject=subject))


def edited_function(before: str, after: str) -> str | None:
    """Return the function of the first source that holds all in which two sources differ, without its indentation.

    None: there is none, it or the change is too short or too long, or a source does not parse.
    """
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    differing = [each[1:] for each in SequenceMatcher(None, old, new, False).get_opcodes() if each[0] != "equal"]
    if sum(max(i2 - i1, j2 - j1) for i1, i2, j1, j2 in differing) not in CHANGED_LINES:
        return None
    try:
        of_old, of_new = _functions(ast.parse(before)), _functions(ast.parse(after))
    except (SyntaxError, ValueError):
        return None
    for name, (a, b) in of_old.items():
        c, d = of_new.get(name, (0, 0))
        if b - a not in FUNCTION_LINES or d - c not in FUNCTION_LINES:
            continue
        if all(a <= i1 and i2 <= b and c <= j1 and j2 <= d for i1, i2, j1, j2 in differing):
            return textwrap.dedent("".join(old[a:b]))
    return None


def _functions(node: ast.AST, prefix: str = "") -> dict[str, tuple[int, int]]:
    """Return begin and end of every function's lines, from 0, by its qualified name; decorators are its own."""
    spans = dict[str, tuple[int, int]]()
    for child in ast.iter_child_nodes(node):
        name = f"{prefix}.{child.name}" if hasattr(child, "name") else prefix
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min(each.lineno for each in (child, *child.decorator_list))
            spans[name] = first - 1, child.end_lineno or first
        spans |= _functions(child, name)
    return spans


def _git(repository: Path, *arguments: str) -> str:
    command = ("git", "-C", str(repository), *arguments)
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, encoding="utf-8", errors="replace").stdout  # noqa: S603
