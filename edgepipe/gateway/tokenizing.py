"""Converts text to token ids and back over HTTP, for benchmarks that count tokens; the API is vLLM's."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from edgepipe.children.user_turns import UserTurns
from edgepipe.gateway.access import owner_of
from edgepipe.gateway.bodies import BodyReader
from edgepipe.gateway.completion_service import TooManyTokens, decoded, encode
from edgepipe.gateway.conversation import render_chat
from edgepipe.gateway.json_pieces import ArrayParts
from edgepipe.gateway.models import Assets, ModelEntry, ModelTable
from edgepipe.gateway.pieced import PiecedAnswers
from edgepipe.gateway.problems import bad_request
from edgepipe.gateway.schema import ChatBody, DetokenizeBody, TokenizeBody
from edgepipe.gateway.tool_choice import choose_tools

MAX_TOKENS = 1 << 18  # tokens of one text
MAX_TOKEN_STRINGS = 1 << 16
_PART_IDS = 512  # converted to text at once


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenHandlers:
    """Handlers of the token endpoints."""

    models: ModelTable
    bodies: BodyReader
    answers: PiecedAnswers
    threads: UserTurns  # threads that tokenise

    async def tokenize(self, request: Request) -> Response:
        """``POST /tokenize``."""
        owner = owner_of(request)
        body = await self.bodies.read(request, TokenizeBody)
        entry = self.models.get(body.model)
        assets = await entry.assets()
        if body.prompt is not None:
            special = body.add_special_tokens is not False
            ids = await self._encode(assets, body.prompt, special_tokens=special, param="prompt", owner=owner)
        else:
            chat = ChatBody(messages=body.messages or [], chat_template_kwargs=body.chat_template_kwargs)
            choice, defaults = choose_tools(body.tools), entry.served.template_keywords
            text = await render_chat(assets, chat, choice, owner=owner, defaults=defaults)
            special = bool(body.add_special_tokens)
            ids = await self._encode(assets, text, special_tokens=special, param="messages", owner=owner)
        texts = _token_texts(assets, ids[:MAX_TOKEN_STRINGS]) if body.return_token_strs else None
        return self.answers.json(
            {"count": len(ids), "max_model_len": entry.served.context_length, "tokens": ids, "token_strs": texts}
        )

    async def detokenize(self, request: Request) -> Response:
        """``POST /detokenize``."""
        body = await self.bodies.read(request, DetokenizeBody)
        assets = await self.models.get(body.model).assets()
        _check(body.tokens, assets)
        return self.answers.json({"prompt": await decoded(assets, body.tokens, turns=self.answers.turns)})

    async def tokenizer_info(self, request: Request) -> Response:
        """``GET /tokenizer_info``; ``?model=`` if several are served."""
        entry: ModelEntry = self.models.get(request.query_params.get("model"))
        assets = await entry.assets()
        return self.answers.json(
            {"model": entry.served.name, "model_max_length": entry.served.context_length, **assets.info()}
        )

    async def _encode(self, assets: Assets, text: str, *, special_tokens: bool, param: str, owner: str) -> list[int]:
        try:
            return await encode(
                assets,
                text,
                special_tokens=special_tokens,
                at_most=MAX_TOKENS,
                threads=self.threads,
                owner=owner,
            )
        except TooManyTokens as exc:
            message = f"the text has {exc.count} tokens, at most {MAX_TOKENS} can be used"
            raise bad_request(message, param=param, code="context_length_exceeded") from exc


def _token_texts(assets: Assets, ids: list[int]) -> ArrayParts:
    return ArrayParts(
        [assets.token_text(token) for token in ids[start : start + _PART_IDS]]
        for start in range(0, len(ids), _PART_IDS)
    )


def _check(tokens: list[int], assets: Assets) -> None:
    highest = max(tokens, default=0)
    if highest >= assets.vocab_size:
        raise bad_request(f"the model has no token {highest}; ids go from 0 to {assets.vocab_size - 1}", param="tokens")
