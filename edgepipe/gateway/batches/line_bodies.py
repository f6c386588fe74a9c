"""Lines of a batch as checked requests."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from edgepipe.gateway.batches.lines import MAX_ID_CHARS
from edgepipe.gateway.schema import ChatBody, CompletionBody, Text
from edgepipe.gateway.strict_body import StrictBody

_CustomId = Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]


class ChatLine(StrictBody):
    """A line of a batch for ``/v1/chat/completions``."""

    custom_id: _CustomId
    method: Literal["POST"]
    url: Literal["/v1/chat/completions"]
    body: ChatBody


class CompletionLine(StrictBody):
    """A line of a batch for ``/v1/completions``."""

    custom_id: _CustomId
    method: Literal["POST"]
    url: Literal["/v1/completions"]
    body: CompletionBody


LINE_KINDS: dict[str, type[ChatLine | CompletionLine]] = {
    "/v1/chat/completions": ChatLine,
    "/v1/completions": CompletionLine,
}


class OutputExpiry(StrictBody):
    """When a file is deleted."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3600, le=30 * 24 * 3600)]


class BatchExtension(StrictBody):
    """Fields of a batch that OpenAI's API does not have."""

    copies: Annotated[int, Field(ge=1, le=2)] = 1  # 2: another machine keeps a copy


class BatchBody(StrictBody):
    """``POST /v1/batches``."""

    input_file_id: Text
    endpoint: Text
    completion_window: Annotated[str, Field(max_length=16)] = "24h"
    metadata: Annotated[
        dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None, Field(max_length=16)
    ] = None
    output_expires_after: OutputExpiry | None = None
    edgepipe: BatchExtension | None = None
