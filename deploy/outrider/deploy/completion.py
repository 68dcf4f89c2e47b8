"""`outrider completion`: what makes a shell complete commands, options, and the words and files that they take."""

from __future__ import annotations

import argcomplete

from outrider.deploy.arguments import Given
from outrider.deploy.commands.operating import CompletionSettings


def completion(given: Given) -> int:
    """Write the completion script to standard output, for its start file to evaluate."""
    print(argcomplete.shellcode(["outrider"], shell=given(CompletionSettings).shell))
    return 0
