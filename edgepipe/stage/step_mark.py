"""Shows which step a stage computes, in memory that survives the stage's process.

The daemon creates a small anonymous file and passes it to the stage; both map it. When the process dies, the daemon
reads the current step. So it can distinguish a crash inside a step from others, at the cost of one store per step.
"""

from __future__ import annotations

import mmap
import os
import struct

from edgepipe.ids import StepId

_FORM = struct.Struct("<QQ")  # the epoch's counter and the step; zeros between steps


class StepMark:
    """One side's view of the mark; ``write`` belongs to the compute thread alone."""

    def __init__(self, descriptor: int) -> None:
        """Raises OSError if the descriptor's file cannot be mapped, or the disk is full."""
        if os.fstat(descriptor).st_size < _FORM.size:
            os.pwrite(descriptor, bytes(_FORM.size), 0)  # real bytes: a sparse file's first store may raise SIGBUS
        self._memory = mmap.mmap(descriptor, _FORM.size)

    def write(self, epoch: int, step: int) -> None:
        """Set the current step and its epoch's counter; zeros: no step."""
        _FORM.pack_into(self._memory, 0, epoch, step)

    def read(self) -> tuple[int, StepId] | None:
        """Return the epoch's counter and the current step; None between steps."""
        epoch, step = _FORM.unpack_from(self._memory)
        return (epoch, StepId(step)) if step else None

    def close(self) -> None:
        """Unmap the memory."""
        self._memory.close()
