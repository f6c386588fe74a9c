"""Chooses a node's default backend. Finds packages without importing them: the daemon never computes."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from importlib.util import find_spec

from edgepipe.backend.loader import backend_names
from edgepipe.errors import ConfigInvalid, FeatureMissing

NONE = "none"  # the node offers gateway, chat and status, and computes nothing
# Jetson, WSL2 and AMD included.
_GPU_DRIVERS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/nvhost-gpu", "/dev/dxg", "/dev/kfd")
_LIBRARIES = ("torch", "mlx")  # backends named after the package that they need


def choose_backend(wanted: str) -> str:
    """Return the backend's name: ``wanted`` unless that is ``auto``.

    ``auto``: MLX on Apple silicon, else torch where installed (it finds CUDA itself), else MLX's CPU device, else none.
    Raises ConfigInvalid for an undeclared backend, FeatureMissing for one whose library is not installed.
    """
    if wanted != "auto":
        return _checked(wanted)
    apple = platform.system() == "Darwin" and platform.machine() == "arm64"
    order = ("mlx", "torch") if apple else ("torch", "mlx")
    return next((name for name in order if find_spec(name) is not None), NONE)


def check_device(device: str, *, exists: Callable[[str], bool] = os.path.exists) -> None:
    """Raise ConfigInvalid for a CUDA device on a Linux machine without a GPU driver: no stage could start there."""
    if not device.startswith("cuda") or platform.system() != "Linux" or any(exists(path) for path in _GPU_DRIVERS):
        return
    raise ConfigInvalid(
        f"this machine has no device '{device}'",
        fact="no driver of an NVIDIA or AMD GPU is loaded here",
        next_step="leave --device out, or install the driver; then: edgepipe doctor",
    )


def installed_backends(
    has_package: Callable[[str], bool] = lambda name: find_spec(name) is not None,
) -> tuple[str, ...]:
    """Return the backends whose packages are installed."""
    return tuple(name for name in backend_names() if name not in _LIBRARIES or has_package(name))


def _checked(wanted: str) -> str:
    known = (*backend_names(), NONE)
    if wanted not in known:
        raise ConfigInvalid(
            f"there is no backend '{wanted}'",
            fact=f"installed: {', '.join(known)}",
            next_step="name one of these, or leave --backend out",
        )
    if wanted in _LIBRARIES and find_spec(wanted) is None:
        raise FeatureMissing(
            f"the {wanted} backend cannot run here",
            fact=f"the package {wanted} is not installed",
            next_step=f"edgepipe update --extra {wanted}",
        )
    return wanted
