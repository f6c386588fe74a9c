"""How fast a real model decodes behind a long context with each form of KV, on one thread of this CPU."""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

import torch
from kv_quality import FORMS, blocks_of, loaded

from edgepipe.store.store import StoredModel
from tests.support.backends.steps import make_step, run_step, step_row, token_ids

_SHORT = 16  # tokens of a context whose attention takes no time
_WARM_UPS = 2


class DecodeTimes(NamedTuple):
    """Seconds of one decode step, medians."""

    long_s: float  # behind the whole context
    short_s: float  # behind a few tokens

    @property
    def attention_s(self) -> float:
        """The time that the context costs."""
        return self.long_s - self.short_s


def decode_times(model: StoredModel, num_tokens: int, *, rounds: int) -> dict[str, DecodeTimes]:
    """Return the times with wide KV and with each form, round by round beside one another; the KV is random."""
    backends = {name: loaded(model, form, num_tokens, 1) for name, form in {"wide": "", **FORMS}.items()}
    for backend in backends.values():
        for pool in backend._pools.values():  # pyright: ignore[reportPrivateUsage]
            decoder = backend._decoders[0]  # pyright: ignore[reportPrivateUsage]
            for heads in decoder.heads:
                kv = torch.randn(num_tokens, heads.entries, heads.head_dim)
                pool.write(heads.layer, torch.arange(num_tokens), kv)
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in backends}
    for number in range(rounds + _WARM_UPS):
        for name, backend in backends.items():
            for times, length in zip(found[name], (num_tokens, _SHORT), strict=True):
                row = step_row(length - 1, 1, (0, blocks_of(num_tokens)))
                begun_s = time.perf_counter()
                run_step(backend, make_step([row]), token_ids([7]))
                if number >= _WARM_UPS:
                    times.append(time.perf_counter() - begun_s)
    for backend in backends.values():
        backend.close()
    return {name: DecodeTimes(*(statistics.median(times) for times in both)) for name, both in found.items()}
