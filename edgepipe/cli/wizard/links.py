"""Describes in words how a link affects a pipeline. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgepipe.units import format_rate

if TYPE_CHECKING:
    from edgepipe.wire.serving import LinkProfile

_HOP_BYTES = 2 * 5120  # bytes of one token of a 32B model in bf16
_TOKEN_MS = 40.0  # time per token of such a model on two good machines
_FINE, _NOTICEABLE = 0.1, 0.3  # shares of a token's time
_PROMPT_TOKENS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineLink:
    """Link between this machine and another."""

    rtt_ms: float
    bytes_per_s: float = 0.0  # rate of the slower direction; 0: not measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """Verdict on a link, for people."""

    text: str
    good: bool


def link_meaning(*, rtt_ms: float, bytes_per_s: float) -> Meaning:
    """Rate a link by one chat with a 32B model on two stages. ``bytes_per_s`` 0: not measured."""
    if rtt_ms <= 0:
        return Meaning(text="not measured yet; see 'edgepipe status'", good=True)
    rate = f", {format_rate(bytes_per_s)}" if bytes_per_s else ""
    added_ms = rtt_ms + (2 * _HOP_BYTES / bytes_per_s * 1e3 if bytes_per_s else 0.0)  # a token goes there and back
    share = added_ms / _TOKEN_MS
    if share <= _FINE:
        verdict = "fine for 2 stages of a 32B model"
    else:
        longer = f"each token of a 32B model over 2 stages takes {added_ms:.0f} ms longer"
        verdict = (
            f"{longer}; cables on both ends help"
            if share <= _NOTICEABLE
            else f"slow: {longer}; use cables on both ends"
        )
    prompt = ""
    if bytes_per_s and (upload_s := _PROMPT_TOKENS * _HOP_BYTES / bytes_per_s) > 0.5:
        prompt = f"; a prompt of {_PROMPT_TOKENS} tokens {upload_s:.1f} s"
    return Meaning(text=f"{rtt_ms:.1f} ms{rate}: {verdict}{prompt}", good=share <= _FINE)


def links_of(own: str, profiles: Iterable[LinkProfile]) -> dict[str, MachineLink]:
    """Merge both directions to each other node into one link."""
    links: dict[str, MachineLink] = {}
    for profile in profiles:
        if own not in (profile.sender, profile.receiver):
            continue
        other = profile.receiver if profile.sender == own else profile.sender
        known = links.get(other)
        rate = profile.bytes_per_s if known is None else min(profile.bytes_per_s, known.bytes_per_s)
        rtt_ms = (known.rtt_ms if known else 0.0) + profile.one_way_s * 1e3
        links[other] = MachineLink(rtt_ms=rtt_ms, bytes_per_s=rate)
    return links
