"""Output of ``edgepipe status``: fits 80 columns, readable without colour."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.text import Text

from edgepipe import PROTOCOL_VERSION, __version__
from edgepipe.cli.output import bar, indented, make_table
from edgepipe.cli.serve import layers_of
from edgepipe.cli.views.left_out import left_out_text
from edgepipe.cluster.absence import absence_text, continuing_text, joined, missed, since_text, stopped
from edgepipe.cluster.model_copies import ModelCopies, copies_of
from edgepipe.units import format_bytes, format_duration_s
from edgepipe.versions import are_near, is_behind, newest

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.padding import Padding
    from rich.table import Table

    from edgepipe.backend.types import PackedProducts, SlowPath
    from edgepipe.wire.engines import Advice, DraftState, EngineState, PromptSteps
    from edgepipe.wire.nodes import ClusterStatus, DeviceState, ForeignNode, MemberState, Transfer

_BAR_CELLS = 10
_STYLES = {"alive": "green", "suspect": "yellow", "dead": "red", "left": "dim", "ready": "green", "failed": "red"}
_AWAY = {"suspect": "does not answer", "dead": "gone", "asleep": "asleep", "left": "has left"}
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
    for node in stopped(status.absent):
        yield Text(f"○ {_short(node.name)} {since_text(node, now_s=time.time())}", style="dim")
    if news := news_of(status):
        yield Text(f"\n{news}", style="yellow")
    names = {member.node.node_id: member.node.name for member in status.members}
    for text in behind_notes(status):
        yield Text(text, style="yellow")
    for link in status.broken_links:
        node, other = (_short(names.get(end, end)) for end in (link.node_id, link.other_id))
        yield Text(f"{node} and {other} do not reach each other, but this machine reaches both", style="yellow")
    copies = copies_of(status.members)
    for engine in status.engines:
        yield Text()
        yield from _engine(engine)
        if text := _copies(copies.get((engine.model, engine.manifest_hash)), len(status.members)):
            yield indented(Text(text, style="dim"))
    if not status.engines:
        yield Text("\nno model is served · next: edgepipe serve MODEL", style="dim")
    transfers = [(member, transfer) for member in status.members for transfer in member.node.transfers]
    if transfers:
        yield Text()
        yield _downloads(transfers, {member.node.node_id: member.node.name for member in status.members})
    for record in status.unwritten:
        yield Text(f"this node cannot write {record}; it tries again until the disk has room", style="yellow")
    for text in trust_notes(status):
        yield Text(text, style="yellow")
    for refused in status.refused:
        yield Text(f"refused {refused.peer}: {refused.error.what}", style="yellow")
        for text in filter(None, (refused.error.fact, refused.error.next_step)):
            yield indented(Text(text, style="yellow"))


def trust_notes(status: ClusterStatus) -> Iterator[str]:
    """Describe what separates this node from others: removal, damage, no multicast, other clusters and versions."""
    if status.removed:
        yield f"this machine was removed from '{status.cluster_name}'; to join again: edgepipe node join CODE"
    if status.trust_damage:
        yield "the trust store is damaged: no machine can join until this node has reached a member of its cluster"
    if missed(status.absent) and len(status.members) == 1:
        yield "no other machine answers: 'edgepipe doctor' tells why"
    if status.discovery_problem and len(status.members) == 1:
        yield f"this node cannot use mDNS: {status.discovery_problem}; it uses remembered addresses and --peer"
    for other in status.neighbours[:_NEIGHBOURS]:
        if other.cluster_id == status.cluster_id:
            yield f"'{other.name}' at {other.address} claims to be in this cluster: {_difference(other)}"
        elif len(status.members) == 1:
            yield f"found '{other.name}' at {other.address}, of cluster '{other.cluster_name}'; not paired with it"


def _difference(other: ForeignNode) -> str:
    """Say what keeps a node that names this cluster from it."""
    if other.protocol_version == PROTOCOL_VERSION:
        return "not paired"
    its = f"edgepipe {other.edgepipe_version} (protocol {other.protocol_version})"
    return f"it runs {its}, this machine {__version__} (protocol {PROTOCOL_VERSION})"


def behind_notes(status: ClusterStatus) -> Iterator[str]:
    """Name the nodes whose version is older than that of another node, with the command."""
    latest = newest(member.node.edgepipe_version for member in status.members)
    for member in status.members:
        if is_behind(version := member.node.edgepipe_version, latest):
            name = _short(member.node.name)
            far = "" if are_near(version, latest) else " (only versions at most one minor apart are tested together)"
            yield f"{name} runs edgepipe {version}, another node {latest}{far}; on {name}: edgepipe update"


def news_of(status: ClusterStatus) -> str:
    """Describe absent nodes: ``macbook asleep since 21:14; continuing on 2 machines``; empty if no node is missed."""
    if not (gone := missed(status.absent)):
        return ""
    return joined(absence_text(gone, now_s=time.time()), *map(continuing_text, status.engines))


def is_healthy(status: ClusterStatus) -> bool:
    """Return whether every node answers, every device works, and every served model can answer."""
    devices = [device for member in status.members for device in member.node.devices]
    return (
        all(member.state == "alive" for member in status.members)
        and all(part.state not in ("failed", "waiting") for part in (*status.engines, *devices))
        and not any(engine.left_out for engine in status.engines)
        and not (
            missed(status.absent) or status.broken_links or status.removed or status.trust_damage or status.unwritten
        )
    )


def _headline(status: ClusterStatus) -> Text:
    alive = sum(member.state == "alive" for member in status.members)
    total = len(status.members)
    healthy = is_healthy(status)
    line = Text()
    line.append(status.cluster_name or status.cluster_id, style="bold")
    line.append(" · ")
    leaving = [member.node.name for member in status.members if member.node.leaving and member.state == "alive"]
    drained = [member for member in status.members if member.node.draining and member.node.name not in leaving]
    line.append("healthy" if healthy else "degraded", style="green" if healthy else "yellow")
    line.append(f" · {alive} of {total} nodes" if alive != total else f" · {total} node{'s' * (total != 1)}")
    if drained:
        line.append(f", {len(drained)} drained")
    if leaving:
        line.append(f", {' and '.join(leaving)} {'is' if len(leaving) == 1 else 'are'} leaving", style="yellow")
    if away := len(stopped(status.absent)):
        line.append(f", {away} stopped")
    rate = sum(engine.tokens_per_s for engine in status.engines)
    if rate:
        line.append(f" · {rate:.1f} tok/s")
    line.append(f" · up {format_duration_s(max(1.0, status.uptime_ms // 1000))}")
    return line


def render_nodes(status: ClusterStatus) -> Table:
    """Render the machines: device, memory, round trip."""
    table = make_table("NODE", "DEVICE", "MEMORY", "RTT", right=("RTT",), whole=("NODE",))
    for member in status.members:
        name = _short(member.node.name) + (" (this)" if member.self else "")
        rtt = "-" if member.self else f"{member.rtt_ms:.2f} ms"
        first = Text("● ", style=_STYLES.get(member.state, "")) + Text(name, style="not bold")
        devices = member.node.devices
        if not devices:
            table.add_row(first, Text("no device", "dim"), _away(member) or "", rtt)
        for device in devices:
            device_name, memory = _device(device)
            if away := _away(member):
                memory = away
            elif member.node.leaving:
                memory = Text("leaving: its work moves" if device.reserved_bytes else "leaving", "yellow")
            elif member.node.draining:
                memory = Text("being drained" if device.reserved_bytes else "drained, takes no work", "yellow")
            table.add_row(first, device_name, memory, rtt)
            first, rtt = Text(), ""
    return table


def _away(member: MemberState) -> Text | None:
    """Describe a node whose memory is not known now; None for a node that answers."""
    if member.state == "alive":
        return None
    return Text(_AWAY.get(member.state, member.state), _STYLES.get(member.state, "dim"))


def _device(device: DeviceState) -> tuple[Text, Text]:
    profile, words = device.profile, ()
    if profile is not None:
        words = (profile.backend, profile.device, _DTYPES.get(profile.compute_dtype, profile.compute_dtype))
    name = Text(" ".join(filter(None, words)))
    if device.state in ("starting", "failed"):
        error = device.error.what if device.error is not None else ""
        reason = error if device.state == "failed" else "measuring"
        return name, Text(reason, style=_STYLES.get(device.state, "dim"))
    usable = device.reserved_bytes + device.free_bytes
    memory = bar(device.reserved_bytes / usable if usable else 0.0, width=_BAR_CELLS)
    return name, Text(f"{memory} {device.reserved_bytes / 1e9:.1f} of {usable / 1e9:.1f} GB")


def _engine(engine: EngineState) -> Iterator[RenderableType]:
    line = Text(engine.title, style="bold")
    if engine.names:
        line.append(f" ({', '.join(engine.names)})")
    line.append(" · ", style="not bold").append(engine.state, style=_STYLES.get(engine.state, "not bold"))
    if engine.state == "ready":
        line.append(_figures(engine), style="not bold")
    elif engine.starts_at_us:
        line.append(f" · {_next_start(engine)}", style="yellow")
    elif engine.message:
        progress = f" {engine.progress:.0%}" if engine.progress < 1.0 else ""  # nothing loads during a pause
        line.append(f" · {engine.message}{progress}", style="not bold")
    yield line
    if engine.error is not None and engine.state in ("failed", "waiting"):
        for text in (engine.error.what, engine.error.fact, engine.error.next_step):
            if text:
                yield indented(Text(text, style="red"))
    for entry in engine.left_out:
        yield indented(Text(left_out_text(entry), style="yellow"))
    yield from render_plan(engine)


def _next_start(engine: EngineState) -> str:
    """Say when a crashed engine starts again, by this machine's clock."""
    left_s = round(engine.starts_at_us / 1e6 - time.time())
    if left_s < 1:
        return "starts again now"
    return f"starts again in {left_s} s" if left_s < 60 else f"starts again in {format_duration_s(left_s)}"


