"""Workload of a bench or simulation: arrivals, lengths and shared prefixes of requests. PURE.

The same seed gives the same requests everywhere, so that compared runs have equal workloads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np

from edgepipe.errors import ConfigInvalid
from edgepipe.scheduler import Priority

_TRACE_FORMAT = "arrival_s, prompt_tokens, output_tokens"
_SHAREGPT_MEDIANS = (148, 164)  # tokens of prompt and output
_AZURE_MEANS = (5.21, 1.66)  # times ShareGPT's (gLLM, section 4.1); with equal shapes the medians scale equally
_CHAT_SIGMA = 0.9  # deviation of the logarithm: the longest of a hundred is about eight times the median


class Arrivals(Enum):
    """Arrival process of requests."""

    FIXED = "fixed"  # all requests come at the start
    POISSON = "poisson"  # requests come independently, at a rate
    CLOSED = "closed"  # one request per user: the next when the last has ended
    TRACE = "trace"  # requests come at recorded times


class LengthDistribution(Protocol):
    """A distribution of token counts."""

    def draw(self, generator: np.random.Generator, count: int) -> list[int]:
        """Draw ``count`` lengths, each at least 1."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedLengths:
    """Constant length."""

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ConfigInvalid(f"a length of {self.tokens} tokens is too small", fact="a request has at least one")

    def draw(self, generator: np.random.Generator, count: int) -> list[int]:
        """Return ``count`` equal lengths."""
        return [self.tokens] * count


@dataclass(frozen=True, slots=True, kw_only=True)
class LognormalLengths:
    """Log-normal lengths: many short and a few long ones, as in chats."""

    median_tokens: float
    sigma: float = _CHAT_SIGMA  # deviation of the logarithm
    max_tokens: int = 8192  # caps longer draws

    def __post_init__(self) -> None:
        if self.median_tokens < 1 or self.sigma < 0 or self.max_tokens < 1:
            raise ConfigInvalid("lognormal lengths need a median and a maximum of at least one token")

    def draw(self, generator: np.random.Generator, count: int) -> list[int]:
        """Draw ``count`` rounded lengths."""
        drawn = np.exp(generator.normal(math.log(self.median_tokens), self.sigma, count))
        return [int(tokens) for tokens in np.clip(np.rint(drawn), 1, self.max_tokens)]


def named_lengths(name: str) -> tuple[LengthDistribution, LengthDistribution]:
    """Return prompt and output lengths of ``sharegpt`` or ``azure``. Raises ConfigInvalid for another name."""
    scales = {"sharegpt": (1.0, 1.0), "azure": _AZURE_MEANS}.get(name)
    if scales is None:
        raise ConfigInvalid(f"no lengths are called '{name}'", fact="there are sharegpt, azure and fixed")
    prompt, output = (
        LognormalLengths(median_tokens=median * scale) for median, scale in zip(_SHAREGPT_MEDIANS, scales, strict=True)
    )
    return prompt, output


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadRequest:
    """One request of a workload."""

    index: int  # place in the workload, from 0
    arrival_s: float | None  # seconds after the start; None: when a user of the closed loop is free
    prompt_tokens: int  # including the shared prefix
    output_tokens: int
    prefix: int | None = None  # index of its shared prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests in the order of arrival."""

    arrivals: Arrivals
    requests: tuple[WorkloadRequest, ...]
    seed: int
    description: str  # text for people: "poisson 4/s, sharegpt lengths"
    concurrency: int | None = None  # users of the closed loop
    prefix_tokens: int = 0  # length of each shared prefix
    priority: Priority = Priority.INTERACTIVE  # priority of every request

    def prompt_ids(self, request: WorkloadRequest, *, vocab_size: int = 256) -> tuple[int, ...]:
        """Return the request's token ids, uniform below ``vocab_size``; equal prefixes have equal ids."""
        shared: list[int] = []
        if request.prefix is not None:
            shared = self._ids(
                (self.seed, 1, request.prefix), min(self.prefix_tokens, request.prompt_tokens), vocab_size
            )
        own = self._ids((self.seed, 2, request.index), request.prompt_tokens - len(shared), vocab_size)
        return (*shared, *own)

    @staticmethod
    def _ids(entropy: tuple[int, ...], count: int, vocab_size: int) -> list[int]:
        return np.random.default_rng(entropy).integers(0, vocab_size, count).tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """Parameters for drawing a workload. Raises ConfigInvalid for invalid values."""

    arrivals: Arrivals = Arrivals.FIXED
    num_requests: int = 64
    rate_per_s: float | None = None  # rate of Poisson arrivals
    concurrency: int | None = None  # users of the closed loop
    prompt: LengthDistribution = FixedLengths(tokens=128)  # tokens without the shared prefix
    output: LengthDistribution = FixedLengths(tokens=128)
    lengths_name: str = "fixed"  # name of the lengths in the description
    prefix_tokens: int = 0  # shared by all requests of a group, before their own prompt
    num_prefixes: int = 1  # groups, assigned to requests in turn
    priority: Priority = Priority.INTERACTIVE
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_requests < 1 or self.num_prefixes < 1 or self.prefix_tokens < 0 or self.seed < 0:
            raise ConfigInvalid("a workload has at least one request, and no count below zero")
        if self.arrivals is Arrivals.POISSON and not 0 < (self.rate_per_s or 0) < math.inf:
            raise ConfigInvalid("Poisson arrivals need a rate above zero", next_step="give it with --rate 4")
        if self.arrivals is Arrivals.CLOSED and (self.concurrency or 0) < 1:
            raise ConfigInvalid("a closed loop needs at least one user", next_step="give them with --concurrency 64")


