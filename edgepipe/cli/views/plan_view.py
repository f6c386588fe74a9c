"""Output of ``edgepipe plan``: fits 80 columns, readable without colour."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.text import Text

from edgepipe.cli.output import bar, indented, make_table
from edgepipe.planner.demand import Objective
from edgepipe.planner.plan import Plan
from edgepipe.planner.preview import (
    DISK_BYTES,
    Preview,
    busy_fraction,
    disk_kv_tokens,
    experts_text,
    host_kv_tokens,
    plan_text,
)
from edgepipe.planner.profiles import MEASURED
from edgepipe.spec.kv_forms import KV_4BIT, KV_8BIT
from edgepipe.spec.longrope import factors_in_words
from edgepipe.spec.memory_classes import state_slots
from edgepipe.units import format_bytes, format_duration_s, format_rate

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.padding import Padding
    from rich.table import Table

    from edgepipe.planner.draft_forecast import DraftForecast
    from edgepipe.planner.forecast import Hop
    from edgepipe.planner.preview import LongPrompt
    from edgepipe.planner.shortage import Shortage
    from edgepipe.planner.what_if import Alternative

_BAR_CELLS = 10
_TOKEN_CELLS, _FEWEST_CELLS = 44, 8
_NAME_CHARS = 14
_DEVICE_CHARS = 16
_COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red")
_MOST_PLACED = 4  # machines of another plan
_MOST_LEFT_OUT = 6


def render_preview(shown: Preview) -> Iterator[RenderableType]:
    """Render a headline, machines, the ring, one token's time, predictions and comparisons."""
    found = shown.plan
    yield _headline(shown)
    if shown.without:
        yield Text(f"fits only with the changes ({shown.changes}); now {shown.without}", style="yellow")
    yield Text()
    yield _machines(found)
    if words := experts_text(found) or shown.note:
        yield Text(words, style="yellow")
    yield from _left_out(found)
    if len(found.stages) > 1:
        yield Text()
        yield from _ring(found)
    yield Text()
    yield _Token(found)
    yield Text()
    yield from _predictions(shown)
    if shown.alternatives or shown.changed is not None:
        yield Text()
        yield _compared(shown)
    if shown.helps:
        yield Text()
        yield _helps(shown)


def render_shortage(short: Shortage, model: str, *, all_bytes: int) -> Iterator[RenderableType]:
    """Render the required memory, the free memory per machine, and changes that would help.

    ``all_bytes``: memory of the machines, taken or free; ``--force`` helps if that is enough.
    """
    line = Text(f"{model} does not fit: ", style="bold red")
    line.append(f"needs {format_bytes(short.needed_bytes)}", style="not bold")
    yield line
    yield Text()
    table = make_table("MEMORY", "SIZE", right=("SIZE",))
    kv = f"KV of {short.kv_tokens:,} tokens"
    for label, size in (("weights", short.weight_bytes), (kv, short.kv_bytes), ("needed", short.needed_bytes)):
        table.add_row(f"  {label}", format_bytes(size))
    for name, size in short.rooms:
        table.add_row(f"  free on {_short(name)}", format_bytes(size))
    table.add_row("  free", format_bytes(short.free_bytes))
    missing = format_bytes(short.missing_bytes) if short.missing_bytes else "no cut between layers fits"
    table.add_row("  missing", Text(missing, style="red"))
    yield table
    yield Text()
    helps = make_table("WHAT WOULD HELP", "GAIN", "", right=("GAIN",))
    for change in short.helps:
        helps.add_row(f"  {change.what}", format_bytes(change.gain_bytes), "enough" if change.enough else "")
    yield helps
    if short.missing_bytes and all_bytes >= short.needed_bytes:
        yield Text("\nor plan as if all memory were free: --force (the system may swap, or kill a stage)", style="dim")


