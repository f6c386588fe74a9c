"""What encryption costs: SmolLM2 over two encrypted nodes and over two that are not, in turn; and a connection.

Tokens per second on a machine that others use swing by more than encryption costs. So rounds are short, each of one
kind beside one of the other, and the median of the ratios of neighbours counts. What the processes spent in CPU time
per token does not care who else runs, so it stands beside that.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import psutil
from bench_foundation import stored_demo
from figures import Row, below
from local_nodes import Node, complete, decode_rate, running_nodes

from edgepipe.ids import NodeId
from edgepipe.link.channels import bind, make_channel, make_server
from edgepipe.security.access import Kind
from edgepipe.security.certificates import make_key_pair
from edgepipe.security.mutual_tls import MutualTls, Peer, Plaintext, Security

SEQUENCES = 16
TOKENS = 24
PAIRS = 10
CONNECTIONS = 40
LEAST = 0.97  # of the tokens per second without
MOST_CPU = 1.03  # of the CPU time without


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round of all sequences."""

    tokens_per_s: float
    cpu_ms: float  # per token, of all processes of both nodes, prompts included


def cost_rows() -> list[Row]:
    """Both clusters stand all the time; ``PAIRS`` short rounds of each, neighbours in changing order."""
    model = stored_demo()
    prompts = [[(7 * i + 13 * j) % 40_000 + 100 for j in range(24)] for i in range(SEQUENCES)]
    folder = model.path.parent
    with (
        running_nodes(2, models_dir=folder, threads=1) as encrypted,
        running_nodes(2, models_dir=folder, threads=1, encrypted=False) as plain,
    ):
        for nodes in (encrypted, plain):
            nodes[0].edgepipe("serve", "demo", "--context", "2048", "--plan", "n0:0-14,n1:15-29")
        processes = {"tls": _processes(encrypted), "plain": _processes(plain)}
        first = {"tls": encrypted[0], "plain": plain[0]}
        for node in first.values():
            complete(node, prompts, max_tokens=16)
        pairs: list[dict[str, Round]] = []
        for index in range(PAIRS):
            order = sorted(first, reverse=bool(index % 2))
            pairs.append({name: _round(first[name], prompts, processes[name]) for name in order})
        found, refused = _connections(encrypted), sum(node.status().get("refused_handshakes", 0) for node in encrypted)
    return [
        *_compared(pairs),
        Row("connections between all processes", found, ""),
        below("  refused handshakes meanwhile", refused, "", 0),
    ]


def _compared(pairs: Sequence[dict[str, Round]]) -> list[Row]:
    """Medians over the rounds; the ratio is the median of neighbours' ratios."""
    rates = {name: statistics.median(pair[name].tokens_per_s for pair in pairs) for name in ("tls", "plain")}
    cpu = {name: statistics.median(pair[name].cpu_ms for pair in pairs) for name in ("tls", "plain")}
    ratios = sorted(pair["tls"].tokens_per_s / pair["plain"].tokens_per_s for pair in pairs)
    spent = sorted(pair["tls"].cpu_ms / pair["plain"].cpu_ms for pair in pairs)
    ratio, dearer = statistics.median(ratios), statistics.median(spent)
    lower, _, upper = statistics.quantiles(ratios, n=4)
    met = ratio >= LEAST
    return [
        Row(
            f"{SEQUENCES} sequences, 2 stages, with TLS",
            rates["tls"],
            "tokens/s",
            rates["plain"],
            "without",
            ratio,
            f">= {LEAST:.2f}x",
            met,
        ),
        Row(f"  middle half of the {len(pairs)} ratios, from", lower, "x", upper, "to"),
        Row("  the lowest", ratios[0], "x", ratios[-1], "the highest"),
        Row(
            "  CPU time per token of all processes",
            cpu["tls"],
            "ms",
            cpu["plain"],
            "without",
            dearer,
            f"<= {MOST_CPU:.2f}x",
            dearer <= MOST_CPU,
        ),
        Row("  its ratios, the lowest", spent[0], "x", spent[-1], "the highest"),
    ]


def _round(node: Node, prompts: Sequence[list[int]], processes: Sequence[psutil.Process]) -> Round:
    before = _cpu_s(processes)
    answers = complete(node, prompts, max_tokens=TOKENS)
    spent_s = _cpu_s(processes) - before
    tokens = sum(len(answer.token_ids) for answer in answers)
    return Round(tokens_per_s=decode_rate(answers), cpu_ms=spent_s / tokens * 1e3)


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    """User and system time of all."""
    times = [process.cpu_times() for process in processes]
    return sum(one.user + one.system for one in times)


def _processes(nodes: Sequence[Node]) -> list[psutil.Process]:
    return [process for node in nodes for _, process in node.processes()]


def _connections(nodes: Sequence[Node]) -> int:
    """Established TCP connections, each counted at the end that dialled."""
    processes = _processes(nodes)
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
