"""Copies between a CUDA device and host memory, beside its computing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from edgepipe.backend.host_places import PinningFailed
from edgepipe_torch.layers.host_copies import Mark, Mover


class CudaPins:
    """Page-locks host memory for a device. See ``Pins``."""

    def __init__(self, place: torch.device) -> None:
        self._place = place

    def pin(self, memory: memoryview) -> None:
        """See ``Pins``."""
        if error := int(_runtime().cudaHostRegister(_address(memory), len(memory), 0)):
            self._clear_error()
            raise PinningFailed(f"CUDA pins no more memory (error {error})")

    def unpin(self, memory: memoryview) -> None:
        """See ``Pins``. Memory that CUDA does not release stays with it until the process ends."""
        with torch.cuda.device(self._place):  # another thread's first call would take memory on the first device
            if int(_runtime().cudaHostUnregister(_address(memory))):
                self._clear_error()

    def _clear_error(self) -> None:
        """Let the next check raise CUDA's last error here: torch raises it behind whatever it starts next."""
        with suppress(RuntimeError):
            torch.zeros(1, device=self._place)


class SideStream(Mover):
    """Copies on a stream of their own.

    They run beside the step that was submitted before and beside their own, unless these use what they copy, and
    before the next one.
    """

    def __init__(self, place: torch.device) -> None:
        self.pins = CudaPins(place)
        self._place = place
        self._stream: torch.cuda.Stream | None = None  # made by the first copies
        self._beside = False  # whether copies may still run that the computing stream does not wait for

    @contextmanager
    def copying(self, *, at_once: bool, beside: bool) -> Iterator[None]:
        """See ``Mover``."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._place)
        computing = torch.cuda.current_stream(self._place)
        if not at_once:
            self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream):
            yield
        self._beside = beside
        if not beside:
            computing.wait_stream(self._stream)

    def end_beside(self) -> None:
        """See ``Mover``."""
        if self._beside and self._stream is not None:
            torch.cuda.current_stream(self._place).wait_stream(self._stream)
        self._beside = False

    def mark(self) -> Mark | None:
        """See ``Mover``."""
        return self._stream.record_event() if self._beside and self._stream is not None else None

    def wait(self) -> None:
        """See ``Mover``. On a device that fails, nothing is left to wait for."""
        if self._stream is not None:
            with suppress(RuntimeError):
                self._stream.synchronize()


def _runtime() -> Any:
    return torch.cuda.cudart()


def _address(memory: memoryview) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
