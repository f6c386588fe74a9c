"""What encryption costs: SmolLM2 over two encrypted nodes and over two that are not, in turn; and a connection."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence

import grpc
import psutil
from bench_foundation import stored_demo
from figures import Row, at_least, below
from local_nodes import Node, complete, decode_rate, running_nodes

from edgepipe.ids import NodeId
from edgepipe.link.access import Kind
from edgepipe.link.certificates import make_key_pair
from edgepipe.link.channels import bind, make_channel, make_server
from edgepipe.link.security import MutualTls, Peer, Plaintext, Security

SEQUENCES = 16
TOKENS = 48
ROUNDS = 6
CONNECTIONS = 40


def cost_rows() -> list[Row]:
    """Tokens per second of both, each round of one beside a round of the other, the order changing."""
    model = stored_demo()
    prompts = [[(7 * i + 13 * j) % 40_000 + 100 for j in range(24)] for i in range(SEQUENCES)]
    folder = model.path.parent
    with (
        running_nodes(2, models_dir=folder, threads=1) as encrypted,
        running_nodes(2, models_dir=folder, threads=1, encrypted=False) as plain,
    ):
        for nodes in (encrypted, plain):
            nodes[0].edgepipe("serve", "demo", "--context", "2048", "--plan", "n0:0-14,n1:15-29")
            complete(nodes[0], prompts, max_tokens=16)
        rates: dict[str, list[float]] = {"tls": [], "plain": []}
        for index in range(ROUNDS):
            for name, nodes in sorted({"tls": encrypted, "plain": plain}.items(), reverse=bool(index % 2)):
                rates[name].append(decode_rate(complete(nodes[0], prompts, max_tokens=TOKENS)))
        found, refused = _connections(encrypted), sum(node.status().get("refused_handshakes", 0) for node in encrypted)
    ratios = [tls / plain for tls, plain in zip(rates["tls"], rates["plain"], strict=True)]
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return [
        at_least("16 sequences, 2 stages, with TLS", medians["tls"], "tokens/s", medians["plain"], "without", 0.97),
        Row("  slowest and fastest round", min(rates["tls"]), "tokens/s", max(rates["tls"]), "fastest"),
        Row("  the same without", min(rates["plain"]), "tokens/s", max(rates["plain"]), "fastest"),
        Row("  ratio of neighbouring rounds, lowest", min(ratios), "", max(ratios), "highest"),
        Row("connections between all processes", found, ""),
        below("  refused handshakes meanwhile", refused, "", 0),
    ]


def _connections(nodes: Sequence[Node]) -> int:
    """Established TCP connections, each counted at the end that dialled."""
    processes = [process for node in nodes for _, process in node.processes()]
    listening = {
        one.laddr.port for each in processes for one in each.net_connections("tcp") if one.status == psutil.CONN_LISTEN
    }
    return sum(
        one.status == psutil.CONN_ESTABLISHED and one.raddr.port in listening
        for each in processes
        for one in each.net_connections("tcp")
    )


def connect_rows() -> list[Row]:
    """From nothing to the answer of the first call, on loopback."""
    pair = make_key_pair()
    tls = MutualTls(pair, callers=(Kind.NODE,))
    peer = Peer(node_id=NodeId(pair.fingerprint), kind=Kind.NODE, certificate=pair.certificate)
    tls.introduce([peer], nodes=[peer])
    took = {name: asyncio.run(_connect(security, peer)) for name, security in (("tls", tls), ("plain", Plaintext()))}
    return [Row("connect and first call, TLS", took["tls"] * 1e3, "ms", took["plain"] * 1e3, "without")]


async def _connect(security: Security, peer: Peer) -> float:
    async def answer(request: bytes, context: object) -> bytes:
        return request

    handlers = {"Heartbeat": grpc.unary_unary_rpc_method_handler(answer)}
    server = make_server(security)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("edgepipe.wire.v1.Node", handlers),))
    port = bind(server, security, host="127.0.0.1", port=0)
    await server.start()
    times: list[float] = []
    for _ in range(CONNECTIONS):
        began = time.perf_counter()
        async with make_channel(f"127.0.0.1:{port}", security.to_node(peer.node_id)) as channel:
            await channel.unary_unary("/edgepipe.wire.v1.Node/Heartbeat")(b"x", timeout=10)
            times.append(time.perf_counter() - began)
    await server.stop(None)
    return statistics.median(times)
