"""``edgepipe config show``"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from edgepipe.cli.options import DataDir, Json
from edgepipe.cli.output import make_console, make_table, print_json

app = typer.Typer(help="Settings and where they come from.")


@app.callback()
def _group() -> None:
    """Settings and where they come from."""


@app.command()
def show(
    origin: Annotated[bool, typer.Option("--origin", help="Say where each value comes from.")] = False,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Show every setting. Flags win over EDGEPIPE_* variables, those over the TOML file, that over defaults."""
    from edgepipe.config import default_config_file, load_config

    loaded = load_config({"data_dir": data_dir})
    values = {name: _plain(value) for name, value in asdict(loaded.values).items()}
    values["api_key"] = ["(set)"] * len(loaded.values.api_key)  # for eyes that look over a shoulder, and for logs
    if as_json:
        print_json({name: {"value": value, "origin": loaded.origins[name]} for name, value in values.items()})
        return
    table = make_table("SETTING", "VALUE", *(["FROM"] if origin else []))
    for name, value in values.items():
        shown = ",".join(map(str, value)) if isinstance(value, list) else str(value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        table.add_row(name, shown or "-", *([loaded.origins[name]] if origin else []))
    make_console().print(table)
    print(f"\nfile: {default_config_file()}")


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [str(part) for part in value]  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return value if isinstance(value, (bool, int, str)) else str(value)
