"""Hurdles between a job and its first line, on a node or in its agent, each told in one line with the remedy."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from outrider.proto.errors import Unavailable

# What a job of Outrider needs of the python that runs it; a python without them is not the one of Ray's environment.
NEEDED = ("ray", "grpc", "numpy", "fsspec", "outrider")
LACKING = (
    "import importlib.util, sys; "
    f"lacking = [name for name in {NEEDED} if importlib.util.find_spec(name) is None]; "
    "print(*lacking); sys.exit(bool(lacking))"
)
NO_PYTHON = 3  # the job's exit status
# Parts of what the dashboard says if the head's agent, which starts jobs, is not there.
AGENT_IS_AWAY = ("available agent", "head node agent", "Agent info not found", "Cannot connect to host")


def entrypoint(words: Sequence[str]) -> str:
    """Return the shell's line for a job, which first looks whether the node's `python` is the one for it.

    Ray runs a job in the PATH that Ray itself was started with; `.venv/bin/ray start` leaves another python there.
    """
    says = (
        "outrider submit: the python in Ray's PATH on $(hostname) ($(command -v python || echo none)) lacks "
        "${lacking:-everything}; start Ray there with its environment's bin folder first in PATH, or add --install pip"
    )
    check = f'lacking=$(python -c {shlex.quote(LACKING)} 2>/dev/null) || {{ echo "{says}" >&2; exit {NO_PYTHON}; }}'
    return f"{check}; exec {shlex.join(words)}"


def agent_errors(address: str) -> dict[str, Unavailable]:
    """Return the error for each way in which the dashboard says that the head's agent is away."""
    away = Unavailable(
        f"the head behind {address} has no agent to start jobs: it lacks ray[default], or another Ray on that machine "
        "has its port (ray start --dashboard-agent-listen-port N); dashboard_agent.log there says which",
        field="address",
    )
    return dict.fromkeys(AGENT_IS_AWAY, away)


def reason(message: str) -> str:
    """Return the one line of a long message that says why: pip's own error, or else the last line of a traceback."""
    lines = [line.strip() for line in message.replace("\\n", "\n").split("\n") if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return ([*lines, *errors] or ["it does not say why"])[-1][:300]


def not_run(message: str) -> str:
    """Return why Ray did not run a job at all, with the remedy where its environment is the reason."""
    if "runtime_env" in message or "runtime environment" in message:
        return f"its node could not make its environment: {reason(message)}; `--wheel none` takes what the nodes have"
    return reason(message)
