"""No text of gRPC, pip, the system or Python reaches a screen or an answer of the API."""

from __future__ import annotations

import ast
import errno
import importlib
import json
import re
import socket
import ssl
import tomllib
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import grpc
import grpc.aio
import httpx
import pytest

import edgepipe
from edgepipe.cli.output import print_bug
from edgepipe.errors import ModelInvalid, all_errors
from edgepipe.gateway.context import prompt_too_long
from edgepipe.link.channels import from_rpc_error
from edgepipe.plain_words import plain, plain_fetch
from edgepipe.weights.gguf_header import read_gguf_header

_PACKAGE = Path(edgepipe.__file__).parent
_SOURCES = (_PACKAGE, _PACKAGE.parent / "backends")
_TRANSLATORS = ("plain", "plain_call", "plain_fetch", "from_rpc_error")


@cache
def _modules() -> list[tuple[Path, list[ast.ClassDef], list[ast.ExceptHandler]]]:
    """Classes and handlers of each module."""
    found: list[tuple[Path, list[ast.ClassDef], list[ast.ExceptHandler]]] = []
    for path in (path for folder in _SOURCES for path in sorted(folder.rglob("*.py")) if "_pb2" not in path.name):
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
        found.append((path, classes, [node for node in nodes if isinstance(node, ast.ExceptHandler)]))
    return found


def _own_exceptions() -> set[str]:
    """Names of exceptions that edgepipe defines: their texts are written for people."""
    names = {cls.__name__ for cls in all_errors()}
    for _, classes, _ in _modules():
        names |= {
            node.name
            for node in classes
            if any("Error" in ast.unparse(b) or "Exception" in ast.unparse(b) for b in node.bases)
        }
    return names