def render_plan(engine: EngineState) -> Iterator[RenderableType]:
    """Render the ring, its stages, and the reasons for the number of micro-batches."""
    if engine.stages:
        yield _Ring(engine)
        yield _stages(engine)
        yield from _packed_products(engine)
        yield from _slow_paths(engine)
    if engine.state == "ready" and engine.why:
        yield from _sizing(engine)
    if engine.state == "ready" and engine.advice is not None:
        yield from _advice(engine.model, engine.advice)


def _copies(copies: ModelCopies | None, num_nodes: int) -> str:
    """Describe the number of copies on disk, in a cluster of several nodes."""
    if copies is None or num_nodes < 2:
        return ""
    if copies.fewest > 1:
        return f"on disk: {copies.fewest} copies of every layer"
    return f"on disk: some layers only once, on {' or '.join(_short(name) for name in copies.nodes)}"


def _figures(engine: EngineState) -> str:
    requests = f" · {engine.running} running" + (f", {engine.waiting} waiting" if engine.waiting else "")
    used = engine.num_blocks - engine.free_blocks
    kept = f" · KV {used * engine.block_size:,} of {engine.num_blocks * engine.block_size:,} tokens"
    if engine.state_slots:
        kept += f" · states {engine.state_slots - engine.free_slots} of {engine.state_slots}"
    return requests + kept


