"""``edgepipe plan``: shows where each layer would go, and the predicted speed, without loading a model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from edgepipe.cli.draft_models import with_draft_model
from edgepipe.cli.options import (
    DataDir,
    Dtype,
    Exclude,
    ExpertsInRam,
    First,
    Json,
    KVForm,
    LayerPlan,
    NumNodes,
    ObjectiveName,
    Replicas,
    checked_dtype,
    checked_kv,
    checked_replicas,
    complete_known_model,
    data_dir_of,
    models_dir_of,
)
from edgepipe.cli.output import make_console, print_json
from edgepipe.errors import ConfigInvalid, NoFeasiblePlacement

if TYPE_CHECKING:
    from pathlib import Path

    from edgepipe.backend.types import StageSettings
    from edgepipe.planner.cluster import Cluster
    from edgepipe.planner.constraints import Constraints
    from edgepipe.planner.demand import Demand

_CONVERSATION_TOKENS = 4096  # a long chat; the default context
_READ_TOKENS = 1024  # tokens that a token attends to on average, by default

Context = Annotated[
    int, typer.Option("--context", metavar="TOKENS", min=0, help="Required context in tokens; 0: as much as fits.")
]
Concurrency = Annotated[int, typer.Option("--concurrency", metavar="N", min=1, help="Chats at the same time.")]
WhatIf = Annotated[
    str,
    typer.Option(
        "--what-if",
        metavar="CHANGES",
        help='Compare with changes: "add rtx4090, link 2.5gbit, memory a 64GB".',
        show_default=False,
    ),
]
Emulate = Annotated[
    str,
    typer.Option(
        "--emulate",
        metavar="DEVICES",
        help='Plan for known devices: "4x rtx4090, cpu 6 cores 32GB".  [default: the cluster]',
    ),
]
EmulatedLink = Annotated[
    str,
    typer.Option(
        "--link",
        metavar="LINK",
        help="Link between emulated devices: wifi, gigabit, 2.5g, 10g, thunderbolt, or 1gbit,0.3ms.",
    ),
]
Draft = Annotated[
    str,
    typer.Option(
        "--draft",
        metavar="SOURCE",
        help="Count what drafts: mtp (the model's own layer), the name of a draft model, or off.",
    ),
]


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="A model of the cluster, or a known one: qwen3:32b, llama-3.3-70b:q8_0, ...",
            autocompletion=complete_known_model,
        ),
    ],
    objective: ObjectiveName = "",
    context: Context = 0,
    concurrency: Concurrency = 16,
    nodes: NumNodes = 0,
    replicas: Replicas = "",
    exclude: Exclude = "",
    first: First = "",
    layers: LayerPlan = "",
    what_if: WhatIf = "",
    emulate: Emulate = "",
    link: EmulatedLink = "",
    dtype: Dtype = "auto",
    kv: KVForm = "auto",
    experts_in_ram: ExpertsInRam = "none",
    draft: Draft = "off",
    measure: Annotated[bool, typer.Option("--measure", help="Measure devices and links again.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Plan as if all memory were free.")] = False,
    as_json: Json = False,
    data_dir: DataDir = None,
) -> None:
    """Show where layers would go, and the predicted speed."""
    from edgepipe.backend.types import StageSettings
    from edgepipe.planner.constraints import Constraints
    from edgepipe.spec.expert_places import check_has_experts, checked_choice

    _refuse_contradictions(model, link=link, emulate=emulate, measure=measure, data_dir=data_dir)
    num_replicas, auto_replicas = checked_replicas(replicas, plan=layers, first=first)
    if what_if and (num_replicas or auto_replicas):
        raise ConfigInvalid("--what-if and --replicas contradict each other", next_step="give one of them")
    settings = StageSettings(dtype=checked_dtype(dtype), kv=checked_kv(kv))
    if emulate and dtype == "float32":
        raise ConfigInvalid(
            "--emulate plans in bfloat16",
            fact="data sheets give rates for bfloat16 only",
            next_step="leave --dtype out",
        )
    constraints = Constraints(
        num_nodes=nodes,
        exclude=tuple(name.strip() for name in exclude.split(",") if name.strip()),
        layers=layers,
        first=first,
        experts_in_ram=checked_choice(experts_in_ram),
    )
    if emulate:
        cluster = _imagined(model, emulate, link or "1gbit,0.3ms", settings.kv, mtp=draft == "mtp")
    else:
        cluster = _surveyed(model, settings, data_dir, fresh=measure, mtp=draft == "mtp")
    if draft not in ("mtp", "off"):
        cluster = with_draft_model(cluster, draft, models_dir=None if emulate else models_dir_of(data_dir, None))
    _tell_of_known_shape(cluster.model, on_no_disk=not emulate, measured=measure)
    check_has_experts(constraints.experts_in_ram, cluster.config)
    demand = make_demand(cluster, objective=objective, context=context, concurrency=concurrency)
    cluster = _all_memory(cluster) if force else cluster
    if auto_replicas or num_replicas > 1:
        _show_layouts(cluster, demand, constraints, count=num_replicas, as_json=as_json)
    else:
        _show(cluster, demand, constraints, what_if=what_if, as_json=as_json)


def _refuse_contradictions(model: str, *, link: str, emulate: str, measure: bool, data_dir: Path | None) -> None:
    """Raise ConfigInvalid if two of these flags cannot be obeyed together."""
    if link and not emulate:
        raise ConfigInvalid(
            "--link goes with --emulate",
            fact="a running cluster measures its links",
            next_step=f'compare with another link: edgepipe plan {model} --what-if "link {link}"',
        )
    if emulate and measure:
        raise ConfigInvalid(
            "--emulate and --measure contradict each other",
            fact="data sheets describe emulated devices",
            next_step="give one of them",
        )
    if emulate and data_dir is not None:
        raise ConfigInvalid("--emulate and --data-dir contradict each other", next_step="give one of them")


def make_demand(cluster: Cluster, *, objective: str, context: int, concurrency: int) -> Demand:
    """Build the demand from the flags. Raises ConfigInvalid."""
    from edgepipe.planner.demand import Demand, Objective

    kinds = {"": Objective.LATENCY, **{kind.value: kind for kind in Objective}}
    if objective not in kinds:
        raise ConfigInvalid(f"--objective cannot be '{objective}'", next_step="give latency or throughput")
    whole = cluster.config.context_for(context)
    conversation = whole if context else min(_CONVERSATION_TOKENS, whole)
    return Demand(
        config=cluster.config,
        weights=cluster.weights,
        objective=kinds[objective],
        concurrency=concurrency,
        context_tokens=conversation,
        must_keep_tokens=context,
        read_tokens=min(_READ_TOKENS, conversation),
    )


def _imagined(model: str, devices: str, link: str, kv: str, *, mtp: bool) -> Cluster:
    from edgepipe.backend.devices import parse_devices
    from edgepipe.planner.cluster import known_cluster
    from edgepipe.spec.drafting import drafting
    from edgepipe.store.typed_names import planned_name
    from edgepipe.units import parse_link
    from edgepipe.weights.mixes import named_model

    model = planned_name(model)
    config, weights = named_model(model)
    config = drafting(config, model) if mtp else config
    return known_cluster(parse_devices(devices), config, link=parse_link(link), model=model, weights=weights, kv=kv)


def _surveyed(model: str, settings: StageSettings, data_dir: Path | None, *, fresh: bool, mtp: bool) -> Cluster:
    """Return the cluster of this machine's node; nodes first measure unknown devices and links."""
    from edgepipe.cli.admin import ask_node
    from edgepipe.wire.surveys import cluster_of

    with make_console(stderr=True).status("measuring devices and links"):
        survey = ask_node(data_dir_of(data_dir), lambda admin: admin.survey(model, settings, fresh=fresh))
    return cluster_of(survey, mtp=mtp)


