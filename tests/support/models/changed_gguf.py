"""A GGUF file with the metadata of another one, and changed tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

Arrays = dict[str, npt.NDArray[np.float32 | np.float16]]


def write_changed(target: Path, source: Path, change: Callable[[Arrays], Arrays]) -> Path:
    """Write what ``change`` makes of a file's float tensors, by GGUF's names; their types are those of the arrays."""
    reader = gguf.GGUFReader(source)
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, arch)
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(field.name, field.contents(), field.types[0])
    for name, tensor in change({tensor.name: np.array(tensor.data) for tensor in reader.tensors}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
