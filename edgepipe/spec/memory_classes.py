"""What a model's layers keep of a sequence: the keys and values of its whole context, or of a window, or a state.

Every node derives the same classes from the config, in one order: first the layers that keep the context, then one
class per window, ascending. A model without layers of the first kind keeps the context in the layers of its widest
window. Recurrent layers keep a state in slots of their own. See ``docs/adr/memory-classes.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from edgepipe.spec.facts import LayerRange, ModelConfig, Slice
from edgepipe.spec.kv_forms import rest_tokens, slots_of_chat

SLACK_TOKENS = 2048
"""Tokens of a prompt that may be in flight beyond a window, whatever the load: some steps' prefill."""

MOST_SLACK_TOKENS = 8192
"""The same while half of the window's pool is free: a thousand tokens on each of eight devices and links."""

MOST_TOKENS = 1 << 40
"""More tokens of KV than any machine holds."""

AUTO_TIER_PARTS = 3
"""``--kv-ram auto`` gives idle KV one of so many parts of the free host memory beside a device."""

_BLOCK_SIZE = 16  # default tokens per KV block; most devices use this size
_SLACK_PARTS = 8  # the slack takes at most 1/8 of the context
_MOST_SLACK_PARTS = 4  # bound while half of the pool is free: 1/4 of the context and of the pool
_POOL_PARTS = 8  # a window's pool has at least 1/8 of the context's blocks
LEAST_SLOTS = 4
"""Slots of the states of two sequences, and of a snapshot of each."""

