"""Output of ``edgepipe`` without a verb: this machine's node, cluster and models, and the next commands."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from edgepipe import __version__
from edgepipe.cli.output import say
from edgepipe.safe_text import one_line

if TYPE_CHECKING:
    from edgepipe.wire.nodes import ClusterStatus


def overview() -> None:
    """Print the node, the models and the next commands on one screen. Missing parts are shown, not errors."""
    from edgepipe.config import load_config
    from edgepipe.daemon.machine.data_dir import home_name

    config = load_config().values
    print(f"edgepipe {__version__} · one language model over the machines you already own\n")
    status = _status(config.data_dir)
    home = "" if status is not None else home_name(config.data_dir)
    facts = _node_facts(status, home) + _model_facts(config.models_dir)
    for label, text in facts:
        say(one_line(text), first=f"  {label:<8}")
    print("\nnext")
    for command, why in _next_steps(status, home):
        say(why, first=f"  {command:<28}")
    print("\nall commands: edgepipe --help")


def _status(data_dir: Path) -> ClusterStatus | None:
    """Return the cluster as the running node sees it, or None. Imports gRPC only if the node's socket exists."""
    from edgepipe.daemon.machine.data_dir import socket_path

    if not socket_path(data_dir).exists():
        return None
    from edgepipe.cli.admin import run_async, status_if_running

    return run_async(status_if_running(data_dir))


def _node_facts(status: ClusterStatus | None, home: str) -> list[tuple[str, str]]:
    if status is None:
        return [("node", f"belongs to '{home}', but does not run" if home else "not running on this machine")]
    own = next((member.node for member in status.members if member.self), None)
    alive = sum(member.state == "alive" for member in status.members)
    served = sorted({engine.model for engine in status.engines if engine.state == "ready"})
    name = own.name if own else "this machine"
    facts = [
        ("node", f"'{name}' runs in cluster '{status.cluster_name}', {alive} node{'s' * (alive != 1)}"),
        ("served", ", ".join(served) or "no model yet"),
    ]
    if own and served:
        facts.append(("API", f"http://127.0.0.1:{own.http_port}/v1"))
    return facts


def _model_facts(models_dir: Path) -> list[tuple[str, str]]:
    try:
        folders = [path.name for path in models_dir.iterdir() if not path.name.startswith(".")]
        names = sorted({name.partition("@")[0].replace("--", "/") for name in folders})  # a hash follows the @
    except OSError:
        names = []
    return [("models", ", ".join(names) if names else "none on this disk")]


def _next_steps(status: ClusterStatus | None, home: str) -> list[tuple[str, str]]:
    demo = ("edgepipe demo", "two nodes and a small model on this machine")
    if home:
        return [("edgepipe node start", f"start this machine's node in '{home}'"), ("edgepipe doctor", "find problems")]
    if status is None:
        setup = ("edgepipe setup", "make this machine a node, step by step")
        return [demo, setup, ("edgepipe node start", "start a node without questions")]
    if any(engine.state == "ready" for engine in status.engines):
        return [("edgepipe chat", "talk to the model"), ("edgepipe status", "nodes, memory, stages, links")]
    return [
        ("edgepipe models pull MODEL", "fetch a model (demo: a small one)"),
        ("edgepipe serve MODEL", "load a model on the nodes"),
        ("edgepipe status", "nodes, memory, stages, links"),
    ]