def _tell_of_known_shape(model: str, *, on_no_disk: bool, measured: bool) -> None:
    """Say on stderr what differs from a plan of files: the sizes of some types, and that no machine has the model."""
    from edgepipe.store.known_models import known_models
    from edgepipe.weights.mixes import stand_in

    name, _, kind = model.partition(":")
    if not kind or name not in (known.name for known in known_models()):
        return
    notes: list[str] = []
    if near := stand_in(kind):
        notes.append(f"{kind.upper()} has no published rule: sizes are those of {near.upper()}")
    if on_no_disk:
        notes.append(f"no machine has it yet: edgepipe models pull {model}")
        if not measured:
            notes.append("--measure measures its layers on these machines")
    for note in notes:
        make_console(stderr=True).print(note, style="dim", soft_wrap=True)


def _all_memory(cluster: Cluster) -> Cluster:
    """Treat all memory as free for models."""
    machines = [
        replace(
            machine,
            room=replace(machine.room, free_bytes=max(machine.total_bytes, machine.room.free_bytes)),
            taken_bytes=0,
        )
        for machine in cluster.machines
    ]
    return replace(cluster, machines=tuple(machines))


def _show(cluster: Cluster, demand: Demand, constraints: Constraints, *, what_if: str, as_json: bool) -> None:
    from edgepipe.cli.views.plan_view import render_preview
    from edgepipe.planner.plan import plan as make_plan
    from edgepipe.planner.preview import preview, preview_as_dict
    from edgepipe.planner.what_if import changed

    console = make_console()
    other = changed(cluster, what_if) if what_if else None
    try:
        shown = preview(demand, cluster, constraints)
    except NoFeasiblePlacement as error:
        if other is None:
            if not constraints.experts_in_ram:  # else the error has the sums of the share
                _show_shortage(cluster, demand, constraints, as_json=as_json)
            raise
        found = preview(demand, other, replace(constraints, layers=""))
        shown = replace(found, changes=what_if, without=error.what)
    else:
        if other is not None:
            what_would = make_plan(demand, other.machines, other.links, replace(constraints, layers=""))
            shown = replace(shown, changed=what_would, changes=what_if)
    if as_json:
        print_json(preview_as_dict(shown))
        return
    for part in render_preview(shown):
        console.print(part)


