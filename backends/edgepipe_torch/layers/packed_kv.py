"""The KV pools of a slice as codes, one for each kind of layer: ``[layers, slots, entries, ...]``, and their scales.

``kv_codes`` has the forms. With 4 bits, the lower bits of a sequence's newest tokens lie in the slots of the codes that
come ``REST_TOKENS`` later (``kv_forms``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from edgepipe.backend.types import BlockCopy
from edgepipe.spec.kv_forms import KV_4BIT, KV_8BIT
from edgepipe_torch.layers.head_shape import LayerHeads, by_kind
from edgepipe_torch.layers.host_copies import Stored
from edgepipe_torch.layers.kv import KVStorage
from edgepipe_torch.layers.kv_codes import Codes, FourBits, KVCodes, codes_of


class PackedKVStorage:
    """Codes of a slice's layers. Physical block b has slots ``[b * size, (b + 1) * size)``."""

    def __init__(
        self,
        heads: Sequence[LayerHeads],
        *,
        classes: Sequence[int],
        num_blocks: Sequence[int],
        block_size: int,
        device: torch.device,
        form: str = KV_8BIT,
        spare_blocks: int = 0,
    ) -> None:
        """``form``: of ``KV_FORMS``. The other arguments: see ``KVStorage``.

        Raises RuntimeError or MemoryError for lack of memory, ConfigInvalid for heads that the form does not keep.
        """
        self.block_size = block_size
        self.num_blocks = num_blocks  # see ``KVStorage``
        self.device = device
        self._form = form
        self._heads = heads
        self._forms = [codes_of(form, alike[0].head_dim, alike[0].value_width) for alike in by_kind(heads)]
        self.pools = [
            own.empty((len(alike), (num_blocks[each] + spare_blocks) * block_size, alike[0].entries), device)
            for own, alike, each in zip(self._forms, by_kind(heads), classes, strict=True)
        ]
        self._copied = [array for pool, each in zip(self.pools, classes, strict=True) if each == 0 for array in pool]
        self.stored = [
            Stored(each, array, 1, block_size) for pool, each in zip(self.pools, classes, strict=True) for array in pool
        ]
        self._layers = [Codes(*(array[each.place] for array in self.pools[each.kind])) for each in heads]
        self._rests: dict[int, Tensor] = {}  # keys are kinds of layers

    @property
    def has_rests(self) -> bool:
        """Whether the newest tokens' lower bits are kept, too."""
        return self._form == KV_4BIT

    @property
    def num_bytes(self) -> int:
        """Memory of the pools."""
        return sum(array.nbytes for pool in self.pools for array in pool)

    def write(self, layer: int, slots: Tensor, kv: Tensor) -> None:
        """Write kv [T, entries, D] to slots [T]; ``layer`` counts from the slice's first."""
        pool, heads = self._layers[layer], self._heads[layer]
        form = self.form(heads)
        if isinstance(form, FourBits):
            made, rests = form.encode_whole(kv)
            self.rests(heads, len(kv)).copy_(rests)
        else:
            made = form.encode(kv)
        pool.codes.index_copy_(0, slots, made.codes)
        pool.scales.index_copy_(0, slots, made.scales)

    def write_whole(self, heads: LayerHeads, slots: Tensor, kv: Tensor, rest_slots: Tensor) -> None:
        """Write kv [T, entries, D] to slots [T] of a layer, and its lower bits to ``rest_slots`` [T] of the codes."""
        pool, form = self._layers[heads.layer], self.form(heads)
        assert isinstance(form, FourBits)
        made, rests = form.encode_whole(kv)
        pool.codes.index_copy_(0, slots, made.codes)
        pool.scales.index_copy_(0, slots, made.scales)
        pool.codes.index_copy_(0, rest_slots, rests)

    def rests(self, heads: LayerHeads, num_tokens: int) -> Tensor:
        """Return the lower bits [T, entries, D / 2] of the tokens that were written last to a layer of a kind."""
        found = self._rests.get(heads.kind)
        if found is None or len(found) < num_tokens:
            codes = self._layers[heads.layer].codes
            with torch.inference_mode(False):  # the pools are writable in and out of that mode, too
                found = self._rests[heads.kind] = torch.zeros(
                    num_tokens, *codes.shape[1:], dtype=codes.dtype, device=self.device
                )
        return found[:num_tokens]

    def keep(self, heads: LayerHeads, tokens: Tensor, slots: Tensor) -> None:
        """Write the lower bits of tokens [K] of the last ``write`` to slots [K] of the codes."""
        rests = self._rests[heads.kind].index_select(0, tokens)
        self._layers[heads.layer].codes.index_copy_(0, slots, rests)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks in every layer that keeps the context, in the given order."""
        for copy in copies:
            source, target = copy.source * self.block_size, copy.target * self.block_size
            for array in self._copied:
                array[:, target : target + self.block_size].copy_(array[:, source : source + self.block_size])

    def form(self, heads: LayerHeads) -> KVCodes:
        """Return what encodes and widens a layer's vectors."""
        return self._forms[heads.kind]

    def arrays(self, layer: int) -> Codes:
        """Return a layer's slots."""
        return self._layers[layer]

    def run(self, layer: int, first_slot: int, end_slot: int) -> Codes:
        """Return views of ``[first_slot, end_slot)`` in a layer."""
        pool = self._layers[layer]
        return Codes(pool.codes[first_slot:end_slot], pool.scales[first_slot:end_slot])

    def gather(self, layer: int, slots: Tensor) -> Codes:
        """Return copies of slots [L] of a layer."""
        pool = self._layers[layer]
        return Codes(pool.codes.index_select(0, slots), pool.scales.index_select(0, slots))

    def pages(self, layer: int) -> tuple[Codes, Codes]:
        """Return views of a layer's keys and values as pages [blocks, block size, Hkv, ...].

        Values that are a part of their keys are the keys.
        """
        heads = self._heads[layer]
        rows = Codes(*(array.view(-1, self.block_size, *array.shape[1:]) for array in self._layers[layer]))
        if heads.value_width:
            return rows, rows
        codes, scales = (array.split(heads.num_kv_heads, dim=2) for array in rows)
        return Codes(codes[0], scales[0]), Codes(codes[1], scales[1])


Storage = KVStorage | PackedKVStorage
