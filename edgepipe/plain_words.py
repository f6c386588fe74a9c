"""PURE. Say in plain words what the system, gRPC, pip, an HTTP library or Python reported.

The only place that translates: no text of theirs reaches a screen or an answer of the API. ``edgepipe --debug`` and the
logs show the originals.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator
from http import HTTPStatus
from json import JSONDecodeError

_NO_NAMES = "no internet: the host's name cannot be looked up"
_SILENT = "no answer came in time"
_REFUSED = "no program listens there"
_CUT = "the other side closed the connection"
_NO_WAY = "no way leads there: is that machine on, and on this network?"
_OFFLINE = "this machine has no network"
_UNTRUSTED = "its certificate is not trusted: is there a login page or a proxy on this network?"
_NOT_TLS = "the encrypted connection failed"
_UNKNOWN = "an unforeseen fault; 'edgepipe logs' has the details"

_SYSTEM: dict[int, str] = {
    errno.ENOENT: "it is missing",
    errno.EACCES: "this user has no permission",
    errno.EPERM: "the system does not permit it",
    errno.EEXIST: "it exists already",
    errno.ENOTDIR: "a part of its path is no folder",
    errno.EISDIR: "it is a folder",
    errno.ENOTEMPTY: "the folder is not empty",
    errno.ELOOP: "it is a link, or links to itself",
    errno.ENAMETOOLONG: "the name is too long",
    errno.EROFS: "the disk is read-only",
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "this user's share of the disk is full",
    errno.EIO: "the disk fails",
    errno.ESTALE: "the network disk is gone",
    errno.EBUSY: "another program uses it",
    errno.EMFILE: "too many files are open",
    errno.ENFILE: "too many files are open on this machine",
    errno.ENOMEM: "no memory is left",
    errno.EAGAIN: "the system has no room for it now",
    errno.EADDRINUSE: "another program uses the port",
    errno.EADDRNOTAVAIL: "this machine does not have that address",
    errno.ECONNREFUSED: _REFUSED,
    errno.ECONNRESET: _CUT,
    errno.ECONNABORTED: _CUT,
    errno.EPIPE: _CUT,
    errno.ENOTCONN: _CUT,
    errno.ETIMEDOUT: _SILENT,
    errno.EHOSTUNREACH: _NO_WAY,
    errno.EHOSTDOWN: _NO_WAY,
    errno.ENETUNREACH: _OFFLINE,
    errno.ENETDOWN: _OFFLINE,
}

# Subclasses of OSError whose number says less than their class.
_OS_KINDS: dict[str, str] = {
    "gaierror": _NO_NAMES,
    "SSLCertVerificationError": _UNTRUSTED,
    "SSLError": _NOT_TLS,
    "TimeoutError": _SILENT,
}

# Classes of httpx, httpcore and requests, by name: neither is imported here. The first that is in a chain counts.
_HTTP: dict[str, str] = {
    "ConnectTimeout": _SILENT,
    "ReadTimeout": _SILENT,
    "WriteTimeout": _SILENT,
    "PoolTimeout": _SILENT,
    "ConnectError": "no connection came about",
    "ReadError": _CUT,
    "WriteError": _CUT,
    "CloseError": _CUT,
    "RemoteProtocolError": _CUT,
    "ProxyError": "the proxy of this network does not pass it on",
    "TooManyRedirects": "the address leads in a circle",
    "DecodingError": "the answer is damaged",
    "UnsupportedProtocol": "the address does not begin with http:// or https://",
    "InvalidURL": "it is no address",
}
_HTTP_LIBRARIES = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "h11")

# What gRPC's details say of a broken or refused connection, in the order in which they are tried.
_CONNECTION: tuple[tuple[str, str], ...] = (
    ("connection refused", _REFUSED),
    ("no such file", _REFUSED),
    ("no route to host", _NO_WAY),
    ("host is down", _NO_WAY),
    ("network is unreachable", _OFFLINE),
    ("ping timeout", "it fell silent in the middle of the call"),
    ("keepalive", "it fell silent in the middle of the call"),
    ("certificate", "its certificate is not the expected one"),
    ("handshake", "the encrypted connection failed"),
    ("dns", _NO_NAMES),
    ("timed out", _SILENT),
    ("timeout", _SILENT),
    ("failed to connect", "no connection came about"),
)
_CALLS: dict[str, str] = {
    "DEADLINE_EXCEEDED": _SILENT,
    "CANCELLED": "the call was cancelled",
    "UNIMPLEMENTED": "it does not know this call: another version of edgepipe runs there",
    "PERMISSION_DENIED": "it does not admit this machine",
    "UNAUTHENTICATED": "it does not admit this machine",
    "RESOURCE_EXHAUSTED": "it has too much to do, or the message is too large",
}
_ENDED_FIRST = "the call had ended before its message was written, and why was not told"
_FAILED_THERE = "the process there failed; 'edgepipe logs' on that machine says more"

# Exceptions by the name of their class; a bare Exception comes from the library 'tokenizers'.
_PYTHON: dict[str, str] = {
    "EOFError": "it ends early",
    "IncompleteReadError": "it ends early",
    "MemoryError": "no memory is left",
    "RecursionError": "it is nested too deeply",
    "BadZipFile": "it is no zip archive, or a damaged one",
    "DecodeError": "it is damaged, or of another version",
    "KeyError": "a part of it is missing",
    "TypeError": "a value in it is of the wrong kind",
    "ValueError": "a value in it is wrong",
    "TimeoutExpired": _SILENT,
    "Exception": "the library that reads it does not accept it",
    "PanicException": "the library that reads it gave up",
}

# What torch and MLX say, whose errors are plain RuntimeErrors.
_DEVICE: tuple[tuple[str, str], ...] = (
    ("out of memory", "no memory is left on the device"),
    ("alloc", "no memory is left on the device"),
    ("cuda", "the GPU, or its driver, failed"),
    ("metal", "the GPU, or its driver, failed"),
)

_PIP: tuple[tuple[str, str], ...] = (
    ("no space left", "the disk is full"),
    ("certificate", _UNTRUSTED),
    ("name resolution", _NO_NAMES),
    ("name or service not known", _NO_NAMES),
    ("nodename nor servname", _NO_NAMES),
    ("getaddrinfo", _NO_NAMES),
    ("connection refused", "the package index, or this network's proxy, refuses connections"),
    ("unreachable", _OFFLINE),
    ("proxy", "the proxy of this network does not pass it on"),
    ("timed out", "the package index does not answer"),
    ("timeout", "the package index does not answer"),
    ("no module named pip", "this Python has no pip"),
    ("hash", "what arrived is damaged"),
    ("no matching distribution", "no internet, or a package index without it"),
)


def plain(error: BaseException) -> str:
    """Say in a few words what an exception means: of the system, of an HTTP library, of Python."""
    if type(error).__module__.split(".")[0].startswith("edgepipe"):
        return str(error)  # written for people
    for cause in _chain(error):
        if words := _words(cause):
            return words
    return _UNKNOWN


def plain_call(status: str, details: str) -> str:
    """Say what a failed gRPC call means, from its status (``UNAVAILABLE``) and its details."""
    if status == "UNAVAILABLE":
        return _first(_CONNECTION, details) or _CUT
    if status == "INTERNAL" and details == "Internal error from Core":  # gRPC in this process failed, not the far side
        return _ENDED_FIRST
    return _CALLS.get(status, _FAILED_THERE)


def plain_fetch(lines: Iterable[str]) -> str:
    """Say why pip fetched no package, from what it printed."""
    return _first(_PIP, "\n".join(lines)) or "the package index does not have it, or pip failed"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield what began an error before what it became: the cause is more exact."""
    found: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in found and len(found) < 20:
        found.append(current)
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return reversed(found)


