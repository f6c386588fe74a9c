"""Restarts this machine's node as it was started: by its service manager, or with the same flags in the background.

Restarts without RPCs, since the files on the disk may already be those of another version.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from edgepipe.cli.node_process import start_in_background, wait_until_gone
from edgepipe.cli.output import say
from edgepipe.cli.service import read_state, run_command, service_plan, wait_until_answers
from edgepipe.cli.service_plan import ServiceSetup, starts_node_of
from edgepipe.errors import ClusterError, EdgepipeError, FeatureMissing, VersionMismatch

_VALUE_FLAGS = ("--data-dir",)  # the restart names it anew: the node may have another working directory
_OTHERS_FLAGS = ("--json", "--background", "--quiet-when-ready")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningNode:
    """The node of a data directory."""

    data_dir: Path
    process_id: int = 0
    flags: tuple[str, ...] = ()  # flags of 'node start'
    variables: tuple[tuple[str, str], ...] = ()  # EDGEPIPE_* of its environment
    service: ServiceSetup | None = None
    is_child: bool = False  # another program started it and stops it, such as 'edgepipe demo'


def running_node(data_dir: Path) -> RunningNode | None:
    """Find the node that runs with ``data_dir``, or that its service starts just now; None if none does."""
    service = _active_service(data_dir)
    process_id, words, environment = 0, list[str](), dict[str, str]()
    try:
        process_id = int((data_dir / "daemon.lock").read_text(encoding="ascii"))
        process = psutil.Process(process_id)
        words, environment = process.cmdline(), process.environ()
    except (OSError, ValueError, psutil.Error):
        pass  # it does not run, or not yet
    if "start" not in words:  # another program may have got the process id of a node that was killed
        return RunningNode(data_dir=data_dir, service=service) if service is not None else None
    flags = words[words.index("start") + 1 :]
    return RunningNode(
        data_dir=data_dir,
        process_id=process_id,
        flags=kept_flags(flags),
        variables=tuple((name, value) for name, value in environment.items() if name.startswith("EDGEPIPE_")),
        service=service,
        is_child="--end-with-stdin" in flags,
    )


def running_version(data_dir: Path) -> str:
    """Return the version of edgepipe that the node of ``data_dir`` runs; empty if it does not say.

    It differs from the installed one if the files were changed without a restart.
    """
    from edgepipe.cli.admin import ask_node
    from edgepipe.link.admin_client import Admin

    try:
        status = ask_node(data_dir, Admin.status)
    except VersionMismatch:
        return "of another protocol"
    except EdgepipeError:
        return ""
    return next((member.node.edgepipe_version for member in status.members if member.self), "")


def kept_flags(flags: Sequence[str]) -> tuple[str, ...]:
    """Return the flags of ``node start`` that its successor gets, too. PURE."""
    kept: list[str] = []
    rest = iter(flags)
    for flag in rest:
        if flag in _VALUE_FLAGS:
            next(rest, None)
        elif flag not in _OTHERS_FLAGS and not flag.startswith(tuple(f"{name}=" for name in _VALUE_FLAGS)):
            kept.append(flag)
    return tuple(kept)


def restart(node: RunningNode) -> dict[str, Any]:
    """Stop the node in order, start it again. Return the report of a node in the background; empty for a service.

    Raises FeatureMissing if another program has to do it, ClusterError if the node does not stop, start or answer.
    """
    _check_owner(node)
    say("restarting the node; its work moves to other machines first, for at most 30 s")
    if node.service is not None:
        for command in node.service.restart:
            run_command(command)
        wait_until_answers(node.data_dir)
        return {}
    _end(node)
    return start_in_background(node.data_dir, node.flags, name="", variables=dict(node.variables))


def stop_for_service(node: RunningNode) -> None:
    """Stop a node in the background in order, since a service will run it. Raises FeatureMissing, ClusterError."""
    _check_owner(node)
    say("stopping the running node, which the service starts again; its work moves to other machines first")
    if node.flags:
        say(f"the service has its settings, not its flags ({' '.join(node.flags)}): edgepipe config set NAME VALUE")
    _end(node)


def _check_owner(node: RunningNode) -> None:
    if node.is_child:
        raise FeatureMissing(
            "the running node belongs to another program", next_step="restart that one, such as edgepipe demo --serve"
        )


def _end(node: RunningNode) -> None:
    try:
        os.kill(node.process_id, signal.SIGTERM)
    except ProcessLookupError:
        pass  # it has just stopped
    except PermissionError as exc:
        raise ClusterError(
            "the node cannot be stopped", fact="it belongs to another user", next_step="stop it as that user"
        ) from exc
    wait_until_gone(node.data_dir)


def _active_service(data_dir: Path) -> ServiceSetup | None:
    """Return the service that runs the node of ``data_dir``, if one does."""
    for system in (False, True):
        try:
            plan = service_plan(data_dir, system=system)
            text = plan.path.read_text(encoding="utf-8", errors="replace")
        except (OSError, FeatureMissing):
            continue
        if starts_node_of(data_dir, plan.manager, text) and read_state(plan, run_command)["state"] == "active":
            return plan
    return None
