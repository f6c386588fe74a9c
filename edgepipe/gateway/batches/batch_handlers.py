"""``/v1/batches``: create, list, show and cancel batches. A client sees the batches of its own key only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgepipe.errors import EdgepipeError
from edgepipe.gateway.access import owner_of
from edgepipe.gateway.batches.file_handlers import FileHandlers, page, page_size, unknown
from edgepipe.gateway.batches.line_bodies import BatchBody
from edgepipe.gateway.batches.records import ENDPOINTS, MAX_WINDOW_S, Batch, IllegalChange, window_s
from edgepipe.gateway.batches.service import BatchService
from edgepipe.gateway.bodies import BodyReader
from edgepipe.gateway.endpoints import Endpoint, fields
from edgepipe.gateway.pieced import PiecedAnswers
from edgepipe.gateway.problems import HttpProblem, bad_request, from_error
from edgepipe.gateway.protocols.responses.handlers import no_embeddings

_LISTED, _MAX_LISTED = 20, 100  # batches of one page
_GROUP = "Batches"
_FILE = fields("id", "object", "bytes", "created_at", "filename", "purpose", id="string", bytes="integer")
_BATCH = fields("id", "object", "endpoint", "input_file_id", "completion_window", "status", "created_at", id="string")
_LIST = fields("object", "data", "has_more", object="string", data="array", has_more="boolean")
_FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
        "purpose": {"type": "string", "enum": ["batch"]},
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchHandlers:
    """Handlers of batches."""

    batches: BatchService
    bodies: BodyReader
    answers: PiecedAnswers

    async def create(self, request: Request) -> Response:
        """``POST /v1/batches``."""
        body, owner = await self.bodies.read(request, BatchBody), owner_of(request)
        if body.endpoint == "/v1/embeddings":
            problem = no_embeddings()
            problem.param = "endpoint"
            raise problem
        if body.endpoint not in ENDPOINTS:
            raise bad_request(f"endpoint must be {' or '.join(ENDPOINTS)}", param="endpoint")
        seconds = window_s(body.completion_window)
        if seconds is None:
            most_days = MAX_WINDOW_S // (24 * 3600)
            text = f"completion_window must be minutes, hours or days, such as 90m, 24h or 7d, at most {most_days}d"
            raise bad_request(text, param="completion_window")
        file = await self.batches.store.do(lambda store: store.file(owner, body.input_file_id))
        if file is None or file.purpose != "batch":
            text = f"no file '{body.input_file_id[:64]}' with the purpose batch is stored here for this key"
            raise bad_request(text, param="input_file_id", code="file_not_found")
        batch = await self.batches.create(
            owner,
            endpoint=body.endpoint,
            input_file=file,
            completion_window=body.completion_window,
            window_s=seconds,
            metadata=body.metadata or {},
            kept_s=body.output_expires_after.seconds if body.output_expires_after is not None else None,
            copies=body.edgepipe.copies if body.edgepipe is not None else 1,
        )
        return self._shown(batch)

    async def list_all(self, request: Request) -> Response:
        """``GET /v1/batches``: the newest first."""
        query, owner = request.query_params, owner_of(request)
        count, after = page_size(query.get("limit"), usual=_LISTED, most=_MAX_LISTED), query.get("after", "")
        found = await self.batches.store.do(lambda store: store.list_batches(owner, after=after, count=count + 1))
        if found is None:
            raise bad_request("after must be the id of a batch", param="after")
        return self.answers.json(page([self._json(batch) for batch in found], count))

    async def retrieve(self, request: Request) -> Response:
        """``GET /v1/batches/{id}``."""
        return self._shown(await self._batch(request))

    async def cancel(self, request: Request) -> Response:
        """``POST /v1/batches/{id}/cancel``: running lines end, finished ones keep their results."""
        batch = await self._batch(request)
        try:
            return self._shown(await self.batches.cancel(batch))
        except IllegalChange as exc:
            text = f"{exc}: only a batch that has not ended can be cancelled"
            raise HttpProblem(status=409, message=text, code="batch_not_cancellable") from exc

    async def take_over(self, request: Request) -> Response:
        """``POST /v1/batches/{id}/take_over``: go on here with a batch of a lost machine."""
        try:
            return self._shown(await self.batches.take_over(request.path_params["id"][:64], owner_of(request)))
        except EdgepipeError as exc:
            raise from_error(exc) from exc

    def _shown(self, batch: Batch) -> Response:
        return JSONResponse(self._json(batch))

    def _json(self, batch: Batch) -> dict[str, Any]:
        """Return a batch as clients see it. Without a copy that it wants, its note says so."""
        note, copy = self.batches.note(batch), self.batches.copy_text(batch)
        return batch.to_json(note=note or (copy if not batch.keeper else ""), copy=copy)

    async def _batch(self, request: Request) -> Batch:
        owner, batch_id = owner_of(request), request.path_params["id"]
        found = await self.batches.store.do(lambda store: store.batch(owner, batch_id))
        if found is None:
            raise unknown("batch", batch_id)
        return found


def batch_endpoints(batches: BatchService, bodies: BodyReader, answers: PiecedAnswers) -> list[Endpoint]:
    """Return the endpoints of files and batches."""
    return [
        *_file_endpoints(FileHandlers(batches=batches, answers=answers)),
        *_batch_endpoints(BatchHandlers(batches=batches, bodies=bodies, answers=answers)),
    ]


def _file_endpoints(files: FileHandlers) -> list[Endpoint]:
    return [
        Endpoint(
            method="POST",
            path="/v1/files",
            handler=files.create,
            group=_GROUP,
            summary="Upload a file with requests, one JSON object a line.",
            form=_FORM,
            answer=_FILE,
        ),
        Endpoint(
            method="GET",
            path="/v1/files",
            handler=files.list_all,
            group=_GROUP,
            summary="List the files of this key.",
            answer=_LIST,
            query=("limit", "order", "after", "purpose"),
        ),
        Endpoint(
            method="GET",
            path="/v1/files/{id}",
            handler=files.retrieve,
            group=_GROUP,
            summary="Show a file.",
            answer=_FILE,
        ),
        Endpoint(
            method="DELETE",
            path="/v1/files/{id}",
            handler=files.delete,
            group=_GROUP,
            summary="Delete a file.",
            answer=fields("id", "object", "deleted", deleted="boolean"),
        ),
        Endpoint(
            method="GET",
            path="/v1/files/{id}/content",
            handler=files.content,
            group=_GROUP,
            summary="Return the bytes of a file.",
            media_type="application/octet-stream",
        ),
    ]


def _batch_endpoints(batches: BatchHandlers) -> list[Endpoint]:
    return [
        Endpoint(
            method="POST",
            path="/v1/batches",
            handler=batches.create,
            group=_GROUP,
            summary="Run the requests of a file, behind interactive ones.",
            body=BatchBody,
            answer=_BATCH,
        ),
        Endpoint(
            method="GET",
            path="/v1/batches",
            handler=batches.list_all,
            group=_GROUP,
            summary="List the batches of this key.",
            answer=_LIST,
            query=("limit", "after"),
        ),
        Endpoint(
            method="GET",
            path="/v1/batches/{id}",
            handler=batches.retrieve,
            group=_GROUP,
            summary="Show a batch.",
            answer=_BATCH,
        ),
        Endpoint(
            method="POST",
            path="/v1/batches/{id}/cancel",
            handler=batches.cancel,
            group=_GROUP,
            summary="Cancel a batch.",
            answer=_BATCH,
        ),
        Endpoint(
            method="POST",
            path="/v1/batches/{id}/take_over",
            handler=batches.take_over,
            group=_GROUP,
            summary="Go on with a batch of a lost machine, from the copy on this one.",
            answer=_BATCH,
        ),
    ]