def _show_layouts(cluster: Cluster, demand: Demand, constraints: Constraints, *, count: int, as_json: bool) -> None:
    """Show ``count`` pipelines over disjoint machines; 0: as many as give most, beside the other numbers."""
    from edgepipe.cli.views.layout_view import layouts_as_dict, render_layouts
    from edgepipe.planner.replicas import best_layout, layout_of

    found = (
        (layout_of(demand, cluster.machines, cluster.links, constraints, count=count),)
        if count
        else best_layout(demand, cluster.machines, cluster.links, constraints)
    )
    if as_json:
        print_json(layouts_as_dict(found, model=cluster.model))
        return
    console = make_console()
    for part in render_layouts(found, model=cluster.model, concurrency=demand.concurrency):
        console.print(part)


def _show_shortage(cluster: Cluster, demand: Demand, constraints: Constraints, *, as_json: bool) -> None:
    """Show the memory arithmetic when memory is too small."""
    from edgepipe.cli.views.plan_view import render_shortage
    from edgepipe.planner.constraints import choose_machines
    from edgepipe.planner.preview import shortage_as_dict
    from edgepipe.planner.shortage import shortage_of

    able, _ = choose_machines(cluster.machines, constraints)
    if not able or constraints.layers or constraints.num_nodes > len(able):
        return
    short = shortage_of(demand, able, num_nodes=constraints.num_nodes)
    if as_json:
        print_json(shortage_as_dict(short))
        return
    console = make_console()
    all_bytes = sum(max(machine.total_bytes, machine.room.free_bytes) for machine in able)
    for part in render_shortage(short, cluster.model, all_bytes=all_bytes):
        console.print(part)
