"""Small models on disk for nodes with the emulated backend."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from edgepipe_emulated import emulated_model_config
from safetensors.numpy import save_file

from edgepipe.spec.facts import ModelConfig
from edgepipe.spec.layout import model_tensors
from edgepipe.store.store import ModelStore, StoredModel
from edgepipe.weights.emulated_folder import write_model_folder
from edgepipe.weights.weights import EMULATED_KEY

CONFIG = emulated_model_config(num_layers=6, tied_embeddings=False)


def pull_emulated(models_dir: Path, source: Path) -> ModelConfig:
    """A model without weights in the store; its shape."""
    write_model_folder(source, CONFIG)
    ModelStore(models_dir).pull(str(source))
    return CONFIG


def pull_with_weights(models_dir: Path, source: Path) -> StoredModel:
    """A model with random tensors in the store, so that there is something to fetch."""
    write_with_weights(source)
    store = ModelStore(models_dir)
    store.pull(str(source))
    return store.resolve(source.name)


def write_with_weights(source: Path) -> None:
    """A folder as somebody uploads one; the emulated backend answers whatever the tensors are."""
    write_model_folder(source, CONFIG)
    config = json.loads((source / "config.json").read_text())
    del config[EMULATED_KEY]
    (source / "config.json").write_text(json.dumps(config))
    draw = np.random.default_rng(7)
    tensors = {name: draw.random(shape, np.float32) for name, shape in model_tensors(CONFIG).items()}
    save_file(tensors, source / "model.safetensors")
