"""``edgepipe serve``"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from edgepipe.cli.options import (
    DataDir,
    Dtype,
    Exclude,
    ExpertsInRam,
    First,
    Json,
    KVDisk,
    KVForm,
    KVRam,
    LayerPlan,
    NumNodes,
    ObjectiveName,
    Replicas,
    WithProgress,
    checked_dtype,
    checked_kv,
    checked_kv_disk,
    checked_kv_ram,
    checked_replicas,
    complete_known_model,
    data_dir_of,
    models_dir_of,
)
from edgepipe.cli.output import as_dict, make_console, print_json
from edgepipe.errors import ConfigInvalid, ModelUnknown, PeerClosed

if TYPE_CHECKING:
    from pathlib import Path

    from edgepipe.link.admin_client import Admin
    from edgepipe.wire.engines import EngineState, StageState
    from edgepipe.wire.serving import ServeRequest

# Where the layers go, beside the options that other verbs share.
Rebalance = Annotated[
    str,
    typer.Option(
        "--rebalance",
        metavar="[now|auto|off]",
        help="Place a served model again: now, auto (again whenever another placement is clearly better) or off.",
        show_default=False,
    ),
]

# How steps are filled.
Concurrency = Annotated[
    int, typer.Option("--concurrency", metavar="N", min=0, help="Chats at the same time; 0: automatic.")
]
MicroBatches = Annotated[
    str, typer.Option("--micro-batches", metavar="K", help="Number of micro-batches in flight, or auto.")
]
PolicyName = Annotated[
    str,
    typer.Option(
        "--policy",
        metavar="POLICY",
        help="Scheduler policy: throttled, sarathi or sarathi-TOKENS; for batches alone temporal or auto.",
    ),
]
ItlGoal = Annotated[
    str,
    typer.Option(
        "--itl-goal",
        metavar="TIME",
        help="Time that prompts may add to each token of a chat: 100ms, 0.3s, or off. Shorter: smoother chats, "
        "later first words.",
    ),
]
Draft = Annotated[
    str,
    typer.Option(
        "--draft",
        metavar="SOURCE",
        help="Where drafts of tokens come from, which one step verifies together: lookup (in the prompt and the "
        "answer), mtp (a layer of the model, if it has one; takes memory), the name of a small model with the same "
        "vocabulary (takes memory), auto (mtp if it fits, else lookup), or off.",
    ),
]

# Memory and number types of the stages.
ContextTokens = Annotated[
    int, typer.Option("--context", metavar="TOKENS", min=0, help="Tokens per conversation; 0: the model's.")
]
KVTokens = Annotated[
    int,
    typer.Option(
        "--kv-tokens", metavar="TOKENS", min=0, help="KV cache of all conversations, in tokens; 0: by memory."
    ),
]
Activations = Annotated[
    str, typer.Option("--activations", metavar="TYPE", help="Type of activations between stages: bf16 or float32.")
]

# What clients see.
FurtherNames = Annotated[
    list[str] | None,
    typer.Option("--name", metavar="NAME", help="Further name for requests; may be given several times."),
]
TemplateKeywords = Annotated[
    str,
    typer.Option(
        "--template-keywords",
        metavar="JSON",
        help="Keywords of the chat template where a request names none: '{\"enable_thinking\": false}'.",
        show_default=False,
    ),
]

_MOVES = {"": "UNCHANGED", "now": "UNCHANGED", "auto": "AUTO", "off": "OFF"}


class ServeCommand(TyperCommand):
    """``--rebalance`` without a value means now."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See ``click.Command.parse_args``."""
        given: list[str] = []
        for index, word in enumerate(args):
            given.append(word)
            if word == "--rebalance" and (args[index + 1 : index + 2] or [""])[0] not in _MOVES.keys() - {""}:
                given.append("now")
        return super().parse_args(ctx, given)


