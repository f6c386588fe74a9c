"""The Backend protocol: loads slices of a model and runs steps, independent of networks, schedules, other stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from edgepipe.backend.drafting import DraftModel
from edgepipe.backend.types import (
    Activations,
    BackendOptions,
    DeviceProfile,
    DraftStep,
    KernelError,
    LoadProgress,
    LogitEdits,
    PackedProducts,
    SlowPath,
    Step,
    StepOutput,
    TokenIds,
)
from edgepipe.spec.facts import ModelConfig, Slice
from edgepipe.spec.tensors import WeightSource

Prepared = Any  # the backend's own type, from prepare to submit
Ticket = Any  # the backend's own type, from submit to collect


class Backend(Protocol):
    """One device of one stage process.

    All methods except ``prepare`` are called on the stage's compute thread, so thread-bound libraries are safe.
    """

    block_sizes: tuple[int, ...]  # efficient numbers of tokens per KV block, ascending; any number works
    max_submitted: int  # maximum number of submitted, uncollected steps: 2 on CUDA and MLX, 1 on CPUs with torch

    @property
    def picks_candidates(self) -> bool:
        """Whether the head's slice takes edits and returns candidates. Known once it is loaded."""
        ...

    @property
    def draft_model(self) -> DraftModel | None:
        """A model that drafts for the loaded one, on the stage with the head. None without one."""
        ...

    def profile(self) -> DeviceProfile:
        """Measure the device: memory, bandwidth, matrix rate. Takes at most 2 s. Raises BackendUnavailable."""
        ...

    def load(self, slices: Sequence[Slice], weights: WeightSource, progress: Callable[[LoadProgress], None]) -> None:
        """Read the slices' tensors one by one into device memory, replacing the loaded ones.

        Never holds more than the shard plus one tensor. Raises ShardMismatch, DeviceOutOfMemory, ModelInvalid.
        """
        ...

    def packed_products(self) -> Sequence[PackedProducts]:
        """Return what multiplies with the loaded packed weights, each once; empty if all loaded weights are floats."""
        ...

    def kv_block_bytes(self, config: ModelConfig, slices: Sequence[Slice], block_size: int) -> int:
        """Return the bytes of one KV block of ``block_size`` tokens in all layers of the slices."""
        ...

    def allocate_kv(
        self,
        *,
        num_blocks: int,
        block_size: int,
        window_blocks: Sequence[int] = (),
        state_slots: int = 0,
        host_places: Sequence[int] = (),
    ) -> None:
        """Allocate the KV pool, or the slots of states, of every loaded layer. Later calls allocate none. Raises
        DeviceOutOfMemory.

        window_blocks  blocks of each windowed class (``model.memory_classes``), whose layers then find their KV by the
                       rows' ``windows``; empty: every layer has ``num_blocks`` and finds it by ``runs``
        state_slots    of each recurrent layer, which the rows' ``state`` names
        host_places    blocks of each class in host memory, and slots of states if the model has any, in the order of
                       ``TierMove.number``; empty: steps have no moves
        """
        ...

    def prepare(self, step: Step) -> Prepared:
        """Build the step's host arrays. Uses neither device nor KV; may run on any thread while a step computes."""
        ...

    def submit(self, prepared: Prepared, inputs: TokenIds | Activations, edits: LogitEdits | None = None) -> Ticket:
        """Apply the step's moves and copies and start the step. May return before it is done.

        Steps that use the same block or slot come in step order; others may pass one another.

        inputs  [T] int32 token ids for the embedding's slice, else [T, H] activations of the pipeline's type
        edits   for the head's slice of a step with logit rows, if ``picks_candidates``

        Raises ShardMismatch if the shape differs.
        """
        ...

    def collect(self, ticket: Ticket) -> StepOutput:
        """Wait for that step only and return its output.

        Activations [T, H]; from the head's slice logits [R, V] float32, or candidates if edits were given, and the
        step's requested scores.
        """
        ...

    def check(self) -> None:
        """Run a small test step on the device without weights and KV. Raises StageError if it fails or gives wrong
        numbers."""
        ...

    def close(self) -> None:
        """Release all memory. May be called twice."""
        ...


@runtime_checkable
class DraftingBackend(Protocol):
    """A backend that computes a layer that predicts one token more (``LayerSpec.mtp``)."""

    def draft(self, step: DraftStep) -> Sequence[TokenIds]:
        """Guess the tokens behind each row by that layer, most likely ones; called on the compute thread.

        The layer computes keys and values of a row's known tokens, and of all guesses but the last. A later draft or
        step overwrites those of guesses. Waits for the device. Raises ShardMismatch if the slice has no such layer,
        StepFailed if blocks do not cover the tokens.
        """
        ...


@runtime_checkable
class CheckingBackend(Protocol):
    """A backend that compares its own kernels with exact results."""

    def kernel_errors(self) -> Iterator[KernelError]:
        """Compare each kernel with float64 on random inputs, one after another. Nothing may be loaded.

        Compiles what is not yet compiled: up to two seconds a kernel. Raises StageError if the device stops.
        """
        ...


@runtime_checkable
class HostMemoryBackend(Protocol):
    """A backend that gives parts of its host memory (``host_places``) back to the system."""

    def host_place_bytes(self) -> Sequence[int]:
        """Return the bytes of a place in host memory, by ``TierMove.number``."""
        ...

    def give_back(self, number: int, places: Sequence[int]) -> None:
        """Give the memory of places back to the system; what they hold is lost. They may be written again later.

        Called on the loop while no step uses the places. number: as in ``TierMove``.
        """
        ...

    def machine_memory(self) -> tuple[int, int] | None:
        """Return the memory that the machine has left for all programs, and all that it has, in bytes.

        None: host memory is not the machine's.
        """
        ...


@runtime_checkable
class DiskBackend(Protocol):
    """A backend whose host memory (``host_places``) can be read and written, so that a disk can lie below it."""

    def host_place(self, number: int, kept: int) -> Sequence[memoryview]:
        """Return the bytes of a block or a slot of states in host memory, which may be written; one-dimensional, "B".

        Called on any thread, while no step uses the place. number, kept: as in ``TierMove``.
        """
        ...

    def disk_seconds(self, number: int, count: int, took_s: float) -> float:
        """Return the seconds that ``count`` copies of such places between host memory and disk take.

        took_s  what they have taken; an emulated device waits as long as its own disk would take
        """
        ...


@runtime_checkable
class WaitingBackend(Protocol):
    """A backend that takes further steps while another thread waits for one."""

    def wait(self, ticket: Ticket) -> None:
        """Wait until the device has computed a step, so that ``collect`` takes no time. May raise what that raises.

        Called on a thread of its own, while the compute thread calls other methods: also ``collect`` for that step.
        """
        ...


@runtime_checkable
class ExplainingBackend(Protocol):
    """A backend that tells why its steps are slow."""

    def slow_paths(self, block_size: int) -> Sequence[SlowPath]:
        """Return what makes steps of the loaded layers slow, with KV blocks of a size; on the compute thread.

        May take seconds.
        """
        ...


class BackendFactory(Protocol):
    """Type of the entry points in the group ``edgepipe.backends``."""

    def __call__(self, options: BackendOptions) -> Backend:
        """Create the backend. Raises BackendUnavailable with the command that installs the missing parts."""
        ...
