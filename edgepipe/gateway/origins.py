"""Web origins (PURE): which web pages and desktop programs may ask, and the headers that their browsers need (CORS).

A browser names the origin of a page in the header ``Origin``. It sends many requests before it knows whether the server
allows them, so the guard refuses a request of another origin before any work.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

Headers = Sequence[tuple[bytes, bytes]]

_SHOWN = re.compile(r"null|[a-z][a-z0-9+.-]{0,31}://[a-z0-9_.:\[\]-]{0,253}")
_HEADER_NAMES = re.compile(r"[a-z0-9!#$%&'*+.^_`|~, -]{1,2048}", re.IGNORECASE)
_WEB = {"http": ":80", "https": ":443"}  # default ports, which origins leave out
_METHODS = "GET, HEAD, POST"
_KEPT_S = 600  # time for which a browser remembers an answer about an origin


class Origins:
    """Origins that may ask besides the node's own pages."""

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        """``patterns``: origins, or ``*`` for any, ``SCHEME://*``, ``SCHEME://*.HOST``, ``SCHEME://HOST:*``."""
        parts = [".*" if each == "*" else re.escape(_plain(each)).replace(r"\*", "[^/]*") for each in patterns]
        self._any = re.compile("|".join(parts) or "(?!)")

    def allow(self, origin: str) -> bool:
        """Return whether a page of this origin may ask."""
        return self._any.fullmatch(_plain(origin)) is not None


def is_own(origin: str, *, host: str) -> bool:
    """Return whether a page comes from the host and port that the request asks. ``host``: of the header ``Host``."""
    scheme, _, asked = _plain(origin).partition("://")
    return scheme in _WEB and asked == _plain(f"{scheme}://{host.strip()}").partition("://")[2]


def shown(origin: str) -> str:
    """Return an origin for a message, or an empty text if it has the form of none."""
    return origin if _SHOWN.fullmatch(origin) else ""


def is_preflight(method: str, headers: Headers) -> bool:
    """Return whether a browser asks whether it may send a request."""
    return method == "OPTIONS" and _value(headers, b"access-control-request-method") != ""


def cors_headers(origin: str) -> Mapping[str, str]:
    """Return the headers of every answer to an allowed origin."""
    return {
        "access-control-allow-origin": origin,
        "access-control-expose-headers": "x-request-id, retry-after",
        "vary": "Origin",
    }


def preflight_headers(headers: Headers) -> Mapping[str, str]:
    """Return the further headers of the answer to a preflight: all that the browser asks for."""
    names = _value(headers, b"access-control-request-headers")
    allowed = names if _HEADER_NAMES.fullmatch(names) else "authorization, content-type"
    private = _value(headers, b"access-control-request-private-network") == "true"
    return {
        "access-control-allow-methods": _METHODS,
        "access-control-allow-headers": allowed,
        "access-control-max-age": str(_KEPT_S),
        **({"access-control-allow-private-network": "true"} if private else {}),
    }


def _value(headers: Headers, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in headers if key == name), "")


def _plain(origin: str) -> str:
    """Return an origin in lower case, without its scheme's default port."""
    origin = origin.strip().lower()
    return origin.removesuffix(_WEB.get(origin.partition("://")[0], ""))
