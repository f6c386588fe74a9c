"""Independent pipelines of one model, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from edgepipe.cli.output import make_table
from edgepipe.planner.preview import plan_as_dict
from edgepipe.planner.replicas import rate_of
from edgepipe.safe_text import one_line

if TYPE_CHECKING:
    from rich.console import RenderableType

    from edgepipe.planner.plan import Plan
    from edgepipe.planner.replicas import Layout


def render_layouts(layouts: Sequence[Layout], *, model: str, concurrency: int) -> Iterator[RenderableType]:
    """Show the pipelines of the first layout, then what each number of pipelines would give."""
    chosen = layouts[0]
    yield Text(f"{model} · {_count(chosen)} · {concurrency} chats at the same time\n", style="bold")
    numbers = ("CHATS", "TOKENS/S", "KV TOKENS")
    table = make_table("PIPELINE", "LAYERS BY NODE", *numbers, right=numbers)
    for number, found in enumerate(chosen.plans, start=1):
        figures = (str(found.demand.concurrency), f"{rate_of(found):.0f}", str(found.kv_tokens))
        table.add_row(f"{number}/{len(chosen.plans)}", _where(found), *figures)
    yield table
    if len(layouts) > 1:
        yield Text()
        compared = make_table("PIPELINES", "TOKENS/S", "MACHINES", right=("TOKENS/S",))
        for layout in sorted(layouts, key=lambda each: len(each.plans)):
            mark = " *" if layout is chosen else ""
            machines = " · ".join("+".join(_names(found)) for found in layout.plans)
            compared.add_row(f"{len(layout.plans)}{mark}", f"{layout.tokens_per_s:.0f}", machines)
        yield compared


def layouts_as_dict(layouts: Sequence[Layout], *, model: str) -> dict[str, Any]:
    """Convert layouts to plain values, the chosen one first."""
    return {
        "model": model,
        "layouts": [
            {
                "replicas": len(layout.plans),
                "tokens_per_s": layout.tokens_per_s,
                "pipelines": [plan_as_dict(found) for found in layout.plans],
            }
            for layout in layouts
        ],
    }


def _count(layout: Layout) -> str:
    return "one pipeline" if len(layout.plans) == 1 else f"{len(layout.plans)} replicas"


def _where(found: Plan) -> str:
    return " ".join(f"{one_line(stage.machine.name)}:{stage.part.layers}" for stage in found.stages)


def _names(found: Plan) -> list[str]:
    return list(dict.fromkeys(one_line(stage.machine.name) for stage in found.stages))
