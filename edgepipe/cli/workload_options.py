"""Options of ``bench`` and ``simulate`` for the cluster and the workload, and the values that they describe."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgepipe.cli.options import checked_kv
from edgepipe.errors import ConfigInvalid
from edgepipe.plain_words import plain

if TYPE_CHECKING:
    from edgepipe.scheduler import Priority
    from edgepipe.simulation.imagined import ImaginedCluster
    from edgepipe.simulation.workload import Arrivals, LengthDistribution, Workload

WORKLOADS = ("fixed", "poisson", "closed")
_REQUESTS = 256
_USERS = 16  # default users of a closed loop
_TOKENS = 128  # default tokens of a prompt, and of an output

Compare = Annotated[
    list[str] | None,
    typer.Option(
        "--compare",
        metavar="KEY=A,B",
        help="KEY=A,B runs each value and compares; KEY is a flag of this command. Repeatable.",
    ),
]
Plot = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Write a chart, such as out.png.", show_default=False)
]


def _option(flag: str, value: str, kind: Any, text: str, **more: Any) -> inspect.Parameter:
    """Make an option without a default, absent from the settings unless given. ``value``: its name in the help."""
    annotation = Annotated[kind | None, typer.Option(f"--{flag}", metavar=value, help=text, show_default=False, **more)]
    name = flag.replace("-", "_")
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


_CLUSTER = (
    _option(
        "as-model", "MODEL", str, "Model to imitate: qwen2.5-32b, llama-3.3-70b:q4_k_m, ...  [default: qwen2.5-32b]"
    ),
    _option("link", "LINK", str, "Link between any two devices: 1gbit,0.3ms or ideal.  [default: 1gbit,0.3ms]"),
    _option("micro-batches", "K", str, "Number of micro-batches in flight, or auto.  [default: auto]"),
    _option(
        "policy",
        "POLICY",
        str,
        "Scheduler policy: throttled, sarathi or sarathi-TOKENS; for batches temporal or auto.  [default: throttled]",
    ),
    _option("itl-goal", "TIME", str, "Time that prompts may add to a token of a chat, or off.  [default: 100ms]"),
    _option(
        "draft",
        "DRAFTS",
        str,
        "Draft model: the share of its drafts that are right, and the time of each, such as 0.7,3ms; off; mtp (the "
        "model's own layer) for simulate; lookup for bench.  [default: off]",
    ),
    _option("plan", "LAYERS", str, 'Layers by device: "a:0-15,b:16-31".'),
    _option("jitter", "SHARE", float, "Standard deviation of step times over their mean.  [default: 0.05]", min=0.0),
    _option("context", "TOKENS", int, "Tokens per conversation.  [default: the model's]", min=1),
    _option("kv-tokens", "TOKENS", int, "KV cache of all conversations, in tokens.  [default: by memory]", min=1),
    _option("kv", "FORM", str, "KV cache in the compute type (auto), in 8bit or 4bit: less memory.  [default: auto]"),
)
_WORKLOAD = (
    _option(
        "workload",
        "WORKLOAD",
        str,
        "fixed (all at once), poisson (--rate), closed (--concurrency), or a trace: "
        "a file of lines arrival_s,prompt_tokens,output_tokens.",
    ),
    _option(
        "priority",
        "PRIORITY",
        str,
        "Priority of the requests: interactive or batch.  [default: batch for policies temporal and auto]",
    ),
    _option("requests", "N", int, "Number of requests.  [default: 256]", min=1),
    _option("rate", "R", float, "Requests per second, Poisson."),
    _option("concurrency", "N", int, "Requests in flight at any time.", min=1),
    _option("lengths", "LENGTHS", str, "Lengths of prompts and outputs: fixed, sharegpt or azure.  [default: fixed]"),
    _option("prompt-tokens", "N", int, "Tokens per prompt, for fixed lengths.  [default: 128]", min=1),
    _option("output-tokens", "N", int, "Tokens per output, for fixed lengths.  [default: 128]", min=1),
    _option("prefix-tokens", "N", int, "Tokens of a shared prefix, before each prompt's own tokens.", min=0),
    _option("prefixes", "N", int, "Number of different shared prefixes.  [default: 1]", min=1),
    _option("seed", "N", int, "Equal seeds give equal requests and jitter.  [default: 0]", min=0),
)
CLUSTER_DEFAULTS = {
    "as-model": "qwen2.5-32b:bf16",
    "link": "1gbit,0.3ms",
    "micro-batches": "auto",
    "policy": "throttled",
    "itl-goal": "100ms",
    "draft": "off",
    "jitter": "0.05",
    "seed": "0",
}
"""Default settings of an emulated or simulated cluster."""


def _keys(parameters: Sequence[inspect.Parameter]) -> tuple[str, ...]:
    return tuple(parameter.name.replace("_", "-") for parameter in parameters)


CLUSTER_KEYS = _keys(_CLUSTER)
"""Settings that ``imagined_cluster`` and the commands read."""
WORKLOAD_KEYS = _keys(_WORKLOAD)
"""Settings that ``make_workload_of`` reads."""


def with_run_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the run options to a command. It gets the given ones as texts in ``settings``."""
    own = inspect.signature(command, eval_str=True)
    added = (*_CLUSTER, *_WORKLOAD)
    names = [parameter.name for parameter in added]
    parameters: list[inspect.Parameter] = []
    for parameter in own.parameters.values():
        shown = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        parameters += added if parameter.name == "settings" else [shown]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        options = {name: given.pop(name) for name in names}
        settings = {name.replace("_", "-"): str(value) for name, value in options.items() if value is not None}
        command(settings=settings, **given)

    shown_as: Any = run  # typer reads the signature and the annotations
    shown_as.__signature__ = own.replace(parameters=parameters)
    shown_as.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def imagined_cluster(settings: Mapping[str, str], *, devices: str) -> ImaginedCluster:
    """Build the cluster that settings over ``CLUSTER_DEFAULTS`` describe. Raises ConfigInvalid, ModelUnknown."""
    from edgepipe.backend.devices import parse_devices
    from edgepipe.simulation.imagined import ImaginedCluster
    from edgepipe.store.typed_names import planned_name
    from edgepipe.units import parse_link
    from edgepipe.weights.mixes import named_model

    config, weights = named_model(planned_name(settings["as-model"]))
    return ImaginedCluster(
        devices=parse_devices(devices),
        config=config,
        weights=weights,
        link=parse_link(settings["link"]),
        adjustments={"jitter": settings["jitter"]},
        plan=settings.get("plan", ""),
        context_length=count_of(settings, "context", 0),
        kv_tokens=count_of(settings, "kv-tokens", 0),
        kv=checked_kv(settings.get("kv", "auto")),
        seed=count_of(settings, "seed", 0, least=0),
    )


