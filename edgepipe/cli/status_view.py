"""The picture that ``edgepipe status`` prints: made for 80 columns, true also without colour."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.text import Text

from edgepipe.cli.output import bar, make_table, printable
from edgepipe.cli.serve import layers_of
from edgepipe.units import format_bytes, format_duration_s

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from edgepipe.wire.v1 import engine_pb2
    from edgepipe.wire.v1 import node_pb2 as pb

_BAR_CELLS = 10
_STYLES = {"alive": "green", "suspect": "yellow", "dead": "red", "left": "dim", "ready": "green", "failed": "red"}
_NAME_CHARS = 16


def render_status(status: pb.ClusterStatus) -> Iterator[RenderableType]:
    """Headline, nodes, one paragraph per model, downloads, refused peers."""
    yield _headline(status)
    yield Text()
    yield _nodes(status)
    for engine in status.engines:
        yield Text()
        yield from _engine(engine)
    if not status.engines:
        yield Text("\nno model is served · next: edgepipe serve MODEL", style="dim")
    transfers = [(member, transfer) for member in status.members for transfer in member.node.transfers]
    if transfers:
        yield Text()
        yield _downloads(transfers, {member.node.node_id: member.node.name for member in status.members})
    for refused in status.refused:
        yield Text(f"refused {printable(refused.peer)}: {printable(refused.error.what)}", style="yellow")


def _headline(status: pb.ClusterStatus) -> Text:
    alive = sum(member.state == "alive" for member in status.members)
    total = len(status.members)
    healthy = alive == total and all(engine.state != "failed" for engine in status.engines)
    line = Text()
    line.append(printable(status.cluster_name or status.cluster_id), style="bold")
    line.append(" · ")
    line.append("healthy" if healthy else "degraded", style="green" if healthy else "yellow")
    line.append(f" · {alive} of {total} nodes" if alive != total else f" · {total} node{'s' * (total != 1)}")
    rate = sum(engine.tokens_per_s for engine in status.engines)
    if rate:
        line.append(f" · {rate:.1f} tok/s")
    line.append(f" · up {format_duration_s(status.uptime_ms // 1000)}")
    return line


def _nodes(status: pb.ClusterStatus) -> Table:
    table = make_table("NODE", "DEVICE", "MEMORY FOR MODELS", "", "RTT", right=("RTT",))
    for member in status.members:
        name = _short(member.node.name) + (" (this)" if member.self else "")
        rtt = "-" if member.self else f"{member.rtt_ms:.2f} ms"
        mark = Text("● ", style=_STYLES.get(member.state, ""))
        first = mark + Text(name)
        devices = list(member.node.devices)
        if not devices:
            table.add_row(first, Text("no device" if member.state == "alive" else member.state, "dim"), "", "", rtt)
        for device in devices:
            table.add_row(first, *_device(device), rtt)
            first, rtt = Text(), ""
    return table


def _device(device: pb.DeviceState) -> tuple[Text, str, Text]:
    profile = device.profile
    what = Text(printable(" ".join(filter(None, (profile.backend, profile.device))))[:20])
    if device.state in ("starting", "failed"):
        reason = device.error.what if device.state == "failed" else "measuring"
        return what, "", Text(printable(reason)[:40], style=_STYLES.get(device.state, "dim"))
    usable = device.reserved_bytes + device.free_bytes
    memory = bar(device.reserved_bytes / usable if usable else 0.0, width=_BAR_CELLS)
    numbers = Text(f"{format_bytes(device.reserved_bytes)} of {format_bytes(usable)}")
    if profile.compute_dtype:
        numbers.append(f" {profile.compute_dtype}", style="dim")
    return what, memory, numbers


def _engine(engine: engine_pb2.EngineState) -> Iterator[Text]:
    line = Text(printable(engine.model), style="bold")
    line.append(" · ", style="not bold").append(engine.state, style=_STYLES.get(engine.state, "not bold"))
    if engine.state == "ready":
        line.append(_figures(engine), style="not bold")
    elif engine.message:
        line.append(f" · {printable(engine.message)} {engine.progress:.0%}", style="not bold")
    yield line
    if engine.HasField("error") and engine.state == "failed":
        for text in (engine.error.what, engine.error.fact, engine.error.next_step):
            if text:
                yield Text(f"  {printable(text)}", style="red")
    if engine.stages:
        yield _ring(engine)
        for index, stage in enumerate(engine.stages):
            yield _stage(stage, last=index == len(engine.stages) - 1)


def _figures(engine: engine_pb2.EngineState) -> str:
    requests = f" · {engine.running} running" + (f", {engine.waiting} waiting" if engine.waiting else "")
    used = engine.num_blocks - engine.free_blocks
    kept = f" · KV {used * engine.block_size}/{engine.num_blocks * engine.block_size} tokens"
    return f"{requests}{kept} · {engine.micro_batches} micro-batch{'es' * (engine.micro_batches != 1)}"


def _ring(engine: engine_pb2.EngineState) -> Text:
    """``  ╭▶ a 0-14 ──▶ b 15-29 ─╮`` with the way back drawn below it."""
    boxes = [f"{_short(stage.node_name)} {layers_of(stage)}" for stage in engine.stages]
    way = " ──▶ ".join(boxes)
    top = f"  ╭▶ {way} ─╮"
    below = "  ╰" + "─" * (len(top) - 4) + "╯"
    return Text(f"{top}\n{below[: len(top) // 2 - 4]} token {below[len(top) // 2 + 3 :]}")


def _stage(stage: engine_pb2.StageState, *, last: bool) -> Text:
    weights = f"{format_bytes(stage.weight_bytes)} weights, {format_bytes(stage.kv_bytes)} KV"
    line = Text(f"    {_short(stage.node_name):<{_NAME_CHARS}} {weights}")
    if stage.step_ms:
        line.append(f" · step {stage.step_ms:.1f} ms · busy {stage.busy:.0%}")
    if stage.one_way_ms and not last:
        line.append(f" · next {stage.one_way_ms:.2f} ms away")
    return line


def _downloads(transfers: list[tuple[pb.MemberState, pb.Transfer]], names: dict[str, str]) -> Table:
    table = make_table("DOWNLOAD", "TO", "", "", "FROM")
    for member, transfer in transfers:
        part = transfer.bytes_done / transfer.bytes_total if transfer.bytes_total else 0.0
        amount = f"{format_bytes(transfer.bytes_done)} of {format_bytes(transfer.bytes_total)}"
        cells = (printable(transfer.model), _short(member.node.name), bar(part, width=_BAR_CELLS), amount)
        table.add_row(*cells, _short(names.get(transfer.source, transfer.source)))
    return table


def _short(name: str) -> str:
    text = printable(name)
    return text if len(text) <= _NAME_CHARS else text[: _NAME_CHARS - 1] + "…"
