"""Compiled kernels: a cache of code on disk, and the reason for the absence of kernels."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from edgepipe.backend.types import PackedProducts
from edgepipe.safe_text import one_line

logger = logging.getLogger(__name__)

_REASON_CHARS = 200  # a compiler's log may be long
_DIGEST_BYTES = 32  # SHA-256 before the code


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

    A digest before the code finds files that a crash cut short or a disk damaged. A file or folder that cannot be used
    costs only time.
    """

    def __init__(self, folder: Path, target: str, *, suffix: str) -> None:
        """``target``: what else the code depends on, such as the CPU and the compiler's version."""
        self._folder = folder
        self._target = target
        self._suffix = suffix

    def get(self, text: str, compile_text: Callable[[str], bytes]) -> bytes:
        """Return the code of a text; compile it if it is new."""
        path = self._folder / f"{hashlib.sha256(f'{self._target} {text}'.encode()).hexdigest()[:32]}{self._suffix}"
        with suppress(OSError):
            stored = path.read_bytes()
            digest, code = stored[:_DIGEST_BYTES], stored[_DIGEST_BYTES:]
            if hashlib.sha256(code).digest() == digest:
                return code
        code = compile_text(text)
        self._keep(path, code)
        return code

    def _keep(self, path: Path, code: bytes) -> None:
        part = path.with_suffix(f".{secrets.token_hex(4)}")
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            part.write_bytes(hashlib.sha256(code).digest() + code)
            part.replace(path)
        except OSError as exc:  # such as a full disk: the next start compiles again
            logger.info("compiled kernels are not kept: %s", exc)
            with suppress(OSError):
                part.unlink()
