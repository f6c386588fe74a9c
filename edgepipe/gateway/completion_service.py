"""Shared request path of all protocols: validate, admit, run, meter."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from edgepipe.children.user_turns import UserTurns
from edgepipe.clock import Clock
from edgepipe.errors import EdgepipeError
from edgepipe.gateway.admission import Admission, Line, Part, Ticket
from edgepipe.gateway.answer_form import answer_form
from edgepipe.gateway.completion import Completion, Counts, run_completion
from edgepipe.gateway.context import check_length, prompt_too_long
from edgepipe.gateway.conversation import render_chat
from edgepipe.gateway.leniency import NoteLog
from edgepipe.gateway.loading import ModelLoads
from edgepipe.gateway.metrics import RequestMeter, RequestMetrics
from edgepipe.gateway.models import Assets, ModelEntry, ModelTable, News
from edgepipe.gateway.problems import bad_request, from_error
from edgepipe.gateway.reasoning_wish import reasoning_wish
from edgepipe.gateway.sampling_choice import sampling_defaults
from edgepipe.gateway.schema import ChatBody, CompletionBody, RequestBody
from edgepipe.gateway.shares import Holding
from edgepipe.gateway.structured import BoundOutput, GrammarCompiler, plan_output
from edgepipe.gateway.text import Delta
from edgepipe.gateway.tool_choice import choose_tools
from edgepipe.gateway.turns import Turns
from edgepipe.gateway.unloading import KeepAlives
from edgepipe.ids import IdSource, PipelineId, RequestId
from edgepipe.sampling import SamplingParams
from edgepipe.sampling.bounds import ModelBounds
from edgepipe.sampling.params import MAX_COUNT
from edgepipe.wire.intake import MAX_REQUEST_IDS, MAX_SCORES, submission_refusal
from edgepipe.wire.requests import Submission

_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
_INLINE_CHARS = 4 << 10  # a thread tokenises longer texts
_DECODED_IDS = 2048  # converted to text at once: 2 to 4 ms
_LONG_CHARS = 128 << 10  # another process tokenises texts longer than this
_MAX_THREADS = 4  # threads that tokenise; others read tokenizers
_MAX_TEXTS = 512  # texts of one user that wait for a thread: one per connection


def _new_threads() -> UserTurns:
    return UserTurns(max_running=_MAX_THREADS, max_waiting=_MAX_TEXTS)


@dataclass(slots=True, kw_only=True)
class PreparedCompletion:
    """A completion that is ready to run, and its counts so far."""

    completion: Completion
    entry: ModelEntry
    assets: Assets
    ticket: Ticket
    meter: RequestMeter
    texts: tuple[str, ...] = ()  # texts of the prompts, if the answer echoes them
    counts: Counts = field(default_factory=Counts)
    keep_s: float | None = None  # how long the model stays loaded afterwards; None: as an earlier request set
    # The entry's number of rings of each pipeline when the request began.
    first_rings: Mapping[PipelineId, int] = field(default_factory=dict[PipelineId, int])

    def details(self) -> dict[str, Any]:
        """Return which machines have computed the answer so far, as JSON: several rings after a recovery."""
        rings = self.entry.rings_since(self.first_rings, self._pipelines())
        return {"rings": [ring.to_json() for ring in rings]}

    def news(self) -> News:
        """Return the news for the client's stream."""
        read, total = self.counts.read_prompt_tokens, self.completion.num_prompt_tokens
        reading = f"{read / total:.0%}".replace("%", " %") if read and not self.counts.completion_tokens else ""
        return replace(self.entry.news(self._pipelines()), reading=reading)

    def _pipelines(self) -> Sequence[PipelineId]:
        return [key for keys in self.counts.pipelines for key in keys]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionService:
    """Prepares and runs completions. Refuses invalid requests before it prepares one."""

    models: ModelTable
    loads: ModelLoads
    keep_alives: KeepAlives
    clock: Clock
    ids: IdSource
    new_seed: Callable[[], int]  # returns the seed of a request that gives none
    admission: Admission
    metrics: RequestMetrics
    compiler: GrammarCompiler
    turns: Turns  # fair turns for the pieces of large answers
    notes: NoteLog = field(default_factory=NoteLog)  # requests that were changed so that they could be answered
    threads: UserTurns = field(default_factory=_new_threads)  # threads that tokenise or write metrics
    salt: bytes = field(default_factory=lambda: secrets.token_bytes(16))  # hides users' labels from other nodes

    async def chat(self, body: ChatBody, *, owner: str, memory: Holding) -> PreparedCompletion:
        """Prepare a conversation's next turn. Raises HttpProblem, EdgepipeError.

        ``memory``: the body's; the ticket's takes its place.
        """
        entry = await self.loads.entry(body.model, owner=owner)
        assets = await entry.assets()
        form = answer_form(body)
        choice = choose_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
        if assets.traits.choose(tools=bool(choice.tools)).one_call:
            choice = choice.with_one_call()
        text = await render_chat(assets, body, choice, owner=owner, defaults=entry.served.template_keywords)
        chat = assets.chat
        plan = await plan_output(
            form=form,
            choice=choice,
            chat=chat,
            in_reasoning=chat.opens_reasoning(text),
            most_thoughts=reasoning_wish(body).most_tokens,
            compiler=self.compiler,
            owner=owner,
        )
        self.notes.tell(entry.served.name, plan.notes)
        context_length = entry.served.context_length
        prompt = await self._encode_prompt(
            assets, text, special_tokens=False, context_length=context_length, param="messages", owner=owner
        )
        sampling = self._sampling(
            body, assets, owner=owner, plan=plan, logprobs=bool(body.logprobs), top=body.top_logprobs or 0
        )
        wanted = body.max_completion_tokens or body.max_tokens
        completion = self._completion(
            body, entry, assets, [prompt], sampling, wanted=wanted, param="messages", plan=plan
        )
        memory.release()
        return self._prepared(completion, entry, assets, owner)

    async def count_prompt_tokens(self, body: ChatBody, *, owner: str) -> int:
        """Return the number of tokens of a conversation's prompt, as ``chat`` makes it. Raises as ``chat``."""
        entry = await self.loads.entry(body.model, owner=owner)
        assets = await entry.assets()
        choice = choose_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
        text = await render_chat(assets, body, choice, owner=owner, defaults=entry.served.template_keywords)
        try:
            ids = await encode(
                assets,
                text,
                special_tokens=False,
                at_most=entry.served.context_length,
                threads=self.threads,
                owner=owner,
            )
        except TooManyTokens as exc:
            return exc.count
        return len(ids)

    async def complete(self, body: CompletionBody, *, owner: str, memory: Holding) -> PreparedCompletion:
        """Prepare continuations of prompts, as ``chat``. Raises HttpProblem, EdgepipeError."""
        entry = await self.loads.entry(body.model, owner=owner)
        assets = await entry.assets()
        plan = await plan_output(form=answer_form(body), compiler=self.compiler, owner=owner)
        context_length = entry.served.context_length
        special = body.add_special_tokens is not False
        prompts = [
            await self._encode_prompt(
                assets, prompt, special_tokens=special, context_length=context_length, param="prompt", owner=owner
            )
            if isinstance(prompt, str)
            else prompt
            for prompt in body.prompt
        ]
        sampling = self._sampling(
            body,
            assets,
            owner=owner,
            plan=plan,
            logprobs=body.logprobs is not None,
            top=body.logprobs or 0,
            prompt_logprobs=bool(body.echo) and body.logprobs is not None,
        )
        wanted = _DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else max(1, body.max_tokens)
        completion = self._completion(body, entry, assets, prompts, sampling, wanted=wanted, param="prompt", plan=plan)
        completion = replace(completion, continues=True, only_scores=body.max_tokens == 0)
        texts = [await self._echoed(assets, prompt) for prompt in body.prompt] if body.echo else []
        memory.release()
        return self._prepared(completion, entry, assets, owner, texts=tuple(texts))

    async def run(self, prepared: PreparedCompletion) -> AsyncGenerator[Delta]:
        """Yield deltas as they become visible. The caller holds the ticket. Raises the engine's error."""
        meter = prepared.meter
        try:
            with self.keep_alives.use(prepared.entry.served, prepared.keep_s):
                await prepared.ticket.admitted.wait()
                prepared.ticket.raise_refusal()
                meter.started()
                deltas = run_completion(
                    prepared.completion,
                    prepared.entry,
                    prepared.assets,
                    prepared.counts,
                    meter,
                    self.turns,
                    prepared.ticket,
                )
                async with aclosing(deltas):
                    async for delta in deltas:
                        prepared.ticket.began(prepared.completion.prompt_of(delta.choice))
                        prepared.ticket.grow(prepared.completion.token_bytes * len(delta.ids))
                        yield delta
        except EdgepipeError as exc:
            meter.failed(exc.code)
            raise
        meter.ended()

    def _prepared(
        self, completion: Completion, entry: ModelEntry, assets: Assets, owner: str, *, texts: tuple[str, ...] = ()
    ) -> PreparedCompletion:
        """Do the last step of preparing, without awaiting: the caller takes the ticket right after."""
        entry.link.check_room(len(completion.requests))
        line = Line(owner=owner, model=completion.model, priority=completion.requests[0].priority)
        ticket = self.admission.enter(
            line,
            parts=[Part(num_choices=r.num_choices, num_tokens=len(r.prompt)) for r in completion.requests],
            num_bytes=completion.held_bytes,
            num_steps=entry.served.num_steps,
            num_engines=entry.served.num_engines,
        )
        meter = self.metrics.begin(
            completion.model,
            request_id=completion.requests[0].request_id,
            num_prompt_tokens=completion.num_prompt_tokens,
            cancel=ticket.refuse,
        )
        ticket.on_leave = meter.left
        return PreparedCompletion(
            completion=completion,
            entry=entry,
            assets=assets,
            ticket=ticket,
            meter=meter,
            texts=texts,
            first_rings=entry.num_rings(),
        )

    async def _encode_prompt(
        self, assets: Assets, text: str, *, special_tokens: bool, context_length: int, param: str, owner: str
    ) -> list[int]:
        try:
            return await encode(
                assets,
                text,
                special_tokens=special_tokens,
                at_most=context_length,
                threads=self.threads,
                owner=owner,
            )
        except TooManyTokens as exc:
            raise from_error(prompt_too_long(exc.count, context_length), param=param) from exc

    async def _echoed(self, assets: Assets, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else await decoded(assets, prompt, turns=self.turns, finish=False)

    def _label(self, owner: str) -> str:
        """Return a label of a user that tells other nodes nothing about the user's key."""
        return hashlib.blake2b(owner.encode(), key=self.salt, digest_size=8).hexdigest()

    def _sampling(
        self,
        body: RequestBody,
        assets: Assets,
        *,
        owner: str,
        plan: BoundOutput,
        logprobs: bool,
        top: int,
        prompt_logprobs: bool = False,
    ) -> SamplingParams:
        """Take sampling parameters from the request, else from the model, else edgepipe's defaults."""
        own = sampling_defaults(
            assets.sampling,
            temperature=body.temperature,
            top_k=body.top_k,
            top_p=body.top_p,
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
        )
        return SamplingParams(
            temperature=own["temperature"],
            seed=(body.seed if body.seed is not None else self.new_seed()) % (1 << 64),
            top_k=max(0, int(own["top_k"])),
            top_p=own["top_p"],
            min_p=own["min_p"],
            frequency_penalty=_or(body.frequency_penalty, 0.0),
            presence_penalty=_or(body.presence_penalty, 0.0),
            repetition_penalty=own["repetition_penalty"],
            logit_bias=tuple(sorted((body.logit_bias or {}).items())),
            logprobs=logprobs,
            top_logprobs=top,
            prompt_logprobs=prompt_logprobs,
            min_tokens=body.min_tokens or 0,
            grammar=None if plan.grammar is None else replace(plan.grammar, user=self._label(owner)),
        )

    def _completion(
        self,
        body: RequestBody,
        entry: ModelEntry,
        assets: Assets,
        prompts: list[list[int]],
        sampling: SamplingParams,
        *,
        wanted: int | None,
        param: str,
        plan: BoundOutput,
    ) -> Completion:
        context_length = entry.served.context_length
        most = _scored_limit(prompts, sampling, num_choices=body.n or 1)
        limits = [
            min(
                most,
                check_length(len(prompt), context_length, wanted=wanted, param=param),
                max(1, (MAX_REQUEST_IDS - len(prompt)) // (body.n or 1)),
            )
            for prompt in prompts
        ]
        if sampling.min_tokens > min(limits):
            raise bad_request(
                f"min_tokens is more than the {min(limits)} tokens that this request may generate",
                param="min_tokens",
            )
        requests = tuple(
            Submission(
                request_id=RequestId(self.ids.new("request")),
                prompt=tuple(prompt),
                num_choices=body.n or 1,
                max_tokens=max_tokens,
                sampling=sampling,
                ignore_eos=bool(body.ignore_eos),
                stop_token_ids=frozenset(body.stop_token_ids or ()),
                priority=int(body.is_batch),
            )
            for prompt, max_tokens in zip(prompts, limits, strict=True)
        )
        model = ModelBounds(vocab_size=assets.vocab_size, context_length=context_length)
        for request in requests:
            _check(request, model, prompt_param=param)
        return Completion(model=entry.served.name, requests=requests, stops=tuple(body.stop or ()), answer=plan.answer)


class TooManyTokens(Exception):
    """A text has more tokens than its caller can use. The caller turns this into the problem of its field."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.count = count


async def encode(
    assets: Assets, text: str, *, special_tokens: bool, at_most: int, threads: UserTurns, owner: str
) -> list[int]:
    """Tokenise a text without blocking the event loop, in the owner's turn.

    Raises TooManyTokens for a long text with more than ``at_most`` tokens, and QueueFull. The caller checks the length
    of short texts.
    """
    if len(text) <= _INLINE_CHARS:
        return assets.encode(text, special_tokens=special_tokens)
    if len(text) <= _LONG_CHARS:
        async with threads.turn(owner):
            return await asyncio.to_thread(assets.encode, text, special_tokens=special_tokens)
    count, ids = await assets.encode_long(text, special_tokens=special_tokens, at_most=at_most, owner=owner)
    if count > at_most:
        raise TooManyTokens(count)
    return ids


async def decoded(assets: Assets, ids: Sequence[int], *, turns: Turns, finish: bool = True) -> str:
    """Return the text of ids, special tokens included. ``finish`` False: drop an incomplete last character."""
    detokenizer, texts = assets.new_decoder(), list[str]()
    for start in range(0, len(ids), _DECODED_IDS):
        if start:
            await turns.take()
        texts += map(detokenizer.add, ids[start : start + _DECODED_IDS])
    return "".join([*texts, detokenizer.finish() if finish else ""])


def _scored_limit(prompts: list[list[int]], sampling: SamplingParams, *, num_choices: int) -> int:
    """Return the most output tokens per choice with log-probabilities. Raises HttpProblem for too long prompts.

    An answer writes the scores of an echoed prompt once for each of its choices.
    """
    scored = num_choices * sum(map(len, prompts)) if sampling.prompt_logprobs else 0
    each = 1 + sampling.top_logprobs
    most = MAX_SCORES // each
    if scored >= most:
        times = f" for each of {num_choices} choices (n)" if num_choices > 1 else ""
        message = (
            f"logprobs: the answer would repeat the prompts' {scored // num_choices} tokens{times}, "
            f"{scored * each} numbers with {sampling.top_logprobs} alternatives per token; at most {MAX_SCORES} are "
            f"allowed, that is {most} tokens"
        )
        raise bad_request(message, param="logprobs")
    return max(1, (most - scored) // (num_choices * len(prompts))) if sampling.logprobs else MAX_COUNT


def _check(request: Submission, model: ModelBounds, *, prompt_param: str) -> None:
    """Raise HttpProblem 400 with the field and its bound, if the engine would refuse the request."""
    if (refused := submission_refusal(request, model)) is not None:
        param = {"prompt": prompt_param, "num_choices": "n"}.get(refused.field, refused.field)
        raise bad_request(f"{param}: {refused.fact}", param=param)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
