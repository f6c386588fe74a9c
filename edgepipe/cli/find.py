"""Find a gateway to chat with: this machine's, else one found by multicast DNS. Loads a model if none is served."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgepipe.addresses import is_loopback
from edgepipe.cli.admin import connect, no_node, status_if_running
from edgepipe.cli.serve import serve_request, serve_with_progress
from edgepipe.cli.sse import ChatClient
from edgepipe.config import HTTP_PORT, load_config
from edgepipe.daemon.machine.data_dir import socket_path
from edgepipe.daemon.machine.http_keys import read_key
from edgepipe.errors import EdgepipeError, ModelUnknown, NodeUnreachable, NoPeersFound
from edgepipe.link.admin_client import Admin
from edgepipe.store.typed_names import meant_names

if TYPE_CHECKING:
    from edgepipe.cluster.discovery import Announcement
    from edgepipe.wire.engines import EngineState
    from edgepipe.wire.nodes import ClusterStatus

USUAL_SAMPLING: Mapping[str, float] = {"temperature": 0.7}
"""Sampling of models whose makers advise none: small models repeat themselves under greedy sampling."""

_MAX_NAMED = 2  # nodes named in an error


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A gateway and a model to ask it for."""

    base_url: str
    model: str
    num_nodes: int = 0  # nodes that share the model; 0: unknown
    api_key: str = field(default="", repr=False)
    sampling: Mapping[str, float] = field(default_factory=lambda: dict(USUAL_SAMPLING))


async def find_target(data_dir: Path, model: str) -> Target:
    """Find a target that answers. Raises NoPeersFound (its fact lists the checks), ModelUnknown, errors of serving."""
    target = await _target(data_dir, model)
    async with ChatClient(target.base_url, api_key=target.api_key) as client:
        return replace(target, sampling={**USUAL_SAMPLING, **await client.sampling(target.model)})


async def _target(data_dir: Path, model: str) -> Target:
    if await status_if_running(data_dir) is None:
        return await _lan_target(data_dir, model)
    async with connect(data_dir) as admin:
        target = await _own_target(admin, model)
        return replace(target, api_key=given_key(data_dir) or read_key(data_dir))


def given_key(data_dir: Path) -> str:
    """Return the API key of the settings. The key file of this machine's node never goes to other machines."""
    given = load_config({"data_dir": data_dir}).values.api_key
    return given[0] if given else ""


async def _own_target(admin: Admin, model: str) -> Target:
    status = await admin.status()
    own = next(member.node for member in status.members if member.self)
    engine = served_engine(status, model, verb="chat")
    if engine is None:
        wanted = model or _only_model(status)
        engine = (await serve_with_progress(admin, serve_request(wanted)))[0]
    return Target(
        base_url=f"http://127.0.0.1:{own.http_port}", model=engine.model, num_nodes=max(1, len(engine.stages))
    )


def served_engine(status: ClusterStatus, model: str, *, verb: str) -> EngineState | None:
    """Choose the engine to use, None if the model is not served.

    Raises ModelUnknown when several models are served and ``model`` is empty; it says to name one to ``verb``.
    """
    ready = [engine for engine in status.engines if engine.state == "ready"]
    if not model and len({engine.model for engine in ready}) > 1:
        raise ModelUnknown(
            "several models are served",
            fact=f"served: {', '.join(sorted({engine.model for engine in ready}))}",
            next_step=f"name one: edgepipe {verb} MODEL",
        )
    named = {name: engine for engine in ready for name in (*engine.names, engine.model)}
    meant = meant_names(model, named) if model else [engine.model for engine in ready]
    return named[meant[0]] if meant else None


def _only_model(status: ClusterStatus) -> str:
    """Return the only model on the nodes' disks, to load it. Raises ModelUnknown for none or several."""
    names = sorted({entry.model for member in status.members for entry in member.node.models if entry.complete})
    if len(names) == 1:
        return names[0]
    raise ModelUnknown(
        "no model is served",
        fact=f"on disk: {', '.join(names) or 'none'}",
        next_step="edgepipe chat MODEL" if names else "edgepipe models pull demo, then edgepipe chat",
    )


async def _lan_target(data_dir: Path, model: str) -> Target:
    from edgepipe.cluster.browsing import browse
    from edgepipe.cluster.founding import home_of

    if home_of(data_dir) is not None:
        raise no_node(data_dir)
    listen_s = load_config({"data_dir": data_dir}).values.listen_s
    found, key = await browse(listen_s=listen_s), given_key(data_dir)
    for announcement in found:
        base_url = f"http://{announcement.host}:{HTTP_PORT}"
        try:
            async with ChatClient(base_url, api_key=key) as client:
                served = await client.models()
        except EdgepipeError:
            continue
        if meant := meant_names(model, served) if model else served:
            return Target(base_url=base_url, model=meant[0], api_key=key)
    checked = f"no node at {socket_path(data_dir)}; "
    if not found:
        raise NoPeersFound(
            fact=f"{checked}no node announced _edgepipe._tcp by mDNS within {listen_s:g} s",
            next_step="edgepipe node start    (to try edgepipe first: edgepipe demo)",
        )
    raise _unusable(found, checked)


def _unusable(found: Sequence[Announcement], checked: str) -> NodeUnreachable:
    """Build the error for nodes that announce themselves but cannot be asked from this machine."""
    nodes = sorted(f"'{node.node_name}' at {node.address}, cluster {node.cluster_name!r}" for node in found)
    names = "; ".join(nodes[:_MAX_NAMED]) + (f"; and {len(nodes) - _MAX_NAMED} more" if len(nodes) > _MAX_NAMED else "")
    if all(is_loopback(node.host) for node in found):
        return NodeUnreachable(
            "this machine's node uses another data directory",
            fact=f"{checked}found {names}",
            next_step="name its folder: --data-dir FOLDER",
        )
    return NodeUnreachable(
        "the nodes found on the network answer HTTP on their own machine only",
        fact=f"{checked}found {names}",
        next_step="join their cluster: edgepipe node invite on one of them, then edgepipe node join on this machine",
    )