def make_workload_of(settings: Mapping[str, str]) -> Workload:
    """Build the workload that settings describe; absent settings take defaults. Raises ConfigInvalid."""
    from edgepipe.simulation.workload import Arrivals, WorkloadSpec, make_workload

    seed = count_of(settings, "seed", 0, least=0)
    arrivals = _arrivals(settings)
    if arrivals is Arrivals.TRACE:
        return _trace(Path(settings["workload"]), settings, seed)
    rate = number_of(settings, "rate") if arrivals is Arrivals.POISSON else None
    users = count_of(settings, "concurrency", _USERS) if arrivals is Arrivals.CLOSED else None
    prompt, output = _lengths(settings)
    return make_workload(
        WorkloadSpec(
            arrivals=arrivals,
            num_requests=count_of(settings, "requests", _REQUESTS),
            rate_per_s=rate,
            concurrency=users,
            prompt=prompt,
            output=output,
            lengths_name=settings.get("lengths", "fixed"),
            prefix_tokens=count_of(settings, "prefix-tokens", 0, least=0),
            num_prefixes=count_of(settings, "prefixes", 1),
            priority=_priority(settings),
            seed=seed,
        )
    )


def _priority(settings: Mapping[str, str]) -> Priority:
    """Parse the priority of all requests. Raises ConfigInvalid."""
    from edgepipe.scheduler import Priority

    default = "batch" if settings.get("policy") in ("temporal", "auto") else "interactive"
    name = settings.get("priority", default)
    if name not in ("interactive", "batch"):
        raise ConfigInvalid(f"no priority is called '{name}'", next_step="give --priority interactive or batch")
    return Priority[name.upper()]


