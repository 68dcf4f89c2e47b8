"""Build the three images without a registry or a daemon, run them together with TLS, and decode; see `--help`.

The base is Debian's own by debootstrap. Ours are built by buildah in a chroot, with this machine's settings of pip, and
the services of compose.yaml and compose.tls.yaml run from them on a loopback of their own.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from image_store import ROOT, ImageStore, MissingTool, check_tools

IMAGES = ("edge", "coordinator", "cloud")
APART = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]


def main() -> int:
    """Build, run, print a table, write the record, and return 1 if something was not as promised."""
    parser = argparse.ArgumentParser(description="Build the images by debootstrap and buildah, run them, and decode.")
    parser.add_argument("--store", type=Path, default=Path("/var/tmp/outrider-images"), help="folder of images, 6 GB")
    parser.add_argument("--driver", default="overlay", choices=["overlay", "vfs"], help="vfs: slow, and works anywhere")
    parser.add_argument("--output", type=Path, required=True, help="file for the record")
    parser.add_argument("--keep", action="store_true", help="keep the store, so that the next run builds what changed")
    options = parser.parse_args()
    try:
        check_tools()
    except MissingTool as error:
        print(f"make images: {error}", file=sys.stderr)
        return 1
    store = ImageStore(options.store.resolve(), options.driver)
    try:
        record = {"revision": _revision(), "machine": platform.platform(), "images": _built(store), "run": _run(store)}
    finally:
        if not options.keep:
            store.remove()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(_table(record))
    broken = broken_promises(record["run"])
    print("\n".join(f"NOT AS PROMISED: {text}" for text in broken), file=sys.stderr, end="\n" if broken else "")
    return 1 if broken else 0


def _built(store: ImageStore) -> dict[str, dict[str, float]]:
    """Build the base and the images; return the seconds of each, and the bytes of all files of an image."""
    began = time.monotonic()
    store.make_base()
    found = {"base": {"seconds": round(time.monotonic() - began)}}
    for image in IMAGES:
        began = time.monotonic()
        store.build(image, {"REVISION": _revision()})
        seconds = round(time.monotonic() - began)
        found[image] = {"seconds": seconds, "bytes": store.bytes_of(f"outrider-{image}")}
    return found


def _run(store: ImageStore) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="outrider-images-"))
    given = {"store": str(store.folder), "driver": store.driver, "folder": str(folder)}
    script = str(Path(__file__).with_name("run_services.py"))
    try:
        done = subprocess.run([*APART, sys.executable, script, json.dumps(given)], stdout=subprocess.PIPE, check=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


def broken_promises(run: dict[str, Any]) -> list[str]:
    """Return what the run shows that should not be."""
    checks = {
        "texts with and without drafts differ": run["same_text_without_drafts"],
        "no draft was accepted": run["accepted_drafts"] > 0,
        "the daemon answered nothing": bool(run["chat"]),
        "there is no verifier": bool(run["verifiers"]),
        "a process has another user than 10001": set(run["users"].values()) == {"10001:10001"},
        "a root can be written": set(run["read_only_roots"]) == set(run["users"]),
    }
    return [text for text, fine in checks.items() if not fine]


def _table(record: dict[str, Any]) -> str:
    rows = [f"base: built in {record['images']['base']['seconds']} s"]
    for image in IMAGES:
        built = record["images"][image]
        rows.append(f"{image}: {built['bytes'] / 1e6:.0f} MB, built in {built['seconds']} s")
    run = record["run"]
    rows.append(
        f"ready {run['ready_s']} s after the first service; {run['tokens']} tokens, {run['accepted_drafts']} drafts"
    )
    return "\n".join([*rows, f"the daemon said: {run['chat']!r}"])


def _revision() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
