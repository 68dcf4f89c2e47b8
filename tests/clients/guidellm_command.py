"""guidellm: vLLM's load tool, as shipped."""

# /// script
# dependencies = ["guidellm==0.8.1"]
# ///

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

from cases import BASE_URL, MODEL, case, run


@case("30 of 30 requests")
def _load() -> None:
    folder = Path(tempfile.mkdtemp())
    prompts, report = folder / "prompts.jsonl", folder / "report.json"
    prompts.write_text("".join(f'{{"prompt": "{i} birds sing in old trees near the river"}}\n' for i in range(40)))
    backend = f"kind=openai_http,target={BASE_URL.removesuffix('/v1')},model={MODEL},max_tokens=16"
    command = ["guidellm", "run", "--backend", backend, "--data", f"kind=json_file,path={prompts}"]
    command += ["--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=30"]
    subprocess.run([*command, "--output", f"kind=json,path={report}"], check=True, stdout=subprocess.DEVNULL)
    totals = json.loads(report.read_text())["benchmarks"][0]["metrics"]["request_totals"]
    assert totals["successful"] == totals["total"] == 30, totals


if __name__ == "__main__":
    run("guidellm")