def _words(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        parts: tuple[BaseException, ...] = error.exceptions  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        return next((words for part in parts if (words := _words(part))), "")
    if isinstance(error, OSError):
        return _of_system(error)
    if status := _http_status(error):
        return status
    if type(error).__module__.split(".")[0] in _HTTP_LIBRARIES:
        return _of_http(error)
    return _of_python(error)


def _of_system(error: OSError) -> str:
    kinds = [kind.__name__ for kind in type(error).__mro__]  # names suffice: pure modules import neither socket nor ssl
    if words := next((_OS_KINDS[kind] for kind in kinds if kind in _OS_KINDS), ""):
        return words
    if status := _http_status(error):  # the hub's library makes its errors OSErrors
        return status
    if not error.errno:
        return ""
    words = _SYSTEM.get(error.errno, os.strerror(error.errno).lower())
    return f"{words}: {error.filename}" if isinstance(error.filename, str) else words


def _of_http(error: BaseException) -> str:
    """Translate an HTTP library's error; some keep the system's number in their text only."""
    text = str(error)
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return _UNTRUSTED
    if number := re.search(r"\[Errno (-?\d+)\]", text):
        code = int(number.group(1))
        return _NO_NAMES if code < 0 or "servname" in text else _SYSTEM.get(code, _HTTP.get(type(error).__name__, ""))
    return _HTTP.get(type(error).__name__, "")


def _http_status(error: BaseException) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if not isinstance(status, int):
        return ""
    phrase = next((each.phrase.lower() for each in HTTPStatus if each == status), "")
    return f"it answered with status {status}" + (f" ({phrase})" if phrase else "")


def _of_python(error: BaseException) -> str:
    if isinstance(error, JSONDecodeError):
        return f"its JSON breaks off or is wrong at line {error.lineno}, column {error.colno}"
    if type(error).__name__ == "TOMLDecodeError":
        place = re.search(r"at (line \d+, column \d+)", str(error))
        return f"its TOML is wrong at {place.group(1) if place else 'its end'}"
    if isinstance(error, UnicodeError):
        return "it is not UTF-8 text"
    if isinstance(error, ImportError):
        return f"the Python package '{error.name}' is missing or damaged" if error.name else ""
    if isinstance(error, RuntimeError) and (words := _first(_DEVICE, str(error))):
        return words
    if isinstance(error, ValueError) and "integer string conversion" in str(error):
        return "a number in it has too many digits"
    return _PYTHON.get(type(error).__name__, "")


def _first(table: tuple[tuple[str, str], ...], text: str) -> str:
    lowered = text.lower()
    return next((words for part, words in table if part in lowered), "")
