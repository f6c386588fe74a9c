"""Which step a stage computes at this moment, written where its death does not erase it.

The daemon makes a small file without a name and hands it to the stage; both map it. When the process dies, the daemon
reads what it was at: a crash inside a step is told from one beside it, at the cost of one store per step.
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
        """Raises OSError if the descriptor is none of a file that can be mapped, or the disk is full."""
        if os.fstat(descriptor).st_size < _FORM.size:
            os.pwrite(descriptor, bytes(_FORM.size), 0)  # a mere size would be missed at the first store: SIGBUS
        self._memory = mmap.mmap(descriptor, _FORM.size)

    def write(self, epoch: int, step: int) -> None:
        """The step of the epoch with that counter is computed from now on; zeros: none is."""
        _FORM.pack_into(self._memory, 0, epoch, step)

    def read(self) -> tuple[int, StepId] | None:
        """The epoch's counter and the step that was being computed; None between steps."""
        epoch, step = _FORM.unpack_from(self._memory)
        return (epoch, StepId(step)) if step else None

    def close(self) -> None:
        """Unmap."""
        self._memory.close()
