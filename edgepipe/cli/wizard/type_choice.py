"""Asks which type of a repository's GGUF files to pull: shows sizes, and which types fit the memory at hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgepipe.cli.output import make_console, make_table, print_json
from edgepipe.cli.wizard.asking import AskedChoice, Asking, say
from edgepipe.errors import ConfigInvalid
from edgepipe.safe_text import one_line
from edgepipe.spec.names import plain_type
from edgepipe.store.gguf_names import GgufChoice, main_scheme
from edgepipe.store.hub import HubSource
from edgepipe.store.known_models import USUAL_TYPE
from edgepipe.units import format_bytes

_NOTHING = "nothing"
_WORK_BYTES = 1_000_000_000  # memory of each machine for a chat's KV cache and the computation
_TYPICAL_MODEL = "llama-3.1-8b"
_PROBE_SHAPE = (256, 4096)  # shape of the weight whose size in memory is compared with its size in the file


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Free memory of one machine."""

    free_bytes: int
    packing: str  # how its backend keeps packed weights: a kind of ``edgepipe.weights.resident``
    dtype: str = "bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Free memory for a model."""

    owner: str  # "this cluster" or "this machine"
    rooms: tuple[Room, ...]

    def fits(self, choice: GgufChoice) -> bool:
        """Return whether all weights of a model of a known type fit, in the form in which each machine keeps them."""
        if not choice.known:
            return False
        capacity = sum(max(0, room.free_bytes - _WORK_BYTES) / _growth(choice.type, room) for room in self.rooms)
        return choice.num_bytes <= capacity


def memory_at_hand(data_dir: Path) -> Memory:
    """Return the free memory of the running node's cluster; without a running node, of this machine."""
    from edgepipe.backend.types import DEFAULT_SETTINGS
    from edgepipe.cli.views.copies_view import members_of
    from edgepipe.daemon.serving.capacity import rooms_of

    alive = [member.node for member in members_of(data_dir) if member.state == "alive"]
    rooms = [
        Room(free_bytes=room.free_bytes, packing=room.packing, dtype=room.dtype)
        for node in alive
        for room in rooms_of(node, DEFAULT_SETTINGS)
    ]
    return Memory(owner="this cluster", rooms=tuple(rooms)) if rooms else _own_memory()


def recommended(choices: Sequence[GgufChoice], memory: Memory) -> GgufChoice | None:
    """Return Q4_K_M if it fits, else the largest choice that fits; None if no choice fits."""
    fitting = [choice for choice in choices if memory.fits(choice)]
    preferred = next((choice for choice in fitting if choice.type == USUAL_TYPE), None)
    return preferred or max(fitting, key=lambda choice: choice.num_bytes, default=None)


def ask_type(asking: Asking, source: HubSource, choices: Sequence[GgufChoice], memory: Memory) -> str:
    """Ask which type to pull. Return the name for ``models pull``. Raises Back and Quit."""
    free = format_bytes(sum(room.free_bytes for room in memory.rooms))
    say(f"{one_line(source.repo)} has {len(choices)} types; free memory of {memory.owner}: {free}")
    best = recommended(choices, memory)
    lines = [AskedChoice(value=name_of(source, choice), text=_line(choice, best, memory)) for choice in choices]
    return asking.choose("Which type?", lines, default=name_of(source, best or _smallest(choices)))


def ask_to_fetch(asking: Asking, model: str, data_dir: Path) -> str:
    """Ask once whether to fetch a model, and which type if the person has named none and there are several.

    Return its name for ``models pull``; empty: the person does not want it. Raises Back and Quit, ModelUnknown, and the
    errors of listing a repository.
    """
    from edgepipe.store.hub import hub_types, plan_hub
    from edgepipe.store.pull import hub_source
    from edgepipe.store.typed_names import understood

    source, meant = hub_source(model), understood(model)
    if source is None or meant is None:
        return model if asking.confirm(f"Fetch {one_line(model)}?", default=True) else ""
    memory = memory_at_hand(data_dir)
    free = f"free memory of {memory.owner}: {format_bytes(sum(room.free_bytes for room in memory.rooms))}"
    types = [] if meant.type_given else hub_types(HubSource(repo=source.repo, revision=source.revision))
    if types:
        say(f"{one_line(source.repo)} has {len(types)} types; {free}")
        best = _wanted(source.type, types, memory) or recommended(types, memory)
        lines = [AskedChoice(value=name_of(source, choice), text=_line(choice, best, memory)) for choice in types]
        lines.append(AskedChoice(value=_NOTHING, text="none now"))
        chosen = asking.choose("Fetch which type?", lines, default=name_of(source, best or _smallest(types)))
        return "" if chosen == _NOTHING else chosen
    whole = GgufChoice(label=source.type, type=source.type, files=plan_hub(source).files)
    verdict = "it fits" if (fits := memory.fits(whole)) else "it does not fit"
    say(f"{one_line(meant.source)} has {format_bytes(whole.num_bytes)}; {free}: {verdict}")
    return model if asking.confirm("Fetch it?", default=fits) else ""


