"""Refuse a model on the Hugging Face Hub after reading only its files' headers, before its weights are downloaded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from edgepipe.errors import EdgepipeError, ModelInvalid
from edgepipe.files.progress import OnProgress, PlannedFile, ProgressCounter
from edgepipe.interrupts import run_interruptible
from edgepipe.spec.config import gguf_config, read_hf_config
from edgepipe.spec.layout import check_layout
from edgepipe.store.hub import HubDownload, failure_text, suggesting_alternative
from edgepipe.store.hub_files import METADATA_WAITS, HeaderParser, HubFiles
from edgepipe.store.hub_patience import PullClock, persist
from edgepipe.store.install import METADATA_NAMES
from edgepipe.text.gguf_tokenizer import check_tokenizer_kind
from edgepipe.weights.gguf_file import JoinedGguf, expected_rope_factors
from edgepipe.weights.gguf_header import MAX_HEADER_BYTES as MAX_GGUF_HEADER_BYTES
from edgepipe.weights.gguf_header import parse_gguf_header
from edgepipe.weights.manifest import MAX_TENSORS, TOKENIZER_FILE
from edgepipe.weights.safetensors_file import (
    INDEX_FILE,
    MAX_HEADER_BYTES,
    indexed_places,
    parse_safetensors,
    shard_names,
)
from edgepipe.weights.weights import layout_with_head, settled_layout

_IDLE_S = 20.0  # limit for silence of the hub
_AT_ONCE = 8  # headers that are read side by side: large models have over a hundred files

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asking:
    """How the hub is asked."""

    endpoint: str | None
    pauses: PullClock
    counter: ProgressCounter  # hears of pauses


def check_hub(
    plan: HubDownload,
    folder: Path,
    on_progress: OnProgress = lambda _: None,
    *,
    endpoint: str | None = None,
    pauses: PullClock | None = None,
) -> None:
    """Read the headers of a plan's weight files and check that the model can be read. Blocks.

    ``folder`` has the plan's metadata files. ``on_progress`` hears of pauses. Raises ModelInvalid (an unreadable
    format, parts that do not fit, tensors that contradict the config), ArchitectureUnsupported, ModelUnknown,
    ModelDownloadFailed, RemoteProtocolError, SendTimeout.
    """
    counter = ProgressCounter(on_progress, "download", sum(file.num_bytes for file in plan.files))
    asking = _Asking(endpoint=endpoint, pauses=pauses or PullClock(), counter=counter)
    if plan.gguf:
        _check_gguf(plan, asking)
    else:
        with suggesting_alternative(plan):
            _check_safetensors(plan, folder, asking)


def _check_gguf(plan: HubDownload, asking: _Asking) -> None:
    with suggesting_alternative(plan):
        reading = _headers(plan, plan.gguf, parse_gguf_header, most_bytes=MAX_GGUF_HEADER_BYTES, asking=asking)
        headers = run_interruptible(reading)
    joined = JoinedGguf(headers)
    factors = expected_rope_factors(joined)  # ``install`` reads the real ones
    check_layout(gguf_config(joined.metadata, joined.shapes, factors), joined.infos)
    check_tokenizer_kind(joined.metadata)


def _check_safetensors(plan: HubDownload, folder: Path, asking: _Asking) -> None:
    config = read_hf_config(folder)
    if plan.strange_tokenizer:
        raise ModelInvalid(
            f"'{plan.source.repo}' has no {TOKENIZER_FILE}",
            fact=f"edgepipe does not read its {plan.strange_tokenizer}",
            next_step=f"pull a copy of the model with a {TOKENIZER_FILE}, or a GGUF file of it",
        )
    files = [file for file in plan.files if file.name not in METADATA_NAMES]
    indexed = set(shard_names(folder)) if (folder / INDEX_FILE).exists() else set[str]()
    if missing := indexed - {file.name for file in files}:
        raise ModelInvalid("the repository lacks weight files", fact=f"missing: {', '.join(sorted(missing)[:5])}")
    reading = _headers(plan, files, parse_safetensors, most_bytes=8 + MAX_HEADER_BYTES, asking=asking)
    places = indexed_places(folder, run_interruptible(reading))
    if len(places) > MAX_TENSORS:
        raise ModelInvalid("the model has too many tensors", fact=f"{len(places)}, at most {MAX_TENSORS} are read")
    infos = {name: place.info for name, (_, place) in places.items()}
    settled_layout(config, infos)
    layout_with_head(config, infos)


async def _headers(
    plan: HubDownload, files: Sequence[PlannedFile], parse: HeaderParser[_T], *, most_bytes: int, asking: _Asking
) -> dict[str, _T]:
    """Return the files' headers by name."""
    hub = HubFiles(replace(plan.source, revision=plan.commit), endpoint=asking.endpoint, idle_s=_IDLE_S)
    turns = asyncio.Semaphore(_AT_ONCE)

    async def read(file: PlannedFile) -> _T:
        async with hub.patience(waits=METADATA_WAITS):
            return await hub.header(file, parse, most_bytes=most_bytes)

    async def header(file: PlannedFile) -> _T:
        def waits(error: EdgepipeError, pause_s: float) -> None:
            asking.counter.waits(file.name, failure_text(error), pause_s=pause_s)

        async with turns:
            return await persist(lambda: read(file), pauses=asking.pauses, on_wait=waits)

    try:
        first = await header(files[0])  # opens the session that all share
        found = [first, *await asyncio.gather(*map(header, files[1:]))]
    finally:
        await hub.aclose()
    return {file.name: each for file, each in zip(files, found, strict=True)}
