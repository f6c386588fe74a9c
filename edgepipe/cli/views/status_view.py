"""Output of ``edgepipe status``: fits 80 columns, readable without colour."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.text import Text

from edgepipe.cli.output import bar, make_table
from edgepipe.cli.serve import layers_of
from edgepipe.cli.views.copies_view import ModelCopies, copies_of
from edgepipe.cli.views.left_out import left_out_text
from edgepipe.cluster.absence import absence_text, continuing_text, joined
from edgepipe.units import format_bytes, format_duration_s

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from edgepipe.backend.types import PackedProducts
    from edgepipe.wire.engines import Advice, EngineState
    from edgepipe.wire.nodes import ClusterStatus, DeviceState, MemberState, Transfer

_BAR_CELLS = 10
_STYLES = {"alive": "green", "suspect": "yellow", "dead": "red", "left": "dim", "ready": "green", "failed": "red"}
_NAME_CHARS = 16
_LINE_CHARS = 80
_NEIGHBOURS = 3  # shown; --json has all
_STAGE_NUMBERS = ("WEIGHTS", "KV", "STEP", "BUSY", "NEXT HOP")
_DTYPES = {"bfloat16": "bf16", "float32": "f32"}


def render_status(status: ClusterStatus) -> Iterator[RenderableType]:
    """Render a headline, nodes, one paragraph per model, downloads and refused peers."""
    yield _headline(status)
    yield Text()
    yield render_nodes(status)
    if news := news_of(status):
        yield Text(f"\n{news}", style="yellow")
    names = {member.node.node_id: member.node.name for member in status.members}
    for link in status.broken_links:
        node, other = (_short(names.get(end, end)) for end in (link.node_id, link.other_id))
        yield Text(f"{node} and {other} do not reach each other, but this machine reaches both", style="yellow")
    copies = copies_of(status.members)
    for engine in status.engines:
        yield Text()
        yield from _engine(engine)
        if text := _copies(copies.get((engine.model, engine.manifest_hash)), len(status.members)):
            yield Text(text, style="dim")
    if not status.engines:
        yield Text("\nno model is served · next: edgepipe serve MODEL", style="dim")
    transfers = [(member, transfer) for member in status.members for transfer in member.node.transfers]
    if transfers:
        yield Text()
        yield _downloads(transfers, {member.node.node_id: member.node.name for member in status.members})
    for text in trust_notes(status):
        yield Text(text, style="yellow")
    for refused in status.refused:
        yield Text(f"refused {refused.peer}: {refused.error.what}", style="yellow")
        yield Text(f"  {refused.error.next_step}", style="yellow")


def trust_notes(status: ClusterStatus) -> Iterator[str]:
    """Describe what separates this node from others: removal, damage, no multicast, other clusters and versions."""
    if status.removed:
        yield f"this machine was removed from '{status.cluster_name}'; to join again: edgepipe node join CODE"
    if status.trust_damage:
        yield "the trust store is damaged: no machine can join until this node has reached a member of its cluster"
    if status.discovery_problem and len(status.members) == 1:
        yield f"this node cannot use mDNS: {status.discovery_problem}; it uses remembered addresses and --peer"
    for other in status.neighbours[:_NEIGHBOURS]:
        if other.cluster_id == status.cluster_id:
            yield f"'{other.name}' at {other.address} claims to be in this cluster: other version, or not paired"
        elif len(status.members) == 1:
            yield f"found '{other.name}' at {other.address}, of cluster '{other.cluster_name}'; not paired with it"


def news_of(status: ClusterStatus) -> str:
    """Describe absent nodes: ``macbook asleep since 21:14; continuing on 2 machines``; empty if no node is absent."""
    if not status.absent:
        return ""
    return joined(absence_text(status.absent, now_s=time.time()), *map(continuing_text, status.engines))


def _headline(status: ClusterStatus) -> Text:
    alive = sum(member.state == "alive" for member in status.members)
    total = len(status.members)
    devices = [device for member in status.members for device in member.node.devices]
    healthy = (
        alive == total and not status.absent and all(part.state != "failed" for part in (*status.engines, *devices))
    )
    line = Text()
    line.append(status.cluster_name or status.cluster_id, style="bold")
    line.append(" · ")
    drained = [member for member in status.members if member.node.draining]
    line.append("healthy" if healthy else "degraded", style="green" if healthy else "yellow")
    line.append(f" · {alive} of {total} nodes" if alive != total else f" · {total} node{'s' * (total != 1)}")
    if drained:
        line.append(f", {len(drained)} drained")
    rate = sum(engine.tokens_per_s for engine in status.engines)
    if rate:
        line.append(f" · {rate:.1f} tok/s")
    line.append(f" · up {format_duration_s(status.uptime_ms // 1000)}")
    return line


def render_nodes(status: ClusterStatus) -> Table:
    """Render the machines: device, memory, round trip."""
    table = make_table("NODE", "DEVICE", "MEMORY", "RTT", right=("RTT",))
    for member in status.members:
        name = _short(member.node.name) + (" (this)" if member.self else "")
        rtt = "-" if member.self else f"{member.rtt_ms:.2f} ms"
        first = Text("● ", style=_STYLES.get(member.state, "")) + Text(name, style="not bold")
        devices = member.node.devices
        if not devices:
            table.add_row(first, Text("no device" if member.state == "alive" else member.state, "dim"), "", rtt)
        for device in devices:
            device_name, memory = _device(device)
            if member.node.draining:
                memory = Text("being drained" if device.reserved_bytes else "drained, takes no work", "yellow")
            table.add_row(first, device_name, memory, rtt)
            first, rtt = Text(), ""
    return table


def _device(device: DeviceState) -> tuple[Text, Text]:
    profile, words = device.profile, ()
    if profile is not None:
        words = (profile.backend, profile.device, _DTYPES.get(profile.compute_dtype, profile.compute_dtype))
    name = Text(" ".join(filter(None, words))[:22])
    if device.state in ("starting", "failed"):
        error = device.error.what if device.error is not None else ""
        reason = error if device.state == "failed" else "measuring"
        return name, Text(reason[:34], style=_STYLES.get(device.state, "dim"))
    usable = device.reserved_bytes + device.free_bytes
    memory = bar(device.reserved_bytes / usable if usable else 0.0, width=_BAR_CELLS)
    return name, Text(f"{memory} {device.reserved_bytes / 1e9:.1f} of {usable / 1e9:.1f} GB")


def _engine(engine: EngineState) -> Iterator[RenderableType]:
    line = Text(engine.model, style="bold")
    line.append(" · ", style="not bold").append(engine.state, style=_STYLES.get(engine.state, "not bold"))
    if engine.state == "ready":
        line.append(_figures(engine), style="not bold")
    elif engine.message:
        line.append(f" · {engine.message} {engine.progress:.0%}", style="not bold")
    yield line
    if engine.error is not None and engine.state in ("failed", "waiting"):
        for text in (engine.error.what, engine.error.fact, engine.error.next_step):
            if text:
                yield Text(f"  {text}", style="red")
    for entry in engine.left_out:
        yield Text(f"  {left_out_text(entry)}", style="yellow")
    yield from render_plan(engine)


def render_plan(engine: EngineState) -> Iterator[RenderableType]:
    """Render the ring, its stages, and the reasons for the number of micro-batches."""
    if engine.stages:
        yield _ring(engine)
        yield _stages(engine)
        yield from _packed_products(engine)
    if engine.state == "ready" and engine.why:
        yield _sizing(engine)
    if engine.state == "ready" and engine.advice is not None:
        yield _advice(engine.model, engine.advice)


def _copies(copies: ModelCopies | None, num_nodes: int) -> str:
    """Describe the number of copies on disk, in a cluster of several nodes."""
    if copies is None or num_nodes < 2:
        return ""
    if copies.fewest > 1:
        return f"  on disk: every layer {copies.fewest} times"
    return f"  on disk: some layers only once, on {' or '.join(_short(name) for name in copies.nodes)}"


def _figures(engine: EngineState) -> str:
    requests = f" · {engine.running} running" + (f", {engine.waiting} waiting" if engine.waiting else "")
    used = engine.num_blocks - engine.free_blocks
    kept = f" · KV {used * engine.block_size}/{engine.num_blocks * engine.block_size}"
    if engine.state_slots:
        kept += f" · states {engine.state_slots - engine.free_slots}/{engine.state_slots}"
    return f"{requests}{kept} · M {engine.micro_batches}"


def _sizing(engine: EngineState) -> Text:
    """Explain the number of micro-batches, a reason per line, and name the bottleneck."""
    first, *others = engine.why.split("; ")
    lines = [f"Micro-batches: {first}", *(f"{thought[:1].upper()}{thought[1:]}." for thought in others)]
    if engine.bottleneck:
        lines.append(f"Slowest: {_place(engine)} · {engine.predicted_tokens_per_s:.0f} tok/s expected of this load")
    if engine.cached_tokens:
        hits = engine.cached_tokens / max(1, engine.admitted_tokens)
        lines.append(f"Prefix cache: {hits:.0%} of {engine.admitted_tokens} tokens")
    if engine.preemptions:
        lines.append(f"Preempted {_times(engine.preemptions)}: the KV cache is short")
    if engine.missed_snapshots:
        count = f"{engine.missed_snapshots} snapshot{'s' * (engine.missed_snapshots > 1)} of states"
        lines.append(f"Did not keep {count}: running chats held all {engine.state_slots} slots")
    if engine.recoveries:
        lines.append(f"Recovered {_times(engine.recoveries)}; {_paused(engine.stall_ms)}")
    if engine.moves:
        lines.append(f"Moved {_times(engine.moves)}, as asked for; {_paused(engine.move_pause_ms)}")
    return Text("\n".join(f"  {line}" for line in lines), style="dim")


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")


def _paused(pause_ms: int) -> str:
    if not pause_ms:
        return "no answer had to wait"
    return f"answers paused for {format_duration_s(pause_ms / 1e3)} in total"


def _advice(model: str, advice: Advice) -> Text:
    """Describe a better placement: its gain, the reason and the pause that switching costs."""
    line = Text(f"  A faster layout exists (+{advice.gain * 100:.0f} %): {layout_text(advice.plan)}.", style="yellow")
    line.append(f"\n  {advice.why}. Switching pauses answers for {format_duration_s(advice.pause_s)}:")
    return line.append(f"\n  edgepipe serve {model} --rebalance")


def layout_text(plan: str) -> str:
    """Turn ``a:0-14,b:15-29`` into ``layers 0-14 on a, 15-29 on b``; for one machine ``all layers on a``."""
    parts = [part.rpartition(":") for part in plan.split(",")]
    if len(parts) == 1:
        return f"all layers on {parts[0][0]}"
    return "layers " + ", ".join(f"{layers} on {name}" for name, _, layers in parts)


def _place(engine: EngineState) -> str:
    """Add node names to the engine's bottleneck: ``stage 1 (studio)``, ``link 0-1 (gamer to studio)``."""
    kind, _, numbers = engine.bottleneck.partition(" ")
    indices = [int(number) for number in numbers.split("-") if number.isdecimal()]
    names = [_short(engine.stages[index].node_name) for index in indices if index < len(engine.stages)]
    return f"{engine.bottleneck} ({' to '.join(names)})" if names and kind in ("stage", "link") else kind


