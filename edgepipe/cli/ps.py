"""``edgepipe ps``"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgepipe.cli.options import DataDir, Json, data_dir_of
from edgepipe.cli.output import as_dict, make_console, make_table, print_json

if TYPE_CHECKING:
    from edgepipe.wire.engines import EngineState


def ps(data_dir: DataDir = None, as_json: Json = False) -> None:
    """List the served models and their nodes."""
    from edgepipe.cli.admin import Admin, ask_node
    from edgepipe.cli.views.status_view import news_of

    status = ask_node(data_dir_of(data_dir), Admin.status)
    engines = status.engines
    if as_json:
        print_json([as_dict(engine) for engine in engines])
    elif not engines:
        print("no model is served\nserve one: edgepipe serve MODEL    (see 'edgepipe models list')")
    else:
        numbers = ("CONTEXT", "RUNNING", "WAITING")
        table = make_table("MODEL", "STATE", "LAYERS BY NODE", *numbers, right=numbers)
        for engine in engines:
            table.add_row(*_row(engine))
        make_console().print(table)
        if news := news_of(status):
            print(news)


def _row(engine: EngineState) -> list[str]:
    from edgepipe.cli.serve import layers_of

    where = " ".join(f"{stage.node_name}:{layers_of(stage)}" for stage in engine.stages)
    context = str(engine.context_length or "-")
    name = f"{engine.model} ({', '.join(engine.names)})" if engine.names else engine.model
    return [name, engine.state, where or "-", context, str(engine.running), str(engine.waiting)]
