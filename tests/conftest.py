"""What all tests share: Hypothesis without deadlines, and where the demo model is."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

from edgepipe.errors import EdgepipeError
from edgepipe.model.store import ModelStore, StoredModel

# A shared machine is slow now and then, and that is no failure.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# A shell's background job ignores ^C, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_CACHE = Path("~/.cache/edgepipe-tests").expanduser()


@pytest.fixture(scope="session")
def models_dir() -> Path:
    """A model store that holds ``demo``: the folder that scripts/test fills, or the one in EP_TEST_MODELS."""
    folder = Path(os.environ.get("EP_TEST_MODELS") or _CACHE)
    try:
        ModelStore(folder).resolve("demo")
    except EdgepipeError as exc:
        pytest.fail(f"the demo model is missing: edgepipe models pull demo --models-dir {folder}  ({exc})")
    return folder


@pytest.fixture(scope="session")
def demo_model(models_dir: Path) -> StoredModel:
    """SmolLM2-135M-Instruct as the store keeps it."""
    return ModelStore(models_dir).resolve("demo")