def _wanted(kind: str, choices: Sequence[GgufChoice], memory: Memory) -> GgufChoice | None:
    """Return the choice of a type, with or without its maker's prefix, if it fits."""
    same = [choice for choice in choices if kind and plain_type(choice.type) == plain_type(kind)]
    return next((choice for choice in same if memory.fits(choice)), None)


def refuse_without_type(
    source: HubSource, choices: Sequence[GgufChoice], memory: Memory, *, as_json: bool
) -> ConfigInvalid:
    """Print the types. Return the error for a pull that needs one and cannot ask."""
    best = recommended(choices, memory)
    if as_json:
        print_json({"model": source.repo, "types": [_row(source, choice, best, memory) for choice in choices]})
    else:
        table = make_table("TYPE", "SIZE", "", right=("SIZE",), whole=("TYPE",))
        for choice in choices:
            table.add_row(one_line(choice.label), format_bytes(choice.num_bytes), _verdict(choice, best, memory))
        make_console().print(table)
    return ConfigInvalid(
        f"'{source.repo}' has {len(choices)} types of one model",
        fact=f"a pull fetches one; 'fits' is for {memory.owner}",
        next_step=f"edgepipe models pull {name_of(source, best or _smallest(choices))}",
    )


def _smallest(choices: Sequence[GgufChoice]) -> GgufChoice:
    """Return the smallest choice, if possible of a known type."""
    return min(choices, key=lambda choice: (not choice.known, choice.num_bytes))


def name_of(source: HubSource, choice: GgufChoice) -> str:
    """Return the name of one type for ``models pull``."""
    return f"{source.repo}:{choice.label}" + (f"@{source.revision}" if source.revision != "main" else "")


def _own_memory() -> Memory:
    from edgepipe.backend.machine_memory import machine_memory
    from edgepipe.daemon.device.memory import headroom_bytes

    available, total = machine_memory()
    free = max(0, available - headroom_bytes(total_bytes=total, on_host=True))
    return Memory(owner="this machine", rooms=(Room(free_bytes=free, packing="torch-cpu"),))


def _growth(kind: str, room: Room) -> float:
    """Return the bytes in memory per byte of a file: of a model of 8B in a known mix, else of most weights."""
    from edgepipe.weights.mixes import mix_names

    mix = plain_type(kind)
    return _growth_of_mix(mix, room) if mix in mix_names() else _growth_of_scheme(main_scheme(kind), room)


def _growth_of_mix(mix: str, room: Room) -> float:
    from edgepipe.spec.facts import LayerRange, Slice
    from edgepipe.weights.mixes import mix_weights, named_model
    from edgepipe.weights.resident import resident_sizes

    config, table = named_model(f"{_TYPICAL_MODEL}:{mix}")
    whole = Slice(index=0, layers=LayerRange(0, config.num_layers), embedding=True, head=True)
    stored = sum(weight.num_bytes for weight in mix_weights(config, mix, whole))
    return resident_sizes(config, table, kind=room.packing, dtype=room.dtype).matrices / stored


def _growth_of_scheme(scheme: str, room: Room) -> float:
    from edgepipe.spec.gguf_types import BLOCKS_BY_NAME
    from edgepipe.weights.gguf_packing import gguf_form
    from edgepipe.weights.resident import resident_bytes

    block = BLOCKS_BY_NAME.get(scheme)
    if block is None:
        return 1.0
    rows, inputs = _PROBE_SHAPE
    stored = rows * inputs // block.block_values * block.block_bytes
    return resident_bytes(gguf_form(scheme), _PROBE_SHAPE, kind=room.packing, dtype=room.dtype) / stored


def _line(choice: GgufChoice, best: GgufChoice | None, memory: Memory) -> str:
    return f"{choice.label:<14} {format_bytes(choice.num_bytes):>9}  {_verdict(choice, best, memory)}"


def _verdict(choice: GgufChoice, best: GgufChoice | None, memory: Memory) -> str:
    if choice is best:
        return "fits, recommended"
    if not choice.known:
        return "not supported"
    return "fits" if memory.fits(choice) else "too large"


def _row(source: HubSource, choice: GgufChoice, best: GgufChoice | None, memory: Memory) -> Mapping[str, Any]:
    return {
        "type": choice.label,
        "size_bytes": choice.num_bytes,
        "files": len(choice.files),
        "supported": choice.known,
        "fits": memory.fits(choice),
        "recommended": choice is best,
        "command": f"edgepipe models pull {name_of(source, choice)}",
    }
