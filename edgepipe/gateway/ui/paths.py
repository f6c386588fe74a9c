"""Tells requests of the page from others, and names those that hold nothing private. PURE."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.types import Scope

UI = "/ui/"
FILES = "/ui/page/"  # the page's files
SESSION = "/ui/session"  # takes a ticket instead of a key
_OWN_SITES = frozenset({b"same-origin", b"none"})  # Sec-Fetch-Site of the page itself, and of an address that is typed


def is_page_file(scope: Scope) -> bool:
    """Return whether a request is for the page itself, which holds nothing private and needs no key."""
    if scope["method"] not in ("GET", "HEAD"):
        return False
    return scope["path"].startswith(FILES) or (scope["path"] == "/" and wants_page(scope))


def wants_page(scope: Scope) -> bool:
    """Return whether a browser asks for ``/``; other programs get a line of text, and so does HEAD."""
    accepted = [value for name, value in scope["headers"] if name == b"accept"]
    return scope["method"] == "GET" and any(b"text/html" in value for value in accepted)


def is_foreign(scope: Scope) -> bool:
    """Return whether a browser sends a request below ``UI`` for a page of another origin, as it says itself.

    Such a request may carry no Origin: an image of another site has none.
    """
    headers: Sequence[tuple[bytes, bytes]] = scope["headers"]
    sites = [value for name, value in headers if name == b"sec-fetch-site"]
    return scope["path"].startswith(UI) and any(site not in _OWN_SITES for site in sites)
