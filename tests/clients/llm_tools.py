"""llm, tools: `llm -T` and `llm --functions`."""

# /// script
# dependencies = ["llm==0.36"]
# ///

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

from cases import API_KEY, MODEL, case, each_tool_url, run

FUNCTION = 'def get_weather(city: str) -> str:\n    "Say what the weather is like."\n    return "warm in " + city\n'


def llm(url: str, *arguments: str) -> str:
    """Return what the command prints, with the daemon as a model of its own."""
    with tempfile.TemporaryDirectory() as folder:
        known = {"model_id": "here", "model_name": MODEL, "api_base": url, "supports_tools": True}
        Path(folder, "extra-openai-models.yaml").write_text(json.dumps([known]))  # YAML holds JSON
        environment = os.environ | {"LLM_USER_PATH": folder, "OPENAI_API_KEY": API_KEY}
        command = ["llm", "-m", "here", *arguments]
        return subprocess.run(command, capture_output=True, check=True, text=True, env=environment).stdout


@case("-T")
@each_tool_url
def _named(url: str) -> None:
    assert "It is said: 0." in llm(url, "-T", "llm_version", "Which version is it?")


@case("--functions")
@each_tool_url
def _functions(url: str) -> None:
    assert "It is said: warm in Paris" in llm(url, "--functions", FUNCTION, "Is it warm in Paris?")
    assert "It is said: warm in Paris" in llm(url, "--no-stream", "--functions", FUNCTION, "Is it warm in Paris?")


if __name__ == "__main__":
    run("llm")
