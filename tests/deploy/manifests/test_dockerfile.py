"""The Dockerfile without a build: what it copies, installs and starts is there."""

from __future__ import annotations

import http.server
import os
import re
import shlex
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from dockerfile_stages import DOCKERFILE, IMAGES, chain, exec_form, extras, ignored, programs, setting, stages
from image_locks import PYPROJECT, closure
from manifest_checks import version
from manifest_commands import read_command
from manifest_documents import ROOT
from packaging.utils import canonicalize_name

STAGES = stages(DOCKERFILE.read_text(encoding="utf-8"))
RULES = (ROOT / ".dockerignore").read_text(encoding="utf-8")


def test_every_copied_file_is_in_the_checkout_and_in_the_build_context() -> None:
    for stage in STAGES.values():
        for source, paths, _ in stage.copies():
            if source:
                assert source in STAGES
                continue
            for path in paths:
                files = (
                    [ROOT / path]
                    if (ROOT / path).is_file()
                    else [*(ROOT / path).rglob("*.py"), *(ROOT / path).rglob("*.txt"), *(ROOT / path).rglob("*.toml")]
                )
                assert files, f"{path} does not exist"
                assert not [f for f in files if "__pycache__" not in f.parts and _is_ignored(f)]


def _is_ignored(path) -> bool:
    return ignored(path.relative_to(ROOT).as_posix(), RULES)


def test_the_build_context_has_neither_history_nor_tests_nor_anything_secret() -> None:
    for path in (".git/config", ".venv/bin/python", "tests/conftest.py", "keys.toml", "secret", "deploy/kubernetes/x"):
        assert ignored(path, RULES), path
    for path in ("proto/outrider/proto/lease.py", "deploy/docker/healthy.py", "deploy/docker/locks/edge.txt"):
        assert not ignored(path, RULES), path
    assert ignored("proto/outrider/proto/__pycache__/lease.pyc", RULES)


def test_all_that_goes_into_the_wheel_is_copied_before_it_is_built() -> None:
    copied = {path for _, paths, _ in STAGES["wheel"].copies() for path in paths}
    for package in PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
        assert {package, package.partition("/")[0]} & copied
    assert STAGES["wheel"].all("ENV") == ["SETUPTOOLS_SCM_PRETEND_VERSION=${VERSION}"]
    assert {PYPROJECT["project"]["readme"], *PYPROJECT["project"]["license-files"], "deploy/models"} <= copied


@pytest.mark.parametrize("image", IMAGES)
def test_the_cloud_has_models_and_an_edge_fetches_them(image) -> None:
    installed = [run for run in STAGES[f"{image}-environment"].all("RUN") if "/dist/outrider_models-*.whl" in run]
    assert len(installed) == (image != "edge")


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_installs_extras_that_exist(image) -> None:
    assert extras(STAGES, image) <= set(PYPROJECT["project"]["optional-dependencies"])
    assert (
        extras(STAGES, image)
        == {
            "edge": {"edge"},
            "coordinator": {"coordinator", "edge"},
            "cloud": {"cloud", "coordinator", "edge", "jobs"},
        }[image]
    )


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_runs_as_a_plain_user_says_what_it_is_and_tells_whether_it_is_well(image) -> None:
    assert setting(STAGES, image, "USER") == "10001:10001"
    labels = " ".join(label for stage in chain(STAGES, image) for label in stage.all("LABEL"))
    assert {"title", "description", "version", "revision", "licenses"} <= set(re.findall(r"image\.(\w+)=", labels))
    assert f'title="outrider-{image}"' in labels
    assert f"\nARG VERSION={version()}\n" in DOCKERFILE.read_text(encoding="utf-8")
    assert "VERSION" in STAGES[image].all("ARG")
    assert STAGES[image].base == "base"
    check = setting(STAGES, image, "HEALTHCHECK").partition("CMD ")[2]
    (asked,) = (server.rpartition(":")[2] for server in read_command(exec_form(check), {}, image).health_of)
    if image != "cloud":  # a Ray node's own port
        assert asked.partition("/")[0] == setting(STAGES, image, "EXPOSE")


@pytest.mark.parametrize("image", IMAGES)
def test_what_an_image_starts_by_itself_is_a_command(image) -> None:
    entry, default = (exec_form(setting(STAGES, image, name)) for name in ("ENTRYPOINT", "CMD"))
    assert entry == ["outrider"]
    assert default == [{"cloud": "verifier"}.get(image, image), "--help"]  # deployments say the rest
    assert read_command([*entry, default[0]], {}, image).complaints == []


