"""Format and parse numbers with units."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from edgepipe.errors import ConfigInvalid

_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def format_bytes(num_bytes: float) -> str:
    """Format bytes: ``19_300_000_000`` -> ``"19.3 GB"`` (decimal, as for disks and networks)."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def format_rate(bytes_per_s: float) -> str:
    """Format a rate in bytes per second: ``117_000_000`` -> ``"936 Mbit/s"``."""
    bits = bytes_per_s * 8
    return f"{bits / 1e9:.1f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.0f} Mbit/s"


def format_duration_s(seconds: float) -> str:
    """Format a duration: ``0.0004`` -> ``"0.40 ms"``, ``0.4753`` -> ``"475 ms"``, ``75`` -> ``"1 min 15 s"``.

    The larger unit comes with the next one, up to days with hours.
    """
    if seconds < 1:
        ms = seconds * 1e3
        return f"{ms:.{2 if ms < 10 else 1 if ms < 100 else 0}f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours_left = divmod(hours, 24)
    if days:
        return f"{days} d {hours_left} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def parse_bytes(text: str) -> int:
    """Parse a size such as ``"24GB"``, ``"512 MiB"``, ``"1000"`` to bytes. Raises ConfigInvalid."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", text.lower())
    if not match:
        raise ConfigInvalid(f"'{text}' is not a size", next_step="write it like 24GB or 512MiB")
    number, prefix, binary = match.groups()
    size = 1024 ** "kmgt".index(prefix) * 1024 if binary and prefix else _DECIMAL[prefix]
    return int(float(number) * size)


def parse_rate(text: str) -> float:
    """Parse a rate such as ``"1gbit"``, ``"100 mbit/s"`` to bytes per second. Raises ConfigInvalid."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)bit(?:/s)?\s*", text.lower())
    if not match:
        raise ConfigInvalid(f"'{text}' is not a rate", next_step="write it like 1gbit or 300mbit")
    return float(match.group(1)) * _DECIMAL[match.group(2)] / 8


def parse_duration_s(text: str) -> float:
    """Parse a duration such as ``"0.3ms"``, ``"5s"`` to seconds. Raises ConfigInvalid."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(us|ms|s|min|h)\s*", text.lower())
    if not match:
        raise ConfigInvalid(f"'{text}' is not a duration", next_step="write it like 0.3ms or 5s")
    return float(match.group(1)) * {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}[match.group(2)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkShape:
    """Properties of a link: a rate, which occupies the link, and a delay, which does not."""

    bytes_per_s: float = math.inf
    one_way_s: float = 0.0
    jitter_s: float = 0.0  # the delay is uniform over [one_way_s, one_way_s + jitter_s); order is kept

    @property
    def ideal(self) -> bool:
        """Whether the link has no limit and no delay."""
        return math.isinf(self.bytes_per_s) and not self.one_way_s and not self.jitter_s

    def upload_s(self, num_bytes: int) -> float:
        """Return the seconds that the bytes occupy the wire."""
        return num_bytes / self.bytes_per_s


_LINKS = {  # rates and delays of home networks; a Wi-Fi's change from packet to packet
    "wifi": "200mbit,2ms,2ms",
    "gigabit": "1gbit,0.3ms",
    "2.5g": "2.5gbit,0.2ms",
    "5g": "5gbit,0.15ms",
    "10g": "10gbit,0.1ms",
    "thunderbolt": "20gbit,0.1ms",  # IP over Thunderbolt 4 reaches half of the cable's rate
}
# Names without their version.
_LINK_ALIASES = {"wlan": "wifi", "1g": "gigabit", "tb": "thunderbolt", "usb": "thunderbolt"}


def named_link(text: str) -> LinkShape | None:
    """Return a kind of link by name: ``wifi``, ``gigabit``, ``2.5g``, ``10g``, ``thunderbolt``; None without one."""
    key = re.sub(r"(?:be|[3-7])$", "", re.sub(r"[\s_-]", "", text.lower()))
    found = _LINKS.get(_LINK_ALIASES.get(key, key))
    return parse_link(found) if found is not None else None


def parse_link(text: str) -> LinkShape:
    """Parse ``"1gbit,0.3ms"``, ``"100mbit,5ms,1ms"`` (with jitter), ``"1gbit"``, ``"wifi"``, ``"ideal"``.

    Raises ConfigInvalid.
    """
    parts = [part.strip() for part in text.lower().split(",")]
    if parts == ["ideal"]:
        return LinkShape()
    if (named := named_link(text)) is not None:
        return named
    try:
        rate = parse_rate(parts[0])
        times = [parse_duration_s(part) for part in parts[1:]]
    except ConfigInvalid as exc:
        raise _no_link(text, exc.what) from exc
    if len(times) > 2 or rate <= 0:
        raise _no_link(text, "the rate is zero" if rate <= 0 else f"it has {len(parts)} parts")
    return LinkShape(bytes_per_s=rate, one_way_s=sum(times[:1]), jitter_s=sum(times[1:]))


def _no_link(text: str, fact: str) -> ConfigInvalid:
    return ConfigInvalid(
        f"'{text}' is not a valid link",
        fact=fact,
        next_step=f"name one ({', '.join(_LINKS)}, ideal), or rate and one-way latency: 1gbit,0.3ms",
    )
