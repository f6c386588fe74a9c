"""Errors on the wire."""

from __future__ import annotations

from edgepipe.errors import EdgepipeError, error_class
from edgepipe.safe_text import one_line
from edgepipe.wire.sizes import MAX_ERROR_BYTES, MAX_ERROR_NAME_BYTES
from edgepipe.wire.v1 import common_pb2 as pb


def error_to_wire(error: EdgepipeError) -> pb.Error:
    """Convert an error for another process; its texts are cut to the limits of messages."""
    return pb.Error(
        code=error.code,
        what=_cut(error.what, MAX_ERROR_BYTES),
        fact=_cut(error.fact, MAX_ERROR_BYTES),
        next_step=_cut(error.next_step, MAX_ERROR_BYTES),
        node=_cut(error.node, MAX_ERROR_NAME_BYTES),
        stage=_cut(error.stage, MAX_ERROR_NAME_BYTES),
        request_id=_cut(error.request_id, MAX_ERROR_NAME_BYTES),
    )


def _cut(text: str, most_bytes: int) -> str:
    data = text.encode(errors="replace")
    return text if len(data) <= most_bytes else data[: most_bytes - 4].decode(errors="ignore") + " ..."


def error_from_wire(error: pb.Error) -> EdgepipeError:
    """Restore an error as its own class; unknown codes become plain ``EdgepipeError``.

    Its texts are safe to show and within the limits of messages.
    """
    return error_class(error.code)(
        one_line(_cut(error.what, MAX_ERROR_BYTES)),
        fact=one_line(_cut(error.fact, MAX_ERROR_BYTES)),
        next_step=one_line(_cut(error.next_step, MAX_ERROR_BYTES)),
        node=one_line(_cut(error.node, MAX_ERROR_NAME_BYTES)),
        stage=one_line(_cut(error.stage, MAX_ERROR_NAME_BYTES)),
        request_id=one_line(_cut(error.request_id, MAX_ERROR_NAME_BYTES)),
    )
