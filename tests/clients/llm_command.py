"""llm: Simon Willison's command, with the server in extra-openai-models.yaml."""

# /// script
# dependencies = ["llm==0.36"]
# ///

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from cases import API_KEY, BASE_URL, MODEL, case, run

home = tempfile.mkdtemp()
Path(home, "extra-openai-models.yaml").write_text(
    f"- model_id: edge\n  model_name: {MODEL}\n  api_base: {BASE_URL}\n  supports_schema: true\n"
)


def llm(*arguments: str) -> str:
    environment = os.environ | {"LLM_USER_PATH": home, "OPENAI_API_KEY": API_KEY}
    command = ["llm", *arguments, "-m", "edge"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@case("prompt")
def _prompt() -> None:
    assert llm("What is 2 + 3?", "-o", "max_tokens", "8")


@case("system prompt")
def _system() -> None:
    assert llm("What is 2 + 3?", "-s", "be brief", "-o", "max_tokens", "8")


@case("-c goes on")
def _continue() -> None:
    llm("What is 2 + 3?", "-o", "max_tokens", "8")
    assert llm("and 4?", "-c", "-o", "max_tokens", "8")


@case("schema")
def _schema() -> None:
    assert llm("is it?", "--schema", "ok bool", "-o", "max_tokens", "200").startswith("{")


if __name__ == "__main__":
    run("llm")