def _ring(engine: EngineState) -> Text:
    """Draw ``╭▶ a 0-14 ──▶ b 15-29 ─╮`` with the token's path back below it; many stages make one long line."""
    way = " ──▶ ".join(f"{_short(stage.node_name)} {layers_of(stage)}" for stage in engine.stages)
    top = f"  ╭▶ {way} ─╮"
    if len(top) > _LINE_CHARS:
        return Text(f"  {way} ──▶ token")
    line = "─" * (len(top) - len("  ╰ token ╯"))
    half = len(line) // 2
    return Text(f"{top}\n  ╰{line[:half]} token {line[half:]}╯")


def _stages(engine: EngineState) -> Table:
    table = make_table("  STAGE", "WEIGHTS", "KV", "STEP", "BUSY", "NEXT HOP", right=_STAGE_NUMBERS)
    last = len(engine.stages) - 1
    for index, stage in enumerate(engine.stages):
        hop = f"{stage.one_way_ms:.2f} ms" if stage.one_way_ms and index != last else "-"
        step, busy = (f"{stage.decode_ms:.1f} ms", f"{stage.busy:.0%}") if stage.decode_ms else ("-", "-")
        name = f"  {_short(stage.node_name)}"
        table.add_row(name, format_bytes(stage.weight_bytes), format_bytes(stage.kv_bytes), step, busy, hop)
    return table


