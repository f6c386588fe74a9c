"""Refuse a GGUF model on the Hugging Face Hub after reading only its headers, before its weights are downloaded."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from edgepipe.model.config import gguf_config
from edgepipe.model.gguf_file import JoinedGguf
from edgepipe.model.gguf_header import MAX_HEADER_BYTES, GgufHeader, parse_gguf_header
from edgepipe.model.gguf_tokenizer import check_tokenizer_kind
from edgepipe.model.hub import HubPlan, suggesting_alternative
from edgepipe.model.hub_files import METADATA_WAITS, HubFiles
from edgepipe.model.layout import check_layout

_IDLE_S = 20.0  # limit for silence of the hub


def check_hub_gguf(plan: HubPlan, *, endpoint: str | None = None) -> None:
    """Read the headers of a plan's GGUF files and check that the model can be read. Blocks.

    Raises ModelInvalid (unreadable type, parts that do not fit), ArchitectureUnsupported, ModelUnknown,
    ModelDownloadFailed, RemoteProtocolError, SendTimeout.
    """
    joined = JoinedGguf(asyncio.run(_headers(plan, endpoint)))
    check_layout(gguf_config(joined.metadata, joined.shapes), joined.infos)
    check_tokenizer_kind(joined.metadata)


async def _headers(plan: HubPlan, endpoint: str | None) -> dict[str, GgufHeader]:
    hub = HubFiles(replace(plan.source, revision=plan.commit), endpoint=endpoint, idle_s=_IDLE_S)
    headers: dict[str, GgufHeader] = {}
    try:
        with suggesting_alternative(plan):
            for file in plan.gguf:
                async with hub.patience(waits=METADATA_WAITS):
                    headers[file.name] = await hub.header(file, parse_gguf_header, most_bytes=MAX_HEADER_BYTES)
    finally:
        await hub.aclose()
    return headers
