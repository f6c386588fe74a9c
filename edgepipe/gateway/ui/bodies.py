"""Bodies of the page's requests that act (PURE). Unknown fields are refused."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from edgepipe.gateway.schema import Text
from edgepipe.gateway.strict_body import StrictBody

MOST_CONTEXT = 1 << 24  # tokens
MOST_CHATS = 1 << 12


class ActionBody(StrictBody):
    """A body of the page, which is of this version."""

    model_config = ConfigDict(extra="forbid")


class EmptyBody(ActionBody):
    """An action without parameters."""


class TicketBody(ActionBody):
    """``POST /ui/session``."""

    ticket: Text


class TaskBody(ActionBody):
    """``POST /ui/tasks``. The fields after the model are choices of serving; empty or 0: the command's default."""

    kind: Text
    model: Text = ""
    kv: Text = ""
    context: Annotated[int, Field(ge=0, le=MOST_CONTEXT)] = 0
    concurrency: Annotated[int, Field(ge=0, le=MOST_CHATS)] = 0
    draft: Text = ""


class IdBody(ActionBody):
    """A task or a request."""

    id: Text


class ModelBody(ActionBody):
    """A served model."""

    model: Text


class PeerBody(ActionBody):
    """``POST /ui/peers/promote``."""

    peer: Text


class RemovePeerBody(PeerBody):
    """``POST /ui/peers/remove``. ``others``: what becomes of nodes that only this peer let in."""

    others: Literal["", "keep", "drop"] = ""


class InviteBody(ActionBody):
    """``POST /ui/invite``. ``role`` of the joining machine; empty: owner for the second machine, then member."""

    role: Literal["", "owner", "member"] = ""


class AnswerBody(ActionBody):
    """``POST /ui/invite/answer``."""

    accept: bool