@pytest.mark.parametrize("image", IMAGES)
def test_an_images_own_programs_are_executable_and_compile(image) -> None:
    assert set(programs(STAGES, image)) == {
        "outrider-healthy",
        "outrider-in-ray",
        "outrider-drain-here",
        "outrider-keep-verifiers",
    }
    for path in programs(STAGES, image).values():
        text = (ROOT / path).read_text(encoding="utf-8")
        assert text.startswith("#!")
        if path.endswith(".sh"):
            subprocess.run(["sh", "-n", str(ROOT / path)], check=True)
        else:
            compile(text, path, "exec")


def test_a_check_of_health_uses_no_proxy() -> None:
    class Healthy(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(204)
            self.end_headers()

    proxies = dict.fromkeys(("grpc_proxy", "http_proxy"), "http://127.0.0.1:9")
    handler = grpc.unary_unary_rpc_method_handler(lambda _, __: b"\x08\x01")
    rpc = grpc.server(ThreadPoolExecutor(1))
    rpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": handler}),))
    port = rpc.add_insecure_port("127.0.0.1:0")
    rpc.start()
    with http.server.HTTPServer(("127.0.0.1", 0), Healthy) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        for server in (f"http://127.0.0.1:{web.server_port}/health", f"127.0.0.1:{port}"):
            command = [sys.executable, str(ROOT / "deploy" / "docker" / "healthy.py"), server]
            subprocess.run(command, check=True, env={**os.environ, "no_proxy": "", "NO_PROXY": "", **proxies})
        web.shutdown()
    rpc.stop(None)


def test_bases_are_tagged_and_can_be_pinned() -> None:
    text = DOCKERFILE.read_text(encoding="utf-8")
    (base,) = re.findall(r"^ARG PYTHON_IMAGE=(\S+)$", text, re.MULTILINE)
    assert re.fullmatch(r"python:3\.\d+-slim-\w+", base)
    minor = int(base.partition("3.")[2].partition("-")[0])
    assert minor >= int(PYPROJECT["project"]["requires-python"].rpartition(".")[2])
    assert {stage.base for stage in STAGES.values()} - set(STAGES) == {"${PYTHON_IMAGE}"}


def test_no_secret_is_built_in() -> None:
    for stage in STAGES.values():
        for words in (shlex.split(text) for name in ("ARG", "ENV") for text in stage.all(name)):
            for word in words:
                assert not re.search(r"TOKEN|SECRET|PASSWORD|_KEY", word.partition("=")[0])


# --- the extras contain what the commands import ---

# Runs a command that can import the packages of some requirements alone, as if nothing else were installed.
ONLY = r"""
import importlib.abc, sys
allowed = set(sys.argv[1].split(","))
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in allowed:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
from outrider.deploy.cli import main
sys.exit(main(sys.argv[2:]))
"""


def _refused(image: str) -> set[str]:
    """Return the top-level modules of all installed packages outside the image's requirements."""
    from importlib.metadata import packages_distributions

    there = closure([f"outrider[{','.join(extras(STAGES, image))}]"])
    modules = packages_distributions().items()
    return {module for module, names in modules if not there & {canonicalize_name(name) for name in names}}


STARTED = {
    "edge": ["edge", "--listen", "127.0.0.1:x", "--coordinator", "127.0.0.1:9"],
    "coordinator": ["coordinator", "--listen", "127.0.0.1:x", "--verifier", "v=127.0.0.1:9"],
}


@pytest.mark.parametrize("image", STARTED)
def test_an_image_has_every_package_that_its_command_imports(image, tmp_path, tokenizer_file) -> None:
    """The command fails at its address, which is wrong on purpose, after it has imported everything."""
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef" * 4)
    arguments = {
        "edge": ["--cache", str(tmp_path)],
        "coordinator": ["--lease-secret-file", str(secret), "--tokenizer", str(tokenizer_file)],
    }[image]
    refused = _refused(image)
    assert {"torch", "transformers"} <= refused
    run = [sys.executable, "-c", ONLY, ",".join(refused), *STARTED[image], *arguments]
    result = subprocess.run(run, capture_output=True, text=True, check=False, timeout=120)
    assert "listen" in result.stderr, result.stderr
    assert "127.0.0.1:x" in result.stderr
    assert result.returncode == 1