def count_of(settings: Mapping[str, str], key: str, default: int, *, least: int = 1) -> int:
    """Parse a whole number of at least ``least``. Raises ConfigInvalid."""
    text = settings.get(key)
    if text is None:
        return default
    if not text.isdecimal() or int(text) < least:
        raise ConfigInvalid(f"'{text}' is no value for --{key}", next_step=f"give a whole number of {least} or more")
    return int(text)


def number_of(settings: Mapping[str, str], key: str) -> float:
    """Parse a finite number of zero or more. Raises ConfigInvalid."""
    from edgepipe.backend.devices import number_setting

    if key not in settings:
        raise ConfigInvalid(f"--{key} is missing", next_step=f"give it like --{key} 4")
    try:
        return number_setting(settings[key])
    except ConfigInvalid as error:
        raise ConfigInvalid(
            f"'{settings[key]}' is no value for --{key}", fact=error.what, next_step=f"give it like --{key} 4"
        ) from error


def _arrivals(settings: Mapping[str, str]) -> Arrivals:
    """Return the named arrivals, or those that ``--rate`` and ``--concurrency`` imply."""
    from edgepipe.simulation.workload import Arrivals

    rate, users = "rate" in settings, "concurrency" in settings
    if rate and users:
        raise ConfigInvalid("--rate and --concurrency contradict each other", next_step="give one of them")
    name = settings.get("workload") or ("poisson" if rate else "closed")
    if name not in WORKLOADS:
        return Arrivals.TRACE
    for flag, given, wanted in (("rate", rate, "poisson"), ("concurrency", users, "closed")):
        if given and name != wanted:
            raise ConfigInvalid(
                f"--{flag} goes with --workload {wanted}",
                fact=f"the workload is {name}",
                next_step=f"leave --{flag} out",
            )
    return Arrivals(name)


def _lengths(settings: Mapping[str, str]) -> tuple[LengthDistribution, LengthDistribution]:
    from edgepipe.simulation.workload import FixedLengths, named_lengths

    name = settings.get("lengths", "fixed")
    if name != "fixed":
        if given := [key for key in ("prompt-tokens", "output-tokens") if key in settings]:
            raise ConfigInvalid(
                f"--{given[0]} goes with --lengths fixed",
                fact=f"the lengths are {name}",
                next_step=f"leave --{given[0]} out",
            )
        return named_lengths(name)
    prompt, output = (count_of(settings, key, _TOKENS) for key in ("prompt-tokens", "output-tokens"))
    return FixedLengths(tokens=prompt), FixedLengths(tokens=output)


def _trace(path: Path, settings: Mapping[str, str], seed: int) -> Workload:
    from edgepipe.simulation.workload import read_trace

    for key in ("rate", "concurrency", "prompt-tokens", "output-tokens"):
        if key in settings:
            raise ConfigInvalid(
                f"--{key} does not go with a trace", fact=f"{path} lists the arrivals", next_step=f"leave --{key} out"
            )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigInvalid(
            f"'{path}' is no workload",
            fact=f"it is not {', '.join(WORKLOADS)}, and not a readable file: {plain(error)}",
            next_step="name one of them, or a file of lines arrival_s,prompt_tokens,output_tokens",
        ) from error
    return replace(read_trace(text.splitlines(), name=path.name, seed=seed), priority=_priority(settings))
