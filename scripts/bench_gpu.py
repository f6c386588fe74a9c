"""The torch backend's figures on an NVIDIA GPU; ``scripts/gpu_check`` runs it after the GPU tests."""

from __future__ import annotations

import sys

import torch
from bench_backend import backend_rows
from bench_foundation import stored_demo
from figures import print_rows


def main() -> int:
    """One table, or a plain word where there is no GPU."""
    if not torch.cuda.is_available():
        print("No NVIDIA GPU was found on this machine: nothing was measured.")
        return 0
    print_rows(torch.cuda.get_device_name(0), backend_rows(stored_demo().open_weights(), device="cuda"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
