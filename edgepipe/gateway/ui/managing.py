"""The page's actions: each needs a session of ``edgepipe open``, except the one that opens a session."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from edgepipe.errors import ClusterError
from edgepipe.gateway.access import address_of, is_local, require_manager
from edgepipe.gateway.body import parse_json_object, read_body
from edgepipe.gateway.endpoints import Handler
from edgepipe.gateway.key_tries import KeyTries
from edgepipe.gateway.problems import HttpProblem
from edgepipe.gateway.request_ring import RequestRing
from edgepipe.gateway.request_share import memory_of
from edgepipe.gateway.strict_body import BodyT, validate
from edgepipe.gateway.ui.bodies import EmptyBody, IdBody, ModelBody, PeerBody, RemovePeerBody, TaskBody, TicketBody
from edgepipe.gateway.ui.feed import PageFeed, task_json
from edgepipe.gateway.ui.paths import SESSION
from edgepipe.gateway.ui.sessions import SESSION_S, Sessions
from edgepipe.link.admin_client import Admin
from edgepipe.wire.tasks import ServeChoices
from edgepipe.wire.trust import ListPeersReply

_MOST_BODY_BYTES = 8 << 10
_BODY_S = 10.0


class Managing:
    """Handlers of the actions. ``admin`` reaches this gateway's node; None where a gateway runs without one."""

    def __init__(
        self, *, admin: Admin | None, feed: PageFeed, requests: RequestRing, sessions: Sessions, tries: KeyTries
    ) -> None:
        self._admin = admin
        self._feed = feed
        self._requests = requests
        self._sessions = sessions
        self._tries = tries

    def routes(self) -> Sequence[BaseRoute]:
        """Return the routes of the actions."""
        acting = {
            "/ui/tasks": self._start_task,
            "/ui/tasks/cancel": self._cancel_task,
            "/ui/stop": self._stop_model,
            "/ui/undrain": self._undrain,
            "/ui/peers/remove": self._remove_peer,
            "/ui/peers/promote": self._promote_peer,
            "/ui/links": self._measure_links,
            "/ui/requests/cancel": self._cancel_request,
        }
        return [
            Route(SESSION, self._open_session, methods=["POST"]),
            Route(SESSION, self._check_session, methods=["GET"]),
            Route("/ui/tasks/{id}", self._task, methods=["GET"]),
            Route("/ui/peers", self._peers, methods=["GET"]),
            *(Route(path, managed(handler), methods=["POST"]) for path, handler in acting.items()),
        ]

    @property
    def admin(self) -> Admin:
        """The calls to the node. Raises ClusterError without a node."""
        if self._admin is None:
            raise ClusterError("this gateway runs without a node", next_step="edgepipe node start")
        return self._admin

    async def _open_session(self, request: Request) -> Response:
        """``POST /ui/session``: a ticket of ``edgepipe open`` opens a session."""
        address = address_of(request.scope.get("client"))
        if (wait_s := self._tries.wait_s(address)) or not is_local(request.scope):
            raise _no_session(wait_s)
        body = await read_action(request, TicketBody)
        if not await self.admin.redeem_ticket(body.ticket):
            self._tries.failed(address)
            raise _no_session(0)
        return JSONResponse({"token": self._sessions.open(), "valid_s": round(SESSION_S)}, headers=_PRIVATE)

    async def _check_session(self, request: Request) -> Response:
        """``GET /ui/session``: whether the client's token may manage."""
        return JSONResponse({"manages": bool(request.scope["state"].get("manages"))}, headers=_PRIVATE)

    async def _start_task(self, request: Request) -> Response:
        body = await read_action(request, TaskBody)
        choices = ServeChoices(kv=body.kv, context=body.context, concurrency=body.concurrency, draft=body.draft)
        return JSONResponse(task_json(await self.admin.start_task(body.kind, body.model, choices)))

    async def _cancel_task(self, request: Request) -> Response:
        body = await read_action(request, IdBody)
        return JSONResponse(task_json(await self.admin.cancel_task(body.id)))

    async def _task(self, request: Request) -> Response:
        """``GET /ui/tasks/ID``: a task with what its command printed."""
        task = await self.admin.task(request.path_params["id"])
        result = json.loads(task.result) if task.result else None
        return JSONResponse(task_json(task) | {"result": result})

    async def _stop_model(self, request: Request) -> Response:
        body = await read_action(request, ModelBody)
        if not body.model:
            raise HttpProblem(status=400, message="model: name one", code="invalid_value", param="model")
        return JSONResponse({"stopped": await self.admin.stop_model(body.model)})

    async def _undrain(self, request: Request) -> Response:
        await read_action(request, EmptyBody)
        async for _ in self.admin.drain(undo=True):
            pass
        return JSONResponse({})

    async def _peers(self, request: Request) -> Response:
        """``GET /ui/peers``: the members of the cluster, with their roles."""
        return JSONResponse(peers_json(await self.admin.peers()))

    async def _remove_peer(self, request: Request) -> Response:
        body = await read_action(request, RemovePeerBody)
        removed = await self.admin.remove_peer(body.peer, others=body.others)
        return JSONResponse({"name": removed.name, "others": list(removed.others)})

    async def _promote_peer(self, request: Request) -> Response:
        body = await read_action(request, PeerBody)
        return JSONResponse({"name": await self.admin.promote_peer(body.peer)})

    async def _measure_links(self, request: Request) -> Response:
        await read_action(request, EmptyBody)
        measured = await self.admin.measure_links()
        self._feed.update_links(measured)
        return JSONResponse({"links": len(measured.links)})

    async def _cancel_request(self, request: Request) -> Response:
        body = await read_action(request, IdBody)
        self._requests.cancel(body.id)
        return JSONResponse({})


_PRIVATE = {"Cache-Control": "no-store"}


def managed(handler: Handler) -> Handler:
    """Return a handler that acts only for a session of ``edgepipe open``."""

    async def checked(request: Request) -> Response:
        require_manager(request)
        return await handler(request)

    return checked


async def read_action(request: Request, kind: type[BodyT]) -> BodyT:
    """Return the checked body of an action: small, and JSON by its Content-Type. Raises HttpProblem."""
    body = await read_body(request, memory=memory_of(request), within_s=_BODY_S)
    if len(body) > _MOST_BODY_BYTES:
        raise HttpProblem(status=413, message="the body of an action has at most 8 KB", code="request_too_large")
    return validate(kind, parse_json_object(body))


def peers_json(peers: ListPeersReply) -> dict[str, Any]:
    """Return the members of the cluster as the page draws them."""
    rows = [
        {
            "id": peer.node_id,
            "name": peer.name,
            "role": peer.role,
            "state": peer.state,
            "address": peer.address,
            "added_s": peer.added_ms // 1000,
            "added_by": peer.added_by,
            "self": peer.self,
        }
        for peer in peers.peers
    ]
    return {"cluster": peers.cluster_name, "peers": rows}


def _no_session(wait_s: int) -> HttpProblem:
    if wait_s:
        return HttpProblem(
            status=429,
            message=f"too many tickets of this address were not valid. Try again in {wait_s} s",
            code="too_many_tickets",
            headers={"Retry-After": str(wait_s)},
        )
    return HttpProblem(
        status=401,
        message="the ticket is not valid: it opens one page on the node's own machine, within a minute. Type again: "
        "edgepipe open",
        code="ticket_invalid",
    )