def _packed_products(engine: EngineState) -> Iterator[Text]:
    """Name what multiplies with packed weights, by node; the slower ways last, with the reason."""
    nodes: dict[PackedProducts, list[str]] = {}
    for stage in engine.stages:
        for products in stage.products:
            nodes.setdefault(products, []).append(_short(stage.node_name))
    for products in sorted(nodes, key=lambda each: (each.reason, each.by)):
        line = f"  Packed weights: {products.by} on {', '.join(nodes[products])}"
        if not products.reason:
            yield Text(line, style="dim")
            continue
        remedy = f"\n    {products.remedy}" if products.remedy else ""
        yield Text(f"{line}\n    {products.reason}{remedy}", style="yellow")


def _downloads(transfers: list[tuple[MemberState, Transfer]], names: dict[str, str]) -> Table:
    table = make_table("COPY" if all(transfer.copy for _, transfer in transfers) else "DOWNLOAD", "TO", "", "", "FROM")
    for member, transfer in transfers:
        part = transfer.bytes_done / transfer.bytes_total if transfer.bytes_total else 0.0
        amount = f"{format_bytes(transfer.bytes_done)} of {format_bytes(transfer.bytes_total)}"
        cells = (transfer.model, _short(member.node.name), bar(part, width=_BAR_CELLS), amount)
        table.add_row(*cells, _short(names.get(transfer.source, transfer.source)))
    return table


def _short(name: str) -> str:
    return name if len(name) <= _NAME_CHARS else name[: _NAME_CHARS - 1] + "…"
