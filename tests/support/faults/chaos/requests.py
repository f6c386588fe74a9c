"""Requests of every kind whose continuation a fault could spoil: greedy and seeded, several choices, stop strings, half
characters, a grammar, shared prefixes."""

from __future__ import annotations

import random
from typing import Any

_SHARED_PREFIX = "what every prompt begins with, over two blocks"


def draw_request(draw: random.Random, *, index: int, model: str, max_tokens: int) -> dict[str, Any]:
    """The body of the ``index``-th request, without stop strings: see ``stop_inside``."""
    prefix = [ord(char) for char in _SHARED_PREFIX] if index % 2 else []
    prompt = [*prefix, *(draw.randrange(256) for _ in range(draw.randint(3, 60)))]
    if index % 6 == 3:
        return _structured_request(draw, model=model, max_tokens=max_tokens)
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": draw.randint(max_tokens // 2, max_tokens),
        "n": draw.choice((1, 1, 2, 3)),
        "temperature": 0.8 if index % 3 == 1 else 0.0,
        "seed": draw.randrange(1 << 32),
        "ignore_eos": True,
    }


def stop_inside(text: str, draw: random.Random) -> str:
    """Two to four characters from the second half of a text: they will be cut by tokens, and perhaps by the fault."""
    start = draw.randrange(len(text) // 2, max(len(text) // 2 + 1, len(text) - 6))
    return text[start : start + draw.randint(2, 4)] or "never"


def _structured_request(draw: random.Random, *, model: str, max_tokens: int) -> dict[str, Any]:
    """An answer that must obey a grammar, whose state is a function of the tokens before."""
    digits = {"type": "array", "items": {"type": "integer"}, "minItems": 30, "maxItems": 60}
    schema = {"name": "numbers", "schema": digits, "strict": True}
    return {
        "model": model,
        "messages": [{"role": "user", "content": f"numbers {draw.randrange(1000)}"}],
        "max_tokens": max_tokens,
        "temperature": 0.8,
        "seed": draw.randrange(1 << 32),
        "response_format": {"type": "json_schema", "json_schema": schema},
    }
