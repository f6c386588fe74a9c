"""Every listening port of a cluster that serves: strangers get no handshake, members no more than is theirs."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from edgepipe_emulated import emulated_model_config

from edgepipe.errors import AccessDenied, LinkError
from edgepipe.link.channels import make_channel, translated
from edgepipe.security.mutual_tls import Credentials
from edgepipe.store.store import ModelStore
from edgepipe.telemetry.audit import AuditKind, read_audit
from edgepipe.weights.emulated_folder import write_model_folder
from tests.support.cluster.members import stranger_to
from tests.support.processes.nodes import Nodes, idle

STAGE_METHODS = ("Stage/Control", "Stage/Ring")
ALL_METHODS = ("Node/Heartbeat", "Node/Prepare", "Weights/GetManifest", "Engine/Generate", *STAGE_METHODS)


async def call(address: str, credentials: Credentials, method: str) -> None:
    """Send an empty request and wait for what comes. Raises what the call ends with."""
    for attempt in range(3):
        try:
            async with make_channel(address, credentials) as channel, asyncio.timeout(10):
                with translated(address):
                    stream: Any = channel.stream_stream(f"/edgepipe.wire.v1.{method}")(iter([b""]))
                    async for _ in stream:
                        pass
        except LinkError as exc:
            # A call that is refused before its request is written tells gRPC's failure to write, not the refusal.
            if attempt == 2 or "had ended before its message" not in exc.fact:
                raise
        else:
            return


async def shown_at(address: str) -> bytes:
    """The certificate that a process shows to everybody who connects."""
    host, _, port = address.rpartition(":")
    return (await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)))).encode()


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[Nodes]:
    made = Nodes(folder=tmp_path, cluster="doors")
    yield made
    await made.end()


async def test_strangers_reach_no_process_and_members_only_what_is_theirs(nodes: Nodes) -> None:
    write_model_folder(nodes.folder / "tiny", emulated_model_config(num_layers=4))
    ModelStore(nodes.folder / "a" / "models").pull(str(nodes.folder / "tiny"))
    a, b = [await nodes.start(name) for name in ("a", "b")]
    await asyncio.gather(*(node.until(lambda status: idle(status, 2)) for node in (a, b)))
    engine = await a.serve("tiny", plan="a:0-1,b:2-3")
    stages = [stage.address for stage in engine.stages]
    stranger, member = stranger_to(a.data_dir), nodes.member()
    shown = {address: await shown_at(address) for address in (a.address, engine.address, *stages)}

    for address, certificate in shown.items():
        for method in ALL_METHODS:
            with pytest.raises(LinkError):
                await call(address, stranger.to_process(certificate), method)

    older = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    older.check_hostname, older.verify_mode, older.maximum_version = False, ssl.CERT_NONE, ssl.TLSVersion.TLSv1_2
    for address in shown:
        host, _, port = address.rpartition(":")
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection(host, int(port), ssl=older)

    with pytest.raises(AccessDenied):  # a node, but no engine
        await call(a.address, member.to_process(shown[a.address]), "Node/Prepare")
    with pytest.raises(AccessDenied):  # a node, but no gateway
        await call(engine.address, member.to_process(shown[engine.address]), "Engine/Generate")
    for address in stages:  # neither its engine nor its predecessor: no handshake
        for method in STAGE_METHODS:
            with pytest.raises(LinkError):
                await call(address, member.to_process(shown[address]), method)

    await a.until(lambda status: status.refused_handshakes > 3 * len(ALL_METHODS))
    denied = [entry for entry in read_audit(a.data_dir / "audit.log", last=50) if entry.kind == AuditKind.DENIED]
    assert {entry.who for entry in denied} == {member.node_id}
