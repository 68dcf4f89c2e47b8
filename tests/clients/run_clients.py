"""Tries real clients against a daemon, and prints the table of docs/clients.md: `make clients`.

Each client is one file beside this one and has an environment of its own below dist/clients. The exit status is 1 where
something fails that the page says works.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "clients.md"
INSTALLED = ROOT / "dist" / "clients"
SERVES_WITHIN_S = 600.0
CLIENT_WITHIN_S = 900.0
_PACKAGES = re.compile(r"^(?:#|//) dependencies = (\[.*\])$", re.MULTILINE)
_TITLE = re.compile(r'^(?:"""|// )(.+?)(?:: .*|\.)?(?:""")?$', re.MULTILINE)


@dataclass
class Result:
    """Outcome of one client's file; `works` and `fails` have its features, the latter with reasons."""

    title: str
    version: str = "?"
    works: list[str] = field(default_factory=list)
    fails: dict[str, str] = field(default_factory=dict)

    def row(self) -> str:
        """Return the row of the table."""
        fails = "; ".join(f"{feature}: {reason.replace('|', '¦')}" for feature, reason in self.fails.items())
        return f"| {self.title} | {self.version} | {', '.join(self.works)} | {fails} |"


def client_files() -> dict[str, Path]:
    """Return the clients' files by name."""
    files = [*HERE.glob("*.py"), *HERE.glob("*.mjs")]
    return {path.stem: path for path in sorted(files) if _PACKAGES.search(path.read_text())}


def promised() -> dict[str, set[str]]:
    """Return the features that the page says work, by client."""
    rows = re.findall(r"^\| (.+?) \| .*? \| (.*?) \|.*\|$", PAGE.read_text(), re.MULTILINE)
    return {title: {feature.strip() for feature in works.split(",")} - {""} for title, works in rows}


def install(name: str, path: Path) -> list[str]:
    """Install a client's packages where they are not, and return the command that runs its cases."""
    packages = json.loads(_PACKAGES.search(path.read_text()).group(1))  # type: ignore[union-attr]
    folder = INSTALLED / name
    mark = folder / "installed.json"
    if not mark.exists() or json.loads(mark.read_text()) != packages:
        print(f"installing {' '.join(packages)}", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        if path.suffix == ".mjs":
            folder.mkdir(parents=True)
            _run("npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder), *packages)
        else:
            _run(sys.executable, "-m", "venv", str(folder))
            _run(str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *packages)
        mark.write_text(json.dumps(packages))
    if path.suffix != ".mjs":
        return [str(folder / "bin" / "python"), str(path)]
    for module in HERE.glob("*.mjs"):  # node looks for packages beside the file
        shutil.copy(module, folder)
    return ["node", str(folder / path.name)]


def try_client(name: str, path: Path, environment: dict[str, str]) -> Result:
    """Run a client's cases, and collect what they print."""
    title = _TITLE.search(path.read_text())
    result = Result(title.group(1) if title else name)
    command = install(name, path)
    environment = environment | {
        "NODE_MODULES": str(INSTALLED / name / "node_modules"),
        "PATH": f"{INSTALLED / name / 'bin'}:{environment['PATH']}",
    }
    log = INSTALLED / f"{name}.log"
    with log.open("w") as errors:
        process = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, timeout=CLIENT_WITHIN_S
        )
    for line in process.stdout.splitlines():
        try:
            said = json.loads(line)
        except ValueError:
            continue  # a client's own output
        if "version" in said:
            result.version = said["version"]
        elif said["works"]:
            result.works.append(said["feature"])
        else:
            result.fails[said["feature"]] = said["reason"]
    if process.returncode:
        result.fails["all"] = f"ended with status {process.returncode}; see {log.relative_to(ROOT)}"
    return result


@contextmanager
def serving(url: str | None) -> Iterator[str]:
    """Yield the URL of a daemon: the one given, or one over a target started here."""
    if url:
        yield url.rstrip("/")
        return
    address, listen = f"127.0.0.1:{_free_port()}", f"127.0.0.1:{_free_port()}"
    outrider = str(Path(sys.executable).parent / "outrider")
    INSTALLED.mkdir(parents=True, exist_ok=True)
    with (INSTALLED / "outrider.log").open("w") as log:
        processes = [
            subprocess.Popen([outrider, *arguments], stdout=log, stderr=log)
            for arguments in (
                ("up", "--target", "reference", "--listen", address),
                ("edge", "--coordinator", address, "--listen", listen),
            )
        ]
        try:
            _wait_for(f"http://{listen}/health", processes)
            yield f"http://{listen}"
        finally:
            for process in reversed(processes):
                process.terminate()
            for process in processes:
                process.wait()


@contextmanager
def speaking() -> Iterator[str]:
    """Yield the URLs of daemons whose scripted targets call functions, one for each format, as an object of JSON."""
    INSTALLED.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, (INSTALLED / "speaking.log").open("w") as log:
        command = [sys.executable, str(ROOT / "tests" / "edge" / "speaking_target.py"), folder]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process:
            try:
                yield process.stdout.readline().strip()  # type: ignore[union-attr]
            finally:
                process.terminate()


def write_tokenizer() -> Path:
    """Write the embedded target's tokenizer as Hugging Face's libraries read it, for tools that make prompts by it."""
    from outrider.cloud.models.family_index import target_folder, tokenizer_file

    folder = INSTALLED / "tokenizer"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(tokenizer_file(target_folder("reference")), folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


def main() -> int:
    """Run the clients that the command line names, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"clients to try: {', '.join(client_files())}; default: all")
    parser.add_argument("--url", help="a daemon that runs already, such as http://127.0.0.1:8080")
    arguments = parser.parse_args()
    files = {name: path for name, path in client_files().items() if name in (arguments.names or client_files())}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started ends, too
    broken = []
    with serving(arguments.url) as url, speaking() as tool_urls:
        environment = os.environ | {"BASE_URL": f"{url}/v1", "TOOL_URLS": tool_urls, "PYTHONDONTWRITEBYTECODE": "1"}
        environment["TOKENIZER"] = str(write_tokenizer())
        print("| client | version | works | fails |\n|---|---|---|---|")
        for name, path in files.items():
            result = try_client(name, path, environment)
            print(result.row(), flush=True)
            missing = promised().get(result.title, set()) - set(result.works)
            broken += [f"{result.title}: {feature}" for feature in sorted(missing)]
    for each in broken:
        print(f"the page says that this works: {each}", file=sys.stderr)
    return 1 if broken else 0


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=sys.stderr)


def _wait_for(url: str, processes: list[subprocess.Popen[bytes]]) -> None:
    began = time.monotonic()
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError as error:
            if time.monotonic() - began > SERVES_WITHIN_S or any(process.poll() is not None for process in processes):
                raise SystemExit(f"{url} does not answer: {error}; see {INSTALLED}/outrider.log") from error
            time.sleep(0.5)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


if __name__ == "__main__":
    raise SystemExit(main())
