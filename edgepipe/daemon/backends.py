"""Which backend a node uses when nobody says. Looks for packages without importing them: the daemon never computes."""

from __future__ import annotations

import platform
from importlib.util import find_spec

NONE = "none"  # the node gives gateway, chat and status, and computes nothing


def choose_backend(wanted: str) -> str:
    """The backend's name: ``wanted`` unless that is ``auto``.

    MLX on Apple silicon, else torch where it is installed (it finds CUDA itself), else MLX's CPU device, else none.
    """
    if wanted != "auto":
        return wanted
    apple = platform.system() == "Darwin" and platform.machine() == "arm64"
    order = ("mlx", "torch") if apple else ("torch", "mlx")
    return next((name for name in order if find_spec(name) is not None), NONE)
