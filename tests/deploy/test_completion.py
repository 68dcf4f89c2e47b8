"""Shells complete commands, options and their words, in a real bash; zsh and fish where they are installed."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# Does what bash does at a tab: the function that `complete -F` names answers in COMPREPLY.
TAB = r"""
eval "$(register-python-argcomplete outrider)"
COMP_LINE="$1"
COMP_POINT=${#COMP_LINE}
read -ra COMP_WORDS <<< "$COMP_LINE"
[[ $COMP_LINE == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
COMP_TYPE=9
COMP_WORDBREAKS=$' \t\n"\'><=;|&(:'
registered=$(complete -p outrider)
function=$(sed 's/.*-F \([^ ]*\).*/\1/' <<< "$registered")
"$function" outrider "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
printf '%s\n' "${COMPREPLY[@]}"
"""


def found(name: str) -> str:
    shell = shutil.which(name)
    if shell is None:
        pytest.skip(f"needs {name}: apt-get install {name}")
    return shell


def with_outrider(folder: Path) -> dict[str, str]:
    """Return an environment in whose PATH `outrider` is."""
    program = folder / "bin" / "outrider"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m outrider.deploy "$@"\n')
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{program.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"}


@pytest.fixture
def bash(tmp_path: Path):
    shell = found("bash")
    environment = with_outrider(tmp_path)

    def complete(line: str) -> list[str]:
        ended = subprocess.run(
            [shell, "--norc", "-c", TAB, "tab", line],
            capture_output=True,
            text=True,
            check=True,
            env=environment,
            cwd=tmp_path,
        )
        return [word.strip() for word in ended.stdout.split("\n") if word.strip()]

    return complete


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("outrider tra", ["train", "trainer"]),
        ("outrider train st", ["steer"]),
        ("outrider verifier --kv", ["--kv-dtype", "--kv-tokens"]),
        ("outrider run --dtype b", ["bfloat16"]),
    ],
)
def test_a_tab_completes_commands_options_and_words(bash, line, words) -> None:
    assert sorted(word for word in bash(line) if not word.startswith("-h") and word not in ("--help", "--config")) == (
        words
    )


def test_a_tab_completes_files_where_an_option_takes_one(bash, tmp_path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    assert bash("outrider edge --tokenizer tok") == ["tokenizer.json"]


def test_zsh_takes_the_documented_line(tmp_path) -> None:
    zsh, environment = found("zsh"), {**with_outrider(tmp_path), "ZDOTDIR": str(tmp_path)}
    line = 'autoload -Uz compinit && compinit -i && eval "$(register-python-argcomplete outrider)"'
    ended = subprocess.run(
        [zsh, "-f", "-c", f"{line}; print $_comps[outrider]"],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    assert ended.stdout.strip() == "_python_argcomplete"
    assert ended.stderr == ""


def test_fish_takes_the_documented_line(tmp_path) -> None:
    fish, environment = found("fish"), {**with_outrider(tmp_path), "HOME": str(tmp_path)}
    line = 'register-python-argcomplete --shell fish outrider | source; complete -C "outrider ver"'
    ended = subprocess.run([fish, "-N", "-c", line], capture_output=True, text=True, check=True, env=environment)
    assert ended.stdout.split()[0] == "verifier"
