"""Low-rank updates of drafters: W + B A in the place of a matrix W of the parent's graph.

An adapter package is its parent's package with one more file, `adapter.safetensors`, and four more entries in the
manifest, which a reader that does not know them passes over, so that it drafts with the parent:

    parent        version that it was trained on from
    sequence      number among the versions of its name, the newest highest
    learned_from  positions, keys, and positions by class of text
    adapter       rank, and the names of the matrices that change

The file has two tensors for each matrix, `NAME.A` [rank, columns] and `NAME.B` [rows, rank], in float16. They add to
the weights in the parent's graph, and take the place of an adapter that the parent has. Graph and adapter are merged
when the drafter is loaded, so a token costs what it costs with the parent.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from outrider.drafters.graph_file import GraphMatrix, graph_matrices, read_graph_file
from outrider.drafters.packages import DrafterPackage, load_package, version_of
from outrider.proto.drafter_format import ADAPTER, GRAPHS, MANIFEST, LearnedFrom
from outrider.proto.errors import InvalidArgument, ModelRefused
from outrider.proto.plumbing.files import sha256_of

MAX_RELATIVE_NORM = 0.5  # of B A to W: beyond, it is another drafter or a broken one, and no update

_DTYPES: dict[str, np.dtype[Any]] = {"F16": np.dtype("<f2"), "F32": np.dtype("<f4")}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LENGTH_BYTES = 8  # of the header's length, little-endian
_MAX_HEADER_BYTES = 1 << 24

LowRank = tuple[np.ndarray, np.ndarray]  # A [rank, columns], B [rows, rank]
_OF_THE_PARENT = ("check", "training", "parent", "sequence", "learned_from", "adapter")  # entries that do not pass on


def weights_of(package: DrafterPackage) -> dict[str, np.ndarray]:
    """Return the matrices that an adapter of this graph can change, as the graph has them, without an adapter.

    Returns:
        Float32 [rows, columns] by name, in the order of the products, which are `x @ weights.T`; one that is the
        embedding too is there once.

    Raises:
        ModelRefused: the graph cannot be read.
    """
    matrices = graph_matrices(read_graph_file(package.model_path, package.name))
    return {name: matrix.weights() for name, matrix in matrices.items()}


def read_adapter(package: DrafterPackage) -> dict[str, LowRank]:
    """Return the matrices A [rank, columns] and B [rows, rank] of an adapter package, float32, by name.

    Raises:
        ModelRefused: it has none, or its file is not what the manifest says.
    """
    if package.adapter is None:
        raise ModelRefused(f"drafter {package.name} has no adapter")
    tensors = read_tensors(package.adapter_path)
    targets = package.adapter.targets
    expected = {f"{target}.{side}" for target in targets for side in "AB"}
    if set(tensors) != expected:
        wrong = sorted(set(tensors) ^ expected)[0]
        raise ModelRefused(f"drafter {package.name}: {ADAPTER} and the manifest's targets differ in {wrong!r}")
    return {target: (tensors[f"{target}.A"], tensors[f"{target}.B"]) for target in targets}


def merged_graph(package: DrafterPackage) -> bytes:
    """Return the ONNX file of an adapter package: the parent's graph with W + B A in the place of each target W.

    Raises:
        ModelRefused: the adapter does not fit the graph, is not finite, or changes a matrix by too much.
    """
    model = read_graph_file(package.model_path, package.name)
    matrices, adapter = graph_matrices(model), read_adapter(package)
    check_adapter(adapter, matrices, package.name)
    if package.adapter is not None and any(len(a) != package.adapter.rank for a, _ in adapter.values()):
        raise ModelRefused(f"drafter {package.name}: {ADAPTER} has not the rank {package.adapter.rank} of its manifest")
    for name, (a, b) in adapter.items():
        matrices[name].add(b @ a)
    merged: bytes = model.SerializeToString()
    return merged


def check_adapter(adapter: Mapping[str, LowRank], matrices: Mapping[str, GraphMatrix], drafter: str) -> None:
    """Raise ModelRefused, naming the matrix, unless each A, B fits a matrix of the graph, is finite and is small."""
    for name, (a, b) in adapter.items():
        where = f"drafter {drafter}: the adapter of {name!r}"
        matrix = matrices.get(name)
        if matrix is None:
            raise ModelRefused(f"{where} changes a matrix that the graph does not have")
        rows, columns = matrix.shape
        if a.ndim != 2 or b.ndim != 2 or a.shape[1] != columns or b.shape[0] != rows or a.shape[0] != b.shape[1]:
            raise ModelRefused(
                f"{where} has the shapes {list(a.shape)} and {list(b.shape)}; the graph wants [rank, {columns}] and "
                f"[{rows}, rank]"
            )
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise ModelRefused(f"{where} has numbers that are not finite")
        change, norm = product_norm(a, b), float(np.linalg.norm(matrix.weights()))
        if not change <= MAX_RELATIVE_NORM * norm:
            raise ModelRefused(
                f"{where} has the norm {change:.3g}, more than {MAX_RELATIVE_NORM:g} of the matrix's {norm:.3g}"
            )


def product_norm(a: np.ndarray, b: np.ndarray) -> float:
    """Return the Frobenius norm of B A, from Gram matrices [rank, rank]; A [rank, columns], B [rows, rank]."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(np.sqrt(max(0.0, ((b.T @ b) * (a @ a.T)).sum())))


