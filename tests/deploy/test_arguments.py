"""Options of every command: from line, environment and file, with help, and without heavy imports."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.cloud.verifier_config import VerifierConfig
from outrider.coordinator.coordinator_config import CoordinatorConfig
from outrider.deploy.arguments import Argument
from outrider.deploy.cli import COMMANDS, main, parse
from outrider.deploy.local.servers import coordinator_config
from outrider.proto.errors import ConfigError
from outrider.proto.plumbing.tls import ClientTls, ServerTls
from outrider.proto.settings import REQUIRED

RUNNABLE = [name for name, entry in COMMANDS.items() if entry.declared]
HEAVY = ("torch", "ray", "onnxruntime", "transformers", "tokenizers", "numpy", "matplotlib", "pydantic", "rich", "grpc")
# Texts that these options take and that are not their defaults.
TEXTS = {
    **dict.fromkeys(("coordinator", "verifier", "listen", "metrics-listen", "to"), "some:1"),
    "drafter": "ngram",
    "selector": "hedge",
    "window": "7",
    "server": "http://a:1",
    "target-url": "http://a:1",
    "patience": "5,2",
    "read": "0.25",
    "greedy": "0.25",
    "steering": "/p",
    "arms": "frozen,block",
    "trace-endpoint": "http://a:1",
    "kv-tokens": "4096",
    "queue": "8",
    "link": "30,10,50",
    "steps": "2x3",
    "draft-with": "ngram",
    "draft-price": "2",
    "learn-cpu-share": "0.25",
    "learn-max-load": "0.5",
    "edited": "0.25",
    "service": "batch",
}


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OUTRIDER_")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _no_translations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare argparse the search for translations, half of the time of the thousand parsers that are built here."""
    monkeypatch.setattr("argparse._", str)


def text_for(argument: Argument) -> str:
    """Return a value that is not the argument's default."""
    field = argument.field
    if (argument.flag in TEXTS and field.kind is not int) or argument.flag == "kv-tokens":
        return TEXTS[argument.flag]
    if field.choices:
        return next(word for word in reversed(field.choices) if [word] != default_of(argument))
    if argument.flag == "drafting" and field.kind is str:
        return "4:1"  # of both ends; where it is a number, the cloud's alone
    return {bool: "true", int: "12", float: "0.5", str: "some:1", Path: "a/path"}[field.kind]


def default_of(argument: Argument) -> list[str]:
    value = argument.value
    return [getattr(entry, "name", str(entry)).lower() for entry in (value if isinstance(value, tuple) else (value,))]


def required(arguments: tuple[Argument, ...]) -> list[str]:
    """Return words for the required arguments of a command."""
    words = []
    for argument in arguments:
        if argument.default is REQUIRED:
            words += ([] if argument.field.option.positional else [f"--{argument.flag}"]) + [text_for(argument)]
    return words


@pytest.mark.parametrize("command", RUNNABLE)
def test_every_option_has_help_a_flag_a_variable_and_a_key(command, tmp_path, monkeypatch, capfd) -> None:
    entry = COMMANDS[command]
    table, arguments = entry.table or command, entry.load().arguments
    needed = required(arguments)
    file = tmp_path / "outrider.toml"
    monkeypatch.delenv(f"OUTRIDER_{table.upper()}_TARGET", raising=False)  # of all tests
    with pytest.raises(SystemExit, match="0"):
        parse([*command.split(), "--help"])
    shown = capfd.readouterr().out
    for argument in (a for a in arguments if not a.field.option.positional):
        assert argument.field.option.help
        assert f"--{argument.flag}" in shown
        text = text_for(argument)
        words = [f"--{argument.flag}"] + ([] if argument.field.kind is bool else [text])
        wanted = parse([*command.split(), *needed, *words]).values[argument.name]
        assert argument.default is REQUIRED or wanted != argument.value, "the text says something"
        others = needed
        if argument.default is REQUIRED:
            others = [word for word in needed if word not in words[:1]]
            others.remove(text)
        with monkeypatch.context() as patch:
            patch.setenv(f"OUTRIDER_{table.upper()}_{argument.flag.upper().replace('-', '_')}", text)
            assert parse([*command.split(), *others]).values[argument.name] == wanted
        file.write_text(f"[{table}]\n{argument.flag} = {json.dumps(text)}\n")
        assert parse([*command.split(), *others, "--config", str(file)]).values[argument.name] == wanted


