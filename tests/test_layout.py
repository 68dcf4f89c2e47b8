"""Layout of the tree: which part may import which, and the sizes and names in it."""

from __future__ import annotations

import ast
import graphlib
import hashlib
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from research import lines

PARTS = {
    "proto": {"outrider.proto"},
    "edge/outrider/drafters": {"outrider.proto", "outrider.drafters"},
    "edge/outrider/edge": {"outrider.proto", "outrider.drafters", "outrider.edge"},
    "cloud": {"outrider.proto", "outrider.drafters", "outrider.cloud"},
    "coordinator": {"outrider.proto", "outrider.coordinator"},
}
PARTS["deploy"] = {f"outrider.{part}" for part in ("proto", "drafters", "edge", "cloud", "coordinator", "deploy")}
PARTS["deploy/outrider/bench"] = PARTS["deploy"] | {"outrider.bench"}
PARTS["research"] = PARTS["deploy/outrider/bench"] | {"research"}
FORBIDDEN = {
    "proto": {"torch", "ray", "transformers", "onnxruntime"},
    "edge/outrider/drafters": {"torch", "ray", "transformers", "grpc"},
    "edge/outrider/edge": {"torch", "ray", "transformers"},
    "cloud": set(),
    "coordinator": {"torch", "transformers", "onnxruntime"},
    "deploy": set(),
    "deploy/outrider/bench": {"ray"},
    "research": {"ray"},
}


MAX_TRACKED_BYTES = 87 << 20  # 25 MiB of them are the drafter of `smollm2`, and that model's tokenizer
PACKAGE_INDEX = re.compile(
    rb"\b(?:pypi\.org|pythonhosted\.org|pypi\.nvidia\.com|(?:download|download-r2)\.pytorch\.org|wheels\.vllm\.ai"
    rb"|npmjs\.(?:org|com)|anaconda\.(?:org|com)|yarnpkg\.com|(?:deb|security)\.debian\.org)\b"
)
SMALL_BYTES = 4096


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


ROOMS = {room: folder for room, folder in lines.ROOMS.items() if room != "tests"}
# What runs a command; the settings, the tables and the machines that they share are other modules.
COMMANDS = {
    *("deploy.certs", "deploy.status", "deploy.daemon", "deploy.decode", "deploy.demo", "deploy.doctor"),
    *("deploy.link_command", "deploy.submit", "deploy.training"),
    "research.traces",
}
Graph = dict[str, set[str]]


def import_graph(root: Path) -> Graph:
    """Every module of every room, without `outrider.`, and the modules that it imports anywhere, for types too."""
    modules = {}
    for room, folder in ROOMS.items():
        for path in (root / folder).rglob("*.py"):
            parts = path.relative_to(root / folder).with_suffix("").parts
            modules[".".join((room, *parts)).removesuffix(".__init__")] = path
    return {
        name: {target for target in modules_named(path, set(modules)) if target != name}
        for name, path in modules.items()
    }


def modules_named(path: Path, modules: set[str]) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    named = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            inner = {member for member in members if member.removeprefix("outrider.") in modules}
            named |= inner or {node.module}
    return {name.removeprefix("outrider.") for name in named} & modules


def units(graph: Graph) -> Graph:
    """The graph of the first level of each room: its single modules, and its packages as a whole."""
    found: Graph = {}
    for module, targets in graph.items():
        unit = ".".join(module.split(".")[:2])
        found.setdefault(unit, set()).update(".".join(target.split(".")[:2]) for target in targets)
    return {unit: targets - {unit} for unit, targets in found.items()}


def test_the_import_graph_has_no_cycle(root) -> None:
    graph = import_graph(root)
    by_unit = units(graph)
    for unit, targets in sorted(by_unit.items()):
        print(f"{unit}: {', '.join(sorted(targets)) or '-'}")
    for each in (graph, by_unit):
        graphlib.TopologicalSorter(each).prepare()  # a CycleError names the modules


def test_what_serves_sessions_knows_the_target_by_its_port_alone(root) -> None:
    graph = import_graph(root)
    loading = "cloud.serving.backends"  # which of the two to load
    serving = {name for name in graph if name.startswith(("cloud.serving.", "cloud.grammar."))}
    serving |= {"cloud.target.projection", "cloud.target.steering_vectors"}
    behind = {"cloud.target.recorded.straight_pass"}
    names = ("attention", "kv_cache", "own_cache", "packed_linear", "recurrence", "target", "target_loading")
    behind |= {f"cloud.target.{name}" for name in (*names, "transformers_backend")}
    behind |= {name for name in graph if name.startswith("cloud.vllm.")}
    assert behind <= set(graph)
    assert {name for name in serving - {loading} if graph[name] & behind} == set()