def write_adapter_package(
    parent: Path, folder: Path, matrices: Mapping[str, LowRank], *, sequence: int, learned_from: LearnedFrom
) -> Path:
    """Write the package of an adapter; it appears under its name whole, after everything was checked.

    Args:
        parent: folder of the package that it was trained on from, which may itself have an adapter: `matrices` then
            take the place of that, and add to the weights of its graph (`weights_of`).
        folder: folder to make, whose name must not be taken; `.../drafters/NAME/SEQUENCE`, say.
        matrices: A [rank, columns] and B [rows, rank] for each changed matrix, by its name in `weights_of`; all of one
            rank. They are rounded to float16.
        sequence: number among the versions of its name, more than the parent's.
        learned_from: what it was trained on.

    Returns:
        `folder`. Its manifest has the version, a hash of graph and adapter.

    Raises:
        InvalidArgument: the arguments are no good, or `folder` is there already.
        ModelRefused: `check_adapter` says why.
        NotFound, DataLoss: the parent is broken.
    """
    package = load_package(parent)
    _check_arguments(package, folder, matrices, sequence)
    rounded = {target: (a.astype(np.float16), b.astype(np.float16)) for target, (a, b) in matrices.items()}
    check_adapter(rounded, graph_matrices(read_graph_file(package.model_path, package.name)), package.name)
    unfinished = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")  # hidden: a catalogue passes it over
    unfinished.mkdir(parents=True)
    try:
        for file in package.files:
            if file.name != ADAPTER:
                _link_or_copy(package.path_of(file.name), unfinished / file.name)
        write_tensors(
            unfinished / ADAPTER,
            {f"{target}.A": a for target, (a, _) in rounded.items()}
            | {f"{target}.B": b for target, (_, b) in rounded.items()},
        )
        manifest = _manifest(package, unfinished) | {
            "parent": package.version,
            "sequence": sequence,
            "learned_from": asdict(learned_from),
            "adapter": {"rank": len(next(iter(rounded.values()))[0]), "targets": list(rounded)},
        }
        (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _check_arguments(parent: DrafterPackage, folder: Path, matrices: Mapping[str, LowRank], sequence: int) -> None:
    if sequence <= parent.sequence:
        raise InvalidArgument(f"{sequence} does not follow the parent's {parent.sequence}", field="sequence")
    if folder.exists():
        raise InvalidArgument(f"{folder} is there already; a version never changes", field="folder")
    if not matrices or len({len(a) for a, _ in matrices.values()}) > 1:
        raise InvalidArgument("must be one or more, all of one rank", field="matrices")


def _manifest(parent: DrafterPackage, folder: Path) -> dict[str, Any]:
    """Return the parent's manifest with the version and files of `folder`."""
    manifest: dict[str, Any] = json.loads((parent.folder / MANIFEST).read_text(encoding="utf-8"))
    manifest = {key: value for key, value in manifest.items() if key not in _OF_THE_PARENT}
    files = {path.name: {"sha256": sha256_of(path), "bytes": path.stat().st_size} for path in sorted(folder.iterdir())}
    return manifest | {"version": version_of(folder / graph for graph in GRAPHS), "files": files}


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)


# --- files of tensors in the safetensors format: a JSON header and plain numbers, no code ---


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write tensors of float16 or float32 by name."""
    header, offset = {}, 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _LENGTH_BYTES)  # so that the numbers are aligned
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor).tobytes())


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a file of float16 and float32 tensors by name, all as float32.

    Raises:
        ModelRefused: the file is malformed, or has other types.
    """
    content = path.read_bytes()
    length = int.from_bytes(content[:_LENGTH_BYTES], "little")
    data = content[_LENGTH_BYTES + length :]
    try:
        if not 2 <= length <= min(_MAX_HEADER_BYTES, len(content) - _LENGTH_BYTES):
            raise ValueError(f"a header of {length} bytes")
        header = json.loads(content[_LENGTH_BYTES : _LENGTH_BYTES + length])
        return {name: _tensor(name, entry, data) for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelRefused(f"{path.name} is no file of float16 or float32 tensors: {error}") from error


def _tensor(name: str, entry: Mapping[str, Any], data: bytes) -> np.ndarray:
    dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
    start, end = entry["data_offsets"]
    if any(type(number) is not int or number < 0 for number in (*shape, start, end)) or end > len(data):
        raise ValueError(f"{name!r} lies outside the file")
    if end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name!r} has {end - start} bytes where its shape is {shape}")
    tensor: np.ndarray = np.frombuffer(data[start:end], dtype).reshape(shape).astype(np.float32)
    return tensor
