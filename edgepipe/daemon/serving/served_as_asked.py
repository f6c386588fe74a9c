"""Whether a model that is served already is served as a new request asks."""

from __future__ import annotations

from dataclasses import asdict
from enum import Enum
from typing import Any

from edgepipe.backend.types import DEFAULT_SETTINGS, StageSettings
from edgepipe.errors import PlanInvalid
from edgepipe.scheduler.pacing import DEFAULT_ITL_GOAL
from edgepipe.wire.engines import EngineState, ServeSpec
from edgepipe.wire.serving import ServeBody, ServeRequest

_FLAGS = {"context_length": "--context", "activation_type": "--activations"}  # settings whose flag has another name


def check_served_as_asked(
    request: ServeRequest, engine: EngineState, manifest_hash: str, held: ServeBody | None
) -> None:
    """Raise PlanInvalid if the served model has other content, other nodes, other layers or other settings than the
    caller wants. The number of replicas may differ, and then the chats for which they are planned: both can change."""
    if engine.manifest_hash and engine.manifest_hash != manifest_hash:
        raise PlanInvalid(
            f"another model is served by the name {engine.model}",
            fact=f"its content is {engine.manifest_hash[:12]}, the model here has {manifest_hash[:12]}",
            next_step=f"edgepipe stop {engine.model}, then serve it again",
        )
    parts = sorted(
        (part.layers.start, str(part.layers), stage.node_name, stage.node_id)
        for stage in engine.stages
        for part in stage.slices
    )
    if request.plan:
        wanted = [text.strip() for text in request.plan.split(",")]
        allowed = [(f"{name}:{layers}", f"{node_id}:{layers}") for _, layers, name, node_id in parts]
        same = len(wanted) == len(allowed) and all(part in both for part, both in zip(wanted, allowed, strict=True))
    else:
        names = [{name, node_id} for _, _, name, node_id in parts]
        asked = request.options
        same = asked.num_nodes in (0, len(engine.stages))
        same = same and (not names or asked.first in ("", *names[0]))
        same = same and not any(both & set(asked.exclude) for both in names)
    fact = (
        "" if same or not parts else f"it is served as {','.join(f'{name}:{layers}' for _, layers, name, _ in parts)}"
    )
    fact = fact or (_other_setting(request.options, held.spec) if held is not None else "")
    if fact:
        raise PlanInvalid(
            f"{engine.model} is served already, but not as asked",
            fact=fact,
            next_step=f"edgepipe stop {engine.model}, then serve it again",
        )


def _other_setting(asked: ServeSpec, spec: ServeSpec) -> str:
    """Name a setting that a flag asked for and the served model lacks; empty if all agree."""
    flags = {
        "--kv-tokens": (asked.kv_tokens, spec.kv_tokens),
        "--micro-batches": (asked.micro_batches, spec.micro_batches),
        "--policy": (asked.policy, spec.policy or "throttled"),
        "--itl-goal": (asked.itl_goal, spec.itl_goal or DEFAULT_ITL_GOAL),
        "--draft": (asked.draft, spec.draft or "auto"),
        "--experts-in-ram": (asked.experts_in_ram, spec.experts_in_ram or "none"),
        "--template-keywords": (asked.template_keywords, spec.template_keywords or "none"),
        "--concurrency": (0 if asked.num_replicas or asked.auto_replicas else asked.concurrency, spec.concurrency),
        **_stage_flags(asked.settings, spec.settings),
    }
    other = next(((flag, now) for flag, (wanted, now) in flags.items() if wanted not in (0, "", "auto", now)), None)
    return f"it is served with {other[0]} {other[1] or 'auto'}" if other is not None else ""


def _stage_flags(asked: StageSettings, now: StageSettings) -> dict[str, tuple[Any, Any]]:
    """Return the flag of each setting with the value that the user gave (empty: none) and the served model's value."""
    unset, current = asdict(DEFAULT_SETTINGS), asdict(now)
    return {
        _FLAGS.get(name, f"--{name.replace('_', '-')}"): (
            value if value != unset[name] else "",
            current[name].value if isinstance(current[name], Enum) else current[name],
        )
        for name, value in asdict(asked).items()
    }
