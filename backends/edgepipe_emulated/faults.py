"""What an emulated device suffers from: files that others put into a folder and remove while the device runs."""

from __future__ import annotations

from pathlib import Path

from edgepipe.errors import DeviceOutOfMemory, StepFailed

BROKEN = "broken"
"""While a file of this name exists, every step fails. With a number in it, so many steps fail, and it is removed."""
FULL = "full"
"""While a file of this name exists, another program has the device's memory: nothing can be loaded."""


class DeviceFaults:
    """Checks one folder; None: a device without faults."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def check_step(self) -> None:
        """To be asked once for each step. Raises StepFailed if it fails."""
        try:
            self.check_computes()
        except StepFailed:
            self._count_down()
            raise

    def check_computes(self) -> None:
        """Raises StepFailed while the device is broken."""
        if self._has(BROKEN):
            raise StepFailed("the emulated device cannot compute", fact=f"{self._path(BROKEN)} exists")

    def check_memory(self) -> None:
        """Raises DeviceOutOfMemory while another program has the memory."""
        if self._has(FULL):
            raise DeviceOutOfMemory(
                "another program has the emulated device's memory", fact=f"{self._path(FULL)} exists"
            )

    def _count_down(self) -> None:
        """One of the steps that are to fail has failed."""
        text = self._path(BROKEN).read_text()
        if text and int(text) > 1:
            self._path(BROKEN).write_text(str(int(text) - 1))
        elif text:
            self._path(BROKEN).unlink()

    def _has(self, name: str) -> bool:
        return self._folder is not None and self._path(name).exists()

    def _path(self, name: str) -> Path:
        assert self._folder is not None, "asked of a device with faults"
        return self._folder / name
