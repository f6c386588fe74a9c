"""Emulated tokens under random load, each checked: the long test of the engine, of any length.

    python scripts/truth.py TOKENS [--model experts|states|windows] [--seed N] [--losses N]

checks tokens of a model with experts, with recurrent layers or with windows, while stages are lost. Runs with other
seeds are other tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import time

from edgepipe_emulated import emulated_model_config
from figures import Row, print_rows

from edgepipe.spec.facts import ModelConfig
from tests.support.engine.lab import CONFIG
from tests.support.engine.load import run_load

MODELS = {
    "experts": emulated_model_config(num_layers=6, context_length=512, experts=(16, 4)),
    "states": emulated_model_config(num_layers=6, context_length=512, attention_every=3),
    "windows": emulated_model_config(num_layers=6, context_length=512, windows=(16, 24, None)),
}
LONG_MODELS = {
    "plain": emulated_model_config(num_layers=6, context_length=1536),
    "states": emulated_model_config(num_layers=6, context_length=1536, attention_every=3),
    "windows": emulated_model_config(num_layers=6, context_length=1536, windows=(16, 24, None)),
}
"""Models with room for prompts of a thousand tokens."""
_LONG_TOKENS = 1000
TOKENS_PER_LOSS = 6_000


def main() -> None:
    """Check tokens of one model, and print the rows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("tokens", type=int)
    parser.add_argument("--model", choices=MODELS, default="experts")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--losses", type=int, help="in each half; by default one for every 6,000 tokens")
    wanted = parser.parse_args()
    print_rows("truth", lossy_rows(wanted.model, wanted.tokens, seed=wanted.seed, losses=wanted.losses))


def lossy_rows(
    model: str, num_tokens: int, *, seed: int = 2, losses: int | None = None, long_prompts: bool = False
) -> list[Row]:
    """Check tokens of one of ``MODELS``, or of ``LONG_MODELS`` with prompts of up to a thousand tokens.

    ``losses``: in each half; None: one for every TOKENS_PER_LOSS.
    """
    lost = max(1, num_tokens // 2 // TOKENS_PER_LOSS) if losses is None else losses
    if long_prompts:
        return truth_rows(
            num_tokens, config=LONG_MODELS[model], losses=lost, seed=seed, opening_tokens=_LONG_TOKENS, num_gateways=2
        )
    return truth_rows(num_tokens, config=MODELS[model], losses=lost, seed=seed)


def truth_rows(
    num_tokens: int,
    *,
    config: ModelConfig = CONFIG,
    losses: int = 0,
    seed: int = 2,
    opening_tokens: int = 160,
    num_gateways: int = 8,
) -> list[Row]:
    """Blocks shared and blocks copied, half of the tokens each; three stages that take no time.

    ``losses``: stages to lose in each half. ``opening_tokens``: longest common beginning of prompts.
    """
    rows: list[Row] = []
    for contiguous_kv in (False, True):
        begun_s, load = time.perf_counter(), None
        try:
            load = asyncio.run(
                run_load(
                    seed=seed,
                    tokens=num_tokens // 2,
                    contiguous_kv=contiguous_kv,
                    num_gateways=num_gateways,
                    max_blocks=280,
                    opening_tokens=opening_tokens,
                    config=config,
                    losses=losses,
                )
            )
        except* AssertionError as errors:
            what = errors.exceptions[0]
            rows.append(Row(f"truth: {what}", 0, "tokens", target="every token right", met=False))
        if load is None:
            continue
        kind = "copied" if contiguous_kv else "shared"
        name = f"truth, {kind} blocks: {load.preemptions} preemptions, {load.cached_tokens} cached, {losses} losses"
        per_s = load.num_tokens / (time.perf_counter() - begun_s)
        target = "all right, all blocks back"
        rows.append(Row(name, load.num_tokens, "tokens", per_s, "tok/s", target=target, met=True))
    return rows


if __name__ == "__main__":
    main()
