"""Check own kernels before they are used. Pages, blocks and picks compare their own numbers; the verdict is here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from edgepipe.backend.types import KernelError, SlowPath
from edgepipe.safe_text import one_line

logger = logging.getLogger(__name__)

K = TypeVar("K")

_REASON_CHARS = 200  # a compiler's log may be long


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCheck:
    """Kernels that serve only if their errors are within bounds. Texts are for people."""

    kernels: str  # "that pick candidates", for the log
    slow: SlowPath  # what the backend lacks without them; a failed check adds the reason

    def passed(self, make: Callable[[], K], errors: Callable[[K], Iterable[tuple[str, float]]]) -> K | SlowPath:
        """Return kernels that pass on the default device, or what the backend lacks without them.

        ``errors`` yields the name of each error, and the error in units of its bound. MLX compiles the kernels for it.
        """
        try:
            kernels = make()
            for name, error in errors(kernels):
                if error > 1:
                    return self.failed(f"{name} is {error:.3g} times its bound")
        except (RuntimeError, ValueError) as exc:
            return self.failed(_refusal(exc))
        return kernels

    def failed(self, reason: str) -> SlowPath:
        """Return what the backend lacks without the kernels, and log it."""
        logger.warning("own kernels %s are not used: %s", self.kernels, reason)
        return replace(self.slow, reason=reason)


def measured_error(kernel: str, measure: Callable[[], Iterable[float]]) -> KernelError:
    """Return the largest of a kernel's errors, or why the device does not run it."""
    try:
        return KernelError(kernel=kernel, error=max(measure()))
    except (RuntimeError, ValueError) as exc:
        return KernelError(kernel=kernel, reason=_refusal(exc))


def _refusal(exc: Exception) -> str:
    """Return why a kernel does not compile, or why the device refuses it."""
    return one_line(str(exc), most_chars=_REASON_CHARS)