def _again(unix_s: int) -> str:
    """Say when a disk is tried again: nothing goes there before a conversation leaves RAM."""
    if unix_s <= time.time():
        return "The next conversation that leaves RAM tries it again"
    return f"Tried again at {time.strftime('%H:%M:%S', time.localtime(unix_s))}"


def _sizing(engine: EngineState) -> Iterator[Padding]:
    """Explain the number of micro-batches, a reason per line, and name the bottleneck."""
    first, *others = engine.why.split("; ")
    lines = [f"Micro-batches: {first}", *(f"{thought[:1].upper()}{thought[1:]}." for thought in others)]
    if engine.bottleneck:
        expected = f"{engine.predicted_tokens_per_s:.0f} tok/s expected of this load"
        lines.append(f"Slowest: {_place(engine, engine.bottleneck)} · {expected}")
    if engine.prompt_steps is not None:
        lines += _prompt_lines(engine, engine.prompt_steps)
    if engine.drafts is not None:
        lines += filter(None, [drafts_in_words(engine.drafts)])
    if engine.cached_tokens:
        hits = engine.cached_tokens / max(1, engine.admitted_tokens)
        lines.append(f"Prefix cache: {hits:.0%} of {engine.admitted_tokens:,} tokens")
    if engine.host_blocks:
        bound = engine.host_bound_blocks if engine.host_problem else engine.host_blocks
        used, room = (count * engine.block_size for count in (engine.used_host_blocks, bound))
        lines.append(f"KV in RAM: {used:,} of {room:,} tokens; {engine.restored_tokens:,} came back")
        if engine.host_problem:
            whole = engine.host_blocks * engine.block_size
            lines.append(f"KV in RAM has room for {whole:,} tokens when other programs end: {engine.host_problem}")
    if engine.disk_problem:
        lines.append(f"KV on disk: off for now; {engine.disk_problem}. {_again(engine.disk_again_unix_s)}")
    elif engine.disk_blocks:
        used, room = (count * engine.block_size for count in (engine.used_disk_blocks, engine.disk_blocks))
        lines.append(f"KV on disk: {used:,} of {room:,} tokens; {engine.fetched_tokens:,} came back")
    if engine.preemptions:
        lines.append(f"Preempted {_times(engine.preemptions)}: the KV cache is short")
    if engine.missed_snapshots:
        count = f"{engine.missed_snapshots} snapshot{'s' * (engine.missed_snapshots > 1)} of states"
        lines.append(f"Did not keep {count}: running chats held all {engine.state_slots} slots")
    if engine.recoveries:
        lines.append(f"Recovered {_times(engine.recoveries)}; {_paused(engine.stall_ms)}")
    if engine.moves:
        lines.append(f"Moved {_times(engine.moves)}, as asked for; {_paused(engine.move_pause_ms)}")
    for line in lines:
        yield indented(Text(line, style="dim"))


