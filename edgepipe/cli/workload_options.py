"""Options that say what ``bench`` and ``simulate`` ask for, and the workload that they mean."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgepipe.errors import ConfigInvalid

if TYPE_CHECKING:
    from edgepipe.planner.workload import Arrivals, Lengths, Workload

WORKLOADS = ("fixed", "poisson", "closed")
_REQUESTS = 256
_USERS = 16  # of a closed loop, when nothing is said
_TOKENS = 128  # of a prompt and of an output, when nothing is said

WorkloadName = Annotated[
    str,
    typer.Option(
        "--workload",
        help="fixed (all at once), poisson (--rate), closed (--concurrency), or a trace: "
        "a file of lines arrival_s,prompt_tokens,output_tokens.",
        show_default=False,
    ),
]
Requests = Annotated[int, typer.Option("--requests", min=1, help="How many requests.")]
Rate = Annotated[float | None, typer.Option("--rate", help="Requests per second, Poisson.", show_default=False)]
Concurrency = Annotated[
    int | None, typer.Option("--concurrency", min=1, help="Requests under way at any time.", show_default=False)
]
LengthsName = Annotated[str, typer.Option("--lengths", help="fixed, sharegpt or azure.")]
PromptTokens = Annotated[
    int | None, typer.Option("--prompt-tokens", min=1, help="Of fixed lengths.  [default: 128]", show_default=False)
]
OutputTokens = Annotated[
    int | None, typer.Option("--output-tokens", min=1, help="Of fixed lengths.  [default: 128]", show_default=False)
]
PrefixTokens = Annotated[int, typer.Option("--prefix-tokens", min=0, help="Shared by prompts, before their own.")]
Prefixes = Annotated[int, typer.Option("--prefixes", min=1, help="How many different shared prefixes.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Equal seeds give equal requests and jitter.")]

Compare = Annotated[
    list[str] | None,
    typer.Option("--compare", help="KEY=A,B runs each, side by side; KEY is a flag of this command. Repeatable."),
]
Plot = Annotated[Path | None, typer.Option("--plot", help="Write a picture, such as out.png.", show_default=False)]

WORKLOAD_KEYS = (
    "workload",
    "requests",
    "rate",
    "concurrency",
    "lengths",
    "prompt-tokens",
    "output-tokens",
    "prefix-tokens",
    "prefixes",
    "seed",
)
"""What ``make_workload_of`` reads from a run's settings."""


def make_workload_of(settings: Mapping[str, str]) -> Workload:
    """The workload that settings describe; those not given are left out. Raises ConfigInvalid."""
    from edgepipe.planner.workload import Arrivals, WorkloadSpec, make_workload

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
            seed=seed,
        )
    )


def count_of(settings: Mapping[str, str], key: str, default: int, *, least: int = 1) -> int:
    """A whole number of at least ``least``. Raises ConfigInvalid."""
    text = settings.get(key)
    if text is None:
        return default
    if not text.isdecimal() or int(text) < least:
        raise ConfigInvalid(f"'{text}' is no value for --{key}", fact=f"it is a whole number of {least} or more")
    return int(text)


def number_of(settings: Mapping[str, str], key: str) -> float:
    """A finite number of zero or more. Raises ConfigInvalid."""
    from edgepipe.backend.devices import number_setting

    if key not in settings:
        raise ConfigInvalid(f"--{key} is missing", next_step=f"give it like --{key} 4")
    try:
        return number_setting(settings[key])
    except ConfigInvalid as error:
        raise ConfigInvalid(f"'{settings[key]}' is no value for --{key}", fact=error.what) from error


def _arrivals(settings: Mapping[str, str]) -> Arrivals:
    """As named, or as ``--rate`` and ``--concurrency`` imply."""
    from edgepipe.planner.workload import Arrivals

    rate, users = "rate" in settings, "concurrency" in settings
    if rate and users:
        raise ConfigInvalid("--rate and --concurrency contradict each other", next_step="give one of them")
    name = settings.get("workload") or ("poisson" if rate else "closed")
    if name not in WORKLOADS:
        return Arrivals.TRACE
    for flag, given, wanted in (("rate", rate, "poisson"), ("concurrency", users, "closed")):
        if given and name != wanted:
            raise ConfigInvalid(f"--{flag} goes with --workload {wanted}", fact=f"the workload is {name}")
    return Arrivals(name)


def _lengths(settings: Mapping[str, str]) -> tuple[Lengths, Lengths]:
    from edgepipe.planner.workload import FixedLengths, named_lengths

    name = settings.get("lengths", "fixed")
    if name != "fixed":
        if given := [key for key in ("prompt-tokens", "output-tokens") if key in settings]:
            raise ConfigInvalid(f"--{given[0]} goes with --lengths fixed", fact=f"the lengths are {name}")
        return named_lengths(name)
    prompt, output = (count_of(settings, key, _TOKENS) for key in ("prompt-tokens", "output-tokens"))
    return FixedLengths(tokens=prompt), FixedLengths(tokens=output)


def _trace(path: Path, settings: Mapping[str, str], seed: int) -> Workload:
    from edgepipe.planner.workload import read_trace

    for key in ("rate", "concurrency", "prompt-tokens", "output-tokens"):
        if key in settings:
            raise ConfigInvalid(f"--{key} does not go with a trace", fact=f"{path} says what arrives when")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigInvalid(
            f"'{path}' is no workload",
            fact=f"it is none of {', '.join(WORKLOADS)}, and no file that can be read: {_reason(error)}",
        ) from error
    return read_trace(text.splitlines(), name=path.name, seed=seed)


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return error.strerror or "unreadable" if isinstance(error, OSError) else "it is no text"