def test_the_line_wins_over_the_environment_and_that_over_the_file(tmp_path, monkeypatch) -> None:
    file = tmp_path / "outrider.toml"
    file.write_text('[edge]\nmax-requests = 2\nlearn_cpu_share = 0.25\ninsecure-listen = true\ndrafter = "ngram"\n')
    monkeypatch.setenv("OUTRIDER_CONFIG", str(file))

    def values(*words: str) -> tuple[Any, ...]:
        given = parse(["edge", "--coordinator", "a:1", *words]).values
        return tuple(given[name] for name in ("max_requests", "learn_cpu_share", "insecure_listen", "drafter"))

    assert values() == (2, 0.25, True, "ngram")
    monkeypatch.setenv("OUTRIDER_EDGE_MAX_REQUESTS", "3")
    monkeypatch.setenv("OUTRIDER_EDGE_INSECURE_LISTEN", "off")
    assert values() == (3, 0.25, False, "ngram")
    assert values("--max-requests", "4", "--insecure-listen", "--drafter", "none") == (4, 0.25, True, "none")


def test_lists_are_written_as_each_place_writes_lists(tmp_path, monkeypatch) -> None:
    file = tmp_path / "outrider.toml"
    file.write_text('[verifier]\nsteering = ["/a", "/b"]\n[bench]\nrtt = [1, 2.5]\n[train]\ntexts = ["x", "y"]\n')
    needed = ["train", "teacher", "--output", "o"]
    assert parse(["verifier", "--steering", "/a", "--steering", "/b"]).values["steering"] == ("/a", "/b")
    assert parse(["verifier", "--config", str(file)]).values["steering"] == ("/a", "/b")
    assert parse(["bench", "--rtt", "1,2.5"]).values["rtt"] == (1, 2.5)
    assert parse(["bench", "--config", str(file)]).values["rtt"] == (1, 2.5)
    assert parse([*needed, "--texts", "x", "y"]).values["texts"] == (Path("x"), Path("y"))
    assert parse([*needed, "--config", str(file)]).values["texts"] == (Path("x"), Path("y"))
    monkeypatch.setenv("OUTRIDER_VERIFIER_STEERING", "[/c, /d]")
    assert parse(["verifier", "--config", str(file)]).values["steering"] == ("/c", "/d")
    monkeypatch.setenv("OUTRIDER_BENCH_RTT", "7,8")
    assert parse(["bench"]).values["rtt"] == (7, 8)
    monkeypatch.setenv("OUTRIDER_TRAIN_TEXTS", "[z, w]")
    assert parse(needed).values["texts"] == (Path("z"), Path("w"))


def test_projections_are_named_by_absolute_paths_since_an_actor_may_run_elsewhere(tmp_path, monkeypatch) -> None:
    config = tmp_path / "outrider.toml"
    config.write_text('[verifier]\nsteering = ["a", "/b"]\n')
    monkeypatch.chdir(tmp_path)
    given = [
        parse(["verifier", *arguments])(VerifierConfig).steering
        for arguments in (["--steering", "a", "--steering", "/b"], ["--config", str(config)], [])
    ]
    wanted = (str(tmp_path / "a"), "/b")
    assert given == [wanted, wanted, ()]