def drafts_in_words(drafts: DraftState) -> str:
    """Return what drafts tokens, how often the drafts are right, and what that brings; empty before the first draft."""
    if not drafts.source:
        return "Drafts: off, as asked for"
    if not drafts.drafted:
        return ""
    share = f"{drafts.accepted / drafts.drafted:.0%} of {drafts.drafted:,} right"
    by = {"mtp": " by the model's own layer", "model": " by the draft model"}.get(drafts.source, "")
    if drafts.ahead:
        share += f" · {drafts.ahead:,} of {drafts.windows:,} windows in flight behind another"
    return f"Drafts{by}: {share} · chats with drafts are {drafts.factor:.2f} times as fast"


def _prompt_lines(engine: EngineState, steps: PromptSteps) -> Iterator[str]:
    """Explain how prompts go into steps, and the goal that they miss."""
    bound = "the goal for chats (--itl-goal)" if steps.bound == "goal" else _place(engine, steps.bound)
    yield f"Prompts: {steps.in_flight} x {steps.num_tokens:,} tokens in flight, {steps.ms:.0f} ms each · bound: {bound}"
    if steps.over_goal_ms:
        yield f"Each token of a chat waits {steps.over_goal_ms:.0f} ms longer than the goal while a prompt is computed"


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")


def _paused(pause_ms: int) -> str:
    if not pause_ms:
        return "no answer had to wait"
    return f"answers paused for {format_duration_s(pause_ms / 1e3)} in total"


def _advice(model: str, advice: Advice) -> Iterator[Padding]:
    """Describe a better placement: its gain, the reason and the pause that switching costs."""
    for line in (
        f"A faster layout exists ({_gain(advice.gain)}): {layout_text(advice.plan)}.",
        f"{advice.why}. Switching pauses answers for {format_duration_s(advice.pause_s)}:",
        f"edgepipe serve {model} --rebalance",
    ):
        yield indented(Text(line, style="yellow"))