def _headline(shown: Preview) -> Text:
    found = shown.plan
    total = len(found.stages) + len(found.left_out)
    aim = "one chat" if found.demand.objective is Objective.LATENCY else f"{found.demand.concurrency} chats"
    line = Text(shown.model, style="bold")
    used, pieces = len({stage.machine.node_id for stage in found.stages}), len(found.stages)
    if used == 1:
        where = "whole on one machine" if total == 1 else f"whole on one of {total} machines"
    else:
        where = f"split{f' in {pieces} parts' * (pieces != used)} over {used} of {total} machines"
    line.append(f" · {where} · best for {aim}", style="not bold")
    return line


def _machines(found: Plan) -> Table:
    table = make_table("MACHINE", "LAYERS", "MEMORY", "STEP", "BUSY", right=("STEP", "BUSY"))
    for index, stage in enumerate(found.stages):
        used, free = stage.weight_bytes + stage.kv_bytes, stage.machine.room.free_bytes
        room = bar(used / free if free else 1.0, width=_BAR_CELLS)
        style = "red" if used > free else ""
        name = Text(_short(stage.machine.name), style=_COLOURS[index % len(_COLOURS)])
        name.append(f" {_device(stage.machine.device)}", style="dim")
        table.add_row(
            name,
            stage.part.layers.shown,
            Text(f"{room} {used / 1e9:.1f} of {free / 1e9:.1f} GB", style=style),
            f"{stage.alone_s * 1e3:.1f} ms",
            f"{busy_fraction(found, index):.0%}",
        )
    return table


def _left_out(found: Plan) -> Iterator[Text]:
    for entry in found.left_out[:_MOST_LEFT_OUT]:
        yield Text(
            f"{_short(entry.machine.name)} ({_device(entry.machine.device)}) is left out: {entry.reason}", style="dim"
        )
    if (more := len(found.left_out) - _MOST_LEFT_OUT) > 0:
        yield Text(f"and {_count(more, 'more machine')}", style="dim")


def _ring(found: Plan) -> Iterator[Padding]:
    """Render a token's path from top to bottom, with the bottleneck."""
    for index, stage in enumerate(found.stages):
        line = Text()
        line.append(f"{_short(stage.machine.name)} {stage.part.layers.shown}", style=_COLOURS[index % len(_COLOURS)])
        if stage.machine.node_id == found.engine and index == 0:
            line.append("  engine", style="dim")
        yield indented(_marked(line, found, f"stage {index}"))
        if index < len(found.single.hops):
            yield indented(_marked(Text(f"│ {_link(found.many.hops[index])}"), found, f"link {index}-{index + 1}"))
    yield indented(Text(f"╰─▶ token · {format_duration_s(found.single.closing_s)} until the next one begins"))


def _marked(line: Text, found: Plan, place: str) -> Text:
    if found.many.bottleneck == place:
        line.append("  ◀ bottleneck", style="bold red")
    return line


def _link(hop: Hop) -> str:
    shape = hop.link.shape
    rate = "" if shape.bytes_per_s == float("inf") else f" · {format_rate(shape.bytes_per_s)}"
    upload = f" · {format_duration_s(hop.upload_s)} a step" if hop.upload_s else ""
    source = "" if hop.link.measured else " · assumed"
    return f"{format_duration_s(shape.one_way_s)}{rate}{upload}{source}"


class _Token:
    """One chat's token as one bar: how long each stage takes."""

    def __init__(self, found: Plan) -> None:
        rates = found.single
        steps = zip(found.stages, rates.step_s, strict=True)
        self._turn_s = rates.turn_s
        self._parts = [(_short(stage.machine.name), seconds) for stage, seconds in steps]
        self._hops = ("hops, sampling", rates.turn_s - sum(rates.step_s))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        label, end = "one token  ", f" {format_duration_s(self._turn_s)}"
        room = options.max_width - len(label) - len(end) - len(self._parts)  # a short part takes a cell more
        most = max(_FEWEST_CELLS, min(_TOKEN_CELLS, room))
        line, legend = Text(label), Text()
        for index, (name, seconds) in enumerate([*self._parts, self._hops]):
            hops = index == len(self._parts)
            cells = max(1, round(most * seconds / self._turn_s)) if self._turn_s else 1
            style = "dim" if hops else _COLOURS[index % len(_COLOURS)]
            line.append(("░" if hops else "█▓"[index % 2]) * cells, style=style)
            legend.append(f"{name} {seconds * 1e3:.1f}", style=style)
            legend.append(" ms" if hops else " · ")
        yield line.append(end)
        yield indented(legend, by=len(label))


