"""K-quantised copies of models, made by ggml itself: ``ggml_quantize_chunk`` of the library in xllamacpp's wheel.

gguf-py has no quantiser for the K and IQ types. Nothing here is imported by edgepipe; tests that need the library skip
without it (``require_ggml``).
"""

from __future__ import annotations

import ctypes
import importlib.util
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from edgepipe.spec.gguf_types import BLOCKS_BY_NAME, GGUF_TYPES

_IDS = {block.name: number for number, block in GGUF_TYPES.items()}


@cache
def ggml_library() -> ctypes.CDLL | None:
    """Return the library with ggml's functions, or None without xllamacpp."""
    found = importlib.util.find_spec("xllamacpp")
    folders = found.submodule_search_locations if found is not None else None
    files = sorted(Path(folders[0]).glob("*.so")) if folders else []
    if not files:
        return None
    library = ctypes.CDLL(str(files[0]))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    pointers, counts = (ctypes.c_void_p,), (ctypes.c_int64,) * 3
    library.ggml_quantize_chunk.argtypes = [ctypes.c_int, *pointers * 2, *counts, *pointers]
    library.ggml_quantize_requires_imatrix.restype = ctypes.c_bool
    return library


def require_ggml() -> ctypes.CDLL:
    """Return the library, or skip the test."""
    library = ggml_library()
    if library is None:
        pytest.skip("xllamacpp is not installed: pip install xllamacpp")
    return library


def quantise(values: npt.NDArray[np.float32], scheme: str) -> npt.NDArray[np.uint8]:
    """Quantise values [O, I] with ggml; return blocks [O, row bytes]. Skips the test without the library.

    Types that need an importance matrix get equal importances.
    """
    library, block = require_ggml(), BLOCKS_BY_NAME[scheme]
    rows, inputs = values.shape
    if inputs % block.block_values:
        raise ValueError(f"rows of {inputs} values are no multiple of a {scheme} block of {block.block_values}")
    source = np.ascontiguousarray(values, np.float32)
    out = np.empty((rows, inputs // block.block_values * block.block_bytes), np.uint8)
    kind = _IDS[scheme]
    needs_importance = bool(library.ggml_quantize_requires_imatrix(kind))
    importance = np.ones(inputs, np.float32) if needs_importance else None
    written = library.ggml_quantize_chunk(
        kind,
        source.ctypes.data,
        out.ctypes.data,
        0,
        rows,
        inputs,
        None if importance is None else importance.ctypes.data,
    )
    if written != out.nbytes:
        raise RuntimeError(f"ggml wrote {written} bytes of {scheme}, {out.nbytes} were expected")
    return out


def requantised_gguf(source: Path, target: Path, scheme: str, *, table_scheme: str | None = None) -> Path:
    """Write a copy of a GGUF file with every matrix in another type; return ``target``.

    source   a GGUF file of any types: its values are widened exactly, then quantised by ggml
    scheme   type of the matrices; "F32", "F16" and "BF16" do not need the library
    table_scheme  type of the embedding and the head; None: as stored in the source

    A matrix whose rows are no multiple of the type's block gets llama.cpp's substitute with blocks of 32 (Q4_K becomes
    Q5_0, Q5_K Q5_1, Q6_K Q8_0, others IQ4_NL), as ``llama-quantize`` chooses it. Metadata is copied.
    """
    import gguf

    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for key, field in reader.fields.items():
        if key == "general.architecture" or key.startswith("GGUF."):
            continue
        kind = field.types[0]
        sub_type = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), kind, sub_type=sub_type)
    for tensor in reader.tensors:
        stored = tensor.tensor_type
        is_table = tensor.name in ("token_embd.weight", "output.weight")
        wanted = table_scheme if is_table else scheme
        if wanted is None or len(tensor.shape) != 2:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=stored)
            continue
        inputs, rows = (int(dim) for dim in tensor.shape)
        values = gguf.quants.dequantize(tensor.data, stored).reshape(rows, inputs)
        wanted = _fitting(wanted, inputs)
        quant = gguf.GGMLQuantizationType[wanted]
        data = gguf.quants.quantize(values, quant) if wanted in ("F32", "F16", "BF16") else quantise(values, wanted)
        writer.add_tensor(tensor.name, data, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


_SUBSTITUTES = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


def _fitting(scheme: str, inputs: int) -> str:
    """Return the type, or llama.cpp's substitute for rows of no whole 256-value blocks."""
    if inputs % BLOCKS_BY_NAME[scheme].block_values == 0:
        return scheme
    return _SUBSTITUTES.get(scheme, "IQ4_NL")
