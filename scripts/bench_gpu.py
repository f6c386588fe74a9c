"""The torch backend's figures on an NVIDIA GPU; ``scripts/gpu_check`` runs it after the GPU tests."""

from __future__ import annotations

import sys

import torch
from bench_backend import NEW_TOKENS, Ours, backend_rows
from bench_foundation import stored_demo
from edgepipe_torch import TorchBackend
from figures import Row, print_rows

from edgepipe.backend.types import BackendOptions
from edgepipe.model.facts import LayerRange, ModelConfig, make_slices
from edgepipe.model.shapes import named_shape
from edgepipe.stage.probe import MadeUpWeights

LARGE = "llama-3.1-8b"
_ROUNDS = 3
_KV_BYTES = 2 << 30  # more than sixteen sequences take


def large_rows(config: ModelConfig, *, device: str) -> list[Row]:
    """Decoding a model of a usual size, made-up weights, against reading all of it at the rate that was measured."""
    (whole,) = make_slices([LayerRange(0, config.num_layers)], config.num_layers)
    weight_bytes = 2 * (config.slice_parameters(whole) - config.vocab_size * config.hidden_size)  # but the embedding
    profile = TorchBackend(BackendOptions(device=device)).profile()
    if profile.memory_free_bytes < 2 * config.slice_parameters(whole) + _KV_BYTES:
        return [Row(f"{LARGE}: too large for this device", profile.memory_free_bytes / 1e9, "GB free")]
    ours = Ours(MadeUpWeights(config), device=device, threads=1)
    rows: list[Row] = []
    for count in (1, 16):
        run = ours.decode(count)
        per_s = count * NEW_TOKENS / min(run() for _ in range(_ROUNDS))
        allowed = count * profile.bandwidth_bytes_per_s / weight_bytes
        rows.append(
            Row(f"decode, {count} of {LARGE}'s shape", per_s, "tok/s", allowed, "its memory rate", per_s / allowed)
        )
    return rows


def main() -> int:
    """One table, or a plain word where there is no GPU."""
    if not torch.cuda.is_available():
        print("No NVIDIA GPU was found on this machine: nothing was measured.")
        return 0
    rows = backend_rows(stored_demo().open_weights(), device="cuda")
    print_rows(torch.cuda.get_device_name(0), rows + large_rows(named_shape(LARGE), device="cuda"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
