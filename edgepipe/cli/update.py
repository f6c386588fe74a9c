"""``edgepipe update``: a newer version in place of this one, then the node again."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from edgepipe.cli.options import DataDir, data_dir_of
from edgepipe.errors import ConfigInvalid, FeatureMissing
from edgepipe.plain_words import plain

_FACTS = """
import hashlib, importlib.metadata, importlib.util, pathlib, edgepipe
digest = hashlib.sha256()
for name in ("edgepipe", "edgepipe_torch", "edgepipe_mlx", "edgepipe_emulated"):
    spec = importlib.util.find_spec(name)
    for file in sorted(pathlib.Path(spec.origin).parent.rglob("*.*")) if spec else ():
        if file.suffix in (".py", ".js", ".css", ".html", ".json"):
            digest.update(file.read_bytes())
for found in sorted((each.name or "", each.version) for each in importlib.metadata.distributions()):
    digest.update(repr(found).encode())
print(edgepipe.__version__, edgepipe.PROTOCOL_VERSION, digest.hexdigest())
"""
_FACTS_S = 60.0


@dataclass(frozen=True, slots=True)
class _Installed:
    """What lies on the disk now."""

    version: str
    protocol: str
    digest: str  # covers edgepipe's files and the versions of all that it needs


def update(
    source: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="WHERE",
            help="A wheel, a folder of wheels, a checkout, git+URL, or an index.  [default: as it was installed]",
        ),
    ] = "",
    extra: Annotated[
        list[str] | None,
        typer.Option("--extra", metavar="NAME", help="Add torch, mlx or plot to this version, instead of a newer one."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands; change nothing.")] = False,
    data_dir: DataDir = None,
) -> None:
    """Update edgepipe as it was installed, then restart the node."""
    from edgepipe.cli.installation import EXTRAS, extra_commands, find_installation, source_arguments, update_commands
    from edgepipe.cli.restarting import (
        restart,
        running_node,
        running_version,
    )  # now: later, its file may be that of the new version

    folder = data_dir_of(data_dir)
    installed = find_installation()
    if extra:
        _check_extras(extra, EXTRAS, source)
        commands = extra_commands(installed, extra)
    else:
        commands = update_commands(installed, source_arguments(source, installed.extras) if source else ())
    node = running_node(folder)
    running = running_version(folder) if node is not None else ""
    before = _installed()
    built = installed.checkout not in (None, installed.place)
    print(
        f"edgepipe {before.version}, installed with {installed.installer.value} in {installed.place}"
        + (f", from the checkout {installed.checkout}" if built else "")
    )
    if dry_run:
        print("would run:")
        for command in commands:
            print(f"  {shlex.join(command)}")
        print("would then restart the node" if node is not None else "no node runs that would be restarted")
        return
    for command in commands:
        _run(command)
    after = _installed()
    if after == before:
        newest = "has this already" if extra else "is the newest version there"
        print(f"nothing has changed: edgepipe {before.version} {newest}")
        if running in ("", after.version):
            return
        print(f"the node still runs edgepipe {running}")
    elif extra:
        print(f"edgepipe {after.version} has {', '.join(extra)} now")
    elif after.version == before.version:
        print(f"edgepipe {after.version} is installed; its files are newer than before")
    else:
        print(f"edgepipe {after.version} is installed (before: {before.version})")
    if after.protocol != before.protocol:
        print(f"it speaks protocol {after.protocol}, not {before.protocol}: update the other machines, too")
    if node is not None:
        ready = restart(node)
        print(f"the node runs again, at {ready['address']}" if ready else "the node runs again, as a service")


def _check_extras(extras: Sequence[str], known: Collection[str], source: str) -> None:
    """Raise ConfigInvalid for an extra that does not exist, or one beside another source."""
    if unknown := sorted(set(extras) - set(known)):
        raise ConfigInvalid(f"there is no extra '{unknown[0]}'", next_step=f"choose among {', '.join(known)}")
    if source:
        raise ConfigInvalid(
            "--extra and --from contradict each other", next_step="edgepipe update --from WHERE, then add the extra"
        )


def _installed() -> _Installed:
    """Read the facts with a process of its own: this one has the modules of the version before."""
    command = [sys.executable, "-P", "-c", _FACTS]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_FACTS_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        done = None
    if done is None or done.returncode != 0:
        raise FeatureMissing(
            "edgepipe cannot be started any more",
            fact=(done.stderr.strip().splitlines() or [""])[-1] if done else f"{sys.executable} does not answer",
            next_step="install it again, as at first",
        )
    version, protocol, digest = done.stdout.split()
    return _Installed(version, protocol, digest)


def _run(command: tuple[str, ...]) -> None:
    """Run a command whose output people see. Raises FeatureMissing if it fails; the running node goes on."""
    print(f"> {shlex.join(command)}", flush=True)
    try:
        status = subprocess.run(command, check=False, cwd=Path.home()).returncode
    except OSError as exc:
        raise FeatureMissing(
            f"'{command[0]}' cannot be run", fact=plain(exc), next_step=f"install {command[0]}, then try again"
        ) from exc
    if status != 0:
        raise FeatureMissing(
            "edgepipe was not updated",
            fact=f"the command above ended with exit code {status}; a running node goes on",
            next_step="edgepipe update again, or --from WHERE",
        )
