"""Text to token ids and back over HTTP, for benchmarks and evaluations that count tokens (as vLLM has it)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgepipe.gateway.desk import encode, render_chat
from edgepipe.gateway.door import read_checked
from edgepipe.gateway.models import Assets, ModelEntry, ModelTable
from edgepipe.gateway.problems import bad_request
from edgepipe.gateway.schema import MAX_MESSAGES, ChatBody, Checked, Message, Text, TokenId
from edgepipe.gateway.structured import OutputPlan

MAX_TOKEN_STRINGS = 1 << 16


class TokenizeBody(Checked):
    """``POST /tokenize``: a text, or a conversation as its prompt."""

    model: Text | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None  # of a text; a template brings its own
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _has_one(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("either prompt or messages is required")
        return self


class DetokenizeBody(Checked):
    """``POST /detokenize``."""

    model: Text | None = None
    tokens: list[TokenId]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPages:
    """The handlers."""

    models: ModelTable

    async def tokenize(self, request: Request) -> Response:
        """``POST /tokenize``."""
        body = await read_checked(request, TokenizeBody)
        entry = self.models.get(body.model)
        assets = await entry.assets()
        if body.prompt is not None:
            ids = await encode(assets, body.prompt, special_tokens=body.add_special_tokens is not False)
        else:
            text = await render_chat(assets, ChatBody(messages=body.messages or []), OutputPlan())
            ids = await encode(assets, text, special_tokens=bool(body.add_special_tokens))
        texts = [assets.token_text(token) for token in ids[:MAX_TOKEN_STRINGS]] if body.return_token_strs else None
        return JSONResponse(
            {"count": len(ids), "max_model_len": entry.served.context_length, "tokens": ids, "token_strs": texts}
        )

    async def detokenize(self, request: Request) -> Response:
        """``POST /detokenize``."""
        body = await read_checked(request, DetokenizeBody)
        assets = await self.models.get(body.model).assets()
        _check(body.tokens, assets)
        return JSONResponse({"prompt": assets.decode(body.tokens)})

    async def tokenizer_info(self, request: Request) -> Response:
        """``GET /tokenizer_info``; ``?model=`` where several are served."""
        entry: ModelEntry = self.models.get(request.query_params.get("model"))
        assets = await entry.assets()
        return JSONResponse(
            {"model": entry.served.name, "model_max_length": entry.served.context_length, **assets.info()}
        )


def _check(tokens: list[int], assets: Assets) -> None:
    highest = max(tokens, default=0)
    if highest >= assets.vocab_size:
        raise bad_request(f"the model has no token {highest}; ids go from 0 to {assets.vocab_size - 1}", param="tokens")
