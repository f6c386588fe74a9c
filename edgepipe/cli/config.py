"""``edgepipe config``"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from edgepipe.cli.options import DataDir, Json
from edgepipe.cli.output import make_console, make_table, print_json, say

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
    """Show every setting. Priority: flags, EDGEPIPE_* variables, the TOML file, defaults."""
    from edgepipe.config import config_file, load_config

    loaded = load_config({"data_dir": data_dir})
    values = {name: _plain(value) for name, value in asdict(loaded.values).items()}
    values["api_key"] = ["(set)"] * len(loaded.values.api_key)  # keys never appear on a screen or in a log
    if as_json:
        print_json({name: {"value": value, "origin": loaded.origins[name]} for name, value in values.items()})
        return
    table = make_table("SETTING", "VALUE", *(["FROM"] if origin else []))
    for name, value in values.items():
        table.add_row(name, _shown(value) or "-", *([loaded.origins[name]] if origin else []))
    make_console().print(table)
    print(f"\nfile: {config_file()}")


@app.command("set")
def set_value(
    name: Annotated[str, typer.Argument(help="Setting, as 'edgepipe config show' names it.", show_default=False)],
    value: Annotated[str, typer.Argument(help="The new value; separate several by commas.", show_default=False)],
    data_dir: DataDir = None,
) -> None:
    """Write a setting to the settings file. A running node reads it at its next start."""
    from edgepipe.cli.settings_file import write_settings
    from edgepipe.config import config_file, load_config
    from edgepipe.daemon.machine.data_dir import socket_path

    checked = load_config({name: value}, environ={})
    key = next(key for key, origin in checked.origins.items() if origin == "flag")
    path = config_file()
    write_settings(path, {key: _plain(getattr(checked.values, key))})
    say(f"{key} is set in {path}")
    loaded = load_config({"data_dir": data_dir})
    if loaded.origins[key].startswith("env "):
        say(f"{loaded.origins[key].removeprefix('env ')} has another value and wins")
    if socket_path(loaded.values.data_dir).exists():
        say("this machine's node reads it at its next start: edgepipe node stop, then edgepipe node start")


def _shown(value: Any) -> str:
    """Format a value as ``config set`` and the file take it."""
    if isinstance(value, list):
        return ",".join(map(str, value))  # pyright: ignore[reportUnknownArgumentType]
    return str(value).lower() if isinstance(value, bool) else str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [str(part) for part in value]  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return value if isinstance(value, (bool, int, float, str)) else str(value)
