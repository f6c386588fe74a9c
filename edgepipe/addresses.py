"""HOST:PORT as one text, with brackets around a host of IPv6 (RFC 3986, section 3.2.2); addresses of one machine."""

from __future__ import annotations

import ipaddress


def with_port(host: str, port: int) -> str:
    """Join a host and a port."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_and_port(address: str) -> tuple[str, str]:
    """Split HOST:PORT; the host without brackets. Both are empty or wrong if the text is no address."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), port


def host_maybe_port(text: str) -> tuple[str, str]:
    """Split HOST or HOST:PORT as people type them; the port is empty without one. An address of IPv6 needs brackets
    only before a port."""
    if text.count(":") > 1 and not text.startswith("["):
        return text, ""
    if text.startswith("[") and text.endswith("]"):
        return text[1:-1], ""
    return host_and_port(text) if ":" in text else (text, "")


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address of IPv4 or IPv6. False for a name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
