"""Wheels without a network: the project's own, and those that this environment was installed from, packed again."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from email.parser import Parser
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent.parent
_NOT_PACKED = ("INSTALLER", "REQUESTED", "direct_url.json")  # the installer writes them anew


def build_wheel(folder: Path, *, source: Path = ROOT) -> Path:
    """Build the project's wheel from ``source``. Return its path in ``folder``."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source)]
    subprocess.run(build, check=True, timeout=100)
    (wheel,) = folder.glob("edgepipe-*.whl")
    return wheel


def pack_dependencies(folder: Path, *, of: Sequence[str] = ("edgepipe",)) -> None:
    """Write the wheels of everything that these need without extras, and their own, from this environment's files.

    Edgepipe's own wheel is ``build_wheel``'s."""
    for name in sorted({each for top in of for each in _needed(top)} - {"edgepipe"}):
        _pack(metadata.distribution(name), folder)


def later_wheel(wheel: Path, folder: Path, *, version: str) -> Path:
    """Write the same wheel with another version into ``folder``."""
    present = wheel.name.split("-")[1]
    path = folder / wheel.name.replace(present, version)
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if name == "edgepipe/__init__.py" or name.endswith((".dist-info/METADATA", ".dist-info/RECORD")):
                content = content.replace(present.encode(), version.encode())
            new.writestr(name.replace(f"edgepipe-{present}", f"edgepipe-{version}"), content)
    return path


def _needed(name: str) -> set[str]:
    """Return the names of a distribution and all that it needs here."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            lines = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # needed on another system
        found.add(name)
        waiting += [_canonical(line) for line in lines if "extra ==" not in line]
    return found


def _canonical(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None
    return re.sub(r"[-_.]+", "-", match.group()).lower()


def _pack(distribution: metadata.Distribution, folder: Path) -> None:
    facts = Parser().parsestr(distribution.read_text("WHEEL") or "")
    tags = [tag.split("-") for tag in facts.get_all("Tag") or []]
    tag = "-".join(".".join(dict.fromkeys(parts)) for parts in zip(*tags, strict=True))
    name = f"{_canonical(distribution.name).replace('-', '_')}-{distribution.version}-{tag}.whl"
    with zipfile.ZipFile(folder / name, "w") as wheel:
        for file in distribution.files or []:
            if ".." not in file.parts and file.suffix != ".pyc" and file.name not in _NOT_PACKED:
                wheel.write(file.locate(), file.as_posix())
