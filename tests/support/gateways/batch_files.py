"""Batches in front of an engine that answers each prompt with a text of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from edgepipe.errors import EdgepipeError
from edgepipe.wire.v1 import engine_pb2
from tests.support.gateways.fake_engine import FakeEngine, ended_event, tokens_event

COMPLETIONS = "/v1/completions"


def answer_to(prompt: str) -> str:
    """The answer of ``EchoEngine``."""
    return f"<{prompt[::-1]}>"


@dataclass(slots=True)
class EchoEngine(FakeEngine):
    """Answers with the prompt backwards. Prompts with a word of ``errors`` fail so often."""

    errors: dict[str, tuple[EdgepipeError, int]] = field(default_factory=dict[str, tuple[EdgepipeError, int]])
    stop_after: int | None = None  # prompts that are answered; later ones wait for ``release``
    prompts: list[str] = field(default_factory=list[str])  # prompts in order of arrival
    answered: list[str] = field(default_factory=list[str])

    async def _answer(
        self, submit: engine_pb2.Submit, have: Sequence[int], outbox: asyncio.Queue[engine_pb2.EngineEvent | None]
    ) -> None:
        prompt = bytes(submit.prompt).decode()
        self.prompts.append(prompt)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        await asyncio.sleep(0)
        for word, (error, count) in self.errors.items():
            if word in prompt and count:
                self.errors[word] = (error, count - 1)
                outbox.put_nowait(ended_event(submit, 0, 0, "error", error))
                self.num_running -= 1
                return
        if self.stop_after is not None and len(self.answered) >= self.stop_after:
            await self.release.wait()
        ids = list(answer_to(prompt).encode())[: submit.max_tokens]
        outbox.put_nowait(tokens_event(submit, 0, have[0], ids[have[0] :]))
        outbox.put_nowait(ended_event(submit, 0, len(ids), "length", None))
        self.answered.append(prompt)
        self.num_running -= 1


def completion_line(number: int, *, prompt: str = "", **fields: Any) -> dict[str, Any]:
    """A line for ``/v1/completions`` with an id of its own."""
    body = {"model": "tiny", "prompt": prompt or f"prompt {number}", "max_tokens": 200} | fields
    return {"custom_id": f"id-{number}", "method": "POST", "url": COMPLETIONS, "body": body}


def jsonl(lines: Iterable[dict[str, Any] | str]) -> bytes:
    """The bytes of a file of lines; a text stays as it is."""
    return "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines).encode()


@dataclass(frozen=True, slots=True)
class BatchUser:
    """A client of files and batches by plain HTTP."""

    http: httpx.AsyncClient

    async def upload(self, data: bytes, **fields: str) -> dict[str, Any]:
        """Upload a file."""
        answer = await self.http.post(
            "/v1/files", data={"purpose": "batch"} | fields, files={"file": ("in.jsonl", data)}
        )
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def begin(self, data: bytes, *, endpoint: str = COMPLETIONS, **fields: Any) -> str:
        """Upload a file and run it as a batch; the batch's id."""
        file = await self.upload(data)
        answer = await self.create(file["id"], endpoint=endpoint, **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()["id"]

    async def create(self, file_id: str, *, endpoint: str = COMPLETIONS, **fields: Any) -> httpx.Response:
        """Ask for a batch."""
        body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h"} | fields
        return await self.http.post("/v1/batches", json=body)

    async def show(self, batch_id: str) -> dict[str, Any]:
        """The batch."""
        answer = await self.http.get(f"/v1/batches/{batch_id}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def until(self, batch_id: str, *statuses: str, num_done: int = 0) -> dict[str, Any]:
        """The batch once it has one of the statuses, and so many lines have a result."""
        async with asyncio.timeout(60):
            while True:
                batch = await self.show(batch_id)
                counts = batch["request_counts"]
                if batch["status"] in statuses and counts["completed"] + counts["failed"] >= num_done:
                    return batch
                await asyncio.sleep(0.02)

    async def until_noted(self, batch_id: str, word: str) -> dict[str, Any]:
        """The batch once its note has the word."""
        async with asyncio.timeout(60):
            while True:
                if word in (batch := await self.show(batch_id))["edgepipe"]["note"]:
                    return batch
                await asyncio.sleep(0.02)

    async def ended(self, batch_id: str) -> dict[str, Any]:
        """The batch once it has ended."""
        return await self.until(batch_id, "completed", "failed", "expired", "cancelled")

    async def entries(self, file_id: str | None) -> list[dict[str, Any]]:
        """The lines of a file; none without a file."""
        if file_id is None:
            return []
        answer = await self.http.get(f"/v1/files/{file_id}/content")
        assert answer.status_code == 200, answer.text
        return [json.loads(line) for line in answer.text.splitlines()]


async def until_true(wanted: Callable[[], Awaitable[bool]]) -> None:
    """Return once ``wanted`` returns True."""
    async with asyncio.timeout(30):
        while True:
            if await wanted():
                return
            await asyncio.sleep(0.02)


def texts_of(entries: Iterable[dict[str, Any]]) -> dict[str, str]:
    """The answers by id. Fails if an id has two."""
    found: dict[str, str] = {}
    for entry in entries:
        assert entry["custom_id"] not in found, "a line was answered twice"
        assert entry["response"]["status_code"] == 200
        found[entry["custom_id"]] = entry["response"]["body"]["choices"][0]["text"]
    return found


def expected(lines: Iterable[dict[str, Any]]) -> dict[str, str]:
    """What ``EchoEngine`` answers, by id."""
    return {line["custom_id"]: answer_to(line["body"]["prompt"]) for line in lines}
