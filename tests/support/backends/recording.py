"""A backend for nodes of tests, found by its entry point: the emulated one, which notes with what each stage loads."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from edgepipe_emulated import EmulatedBackend

from edgepipe.backend.types import BackendOptions, DeviceProfile, LoadProgress, StageSettings
from edgepipe.spec.facts import Slice
from edgepipe.spec.tensors import WeightSource
from edgepipe.weights.weights import Weights

NAME = "recording"
BLOCK_SIZE = 32  # tokens; the only one that it names as efficient
_FOLDER = "RECORDED_LOADS"  # environment variable


class RecordingBackend(EmulatedBackend):
    """Writes a file for each KV pool that a stage, or a measurement, allocates."""

    block_sizes = (BLOCK_SIZE,)

    def __init__(self, options: BackendOptions) -> None:
        super().__init__(options)
        self._noted: dict[str, Any] = {each.name: str(getattr(options, each.name)) for each in fields(StageSettings)}

    def profile(self) -> DeviceProfile:
        """See ``Backend``."""
        return replace(super().profile(), backend=NAME)

    def load(self, slices: Sequence[Slice], weights: WeightSource, progress: Callable[[LoadProgress], None]) -> None:
        """See ``Backend``."""
        super().load(slices, weights, progress)
        self._noted |= {"served": isinstance(weights, Weights), "config": repr(weights.config)}

    def allocate_kv(self, *, block_size: int, **others: Any) -> None:
        """See ``Backend``."""
        super().allocate_kv(block_size=block_size, **others)
        text = json.dumps({**self._noted, "block_size": str(block_size)})
        (Path(os.environ[_FOLDER]) / f"{os.getpid()}-{id(self)}").write_text(text)


def install(folder: Path) -> Mapping[str, str]:
    """Declare the backend in a folder, as an installed package does. Return the environment of nodes that find it."""
    declared = folder / f"{NAME}-1.dist-info"
    declared.mkdir(parents=True)
    (declared / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1\n")
    (declared / "entry_points.txt").write_text(f"[edgepipe.backends]\n{NAME} = {__name__}:RecordingBackend\n")
    root = Path(__file__).parents[2]
    return {"PYTHONPATH": f"{folder}{os.pathsep}{root}", _FOLDER: str(folder)}


def recorded(folder: Path) -> list[dict[str, Any]]:
    """All notes so far: settings by name as texts, ``served`` for weights of a model, and their ``config``."""
    return [json.loads(path.read_text()) for path in folder.iterdir() if path.is_file()]
