"""How this edgepipe was installed, and the commands that update or remove it."""

from __future__ import annotations

import json
import re
import shlex
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import edgepipe
from edgepipe.errors import ConfigInvalid, FeatureMissing
from edgepipe.system import find_uv

Command = tuple[str, ...]

RELEASED = False  # like scripts/install.sh: until the first release, the index may have another program of this name


EXTRAS = {"torch": "torch", "mlx": "mlx", "plot": "matplotlib"}
"""The package by which an extra is known to be installed."""


class Installer(Enum):
    """Program that installed edgepipe."""

    UV = "uv"
    PIPX = "pipx"
    PIP = "pip"
    CHECKOUT = "checkout"  # installed as editable: the files of the checkout run


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """Where this edgepipe runs from."""

    installer: Installer
    place: Path  # the environment, or the checkout
    python: Path
    python_version: str  # "3.11"
    extras: tuple[str, ...]  # names from EXTRAS
    needs: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])  # as pip takes them, by extra
    source: str = ""  # URL, folder or file that it was installed from; empty: an index
    checkout: Path | None = None  # folder that it runs from, or was built from
    checkout_exists: bool = True
    has_git: bool = False  # ``git pull`` can renew the checkout
    index: tuple[str, ...] = ()  # options that name the index or folder of wheels that uv remembers
    uv: str = ""  # the program, if it is on this machine
    has_pip: bool = True  # this Python can run pip


def find_installation() -> Installation:
    """Find out how this edgepipe was installed. Raises FeatureMissing if it runs without being installed."""
    prefix = Path(sys.prefix)
    try:
        direct: dict[str, Any] = json.loads(metadata.distribution("edgepipe").read_text("direct_url.json") or "{}")
    except metadata.PackageNotFoundError:
        raise FeatureMissing(
            "this edgepipe is not installed",
            fact=f"it runs from {Path(edgepipe.__file__).parent}",
            next_step="update it as you got it",
        ) from None
    checkout = Path(unquote(urlsplit(str(direct["url"])).path)) if "dir_info" in direct else None
    installer, place = Installer.PIP, prefix
    receipt = prefix / "uv-receipt.toml"
    if checkout is not None and direct["dir_info"].get("editable"):
        installer, place = Installer.CHECKOUT, checkout
    elif receipt.exists():
        installer = Installer.UV
    elif (prefix / "pipx_metadata.json").exists():
        installer = Installer.PIPX
    return Installation(
        installer=installer,
        place=place,
        python=Path(sys.executable).absolute(),
        python_version=f"{sys.version_info.major}.{sys.version_info.minor}",
        extras=tuple(extra for extra, package in EXTRAS.items() if find_spec(package) is not None),
        needs={extra: _needs_of(extra) for extra in EXTRAS},
        source=_source(direct),
        checkout=checkout,
        checkout_exists=checkout is None or checkout.is_dir(),
        has_git=checkout is not None and (checkout / ".git").exists(),
        index=_remembered_index(receipt),
        uv=find_uv(),
        has_pip=find_spec("pip") is not None,
    )


def update_commands(installed: Installation, source: Sequence[str] = (), *, released: bool = RELEASED) -> list[Command]:
    """Return the commands that update edgepipe. PURE.

    ``source``: what ``--from`` names, from ``source_arguments``; empty: where it was installed from.
    Raises ConfigInvalid for a source that this installation cannot take, and without a newer version where it was
    installed from; FeatureMissing without uv.
    """
    if installed.installer is Installer.CHECKOUT and source:
        raise ConfigInvalid(
            f"edgepipe runs from the checkout {installed.place}",
            fact="--from cannot change its files",
            next_step=f"git -C {shlex.quote(str(installed.place))} switch BRANCH, then: edgepipe update",
        )
    pull: list[Command] = []
    if not source:
        _check_source(installed, released=released)
        pull = [("git", "-C", str(installed.checkout), "pull", "--ff-only")] if installed.has_git else []
    match installed.installer:
        case Installer.CHECKOUT:
            return [*pull, *_pip(installed, ("-e", f"{installed.place}{_extras(installed.extras)}"), builds=True)]
        case Installer.UV:
            return [*pull, _uv(installed, source)]
        case Installer.PIPX if not source and not installed.source:
            return [("pipx", "upgrade", "edgepipe")]
        case Installer.PIPX | Installer.PIP:
            builds = not source and installed.checkout is not None
            return [*pull, *_pip(installed, source or _again(installed), builds=builds)]


def extra_commands(installed: Installation, extras: Sequence[str], *, released: bool = RELEASED) -> list[Command]:
    """Return the commands that add extras to edgepipe as it is. PURE.

    pip adds what they need. uv makes the environment anew, from where edgepipe came.
    Raises ConfigInvalid if uv would not find that place, FeatureMissing without uv.
    """
    if installed.installer is not Installer.UV:
        return [(*_installs(installed), *(need for extra in extras for need in installed.needs[extra]))]
    if not installed.source.endswith(".whl"):
        _check_source(installed, released=released)
    return [_uv(replace(installed, extras=tuple(dict.fromkeys((*installed.extras, *extras)))), ())]


def remove_command(installed: Installation) -> str:
    """Return the command that removes the program. PURE."""
    match installed.installer:
        case Installer.UV:
            return "uv tool uninstall edgepipe"
        case Installer.PIPX:
            return "pipx uninstall edgepipe"
        case _ if installed.has_pip:
            return shlex.join((str(installed.python), "-m", "pip", "uninstall", "edgepipe"))
        case _:
            return shlex.join(("uv", "pip", "uninstall", "--python", str(installed.python), "edgepipe"))