def _untranslated(node: ast.AST, name: str) -> bool:
    """Whether ``name`` is used below ``node`` outside a call of a translator."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in _TRANSLATORS:
        return False
    if isinstance(node, ast.Attribute) and node.attr in (
        "errno",
        "filename",
        "lineno",
        "colno",
        "count",
        "name",
        "start",
    ):
        return False
    if isinstance(node, ast.Name) and node.id == name:
        return True
    return any(_untranslated(child, name) for child in ast.iter_child_nodes(node))


def _leaks() -> list[str]:
    own = _own_exceptions()
    errors = {cls.__name__ for cls in all_errors()}
    found: list[str] = []
    for path, _, handlers in _modules():
        for handler in handlers:
            if handler.name is None or handler.type is None:
                continue
            kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
            if all(ast.unparse(kind).split(".")[-1] in own for kind in kinds):
                continue
            for call in (node for node in ast.walk(handler) if isinstance(node, ast.Call)):
                parts = [*call.args, *(word.value for word in call.keywords)]
                if (
                    isinstance(call.func, ast.Name)
                    and call.func.id in errors
                    and any(_untranslated(part, handler.name) for part in parts)
                ):
                    found.append(f"{path.relative_to(_PACKAGE.parent)}:{call.lineno}")
    return found


def test_no_error_shows_the_text_of_an_exception_that_is_not_edgepipes() -> None:
    leaks = _leaks()
    assert not leaks, "\n".join(leaks)


_FOREIGN = re.compile(
    r"errno|Exception|Error\b|Traceback|grpc|StatusCode|UNAVAILABLE|UNKNOWN|RPC|ipv4:|\bpip\b|urllib3|httpx|b'|site-packages|0x[0-9a-f]|"
    r"No matching|Expecting|codec"
)


def _http_error(kind: type[httpx.TransportError], cause: OSError) -> Exception:
    """An error as httpx raises it, caused by one of the system."""
    error = kind(str(cause), request=httpx.Request("GET", "https://huggingface.co/api"))
    error.__cause__ = cause
    return error


def _of(action: Callable[[], object]) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        action()
    return caught.value


def _status(code: int) -> Exception:
    response = httpx.Response(code, request=httpx.Request("GET", "https://huggingface.co/api"))
    return _of(response.raise_for_status)  # type: ignore[return-value]


_NO_NAME = socket.gaierror(-3, "Temporary failure in name resolution")
_CASES: dict[str, tuple[Callable[[], BaseException], str]] = {
    "no DNS": (lambda: _NO_NAME, "no internet: the host's name cannot be looked up"),
    "no DNS, through httpx": (lambda: _http_error(httpx.ConnectError, _NO_NAME), "no internet"),
    "no DNS, in httpx's text": (lambda: httpx.ConnectError("[Errno -2] Name or service not known"), "no internet"),
    "refused, in httpx's text": (lambda: httpx.ConnectError("[Errno 111] Connection refused"), "no program listens"),
    "certificate, in httpx's text": (
        lambda: httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed (_ssl.c:1000)"),
        "its certificate is not trusted",
    ),
    "refused": (lambda: ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), "no program listens there"),
    "reset": (lambda: ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), "closed the connection"),
    "no route": (lambda: OSError(errno.EHOSTUNREACH, "No route to host"), "no way leads there"),
    "cable out": (lambda: OSError(errno.ENETUNREACH, "Network is unreachable"), "this machine has no network"),
    "silent": (lambda: TimeoutError(), "no answer came in time"),
    "silent, through httpx": (lambda: httpx.ReadTimeout(""), "no answer came in time"),
    "disk full": (lambda: OSError(errno.ENOSPC, "No space left on device", "/m/x"), "the disk is full: /m/x"),
    "not permitted": (lambda: PermissionError(errno.EACCES, "Permission denied", "/m/x"), "no permission: /m/x"),
    "missing": (lambda: FileNotFoundError(errno.ENOENT, "No such file or directory", "/m/x"), "it is missing: /m/x"),
    "certificate": (lambda: ssl.SSLCertVerificationError(1, "CERTIFICATE_VERIFY_FAILED"), "login page or a proxy"),
    "no TLS": (lambda: ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number"), "encrypted connection"),
    "HTTP 429": (lambda: _status(429), "it answered with status 429 (too many requests)"),
    "HTTP 599": (lambda: _status(599), "it answered with status 599"),
    "JSON": (lambda: _of(lambda: json.loads('{"a": }')), "its JSON breaks off or is wrong at line 1, column 7"),
    "TOML": (lambda: _of(lambda: tomllib.loads("a = = 1")), "its TOML is wrong at line 1, column 5"),
    "bytes": (lambda: _of(lambda: b"\x83\xff".decode()), "it is not UTF-8 text"),
    "cut zip": (lambda: zipfile.BadZipFile("File is not a zip file"), "no zip archive"),
    "import": (lambda: _of(lambda: importlib.import_module("no_such_thing")), "package 'no_such_thing' is missing"),
    "end of file": (lambda: EOFError("Compressed file ended"), "it ends early"),
    "memory": (MemoryError, "no memory is left"),
    "depth": (lambda: RecursionError("maximum recursion depth exceeded"), "nested too deeply"),
    "CUDA memory": (lambda: RuntimeError("CUDA error: out of memory at 0x7f"), "no memory is left on the device"),
    "CUDA": (lambda: RuntimeError("CUDA error: an illegal memory access"), "the GPU, or its driver, failed"),
    "key": (lambda: KeyError("x"), "a part of it is missing"),
    "several": (lambda: ExceptionGroup("unhandled errors in a TaskGroup (1 sub-exception)", [_NO_NAME]), "no internet"),
    "a bug": (lambda: AttributeError("'NoneType' object has no attribute 'x'"), "an unforeseen fault"),
}


@pytest.mark.parametrize("name", _CASES)
def test_an_error_of_the_system_a_library_or_python_reads_plainly(name: str) -> None:
    make, wanted = _CASES[name]
    words = plain(make())
    assert wanted in words
    assert not _FOREIGN.search(words)


_CALLS = {
    ("UNAVAILABLE", "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.2:7117: Failed to connect to "
     "remote host: connect: Connection refused (111)"): "no program listens there",
    ("UNAVAILABLE", "failed to connect to all addresses; UNAVAILABLE: No route to host (113)"): "no way leads there",
    ("UNAVAILABLE", "ping timeout"): "it fell silent in the middle of the call",
    ("UNAVAILABLE", "Socket closed"): "the other side closed the connection",
    ("UNAVAILABLE", "recvmsg:Connection reset by peer"): "the other side closed the connection",
    ("UNAVAILABLE", "FD Shutdown"): "the other side closed the connection",
    ("DEADLINE_EXCEEDED", "Deadline Exceeded"): "no answer came in time",
    ("UNKNOWN", "Unexpected <class 'KeyError'>: 'x'"): "the process there failed",
    ("INTERNAL", "Internal error from Core"): "the call had ended before its message was written",
    ("INTERNAL", "Received RST_STREAM with error code 2"): "the process there failed",
    ("UNIMPLEMENTED", "Method not found!"): "another version of edgepipe",
    ("RESOURCE_EXHAUSTED", "CLIENT: Received message larger than max (5 vs. 4)"): "too large",
}  # fmt: skip


@pytest.mark.parametrize(("status", "details"), _CALLS)
def test_a_failed_call_reads_plainly(status: str, details: str) -> None:
    call = grpc.aio.AioRpcError(grpc.StatusCode[status], grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)
    error = from_rpc_error(call, peer="studio")
    assert _CALLS[status, details] in error.fact
    assert "studio" in error.what
    assert not _FOREIGN.search(str(error).replace("process", ""))


def test_pip_that_finds_no_internet_reads_plainly() -> None:
    lines = [
        "WARNING: Retrying (Retry(total=0)) after connection broken by "
        "'NewConnectionError(<pip._vendor.urllib3 at 0x7f>: Failed to establish a new connection: "
        "[Errno -3] Temporary failure in name resolution')': /simple/x/",
        "ERROR: Could not find a version that satisfies the requirement x (from versions: none)",
        "ERROR: No matching distribution found for x",
    ]
    assert plain_fetch(lines) == "no internet: the host's name cannot be looked up"
    assert plain_fetch(lines[1:]) == "no internet, or a package index without it"
    assert not _FOREIGN.search(plain_fetch(["ERROR: something else"]).replace("pip failed", ""))


def test_an_unforeseen_error_of_a_command_shows_no_python(capsys: pytest.CaptureFixture[str]) -> None:
    print_bug(KeyError("secret"))
    shown = capsys.readouterr().err
    assert "edgepipe made a mistake" in shown
    assert "edgepipe --debug" in shown
    assert not _FOREIGN.search(shown)


def test_a_file_that_is_no_gguf_is_named_without_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"\x83\xff\x00\x01" * 10)
    with pytest.raises(ModelInvalid) as caught:
        read_gguf_header(path)
    assert "does not begin with 'GGUF'" in str(caught.value)
    assert not _FOREIGN.search(str(caught.value))


def test_a_prompt_that_is_too_long_shows_both_numbers() -> None:
    assert "219 tokens; context 200" in str(prompt_too_long(219, 200))
