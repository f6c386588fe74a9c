"""Compiled kernels: a cache of code on disk, and the reason for the absence of kernels."""

from __future__ import annotations

import hashlib
import logging
import shlex
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

from edgepipe.backend.types import KernelError, PackedProducts
from edgepipe.own_files import NotOwn, open_own_folder
from edgepipe.safe_text import one_line

logger = logging.getLogger(__name__)

_REASON_CHARS = 200  # a compiler's log may be long
_DIGEST_BYTES = 32  # SHA-256 before the code
_MARK = ".failed"  # suffix of the name of code that must not run
_MARKED_S = 24 * 3600.0  # the fault may have been the device's or the driver's


class KernelsUnavailable(Exception):
    """Own kernels cannot be used here. The text says why, for logs, ``status`` and ``doctor``."""

    def __init__(self, reason: str, *, remedy: str = "") -> None:
        """``remedy``: a command that makes them available, if one does."""
        super().__init__(reason)
        self.remedy = remedy

    def instead(self, by: str) -> PackedProducts:
        """Describe what computes without own kernels."""
        return PackedProducts(by=by, reason=one_line(str(self), most_chars=_REASON_CHARS), remedy=self.remedy)


class CodeCache:
    """Compiled code on disk, by the text it was compiled from.

    Code of a folder or file that another user may change is never run. A digest before the code finds files that a
    crash cut short or a disk damaged. A file or folder that cannot be used costs only time.
    """

    def __init__(self, folder: Path, target: str, *, suffix: str) -> None:
        """``target``: what else the code depends on, such as the CPU and the compiler's version."""
        self._folder = folder
        self._target = target
        self._suffix = suffix

    def get(self, text: str, compile_text: Callable[[str], bytes]) -> bytes:
        """Return the code of a text; compile it if it is new. Raises KernelsUnavailable if it is marked."""
        name = self._name(text)
        self._refuse_marked(name)
        code = self._kept(name)
        if code is None:
            code = compile_text(text)
            self._keep(name, code)
        return code

    def mark(self, text: str, reason: str) -> None:
        """Refuse the code of a text for a day, also in other processes; ``reason``: why it must not run."""
        self._write(f"{self._name(text)}{_MARK}", f"{int(time.time())} {one_line(reason)}".encode())

    def _name(self, text: str) -> str:
        return f"{hashlib.sha256(f'{self._target} {text}'.encode()).hexdigest()[:32]}{self._suffix}"

    def _refuse_marked(self, name: str) -> None:
        with suppress(OSError, NotOwn, ValueError), open_own_folder(self._folder) as folder:
            marked_s, _, reason = folder.read(f"{name}{_MARK}").decode().partition(" ")
            if 0 <= time.time() - float(marked_s) < _MARKED_S:
                raise KernelsUnavailable(
                    f"{reason} (at an earlier load)", remedy=f"rm {shlex.quote(str(self._folder / name))}{_MARK}"
                )

    def _kept(self, name: str) -> bytes | None:
        with suppress(OSError):
            try:
                with open_own_folder(self._folder) as folder:
                    stored = folder.read(name)
            except NotOwn as exc:
                _log_once(str(exc), exc.remedy)
                return None
            digest, code = stored[:_DIGEST_BYTES], stored[_DIGEST_BYTES:]
            if hashlib.sha256(code).digest() == digest:
                return code
        return None

    def _keep(self, name: str, code: bytes) -> None:
        self._write(name, hashlib.sha256(code).digest() + code)

    def _write(self, name: str, data: bytes) -> None:
        try:
            with open_own_folder(self._folder) as folder:
                folder.write(name, data)
        except NotOwn as exc:
            _log_once(str(exc), exc.remedy)
        except OSError as exc:  # such as a full disk: the next start compiles again
            logger.info("compiled kernels are not kept: %s", exc)


@cache
def _log_once(reason: str, remedy: str) -> None:
    """Say why code on disk is not used."""
    logger.warning(
        "kernels are compiled again, since another user may change kept ones: %s. Mend it: %s", reason, remedy
    )


def kernel_error(kernel: str, measure: Callable[[], float]) -> KernelError:
    """Return a kernel's error, in units of its bound, or why it cannot run."""
    try:
        return KernelError(kernel=kernel, error=measure())
    except KernelsUnavailable as exc:
        return KernelError(kernel=kernel, reason=one_line(str(exc), most_chars=_REASON_CHARS))
