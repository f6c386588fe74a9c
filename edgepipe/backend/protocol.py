"""The Backend protocol: loads slices of a model, runs steps; knows nothing of networks, schedules or other stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from edgepipe.backend.types import (
    Activations,
    BackendOptions,
    DeviceProfile,
    LoadProgress,
    LogitEdits,
    Step,
    StepOutput,
    TokenIds,
)
from edgepipe.model.facts import ModelConfig, Slice
from edgepipe.model.tensors import WeightSource

Prepared = Any  # the backend's own; made by prepare, taken by submit
Ticket = Any  # the backend's own; made by submit, taken by collect


class Backend(Protocol):
    """One device of one stage process.

    Everything but ``prepare`` is called on the stage's one compute thread, so thread-bound libraries are safe.
    """

    block_sizes: tuple[int, ...]  # tokens per KV block that it serves well, ascending; it works with any
    max_submitted: int  # steps that may be submitted and not yet collected: 2 on CUDA, 1 elsewhere
    picks_candidates: bool  # the head's slice takes edits and returns candidates: where logits are dear to move

    def profile(self) -> DeviceProfile:
        """Measure the device: memory, bandwidth, matrix rate. Takes at most 2 s. Raises BackendUnavailable."""
        ...

    def load(self, slices: Sequence[Slice], weights: WeightSource, progress: Callable[[LoadProgress], None]) -> None:
        """Read the slices' tensors one by one into device memory, replacing what was loaded before.

        Never holds more than the shard plus one tensor. Raises ShardMismatch, DeviceOutOfMemory, ModelInvalid.
        """
        ...

    def kv_block_bytes(self, config: ModelConfig, slices: Sequence[Slice], block_size: int) -> int:
        """Bytes that one KV block of ``block_size`` tokens takes in all layers of the slices."""
        ...

    def allocate_kv(self, *, num_blocks: int, block_size: int) -> None:
        """Allocate the KV pool of every loaded layer; nothing is allocated later. Raises DeviceOutOfMemory."""
        ...

    def prepare(self, step: Step) -> Prepared:
        """Build the step's host arrays. Touches neither device nor KV; may run on any thread while a step computes."""
        ...

    def submit(self, prepared: Prepared, inputs: TokenIds | Activations, edits: LogitEdits | None = None) -> Ticket:
        """Apply the step's copies and start computing it, in step order; may return before it is done.

        inputs  [T] int32 token ids for the embedding's slice, else [T, H] activations of the pipeline's type
        edits   for the head's slice of a step with logit rows, if ``picks_candidates``

        Raises ShardMismatch if the shape differs.
        """
        ...

    def collect(self, ticket: Ticket) -> StepOutput:
        """Wait for that step only. [T, H] activations; from the head's slice [R, V] float32 logits, or candidates if
        edits were given, and the scores that the step asks for."""
        ...

    def check(self) -> None:
        """Run a small test step on the device, touching neither weights nor KV. Raises StageError if the device cannot
        compute it, or computes it wrong."""
        ...

    def close(self) -> None:
        """Give all memory back. May be called twice."""
        ...


class BackendFactory(Protocol):
    """What an entry point of the group ``edgepipe.backends`` names."""

    def __call__(self, options: BackendOptions) -> Backend:
        """Make the backend. Raises BackendUnavailable with the command that installs what is missing."""
        ...
