"""A folder of a Llama model in Hugging Face's format as a GGUF file without a tokenizer; needs `gguf` and numpy alone.

`PYTHON gguf_file.py FOLDER FILE DTYPE` with DTYPE float32, float16, bfloat16 or 8-bit. The names, and the order of the
rows of queries and keys, are those of llama.cpp's own converter.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "8-bit": "Q8_0"}
_READ: dict[str, Any] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


def read_weights(file: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield name and float32 array of each tensor in a safetensors file; numpy has no bfloat16."""
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        start = stream.tell()
    raw = np.memmap(file, np.uint8, "r", start)
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        first, end = tensor["data_offsets"]
        values = raw[first:end].view(_READ[tensor["dtype"]])
        if tensor["dtype"] == "BF16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        yield name, values.astype(np.float32).reshape(tensor["shape"])


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Return rows [heads * dim, in] of queries or keys with the halves of each head in turn, for llama.cpp's RoPE."""
    dim = rows.shape[0] // heads
    return rows.reshape(heads, 2, dim // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def convert(folder: Path, file: Path, dtype: str) -> None:
    """Write the model of `folder` to `file`.

    Raises:
        ValueError: it is no plain Llama model.
    """
    import gguf

    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if config["architectures"] != ["LlamaForCausalLM"] or rope.get("rope_type", "default") != "default":
        raise ValueError(
            f"{folder} is no plain Llama model; convert it by llama.cpp's own script, and give --gguf FILE"
        )
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope.get("rope_theta") or config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for weights in sorted(folder.glob("*.safetensors")):
        for name, values in read_weights(weights):
            if name.endswith("q_proj.weight"):
                values = interleaved(values, heads)
            elif name.endswith("k_proj.weight"):
                values = interleaved(values, kv_heads)
            kind = gguf.GGMLQuantizationType[_TYPES[dtype] if values.ndim > 1 else "F32"]
            if (known := names.get_name(name, (".weight", ".bias"))) is None:
                raise ValueError(f"GGUF has no name for {name}")
            writer.add_tensor(known, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
