"""How to draw tokens where a request leaves it open (PURE)."""

from __future__ import annotations

from collections.abc import Mapping

NEUTRAL: Mapping[str, float] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
UNSAID: Mapping[str, float] = {"temperature": 0.8, "min_p": 0.05}
"""Used where neither the request nor the model says anything. With temperature 1 over the whole vocabulary, small
models write nonsense: the many unlikely tokens together are drawn often. ``min_p`` leaves them out."""


def sampling_defaults(own: Mapping[str, float], **asked: float | None) -> dict[str, float]:
    """Return all sampling parameters: the request's (``asked``), else the model's (``own``), else neutral ones.

    ``UNSAID`` holds if neither names a temperature or leaves out any token.
    """
    return {**NEUTRAL, **with_unsaid({**own, **{name: value for name, value in asked.items() if value is not None}})}


def with_unsaid(said: Mapping[str, float]) -> dict[str, float]:
    """Return sampling parameters with those of ``UNSAID`` that hold beside them."""
    narrowed = said.get("top_k", 0) > 0 or said.get("top_p", 1.0) < 1.0 or said.get("min_p", 0.0) > 0.0
    return {**said} if narrowed or "temperature" in said else {**UNSAID, **said}
