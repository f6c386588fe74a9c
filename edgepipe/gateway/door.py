"""The endpoints: read a request, run it, answer whole or as a stream. Everything waits; nothing blocks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgepipe.clock import Clock
from edgepipe.errors import EdgepipeError, RequestInvalid
from edgepipe.gateway.body import parse_json_object, read_body
from edgepipe.gateway.completion import Completion, Counts, limit_tokens, run_completion
from edgepipe.gateway.models import Assets, ModelEntry, ModelTable
from edgepipe.gateway.problems import HttpProblem, from_error
from edgepipe.gateway.responses import (
    DONE,
    ChatShape,
    GatheredChoice,
    Head,
    Shape,
    TextShape,
    event,
    model_card,
)
from edgepipe.gateway.schema import BodyT, ChatBody, CompletionBody, RequestBody, validate
from edgepipe.gateway.streams import EventStream, until_disconnect
from edgepipe.gateway.text import Delta
from edgepipe.ids import IdSource, RequestId
from edgepipe.sampling import SamplingParams
from edgepipe.wire.requests import Submission

_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's for /v1/completions
_INLINE_BYTES = 32 << 10  # larger bodies are parsed, longer texts tokenised, in a thread


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """The handlers and what they share. The routing layer turns HttpProblem and EdgepipeError into responses."""

    models: ModelTable
    clock: Clock
    ids: IdSource
    new_seed: Callable[[], int]  # for requests without a seed

    async def chat(self, request: Request) -> Response:
        """``POST /v1/chat/completions``."""
        body = await _read(request, ChatBody)
        entry = self.models.get(body.model)
        assets = await entry.assets()
        messages = [
            message.model_dump(exclude_none=True) | {"content": message.content or ""} for message in body.messages
        ]
        text = await assets.render(messages)
        prompt = await _encode(assets, text, special_tokens=False)
        wanted = body.max_completion_tokens or body.max_tokens
        completion = self._completion(body, entry, [prompt], wanted=wanted, param="messages")
        head = self._head("chatcmpl", body, entry)
        return await self._answer(
            request, body, completion, entry, assets, ChatShape(head, include_usage=_include_usage(body))
        )

    async def complete(self, request: Request) -> Response:
        """``POST /v1/completions``."""
        body = await _read(request, CompletionBody)
        entry = self.models.get(body.model)
        assets = await entry.assets()
        prompts = [
            await _encode(assets, prompt, special_tokens=True) if isinstance(prompt, str) else prompt
            for prompt in body.prompt
        ]
        wanted = body.max_tokens or _DEFAULT_COMPLETION_TOKENS
        completion = self._completion(body, entry, prompts, wanted=wanted, param="prompt")
        head = self._head("cmpl", body, entry)
        return await self._answer(
            request, body, completion, entry, assets, TextShape(head, include_usage=_include_usage(body))
        )

    async def list_models(self, request: Request) -> Response:
        """``GET /v1/models``."""
        created_s = int(self.clock.wall_s())
        return JSONResponse(
            {"object": "list", "data": [model_card(served, created_s=created_s) for served in self.models.served]}
        )

    async def one_model(self, request: Request) -> Response:
        """``GET /v1/models/{id}``."""
        served = self.models.get(request.path_params["id"]).served
        return JSONResponse(model_card(served, created_s=int(self.clock.wall_s())))

    async def health(self, request: Request) -> Response:
        """``GET /health``: this process lives."""
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """``GET /ready``: a model answers."""
        served = [served.name for served in self.models.served]
        if not served:
            raise HttpProblem(status=503, message="no model is served", code="not_ready", headers={"Retry-After": "1"})
        return JSONResponse({"status": "ready", "models": served})

    def _head(self, prefix: str, body: RequestBody, entry: ModelEntry) -> Head:
        return Head(
            response_id=self.ids.new(prefix),
            created_s=int(self.clock.wall_s()),
            model=entry.served.name,
            with_ids=bool(body.return_token_ids),
        )

    def _completion(
        self, body: RequestBody, entry: ModelEntry, prompts: list[list[int]], *, wanted: int | None, param: str
    ) -> Completion:
        seed = (body.seed if body.seed is not None else self.new_seed()) % (1 << 64)
        context_length = entry.served.context_length
        try:
            limits = [
                limit_tokens(num_prompt_tokens=len(prompt), wanted=wanted, context_length=context_length)
                for prompt in prompts
            ]
        except RequestInvalid as exc:
            raise from_error(exc, param=param) from exc
        requests = tuple(
            Submission(
                request_id=RequestId(self.ids.new("request")),
                prompt=tuple(prompt),
                num_choices=body.n or 1,
                max_tokens=max_tokens,
                sampling=SamplingParams(temperature=1.0 if body.temperature is None else body.temperature, seed=seed),
                ignore_eos=bool(body.ignore_eos),
                stop_token_ids=frozenset(body.stop_token_ids or ()),
            )
            for prompt, max_tokens in zip(prompts, limits, strict=True)
        )
        return Completion(model=entry.served.name, requests=requests, stops=tuple(body.stop or ()))

    async def _answer(
        self,
        request: Request,
        body: RequestBody,
        completion: Completion,
        entry: ModelEntry,
        assets: Assets,
        shape: Shape,
    ) -> Response:
        counts = Counts()
        deltas = run_completion(completion, entry, assets, counts)
        entry.link.check_room(len(completion.requests))
        if body.stream:
            return EventStream(_events(deltas, completion, counts, shape, include_usage=_include_usage(body)))
        choices = await until_disconnect(request, _gather(deltas, completion.num_choices))
        return JSONResponse(shape.whole(completion, choices, counts))


async def _read(request: Request, kind: type[BodyT]) -> BodyT:
    body = await read_body(request)

    def checked() -> BodyT:
        return validate(kind, parse_json_object(body))

    return checked() if len(body) <= _INLINE_BYTES else await asyncio.to_thread(checked)


async def _encode(assets: Assets, text: str, *, special_tokens: bool) -> list[int]:
    if len(text) <= _INLINE_BYTES:
        return assets.encode(text, special_tokens=special_tokens)
    return await asyncio.to_thread(assets.encode, text, special_tokens=special_tokens)


def _include_usage(body: RequestBody) -> bool:
    return bool(body.stream_options and body.stream_options.include_usage)


async def _gather(deltas: AsyncGenerator[Delta], num_choices: int) -> list[GatheredChoice]:
    choices = [GatheredChoice() for _ in range(num_choices)]
    async with aclosing(deltas):
        async for delta in deltas:
            choices[delta.choice].add(delta)
    return choices


async def _events(
    deltas: AsyncGenerator[Delta], completion: Completion, counts: Counts, shape: Shape, *, include_usage: bool
) -> AsyncGenerator[bytes]:
    """The stream's events: one ending, which is ``[DONE]`` or one error."""
    async with aclosing(deltas):
        for chunk in shape.opening(completion):
            yield event(chunk)
        try:
            async for delta in deltas:
                if (chunk := shape.chunk(delta)) is not None:
                    yield event(chunk)
        except EdgepipeError as exc:
            yield event(from_error(exc).body())
            return
    if include_usage:
        yield event(shape.usage_chunk(completion, counts))
    yield DONE