def _predictions(shown: Preview) -> Iterator[RenderableType]:
    found = shown.plan
    many, demand = found.many, found.demand
    table = make_table("EXPECTED", "", "")
    first = f"first word of a {demand.read_tokens:,}-token prompt in {format_duration_s(found.prompt.first_token_s)}"
    table.add_row("  one chat", f"{found.single.tokens_per_s:.1f} tok/s", first)
    if (drafts := shown.drafts) is not None:
        table.add_row("  with drafts", f"{drafts.tokens_per_s:.1f} tok/s", words_of_drafts(drafts))
    each = f"{many.tokens_per_s / many.sequences:.1f} each, {_count(many.micro_batches, 'micro-batch')} under way"
    if many.sequences > 1:
        table.add_row(f"  {_count(many.sequences, 'chat')}", f"{many.tokens_per_s:.1f} tok/s", each)
    if shown.long_prompt is not None:
        for row in _long_prompt(shown.long_prompt, many.sequences):
            table.add_row(*row)
    chats = demand.chats(found.kv_tokens, found.stages[0].machine.room.rest_tokens)
    room = _count(chats, "chat") if chats else "less than one chat"
    table.add_row("  KV room", f"{found.kv_tokens:,} tokens", f"{room} of {demand.context_tokens:,}")
    if below := host_kv_tokens(found):
        table.add_row("  KV in RAM", f"{below:,} tokens", "of chats that have no room; serve --kv-ram auto")
        on_disk = disk_kv_tokens(found, num_bytes=DISK_BYTES)
        table.add_row("  KV on disk", f"{on_disk:,} tokens", "of chats that leave RAM, with --kv-disk 100GB")
    if slots := state_slots(demand.config, found.kv_tokens, most_slots=found.most_slots):
        size = format_bytes(demand.config.state_bytes())
        what = f"one for each running chat; snapshots every {slots.gap:,} tokens"
        table.add_row("  states", f"{slots.num_slots} of {size}", what)
    yield table
    yield indented(Text(_sources(found, now_s=time.time()), style="dim"))
    if not chats:
        room = _narrower_kv({stage.machine.room.kv for stage in found.stages})
        yield indented(Text(f"a chat has {found.kv_tokens:,} tokens at most; {room}", style="yellow"))
    if busy := [_short(stage.machine.name) for stage in found.stages if stage.machine.speed.busy]:
        told = (
            f"{' and '.join(busy)} did other work during the measurement, and may be faster: --measure measures again"
        )
        yield indented(Text(told, style="yellow"))
    if factors := factors_in_words(demand.config, demand.must_keep_tokens):
        yield indented(Text(factors, style="dim"))
    if found.gap > 0.01:
        yield indented(Text(f"another order of machines might be up to {found.gap:.0%} faster", style="dim"))


def words_of_drafts(drafts: DraftForecast) -> str:
    """Describe what drafts bring to one chat."""
    shares = [f"{share:.0%}" for share in drafts.right[: max(1, drafts.count)]]
    each = f"{format_duration_s(drafts.draft_s)} each, "
    right = f"if {', '.join(shares)} are right"
    if not drafts.count:
        return f"none pays: {each}{right}"
    if drafts.in_flight > 1:
        return f"{drafts.factor:.2f}x: {drafts.in_flight} windows of {drafts.count}, {each}{', '.join(shares)} right"
    return f"{drafts.factor:.2f}x: {drafts.count} a turn, {each}{right}"