def source_arguments(where: str, extras: Sequence[str]) -> list[str]:
    """Return pip's and uv's arguments for ``--from``: a wheel, a folder of wheels, a checkout, git+URL, an index' URL.

    Raises ConfigInvalid if there is no such thing.
    """
    name = f"edgepipe{_extras(extras)}"
    if where.startswith("git+"):
        return [f"{name} @ {where}"]
    if where.startswith(("http://", "https://")):
        return ["--index-url", where, name]
    path = Path(where).expanduser().absolute()
    if path.suffix == ".whl" and path.is_file():
        return [f"{path}{_extras(extras)}"]
    if (path / "edgepipe" / "__init__.py").is_file():
        return [f"{path}{_extras(extras)}"]
    if next(path.glob("edgepipe-*.whl"), None) is not None:
        return ["--no-index", "--find-links", str(path), name]
    raise ConfigInvalid(
        f"'{where}' holds no edgepipe",
        fact="it is neither a wheel, a folder with edgepipe-*.whl, a checkout, git+URL, nor the URL of an index",
        next_step="name one of them: edgepipe update --from WHERE",
    )


def _check_source(installed: Installation, *, released: bool) -> None:
    """Check that a newer version may be where edgepipe was installed from. Raises ConfigInvalid."""
    fact = ""
    if installed.source.endswith(".whl"):
        fact = f"it was installed from the file {installed.source}"
    elif installed.checkout is not None and not installed.checkout_exists:
        fact = f"it was installed from the checkout {installed.checkout}, which is gone"
    elif not installed.source and not installed.index and not released:
        fact = "edgepipe has no release yet; the package index may have another program of this name"
    if fact:
        raise ConfigInvalid(
            "edgepipe does not know where newer versions are",
            fact=fact,
            next_step="name one: edgepipe update --from WHERE",
        )


def _uv(installed: Installation, source: Sequence[str]) -> Command:
    """Install anew rather than 'uv tool upgrade', which forgets which PyTorch fits and fetches the one with CUDA."""
    if not installed.uv:
        raise FeatureMissing("uv installed edgepipe, but is not on this machine", next_step="install uv again")
    words = ["--index" if word == "--index-url" else word for word in source]  # uv asks it first, then PyPI
    words = words or [*installed.index, *_again(installed)]
    torch = ("--torch-backend=auto",) if "torch" in installed.extras and "--no-index" not in words else ()
    options = ("--python", installed.python_version, "--upgrade-package", "edgepipe", "--reinstall-package", "edgepipe")
    return (installed.uv, "tool", "install", *options, *torch, *words)


def _pip(installed: Installation, arguments: Sequence[str], *, builds: bool) -> list[Command]:
    """Install what edgepipe needs now, then edgepipe itself even if its version is the same, as between releases.

    ``builds``: the arguments name a folder, whose files pip always takes anew.
    """
    install = _installs(installed)
    if install[0] == installed.uv:
        return [(*install, "--upgrade-package", "edgepipe", "--reinstall-package", "edgepipe", *arguments)]
    commands: list[Command] = [(*install, "--upgrade", *arguments)]
    if not builds:
        commands.append((*install, "--force-reinstall", "--no-deps", *arguments))
    return commands


def _installs(installed: Installation) -> Command:
    """Return how packages come into the environment. Raises FeatureMissing if nothing can bring them."""
    if installed.installer is Installer.PIPX:
        return ("pipx", "runpip", "edgepipe", "install")
    if installed.has_pip:
        return (str(installed.python), "-m", "pip", "install")
    if installed.uv:
        return (installed.uv, "pip", "install", "--python", str(installed.python))
    raise FeatureMissing(
        "nothing on this machine can update edgepipe", fact="its Python has no pip", next_step="install uv"
    )


def _again(installed: Installation) -> list[str]:
    """Return what pip installs from the same place."""
    name = f"edgepipe{_extras(installed.extras)}"
    return [f"{name} @ {installed.source}"] if installed.source else [name]


def _remembered_index(receipt: Path) -> tuple[str, ...]:
    """Return uv's options for the indexes and folders of wheels that its receipt of an installation names."""
    try:
        options = tomllib.loads(receipt.read_text(encoding="utf-8")).get("tool", {}).get("options", {})
    except (OSError, ValueError):
        return ()
    words = ["--no-index"] if options.get("no-index") else []
    for folder in options.get("find-links", ()):
        words += ["--find-links", str(folder)]
    for index in options.get("index", ()):
        words += ["--default-index" if index.get("default") else "--index", str(index.get("url", ""))]
    return tuple(words)


def _source(direct: dict[str, Any]) -> str:
    """Return the URL of a ``direct_url.json`` (PEP 610) as pip takes it; empty for an index."""
    url = str(direct.get("url", ""))
    if "vcs_info" not in direct:
        return url
    wanted = direct["vcs_info"].get("requested_revision", "")
    return f"{direct['vcs_info']['vcs']}+{url}" + (f"@{wanted}" if wanted else "")


def _needs_of(extra: str) -> list[str]:
    """Return what an extra of the installed version needs, with the conditions that remain."""
    found: list[str] = []
    for text in metadata.requires("edgepipe") or ():
        need, _, condition = text.partition(";")
        rest, count = re.subn(rf"\s*(and\s+)?extra == ['\"]{extra}['\"]", "", condition)
        if count:
            found.append(f"{need.strip()}; {rest.strip()}" if rest.strip() else need.strip())
    return found


def _extras(extras: Sequence[str]) -> str:
    return f"[{','.join(extras)}]" if extras else ""