def serve(
    model: Annotated[
        str,
        typer.Argument(
            help="A model of the cluster, or a known name, which is fetched if you agree: qwen3:8b, ...",
            autocompletion=complete_known_model,
        ),
    ],
    names: FurtherNames = None,
    nodes: NumNodes = 0,
    plan: LayerPlan = "",
    exclude: Exclude = "",
    first: First = "",
    replicas: Replicas = "",
    objective: ObjectiveName = "",
    concurrency: Concurrency = 0,
    micro_batches: MicroBatches = "auto",
    policy: PolicyName = "throttled",
    itl_goal: ItlGoal = "100ms",
    draft: Draft = "auto",
    context: ContextTokens = 0,
    kv_tokens: KVTokens = 0,
    dtype: Dtype = "auto",
    kv: KVForm = "auto",
    kv_ram: KVRam = "off",
    kv_disk: KVDisk = "off",
    experts_in_ram: ExpertsInRam = "none",
    template_keywords: TemplateKeywords = "",
    activations: Activations = "bf16",
    rebalance: Rebalance = "",
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Fetch the model without a question if no machine has it.")
    ] = False,
    as_json: Json = False,
    progress: WithProgress = False,
    data_dir: DataDir = None,
) -> None:
    """Load a model on the nodes. Returns when the model can answer."""
    from edgepipe.wire.serving import Moves

    _refuse_contradictions(
        model, plan=plan, nodes=nodes, first=first, exclude=exclude, rebalance=rebalance, replicas=replicas
    )
    if rebalance not in _MOVES:
        raise ConfigInvalid(f"--rebalance cannot be '{rebalance}'", next_step="give now, auto or off")
    if objective not in ("", "latency", "throughput"):
        raise ConfigInvalid(f"--objective cannot be '{objective}'", next_step="give latency or throughput")
    num_replicas, auto_replicas = checked_replicas(replicas, plan=plan, first=first)
    many = auto_replicas or num_replicas > 1  # replicas are for many chats
    request = serve_request(
        model,
        names=names or (),
        nodes=nodes,
        plan=plan,
        micro_batches=micro_batches,
        policy=policy,
        itl_goal=itl_goal,
        draft=draft,
        context=context,
        kv_tokens=kv_tokens,
        dtype=dtype,
        kv=kv,
        kv_ram=kv_ram,
        kv_disk=kv_disk,
        experts_in_ram=experts_in_ram,
        activations=activations,
        template_keywords=template_keywords,
    )
    options = replace(
        request.options,
        exclude=tuple(name.strip() for name in exclude.split(",") if name.strip()),
        first=first,
        throughput=objective == "throughput" or (many and not objective),
        num_replicas=num_replicas,
        auto_replicas=auto_replicas,
        concurrency=concurrency,
    )
    request = replace(
        request,
        options=options,
        must_keep_context=bool(context),
        rebalance=bool(rebalance),
        moves=Moves[_MOVES[rebalance]],
    )

    engines = _serve_or_fetch(request, data_dir, yes=yes, as_json=as_json, lines=as_json and progress)
    if as_json:
        print_json(as_dict(engines[0]) if len(engines) == 1 else [as_dict(engine) for engine in engines])
        return
    for engine in engines:
        print(f"{engine.title} is ready: {describe_stages(engine)}")


def _refuse_contradictions(
    model: str, *, plan: str, nodes: int, first: str, exclude: str, rebalance: str, replicas: str
) -> None:
    """Raise ConfigInvalid if two of these flags cannot be obeyed together."""
    for flag, given in (("--nodes", nodes), ("--first", first), ("--exclude", exclude), ("--rebalance", rebalance)):
        if given and plan:
            raise ConfigInvalid(f"{flag} and --plan contradict each other", next_step="give one of them")
    if rebalance and replicas:
        raise ConfigInvalid(
            "--rebalance and --replicas contradict each other",
            fact="with --rebalance the number of pipelines stays",
            next_step=f"give one after the other: edgepipe serve {model} --replicas {replicas}",
        )


def _serve_or_fetch(
    request: ServeRequest, data_dir: Path | None, *, yes: bool, as_json: bool, lines: bool
) -> Sequence[EngineState]:
    """Serve a model, which is fetched first if no machine has it and the user agrees."""
    from edgepipe.cli.admin import ask_node

    folder = data_dir_of(data_dir)
    try:
        return ask_node(folder, lambda admin: serve_with_progress(admin, request, lines=lines))
    except ModelUnknown as refused:
        from edgepipe.cli.offering import fetch_unserved

        models_dir = models_dir_of(data_dir, None)
        fetched = fetch_unserved(request.options.model, folder, models_dir, refused, yes=yes, as_json=as_json)
    again = replace(request, options=replace(request.options, model=fetched))
    return ask_node(folder, lambda admin: serve_with_progress(admin, again, lines=lines))