def _long_prompt(prompt: LongPrompt, chats: int) -> Iterator[tuple[str, str, str]]:
    """Describe when a long prompt's first word comes, and how its tokens go into steps."""
    alone, beside = prompt.alone, prompt.beside
    first = f"first word of {alone.prompt_tokens:,} tokens; with chats {format_duration_s(beside.first_token_s)}"
    yield "  long prompt", format_duration_s(alone.first_token_s), first
    for label, way in (("its chunks", alone), (f"with {_count(chats, 'chat')}", beside)):
        bound = "for --itl-goal" if way.bound == "goal" else f"on {way.bound}"
        steps = f"{way.in_flight} under way, {format_duration_s(way.chunk_s)} each, {bound}"
        yield f"  {label}", f"{way.chunk_tokens:,} tokens", steps


def _narrower_kv(forms: set[str]) -> str:
    """Say what makes room for more KV than stages with these forms of it have."""
    if KV_4BIT in forms:
        return "a smaller type leaves more room"
    if KV_8BIT in forms:
        return f"--kv {KV_4BIT} makes room for almost twice that"
    return f"--kv {KV_8BIT} makes room for twice that, --kv {KV_4BIT} for almost four times"


def _sources(found: Plan, *, now_s: float) -> str:
    """Describe the sources of the predictions, and their age."""
    measured = [stage.machine.speed.source == MEASURED for stage in found.stages]
    links = [hop.link.measured for hop in found.single.hops]
    when = [stage.machine.speed.measured_s for stage in found.stages if stage.machine.speed.measured_s]
    if all(measured):
        devices = "devices measured"
        if when:
            devices += f" {format_duration_s(max(1.0, now_s - min(when)))} ago"
    elif any(measured):
        devices = f"{sum(measured)} of {len(measured)} devices measured, others estimated from their rates"
    else:
        devices = "devices estimated from their rates of memory and products"
    if not links:
        return devices
    how = "measured" if all(links) else "assumed" if not any(links) else "partly measured"
    return f"{devices}, links {how}"


def _compared(shown: Preview) -> Table:
    table = make_table("COMPARED, TOK/S", "ONE CHAT", "MANY", "", right=("ONE CHAT", "MANY"))
    table.add_row("  this plan", *_rates(shown.plan), "")
    if shown.changed is not None:
        table.add_row("  with the changes", *_rates(shown.changed), _where(shown.changed))
    for alternative in shown.alternatives:
        table.add_row(f"  {alternative.what}", *_alternative(alternative))
    return table


def _alternative(alternative: Alternative) -> tuple[str, str, str]:
    if alternative.plan is None:
        return "-", "-", "does not fit"
    return (*_rates(alternative.plan), _where(alternative.plan))


def _where(found: Plan) -> str:
    """Return the placement in the syntax of ``--plan``, the first machines of many."""
    parts = plan_text(found).split(",")
    return ",".join(parts[:_MOST_PLACED]) + (", …" if len(parts) > _MOST_PLACED else "")


def _rates(found: Plan) -> tuple[str, str]:
    return f"{found.single.tokens_per_s:.1f}", f"{found.many.tokens_per_s:.1f}"


def _helps(shown: Preview) -> Table:
    table = make_table("WHAT WOULD HELP MOST", "GAIN", right=("GAIN",))
    for change in shown.helps:
        table.add_row(f"  {change.what}", f"+{change.gain_over(shown.plan):.0%}")
    return table


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def _short(name: str) -> str:
    return name if len(name) <= _NAME_CHARS else name[: _NAME_CHARS - 1] + "…"


def _device(name: str) -> str:
    """Shorten a device name: ``RTX 4090`` of ``NVIDIA GeForce RTX 4090 (emulated)``."""
    for word in ("NVIDIA ", "GeForce ", "Apple ", " (emulated)", "(R)", "(TM)"):
        name = name.replace(word, "")
    return name if len(name) <= _DEVICE_CHARS else name[: _DEVICE_CHARS - 1] + "…"