_MOST_SLOT_TOKENS, _LEAST_SLOT_TOKENS = 2048, 64  # tokens of KV per slot: upper and lower bound
_LEAST_GAP, _MOST_GAP = 256, 4096  # tokens between a prompt's snapshots
_COUNTED_FORM = "bfloat16"  # form of the KV whose bytes the gap compares


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPool:
    """The blocks of one windowed class on every stage."""

    window: int  # tokens that a query sees, including itself
    slack: int  # tokens that may be in flight beyond the window: every sequence has room for them
    num_blocks: int
    block_size: int  # tokens
    more: int = 0  # tokens that may be in flight in addition, while half of the pool is free
    rest_tokens: int = 0  # see ``kv_forms.rest_tokens``

    @property
    def most_blocks(self) -> int:
        """Blocks that a sequence holds at most while less than half of the pool is free."""
        return -(-(self.window + self.slack + self.rest_tokens) // self.block_size) + 1

    @property
    def most_slack(self) -> int:
        """Tokens that may be in flight beyond the window while half of the pool is free."""
        return self.slack + self.more

    def first_block(self, position: int) -> int:
        """Return the place in a sequence of the first block that the token at ``position`` or a later one sees."""
        return max(0, position - self.window + 1) // self.block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSlots:
    """The slots for states of recurrent layers, numbered alike on every stage."""

    num_slots: int
    gap: int  # tokens between the snapshots of a long prompt, whole blocks

    @property
    def kept_slots(self) -> int:
        """The slots that a stage allocates: one more, of zeros, with which sequences begin."""
        return self.num_slots + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryClasses:
    """The classes of a model. Class 0 keeps the context; class n > 0 keeps ``windows[n - 1]``."""

    windows: tuple[int, ...]  # tokens
    of_layer: tuple[int, ...]  # class of each layer of the model
    context_length: int  # tokens
    slack: int  # tokens
    state_bytes: int = 0  # one sequence's states in all layers; 0: no layer is recurrent
    kv_token_bytes: int = 0  # one token's KV in all layers, in bf16
    rest_tokens: int = 0  # slots that a sequence needs behind its last token's, see ``kv_forms.rest_tokens``

    def pools(self, *, num_blocks: int, block_size: int) -> tuple[WindowPool, ...]:
        """Return the windows' pools beside ``num_blocks`` blocks of the context.

        Empty if no window would keep less than the context: all layers then belong to class 0.
        """
        contexts = -(-num_blocks * block_size // self.context_length)
        pools: list[WindowPool] = []
        for window in self.windows:
            pool = self._pool(window, num_blocks, block_size=block_size)
            blocks = max(num_blocks // _POOL_PARTS, contexts * pool.most_blocks)
            pools.append(self._pool(window, min(num_blocks, blocks), block_size=block_size))
        return tuple(pools) if any(pool.num_blocks < num_blocks for pool in pools) else ()

    def _pool(self, window: int, num_blocks: int, *, block_size: int) -> WindowPool:
        """Return a window's pool. Its size says how much one prompt may have of it while half of it is free."""
        pool_share = num_blocks * block_size // _MOST_SLACK_PARTS - window
        most = min(MOST_SLACK_TOKENS, self.context_length // _MOST_SLACK_PARTS, pool_share)
        return WindowPool(
            window=window,
            slack=self.slack,
            num_blocks=num_blocks,
            block_size=block_size,
            more=max(0, most - self.slack),
            rest_tokens=self.rest_tokens,
        )

    def states(self, *, num_blocks: int, block_size: int, most: int = 0) -> StateSlots | None:
        """Return the slots beside ``num_blocks`` blocks of the context; None for a model without recurrent layers.

        A snapshot takes as many bytes as the KV of ``gap`` tokens, within bounds. So snapshots of a long prompt double
        its memory. All slots take as many bytes as the KV, within bounds: a short chat needs a slot, too. At most
        ``most`` slots (0: no bound) leave room for more KV. If they are fewer, snapshots lie further apart, so that
        those of a prompt that fills the KV still reach from its beginning to its end.
        """
        if not self.state_bytes:
            return None
        alike = self.state_bytes // self.kv_token_bytes if self.kv_token_bytes else _MOST_GAP  # tokens of KV
        gap = max(_LEAST_GAP, min(_MOST_GAP, alike))
        slot_tokens = max(_LEAST_SLOT_TOKENS, min(_MOST_SLOT_TOKENS, alike))
        slots = max(LEAST_SLOTS, -(-num_blocks * block_size // slot_tokens))
        if most and most < slots:
            slots = max(LEAST_SLOTS, most)
            gap = max(gap, num_blocks * block_size // (slots - 1))
        return StateSlots(num_slots=slots, gap=-(-gap // block_size) * block_size)

    def host_places(self, num_blocks: int, windows: Sequence[WindowPool], *, block_size: int) -> tuple[int, ...]:
        """Return the places of each memory class in host memory that holds ``num_blocks`` of the context; 0: none.

        windows  the pools on the device
        """
        if not num_blocks:
            return ()
        contexts = -(-num_blocks * block_size // self.context_length)
        blocks = [max(num_blocks // _POOL_PARTS, contexts * pool.most_blocks) for pool in windows]
        states = self.states(num_blocks=num_blocks, block_size=block_size)
        slots = () if states is None else (states.num_slots,)
        return (num_blocks, *(min(num_blocks, each) for each in blocks), *slots)

    def opened(self, window_blocks: Sequence[int], *, block_size: int) -> tuple[WindowPool, ...]:
        """Return the pools that an epoch was opened with. Raises ValueError for another number of classes."""
        if window_blocks and len(window_blocks) != len(self.windows):
            raise ValueError(f"{len(window_blocks)} windows, not {len(self.windows)}")
        return tuple(
            self._pool(window, blocks, block_size=block_size)
            for window, blocks in zip(self.windows, window_blocks, strict=False)
        )

    def kept_tokens(self, num_tokens: int, *, block_size: int) -> tuple[int, ...]:
        """Return for each layer the tokens that its pool holds, where class 0 holds ``num_tokens``."""
        pools = self.pools(num_blocks=-(-num_tokens // block_size), block_size=block_size)
        if not pools:
            return (num_tokens,) * len(self.of_layer)
        kept = [num_tokens, *(min(num_tokens, pool.num_blocks * block_size) for pool in pools)]
        return tuple(kept[each] for each in self.of_layer)

    def most_blocks(
        self,
        block_bytes: int,
        window_bytes: Sequence[int],
        *,
        state_bytes: int,
        block_size: int,
        room_bytes: float,
        wanted: int,
        most_slots: int = 0,
    ) -> int:
        """Return the most blocks of class 0, at most ``wanted``, whose pools fit into the room; 0 if none do.

        block_bytes   of one block in all layers of a stage
        window_bytes  of these, the bytes of each windowed class
        state_bytes   of one slot in all layers of the stage
        most_slots    see ``states``
        """

        def num_bytes(num_blocks: int) -> int:
            pools = self.pools(num_blocks=num_blocks, block_size=block_size)
            states = self.states(num_blocks=num_blocks, block_size=block_size, most=most_slots)
            kv = pool_bytes(block_bytes, window_bytes, num_blocks, [pool.num_blocks for pool in pools])
            return kv + state_bytes * (states.kept_slots if states else 0)

        return most_within(room_bytes, num_bytes, at_most=wanted)

    def layers(self, number: int, slices: Iterable[Slice]) -> tuple[Slice, ...]:
        """Return the slices' layers of one class, each as a slice."""
        return tuple(
            Slice(index=part.index, layers=LayerRange(layer, layer + 1), embedding=False, head=False)
            for part in slices
            for layer in part.layers
            if self.of_layer[layer] == number
        )


def stage_classes(
    config: ModelConfig, slices: Sequence[Slice], *, num_blocks: int, window_blocks: Sequence[int]
) -> list[tuple[int, tuple[Slice, ...]]]:
    """Return for each class that an epoch was opened with: its blocks, and the slices' layers of it."""
    if not window_blocks:
        return [(num_blocks, tuple(slices))]
    classes = memory_classes(config)
    return [(count, classes.layers(number, slices)) for number, count in enumerate((num_blocks, *window_blocks))]


def memory_classes(config: ModelConfig, kv: str = "") -> MemoryClasses:
    """Derive a model's classes from its layers. ``kv``: form of the KV, see ``kv_forms``; empty: a dtype."""
    slack = max(1, min(SLACK_TOKENS, config.context_length // _SLACK_PARTS))
    windows_of = [layer.attention.window if layer.attention else None for layer in config.layers]
    kept = [_kept(window, slack, config.context_length) for window in windows_of]
    if all(window is not None for window, layer in zip(kept, config.layers, strict=True) if layer.attention):
        widest = max((window for window in kept if window is not None), default=0)
        kept = [None if window == widest else window for window in kept]
    windows = tuple(sorted({window for window in kept if window is not None}))
    return MemoryClasses(
        windows=windows,
        of_layer=tuple(0 if window is None else 1 + windows.index(window) for window in kept),
        context_length=config.context_length,
        slack=slack,
        state_bytes=config.state_bytes(),
        kv_token_bytes=config.kv_bytes_per_token(form=_COUNTED_FORM),
        rest_tokens=rest_tokens(kv),
    )


def pool_bytes(block_bytes: int, window_bytes: Sequence[int], num_blocks: int, window_blocks: Sequence[int]) -> int:
    """Return the bytes of a stage's pools. Without ``window_blocks`` every layer has ``num_blocks``.

    The other arguments: see ``MemoryClasses.most_blocks``.
    """
    saved = sum(size * (num_blocks - count) for size, count in zip(window_bytes, window_blocks, strict=False))
    return block_bytes * num_blocks - saved


def state_slots(config: ModelConfig, num_tokens: int, *, most_slots: int = 0) -> StateSlots | None:
    """Return the slots of states beside a KV cache of ``num_tokens``. See ``MemoryClasses.states``."""
    blocks = -(-num_tokens // _BLOCK_SIZE)
    return memory_classes(config).states(num_blocks=blocks, block_size=_BLOCK_SIZE, most=most_slots)


def kv_bytes(config: ModelConfig, num_tokens: int, *, form: str, most_slots: int = 0) -> tuple[int, ...]:
    """Return the bytes of each layer's KV and states where the layers that keep the context hold ``num_tokens``.

    A chat of so many tokens fits, with the slots that its form of KV needs behind them.

    ``form``: see ``ModelConfig.kv_bytes_per_token``. ``most_slots``: see ``MemoryClasses.states``.
    """
    kept = memory_classes(config, form).kept_tokens(slots_of_chat(num_tokens, form), block_size=_BLOCK_SIZE)
    states = state_slots(config, num_tokens, most_slots=most_slots)
    slots = states.kept_slots if states is not None else 0
    return tuple(
        config.kv_bytes_per_token((layer,), form=form) * count + config.state_bytes((layer,)) * slots
        for layer, count in enumerate(kept)
    )


def most_within(room_bytes: float, bytes_of: Callable[[int], int], *, at_most: int = MOST_TOKENS) -> int:
    """Return the largest count for which ``bytes_of``, which never falls, fits into the room; 0 if none does."""
    low, high = 0, at_most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if bytes_of(middle) <= room_bytes else (low, middle - 1)
    return low


def _kept(window: int | None, slack: int, context_length: int) -> int | None:
    """Return the window, or None if a sequence would hold the context with it."""
    return None if window is None or window + slack >= context_length else window
