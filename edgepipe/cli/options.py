"""Options that several verbs share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from edgepipe.errors import ConfigInvalid
from edgepipe.spec.kv_forms import KV_FORMS

DEGRADED_EXIT = 8
"""Exit code of a verb that shows warnings or problems of the cluster."""

DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir", metavar="FOLDER", help="Folder of the node's identity, socket and logs.", show_default=False
    ),
]
ModelsDir = Annotated[
    Path | None,
    typer.Option("--models-dir", metavar="FOLDER", help="Folder of the models.  [default: DATA_DIR/models]"),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
WithProgress = Annotated[
    bool, typer.Option("--progress", help="With --json: print progress as JSON lines, then the result.")
]
Replicas = Annotated[
    str,
    typer.Option(
        "--replicas",
        metavar="[N|auto]",
        help="Independent pipelines of the model on machines of their own: a number, or auto, as many as give the most "
        "tokens per second of all chats.",
        show_default=False,
    ),
]
ObjectiveName = Annotated[
    str, typer.Option("--objective", metavar="GOAL", help="latency: speed of one chat; throughput: tokens/s of all.")
]
KVForm = Annotated[
    str, typer.Option("--kv", metavar="FORM", help="KV cache in the compute type (auto), in 8bit or 4bit: less memory.")
]
KVRam = Annotated[
    str,
    typer.Option(
        "--kv-ram",
        metavar="[SIZE|auto|off]",
        help="RAM of each stage for conversations that its device has no room for: 8GB, auto (a third of the free RAM "
        "beside a GPU) or off.",
    ),
]
KVDisk = Annotated[
    str,
    typer.Option(
        "--kv-disk",
        metavar="[SIZE|off]",
        help="Disk of each stage for conversations that leave --kv-ram: 100GB, or off. The file is encrypted and ends "
        "with the stage.",
    ),
]
ExpertsInRam = Annotated[
    str,
    typer.Option(
        "--experts-in-ram",
        metavar="[auto|N%|all]",
        help="Keep experts in RAM where a GPU is too small: auto (as few as needed), all, or N% of them.",
        show_default=False,
    ),
]
Exclude = Annotated[
    str, typer.Option("--exclude", metavar="NODES", help="Nodes to leave out: a,b.", show_default=False)
]
First = Annotated[
    str, typer.Option("--first", metavar="NODE", help="The node that holds the first layers.", show_default=False)
]
NumNodes = Annotated[int, typer.Option("--nodes", metavar="N", min=0, help="Number of nodes; 0: the best number.")]
LayerPlan = Annotated[
    str, typer.Option("--plan", metavar="LAYERS", help='Layers by node: "a:0-14,b:15-29".', show_default=False)
]
Dtype = Annotated[str, typer.Option("--dtype", metavar="TYPE", help="auto, float32 or bfloat16.")]


def checked_dtype(dtype: str) -> str:
    """Check the value of ``--dtype``. Return it. Raises ConfigInvalid."""
    if dtype not in ("auto", "float32", "bfloat16"):
        raise ConfigInvalid(f"--dtype cannot be '{dtype}'", next_step="give auto, float32 or bfloat16")
    return dtype


def checked_kv(kv: str) -> str:
    """Check the value of ``--kv``. Return it, empty for auto. Raises ConfigInvalid."""
    if kv not in ("auto", *KV_FORMS):
        raise ConfigInvalid(f"--kv cannot be '{kv}'", next_step=f"give auto, {' or '.join(KV_FORMS)}")
    return "" if kv == "auto" else kv


def checked_kv_ram(text: str) -> str:
    """Check the value of ``--kv-ram``. Return ``StageSettings.kv_ram``. Raises ConfigInvalid."""
    from edgepipe.units import parse_bytes

    if text in ("auto", "off"):
        return "auto" if text == "auto" else ""
    try:
        num_bytes = parse_bytes(text)
    except ConfigInvalid as exc:
        raise ConfigInvalid(f"--kv-ram cannot be '{text}'", next_step="give a size such as 8GB, auto or off") from exc
    return str(num_bytes) if num_bytes else ""


def checked_kv_disk(text: str, *, kv_ram: str) -> str:
    """Check the value of ``--kv-disk``. Return ``StageSettings.kv_disk``. Raises ConfigInvalid.

    ``kv_ram``: the checked value of ``--kv-ram``.
    """
    from edgepipe.units import parse_bytes

    if text == "off":
        return ""
    try:
        num_bytes = parse_bytes(text)
    except ConfigInvalid as exc:
        raise ConfigInvalid(f"--kv-disk cannot be '{text}'", next_step="give a size such as 100GB, or off") from exc
    if num_bytes and not kv_ram:
        raise ConfigInvalid(
            "--kv-disk needs RAM above it",
            fact="conversations go to disk over RAM",
            next_step="add --kv-ram auto, or a size such as --kv-ram 8GB",
        )
    return str(num_bytes) if num_bytes else ""


def data_dir_of(given: Path | None) -> Path:
    """Return the data directory in effect."""
    from edgepipe.config import load_config

    return load_config({"data_dir": given}).values.data_dir


def models_dir_of(data_dir: Path | None, models_dir: Path | None) -> Path:
    """Return the folder of models in effect."""
    from edgepipe.config import load_config

    return load_config({"data_dir": data_dir, "models_dir": models_dir}).values.models_dir


def given_flags(context: typer.Context, *, without: Sequence[str] = ()) -> list[str]:
    """Return the options that the user typed, ready to type again, without the parameters in ``without``."""
    flags: list[str] = []
    for option in context.command.params:
        value: Any = context.params.get(option.name or "")
        if option.name in without or value is None or value == option.default:
            continue
        if isinstance(value, bool):
            flags.append(option.opts[0] if value else option.secondary_opts[0])
        else:
            values = cast("Sequence[object]", value if isinstance(value, (list, tuple)) else (value,))
            flags += [part for typed in values for part in (option.opts[0], str(typed))]
    return flags


def complete_model(incomplete: str) -> list[str]:
    """Complete the name of a model on this machine's disk in a shell. Return no names on any error."""
    from edgepipe.errors import EdgepipeError
    from edgepipe.store.store import ModelStore

    try:
        names = [model.id for model in ModelStore(models_dir_of(None, None)).list()]
    except (EdgepipeError, OSError):
        return []
    return [name for name in names if name.startswith(incomplete)]


def complete_known_model(incomplete: str) -> list[str]:
    """Complete the name of a model on this machine's disk, or a known short name: ``gpt-oss-20b``."""
    from edgepipe.store.known_models import known_models

    known = [name for model in known_models() for name in (model.name, *model.also)]
    return list(dict.fromkeys([*complete_model(incomplete), *(name for name in known if name.startswith(incomplete))]))


def checked_replicas(text: str, *, plan: str = "", first: str = "") -> tuple[int, bool]:
    """Parse ``--replicas``: the number (0: not given), and whether the planner chooses it. Raises ConfigInvalid."""
    from edgepipe.planner.replicas import MOST_REPLICAS

    if not text:
        return 0, False
    for flag, given in (("--plan", plan), ("--first", first)):
        if given and text != "1":
            raise ConfigInvalid(f"--replicas and {flag} contradict each other", next_step="give one of them")
    if text == "auto":
        return 0, True
    if not text.isdecimal() or not 1 <= int(text) <= MOST_REPLICAS:
        raise ConfigInvalid(
            f"--replicas cannot be '{text}'", next_step=f"give auto or a number from 1 to {MOST_REPLICAS}"
        )
    return int(text), False
