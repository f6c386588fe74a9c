"""How this edgepipe was installed, and the commands that update or remove it."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import edgepipe
from edgepipe.errors import ConfigInvalid, FeatureMissing

Command = tuple[str, ...]


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
    extras: tuple[str, ...]  # torch, mlx
    source: str = ""  # URL, folder or file that pip installed from; empty: an index
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
    installer, place = Installer.PIP, prefix
    if direct.get("dir_info", {}).get("editable"):
        installer, place = Installer.CHECKOUT, Path(unquote(urlsplit(str(direct["url"])).path))
    elif (prefix / "uv-receipt.toml").exists():
        installer = Installer.UV
    elif (prefix / "pipx_metadata.json").exists():
        installer = Installer.PIPX
    return Installation(
        installer=installer,
        place=place,
        python=Path(sys.executable).absolute(),
        python_version=f"{sys.version_info.major}.{sys.version_info.minor}",
        extras=tuple(name for name in ("torch", "mlx") if find_spec(name) is not None),
        source=_source(direct),
        uv=shutil.which("uv") or next((str(path) for path in _uv_places() if path.exists()), ""),
        has_pip=find_spec("pip") is not None,
    )


def update_commands(installed: Installation, source: Sequence[str] = ()) -> list[Command]:
    """Return the commands that update edgepipe. PURE.

    ``source``: what ``--from`` names, from ``source_arguments``; empty: where it was installed from.
    Raises ConfigInvalid for a source that this installation cannot take, FeatureMissing without uv.
    """
    match installed.installer:
        case Installer.CHECKOUT if source:
            raise ConfigInvalid(
                f"edgepipe runs from the checkout {installed.place}",
                fact="--from cannot change its files",
                next_step=f"git -C {shlex.quote(str(installed.place))} switch BRANCH, then: edgepipe update",
            )
        case Installer.CHECKOUT:
            editable = ("-e", f"{installed.place}{_extras(installed.extras)}")
            return [("git", "-C", str(installed.place), "pull", "--ff-only"), _pip(installed, editable)]
        case Installer.UV:
            if not installed.uv:
                raise FeatureMissing("uv installed edgepipe, but is not on this machine", next_step="install uv again")
            if not source:
                return [(installed.uv, "tool", "upgrade", "--reinstall-package", "edgepipe", "edgepipe")]
            options = ("--python", installed.python_version, "--reinstall-package", "edgepipe")
            source = ["--index" if word == "--index-url" else word for word in source]  # uv asks it first, then PyPI
            torch = ("--torch-backend=auto",) if "torch" in installed.extras and "--no-index" not in source else ()
            return [(installed.uv, "tool", "install", *options, *torch, *source)]
        case Installer.PIPX if not source:
            return [("pipx", "upgrade", "edgepipe")]
        case Installer.PIPX:
            return [("pipx", "runpip", "edgepipe", "install", "--upgrade", *source)]
        case Installer.PIP:
            return [_pip(installed, source or _again(installed))]


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


def _pip(installed: Installation, arguments: Sequence[str]) -> Command:
    if installed.has_pip:
        return (str(installed.python), "-m", "pip", "install", "--upgrade", *arguments)
    if not installed.uv:
        raise FeatureMissing(
            "nothing on this machine can update edgepipe", fact="its Python has no pip", next_step="install uv"
        )
    options = ("--upgrade-package", "edgepipe", "--reinstall-package", "edgepipe")
    return (installed.uv, "pip", "install", "--python", str(installed.python), *options, *arguments)


def _again(installed: Installation) -> list[str]:
    """Return what pip installs from the same place. Raises ConfigInvalid for a file, which has no newer version."""
    name = f"edgepipe{_extras(installed.extras)}"
    if not installed.source:
        return [name]
    if installed.source.endswith(".whl"):
        raise ConfigInvalid(
            "edgepipe was installed from a file",
            fact=installed.source,
            next_step="name the new version: edgepipe update --from WHEEL",
        )
    return [f"{name} @ {installed.source}"]


def _source(direct: dict[str, Any]) -> str:
    """Return the URL of a ``direct_url.json`` (PEP 610) as pip takes it; empty for an index."""
    url = str(direct.get("url", ""))
    if "vcs_info" not in direct:
        return url
    wanted = direct["vcs_info"].get("requested_revision", "")
    return f"{direct['vcs_info']['vcs']}+{url}" + (f"@{wanted}" if wanted else "")


def _extras(extras: Sequence[str]) -> str:
    return f"[{','.join(extras)}]" if extras else ""


def _uv_places() -> list[Path]:
    return [Path.home() / ".local/bin/uv", Path.home() / ".cargo/bin/uv"]
