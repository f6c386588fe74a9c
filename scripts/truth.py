"""Emulated tokens under random load, each checked: the long test of the engine, of any length."""

from __future__ import annotations

import asyncio
import time

from figures import Row

from tests.support.engine_load import run_load


def truth_rows(num_tokens: int) -> list[Row]:
    """Blocks shared and blocks copied, half of the tokens each; three stages that take no time."""
    rows: list[Row] = []
    for contiguous_kv in (False, True):
        begun_s = time.perf_counter()
        try:
            load = run_load(seed=2, tokens=num_tokens // 2, contiguous_kv=contiguous_kv, num_gateways=8, max_blocks=280)
            stats = asyncio.run(load)
        except AssertionError as error:
            rows.append(Row(f"truth: {error}", 0, "tokens", target="every token right", met=False))
            continue
        kind = "copied" if contiguous_kv else "shared"
        name = f"truth, {kind} blocks: {stats.preemptions} preemptions, {stats.cached_tokens} cached"
        per_s = stats.computed_tokens / (time.perf_counter() - begun_s)
        target = "all right, all blocks back"
        rows.append(Row(name, stats.computed_tokens, "tokens", per_s, "tok/s", target=target, met=True))
    return rows