@pytest.mark.parametrize(
    ("content", "variables", "says"),
    [
        ("[run]\nmax-tokens = 0\n", {}, "outrider.toml: max-tokens: 0 is not in 1..2147483647"),
        ("[run]\nmax-tokens = [1, 2]\n", {}, "outrider.toml: max-tokens: is a list where one value belongs"),
        ("[run]\nexact = 3\n", {}, "outrider.toml: exact: "),
        ("[run]\nprompt = 'x'\n", {}, "[run] has no option prompt"),
        ("run = 3\n", {}, "outrider.toml: run is not a table"),
        ("[run\n", {}, "outrider.toml is not TOML: "),
        ("", {"OUTRIDER_RUN_MAX_TOKENS": "0"}, "OUTRIDER_RUN_MAX_TOKENS: 0 is not in 1..2147483647"),
        ("", {"OUTRIDER_RUN_STEER": "fun"}, "OUTRIDER_RUN_STEER: 'fun' is none of auto, on, off"),
    ],
)
def test_a_mistake_in_file_or_environment_is_one_line_that_names_it(
    content, variables, says, tmp_path, monkeypatch, capfd
) -> None:
    file = tmp_path / "outrider.toml"
    file.write_text(content)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="2"):
        main(["run", "x", "--config", str(file)])
    said = capfd.readouterr().err
    assert says in said
    assert "(see outrider run --help)" in said
    assert len(said.splitlines()) == 1


def test_a_mistake_that_settings_find_names_the_option_and_not_the_field(capfd) -> None:
    line = "edge --coordinator c.example:1 --cloud-tls-cert x"
    assert main(line.split()) == 1
    assert capfd.readouterr().err.startswith("outrider edge: cloud-tls-ca: must be given for TLS")


def test_a_table_of_the_config_file_becomes_a_coordinators_config(tmp_path) -> None:
    (tmp_path / "secret").write_text("0123456789abcdef\n")
    (tmp_path / "tokenizer.json").write_text("{}")
    file = tmp_path / "outrider.toml"
    file.write_text(
        f"""[coordinator]
        lease-secret-file = "{tmp_path}/secret"
        tls-cert = "c"
        tls-key = "k"
        verifier-tls-ca = "a"
        api-keys = "x"
        drafters = ["d"]
        state = "s"
        verifier = ["one=127.0.0.1:1", "two=127.0.0.1:2"]
        tokenizer = "{tmp_path}/tokenizer.json"
        """
    )
    config = coordinator_config(parse(["coordinator", "--config", str(file)]))
    assert isinstance(config, CoordinatorConfig)
    assert (config.tls, config.verifier_tls) == (
        ServerTls(Path("c"), Path("k")),
        ClientTls(Path("a"), Path("c"), Path("k")),
    )
    assert (config.lease_secret, config.api_keys, config.state) == (b"0123456789abcdef", Path("x"), Path("s"))
    assert config.drafters[1:] == (Path("d"),)
    assert [(one.name, one.address, one.tls) for one in config.verifiers] == [
        ("one", "127.0.0.1:1", True),
        ("two", "127.0.0.1:2", True),
    ]
    assert config.ray_address == ""
    file.write_text(file.read_text().replace('tls-key = "k"', ""))
    with pytest.raises(ConfigError) as refusal:
        coordinator_config(parse(["coordinator", "--config", str(file)]))
    assert refusal.value.field == "tls_key"


def loaded_by(*arguments: str) -> set[str]:
    """Return the modules that `outrider` with these arguments has loaded when it ends."""
    program = (
        "import atexit, sys; atexit.register(lambda: print('loaded:', *sys.modules))\n"
        f"from outrider.deploy.cli import main; main({list(arguments)!r})"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(ended.stdout.rpartition("loaded:")[2].split())


@pytest.mark.parametrize("command", ["", "edge", "verifier", "coordinator", "train steer", "bench"])
def test_help_loads_nothing_heavy(command) -> None:
    loaded = loaded_by(*command.split(), "--help")
    assert "argparse" in loaded
    assert not loaded & set(HEAVY)
    if not command:
        assert not {name for name in loaded if name.startswith(("grpc", "outrider.cloud", "outrider.edge"))}


def test_an_edges_help_loads_nothing_of_the_cloud() -> None:
    assert not {name for name in loaded_by("chat", "--help") if name.startswith("outrider.cloud")}


def test_what_runs_every_command_exists() -> None:
    declared = [entry for entry in COMMANDS.values() if entry.declared]
    assert len(declared) >= 15
    for entry in declared:
        module, _, function = entry.load().run.partition(":")
        assert callable(getattr(importlib.import_module(module), function)), entry