def make_workload(spec: WorkloadSpec) -> Workload:
    """Draw the requests. Raises ConfigInvalid for a trace, which must be read."""
    times = _arrival_times(spec, np.random.default_rng((spec.seed, 0)))
    lengths = np.random.default_rng((spec.seed, 3))  # a separate stream, so that the rate does not change the lengths
    prompts, outputs = spec.prompt.draw(lengths, spec.num_requests), spec.output.draw(lengths, spec.num_requests)
    requests = tuple(
        WorkloadRequest(
            index=index,
            arrival_s=times[index],
            prompt_tokens=spec.prefix_tokens + prompts[index],
            output_tokens=outputs[index],
            prefix=index % spec.num_prefixes if spec.prefix_tokens else None,
        )
        for index in range(spec.num_requests)
    )
    return Workload(
        arrivals=spec.arrivals,
        requests=requests,
        seed=spec.seed,
        description=_describe(spec),
        concurrency=spec.concurrency if spec.arrivals is Arrivals.CLOSED else None,
        prefix_tokens=spec.prefix_tokens,
        priority=spec.priority,
    )


def read_trace(lines: Iterable[str], *, name: str = "the trace", seed: int = 0) -> Workload:
    """Read a workload from lines ``arrival_s, prompt_tokens, output_tokens`` (commas or blanks; ``#`` comments).

    Raises ConfigInvalid, which names the line and the expected format.
    """
    requests: list[WorkloadRequest] = []
    for number, line in enumerate(lines, start=1):
        text = line.split("#", 1)[0].strip()
        if text and not _is_header(text, first=not requests):
            requests.append(_trace_line(text, len(requests), f"line {number} of {name}"))
    if not requests:
        raise ConfigInvalid(f"{name} has no requests", fact=f"each line is: {_TRACE_FORMAT}")
    ordered = sorted(requests, key=lambda request: (request.arrival_s, request.index))
    return Workload(
        arrivals=Arrivals.TRACE,
        requests=tuple(ordered),
        seed=seed,
        description=f"{len(ordered)} requests of {name}",
    )


def _arrival_times(spec: WorkloadSpec, generator: np.random.Generator) -> list[float | None]:
    if spec.arrivals is Arrivals.TRACE:
        raise ConfigInvalid("a trace comes from a file", next_step="give it with --workload FILE")
    if spec.arrivals is Arrivals.CLOSED:
        return [None] * spec.num_requests
    if spec.arrivals is Arrivals.FIXED:
        return [0.0] * spec.num_requests
    gaps = generator.exponential(1 / (spec.rate_per_s or 1.0), spec.num_requests)
    return [float(moment) for moment in np.cumsum(gaps)]


def _describe(spec: WorkloadSpec) -> str:
    when = {
        Arrivals.FIXED: "at once",
        Arrivals.POISSON: f"Poisson at {spec.rate_per_s or 0:g}/s",
        Arrivals.CLOSED: f"{spec.concurrency} at a time",
    }.get(spec.arrivals, "")
    shared = f", {spec.prefix_tokens} shared" if spec.prefix_tokens else ""
    kind = "batch requests" if spec.priority is Priority.BATCH else "requests"
    return f"{spec.num_requests} {kind} {when}, {spec.lengths_name} lengths{shared}"


def _is_header(text: str, *, first: bool) -> bool:
    return first and text.replace(" ", "").split(",") == _TRACE_FORMAT.replace(" ", "").split(",")


def _trace_line(text: str, index: int, place: str) -> WorkloadRequest:
    fields = text.replace(",", " ").split()
    try:
        arrival_text, prompt_text, output_text = fields
        arrival_s, prompt_tokens, output_tokens = float(arrival_text), int(prompt_text), int(output_text)
    except ValueError:
        problem = "one of the fields is not a number" if len(fields) == 3 else f"it has {len(fields)} fields"
        raise _bad_line(place, text, problem) from None
    if not 0 <= arrival_s < math.inf:
        raise _bad_line(place, text, "the arrival is not a time of zero or more seconds")
    if prompt_tokens < 1 or output_tokens < 1:
        raise _bad_line(place, text, "prompt and output need at least one token")
    return WorkloadRequest(index=index, arrival_s=arrival_s, prompt_tokens=prompt_tokens, output_tokens=output_tokens)


def _bad_line(place: str, text: str, problem: str) -> ConfigInvalid:
    return ConfigInvalid(
        f"{place} is not a request: '{text[:60]}'",
        fact=f"expected {_TRACE_FORMAT}; {problem}",
        next_step="write it like: 0.25, 148, 164",
    )