def _gain(gain: float) -> str:
    return f"+{gain * 100:.0f} %" if gain < 1 else f"about {1 + gain:.0f} times as fast"


def layout_text(plan: str) -> str:
    """Turn ``a:0-14,b:15-29`` into ``layers 0-14 on a, 15-29 on b``; for one machine ``all layers on a``."""
    parts = [part.rpartition(":") for part in plan.split(",")]
    if len(parts) == 1:
        return f"all layers on {parts[0][0]}"
    return "layers " + ", ".join(f"{_range(layers)} on {name}" for name, _, layers in parts)


def _range(layers: str) -> str:
    """Shorten the range of a single layer: ``29-29`` to ``29``."""
    first, _, last = layers.partition("-")
    return first if first == last else layers


def _place(engine: EngineState, server: str) -> str:
    """Add node names to a stage or link: ``stage 1 (studio)``, ``link 0-1 (gamer to studio)``."""
    kind, _, numbers = server.partition(" ")
    indices = [int(number) for number in numbers.split("-") if number.isdecimal()]
    names = [_short(engine.stages[index].node_name) for index in indices if index < len(engine.stages)]
    return f"{server} ({' to '.join(names)})" if names and kind in ("stage", "link") else kind


class _Ring:
    """Drawing of ``╭▶ a 0-14 ──▶ b 15-29 ─╮`` with the token's path back below it; one line if that is too wide."""

    def __init__(self, engine: EngineState) -> None:
        self._way = " ──▶ ".join(f"{_short(stage.node_name)} {layers_of(stage)}" for stage in engine.stages)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        top = f"  ╭▶ {self._way} ─╮"
        if len(top) > min(_LINE_CHARS, options.max_width):
            yield indented(Text(f"{self._way} ──▶ token"))
            return
        line = "─" * (len(top) - len("  ╰ token ╯"))
        half = len(line) // 2
        yield Text(f"{top}\n  ╰{line[:half]} token {line[half:]}╯")


def _stages(engine: EngineState) -> Table:
    table = make_table("  STAGE", "WEIGHTS", "KV", "STEP", "BUSY", "NEXT HOP", right=_STAGE_NUMBERS)
    last = len(engine.stages) - 1
    for index, stage in enumerate(engine.stages):
        hop = f"{stage.one_way_ms:.2f} ms" if stage.one_way_ms and index != last else "-"
        step, busy = (f"{stage.decode_ms:.1f} ms", f"{stage.busy:.0%}") if stage.decode_ms else ("-", "-")
        name = f"  {_short(stage.node_name)}"
        table.add_row(name, format_bytes(stage.weight_bytes), format_bytes(stage.kv_bytes), step, busy, hop)
    return table


def _packed_products(engine: EngineState) -> Iterator[Padding]:
    """Name what multiplies with packed weights, by node; the slower ways last, with the reason."""
    nodes: dict[PackedProducts, list[str]] = {}
    for stage in engine.stages:
        for products in stage.products:
            nodes.setdefault(products, []).append(_short(stage.node_name))
    for products in sorted(nodes, key=lambda each: (each.reason, each.by)):
        style = "yellow" if products.reason else "dim"
        yield indented(Text(f"Packed weights: {products.by} on {', '.join(nodes[products])}", style=style))
        for text in filter(None, (products.reason, products.remedy)):
            yield indented(Text(text, style=style), by=4)


def _slow_paths(engine: EngineState) -> Iterator[Padding]:
    """Say what makes steps slow, by node, with cost and reason."""
    nodes: dict[SlowPath, list[str]] = {}
    for stage in engine.stages:
        for path in stage.slow_paths:
            nodes.setdefault(path, []).append(_short(stage.node_name))
    for path, names in nodes.items():
        yield indented(Text(f"Slow on {', '.join(names)}: {path.what}", style="yellow"))
        for text in filter(None, (path.reason, path.cost, path.remedy)):
            yield indented(Text(text, style="yellow"), by=4)


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
