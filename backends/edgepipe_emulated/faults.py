"""Faults of an emulated device, controlled by files in a folder while the device runs."""

from __future__ import annotations

from pathlib import Path

from edgepipe.errors import DeviceOutOfMemory, StepFailed

BROKEN = "broken"
"""While this file exists, every step fails. If it holds a number, that many steps fail; then it is deleted."""
FULL = "full"
"""While this file exists, another program occupies the device's memory, and loading fails."""
MEMORY = "memory"
"""While this file exists, it holds the bytes that the machine has left for all programs, and all that it has."""


class DeviceFaults:
    """Checks for fault files in a folder; None: a device without faults."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def check_step(self) -> None:
        """Check before a step; call once per step. Raises StepFailed if the step fails."""
        try:
            self.check_computes()
        except StepFailed:
            self._count_down()
            raise

    def check_computes(self) -> None:
        """Check the device without counting a step. Raises StepFailed while it is broken."""
        if self._has(BROKEN):
            raise StepFailed("the emulated device cannot compute", fact=f"{self._path(BROKEN)} exists")

    def check_memory(self) -> None:
        """Check the memory. Raises DeviceOutOfMemory while another program occupies it."""
        if self._has(FULL):
            raise DeviceOutOfMemory(
                "another program occupies the emulated device's memory", fact=f"{self._path(FULL)} exists"
            )

    def machine_memory(self) -> tuple[int, int] | None:
        """Return the machine's memory that is left, and all of it; None if no file says so."""
        if not self._has(MEMORY):
            return None
        left, total = self._path(MEMORY).read_text().split()
        return int(left), int(total)

    def _count_down(self) -> None:
        """Decrement the number of steps that must fail."""
        text = self._path(BROKEN).read_text()
        if text and int(text) > 1:
            self._path(BROKEN).write_text(str(int(text) - 1))
        elif text:
            self._path(BROKEN).unlink()

    def _has(self, name: str) -> bool:
        return self._folder is not None and self._path(name).exists()

    def _path(self, name: str) -> Path:
        assert self._folder is not None, "only a device with faults has paths"
        return self._folder / name