def serve_request(
    model: str,
    *,
    names: Sequence[str] = (),
    nodes: int = 0,
    plan: str = "",
    micro_batches: str = "auto",
    policy: str = "throttled",
    itl_goal: str = "",
    draft: str = "auto",
    context: int = 0,
    kv_tokens: int = 0,
    dtype: str = "auto",
    kv: str = "auto",
    kv_ram: str = "off",
    kv_disk: str = "off",
    experts_in_ram: str = "none",
    activations: str = "bf16",
    template_keywords: str = "",
) -> ServeRequest:
    """Build the request from the flags. Raises ConfigInvalid."""
    from edgepipe.backend.types import ActivationType, StageSettings
    from edgepipe.scheduler.pacing import DEFAULT_ITL_GOAL, parse_itl_goal
    from edgepipe.scheduler.policy import make_policy
    from edgepipe.spec.expert_places import checked_choice
    from edgepipe.store.further_names import checked_names
    from edgepipe.text.template_defaults import checked_keywords
    from edgepipe.wire.engines import ServeSpec
    from edgepipe.wire.serving import ServeRequest

    if activations not in [kind.value for kind in ActivationType]:
        raise ConfigInvalid(f"--activations cannot be '{activations}'", next_step="give bf16 or float32")
    make_policy(policy)
    parse_itl_goal(itl_goal)
    options = ServeSpec(
        model=model,
        micro_batches=_micro_batches(micro_batches),
        policy=policy if policy != "throttled" else "",
        itl_goal=itl_goal if itl_goal != DEFAULT_ITL_GOAL else "",
        draft=draft if draft != "auto" else "",
        num_nodes=nodes,
        settings=StageSettings(
            dtype=checked_dtype(dtype),
            kv=checked_kv(kv),
            kv_ram=(ram := checked_kv_ram(kv_ram)),
            kv_disk=checked_kv_disk(kv_disk, kv_ram=ram),
            activation_type=ActivationType(activations),
            context_length=context,
        ),
        kv_tokens=kv_tokens,
        experts_in_ram=checked_choice(experts_in_ram),
        names=checked_names(names),
        template_keywords=checked_keywords(template_keywords),
    )
    return ServeRequest(plan=plan, options=options)


async def serve_with_progress(admin: Admin, request: ServeRequest, *, lines: bool = False) -> Sequence[EngineState]:
    """Serve, with a progress bar on stderr, or with ``lines`` of JSON on stdout. Return the ready pipelines.

    Raises the node's error.
    """
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    from edgepipe.cli.views.progress_lines import ProgressLines

    printed = ProgressLines()
    console = make_console(stderr=True)
    columns = (
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"asking for {request.options.model}", total=1.0)
        async for event in admin.serve(request):
            progress.update(task, description=event.message, completed=event.progress)
            if lines:
                printed.show(event.message, bytes_done=round(event.progress * 100), bytes_total=100)
            if event.note:
                progress.console.print(event.note, markup=False, highlight=False, soft_wrap=True)
            if event.engines:
                return event.engines
    raise PeerClosed("the node ended before the model was ready", next_step="see 'edgepipe logs'")


def describe_stages(engine: EngineState) -> str:
    """Describe the placement: ``layers 0-14 on a (torch), 15-29 on b (mlx)``."""
    from edgepipe.spec.expert_places import in_words

    parts = [
        f"{layers_of(stage)} on {stage.node_name} ({stage.backend}){in_words(stage.ram_percent)}"
        for stage in engine.stages
    ]
    return f"layers {', '.join(parts)}"


def layers_of(stage: StageState) -> str:
    """Format a stage's layers, both ends included: ``0-14``."""
    return ",".join(part.layers.shown for part in stage.slices)


def _micro_batches(text: str) -> int:
    """Parse ``--micro-batches``; 0 lets the engine choose. Raises ConfigInvalid."""
    if text == "auto":
        return 0
    if not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise ConfigInvalid(f"--micro-batches cannot be '{text}'", next_step="give auto or a number from 1 to 1024")
    return int(text)
