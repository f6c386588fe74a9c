"""Which backend a node uses when nobody says. Looks for packages without importing them: the daemon never computes."""

from __future__ import annotations

import platform
from importlib.util import find_spec

from edgepipe.backend.loader import backend_names
from edgepipe.errors import ConfigInvalid, FeatureMissing

NONE = "none"  # the node gives gateway, chat and status, and computes nothing
_LIBRARIES = ("torch", "mlx")  # backends named after the package that they need


def choose_backend(wanted: str) -> str:
    """The backend's name: ``wanted`` unless that is ``auto``.

    MLX on Apple silicon, else torch where it is installed (it finds CUDA itself), else MLX's CPU device, else none.
    Raises ConfigInvalid for a backend that nobody declares, FeatureMissing for one whose library is not installed.
    """
    if wanted != "auto":
        return _checked(wanted)
    apple = platform.system() == "Darwin" and platform.machine() == "arm64"
    order = ("mlx", "torch") if apple else ("torch", "mlx")
    return next((name for name in order if find_spec(name) is not None), NONE)


def installed_backends() -> tuple[str, ...]:
    """Those whose packages are here."""
    return tuple(name for name in backend_names() if name not in _LIBRARIES or find_spec(name) is not None)


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
            next_step=f"pip install 'edgepipe[{wanted}]'",
        )
    return wanted