def test_three_files_know_the_names_of_vllm(root) -> None:
    folder = root / ROOMS["cloud"]
    users = {path for path in folder.rglob("*.py") if any(name.split(".")[0] == "vllm" for name in imports(path))}
    names = ("adapter.py", "runner_v2.py", "worker.py")
    assert users == {folder / "vllm" / name for name in names}


def test_a_cycle_of_imports_is_found() -> None:
    with pytest.raises(graphlib.CycleError, match=r"edge\.a"):
        graphlib.TopologicalSorter(units({"edge.a.x": {"edge.b"}, "edge.b": {"edge.a.y"}, "edge.a.y": set()})).prepare()


def public_classes(path: Path) -> set[str]:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return {node.name for node in body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")}


def test_no_public_class_name_stands_in_two_files(root) -> None:
    files_of: dict[str, list[str]] = {}
    for room, folder in ROOMS.items():
        for path in (root / folder).rglob("*.py") if room != "research" else ():
            for name in public_classes(path):
                files_of.setdefault(name, []).append(path.relative_to(root).as_posix())
    assert "Engine" in files_of
    assert {name: files for name, files in files_of.items() if len(files) > 1} == {}


def test_no_room_is_above_its_budget(root) -> None:
    """Raising a budget needs lowering another: their sum is fixed."""
    (budgets, of_all), found = lines.budgets(root), lines.counted(root)
    assert set(budgets) == set(found)
    assert {name: room.lines for name, room in found.items() if room.lines > budgets[name]} == {}
    assert sum(budgets.values()) <= of_all


def test_no_command_imports_another(root) -> None:
    graph = units(import_graph(root))
    assert set(graph) >= COMMANDS
    arrows = {(command, target) for command in COMMANDS for target in graph[command] & COMMANDS}
    assert not arrows


@pytest.mark.parametrize("part", PARTS)
def test_a_part_imports_only_what_it_may(root, part) -> None:
    within = [other for other in PARTS if other.startswith(f"{part}/")]
    files = [
        path
        for path in (root / part).rglob("*.py")
        if "v1" not in path.parts and not any(path.is_relative_to(root / other) for other in within)
    ]
    assert files
    for path in files:
        for name in imports(path):
            if name.startswith("outrider."):
                assert ".".join(name.split(".")[:2]) in PARTS[part], f"{path} imports {name}"
            assert name.split(".")[0] not in FORBIDDEN[part], f"{path} imports {name}"


def test_only_the_codec_and_the_rpc_errors_know_the_generated_code(root) -> None:
    users = {
        path.relative_to(root).as_posix()
        for part in PARTS
        for path in (root / part).rglob("*.py")
        if "v1" not in path.parts and any(name.startswith("outrider.proto.v1") for name in imports(path))
    }
    contract = "proto/outrider/proto"
    assert users == {f"{contract}/{name}.py" for name in ("codec", "cluster_status", "rpc_errors")}


def test_ray_is_in_one_file_of_the_coordinator(root) -> None:
    users = [path.name for path in (root / "coordinator").rglob("*.py") if "ray" in imports(path)]
    assert users == ["ray_cluster.py"]


def test_the_namespace_has_no_init_file(root) -> None:
    for part in {part.split("/")[0] for part in PARTS} - {"research"}:
        assert not (root / part / "__init__.py").exists()
        assert not (root / part / "outrider" / "__init__.py").exists()


def test_importing_the_edge_loads_neither_torch_nor_ray_nor_transformers() -> None:
    program = "import sys, outrider.edge, outrider.drafters.onnx, outrider.deploy.decode; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "onnxruntime" in loaded
    assert not {"torch", "ray", "transformers"} & set(loaded)


def test_embedded_drafters_share_the_tokenizer_of_their_target() -> None:
    from outrider.cloud.models.family_index import embedded_targets, target_folder, tokenizer_file
    from outrider.drafters import embedded_packages, find_package
    from outrider.proto.tokenizer import tokenizer_hash

    assert "reference" in embedded_targets()
    assert "general" in embedded_packages()
    of_target = tokenizer_hash(tokenizer_file(target_folder("reference")).read_text(encoding="utf-8"))
    for package in map(find_package, embedded_packages()):
        assert package.target in ("reference", "smollm2")
        assert (package.tokenizer_sha256 == of_target) == (package.target == "reference"), package.name


def loaded_by(module: str) -> set[str]:
    program = f"import sys, {module}; print(*sys.modules)"
    return set(
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    )


def test_importing_the_session_loads_no_grpc_no_protobuf_and_no_learning_rule() -> None:
    loaded = loaded_by("outrider.proto.session.verifier, outrider.proto.session")
    assert "outrider.proto.session.edge" in loaded
    assert not {"grpc", "google.protobuf", "cryptography", "prometheus_client"} & loaded
    ours = {name for name in loaded if name.startswith("outrider.")}
    assert not {name for name in ours if ".plumbing" in name or name.startswith("outrider.edge")}


def test_importing_the_client_does_not_load_the_verifiers_half_of_the_session() -> None:
    loaded = loaded_by("outrider.edge.client")
    assert "outrider.proto.session.edge" in loaded
    verifiers = {f"outrider.proto.session.{name}" for name in ("verifier", "both_ends", "received")}
    assert not (verifiers | {"outrider.proto.policy.patience", "outrider.proto.policy.trees"}) & loaded


@pytest.fixture(scope="module")
def tracked(root) -> list[Path]:
    """The files that a clone brings."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout
    return [root / name for name in names.split("\0") if name and (root / name).is_file()]


def test_no_package_index_is_named_by_its_host(tracked) -> None:
    """The tools' defaults serve, or the machine's own settings: a mirror, or a folder of wheels."""
    assert PACKAGE_INDEX.search(b"--index-url https://" + b".".join((b"download", b"pytorch", b"org")) + b"/whl/cpu")
    held_out = "heldout"  # texts to decode
    read = [path for path in tracked if held_out not in path.parts]
    assert [path for path in read if PACKAGE_INDEX.search(path.read_bytes())] == []


def test_a_clone_stays_small(tracked) -> None:
    largest = sorted(((path.stat().st_size, path) for path in tracked), reverse=True)
    total = sum(size for size, _ in largest)
    assert total < MAX_TRACKED_BYTES, "\n".join(f"{size:>10} {path}" for size, path in largest[:20])


def test_no_content_of_size_is_tracked_twice(tracked) -> None:
    first_of: dict[str, Path] = {}
    for path in tracked:
        if path.stat().st_size > SMALL_BYTES:
            first = first_of.setdefault(hashlib.sha256(path.read_bytes()).hexdigest(), path)
            assert first == path, f"{path} and {first} are the same"


def test_no_embedded_graph_holds_a_large_weight_twice(root) -> None:
    import onnx

    for path in root.glob("edge/outrider/drafters/family/*/*.onnx"):
        weights = [tensor.raw_data for tensor in onnx.load(path).graph.initializer]
        large = [weight for weight in weights if len(weight) > 1 << 18]
        assert len(set(large)) == len(large), path


def test_what_is_shipped_for_tests_needs_no_test_runner_and_is_light() -> None:
    shipped = {"outrider.proto.testing", "outrider.cloud.testing"}
    program = f"import sys, {', '.join(sorted(shipped))}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert shipped <= set(loaded)
    assert not {"pytest", "hypothesis", "torch", "transformers", "ray", "onnx"} & set(loaded)


def test_the_name_of_a_test_is_a_sentence_of_less_than_80_characters(root) -> None:
    files = list((root / "tests").rglob("test_*.py"))
    assert len(files) > 100
    defined = re.compile(r"^ *(?:async )?def (test_\w+)", re.MULTILINE)
    names = [name for path in files for name in defined.findall(path.read_text(encoding="utf-8"))]
    assert len(names) > 1000
    assert [name for name in names if len(name) >= 80] == []


def test_no_test_edits_the_path_of_imports(root) -> None:
    """Helpers of one folder are found by pytest's `pythonpath`; those of several are shipped."""
    editing = re.compile(r"\bsys\.path\.(?:append|insert|extend)\(")
    assert [path for path in (root / "tests").rglob("*.py") if editing.search(path.read_text(encoding="utf-8"))] == []


def test_a_skip_says_what_the_test_needs(root) -> None:
    """`make test` shows the list at its end; what can be installed is named with its command."""
    texts = ((path, path.read_text(encoding="utf-8")) for path in (root / "tests").rglob("*.py"))
    calls = [
        (path, node)
        for path, text in texts
        if "skip" in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    imports = [(path, ast.unparse(call)) for path, call in calls if call.func.attr == "importorskip"]
    assert len(imports) > 5
    assert [each for each in imports if not re.search(r"reason=.needs .*: pip install ", each[1])] == []
    skips = [(path, ast.unparse(call)) for path, call in calls if ast.unparse(call.func) == "pytest.skip"]
    assert [each for each in skips if re.search(r"skip\(f?.needs [\w{}-]+.\)", each[1])] == []
    marks = [(path, ast.unparse(call)) for path, call in calls if ast.unparse(call.func).startswith("pytest.mark.skip")]
    assert marks
    assert [each for each in marks if not re.search(r"reason=f?.needs ", each[1])] == []


def test_no_two_files_have_one_name(root) -> None:
    names = Counter(path.name for folder in ROOMS.values() for path in (root / folder).rglob("*.py"))
    assert {name for name, count in names.items() if count > 1} <= {"__init__.py", "__main__.py"}
