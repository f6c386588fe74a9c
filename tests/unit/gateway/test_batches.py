"""Files and batches over HTTP: from upload to download, and what breaks in between."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from edgepipe.errors import PromptTooLong, StepFailed
from edgepipe.gateway.access import AccessRules
from edgepipe.gateway.admission import AdmissionLimits
from edgepipe.gateway.batches import store as store_module
from edgepipe.gateway.batches.store import FilesSettings
from edgepipe.testing.clock import FakeClock
from tests.support.gateways.batch_files import (
    BatchUser,
    EchoEngine,
    answer_to,
    completion_line,
    expected,
    jsonl,
    texts_of,
    until_true,
)
from tests.support.gateways.fake_engine import view_of
from tests.support.gateways.server import Served, serving
from tests.support.processes.waiting import until

KEYS = ("ep-first-long-key", "ep-second-long-key")
CHAT = "/v1/chat/completions"


def kept(folder: Path, **changes: Any) -> FilesSettings:
    return replace(FilesSettings(folder=folder / "batches", least_free_bytes=0), **changes)


@asynccontextmanager
async def batching(
    tmp_path: Path, engine: EchoEngine | None = None, **more: Any
) -> AsyncIterator[tuple[Served, BatchUser]]:
    """A gateway that keeps files, and its user."""
    files = more.pop("files", None) or kept(tmp_path)
    async with serving(engine or EchoEngine(), files=files, **more) as served:
        yield served, BatchUser(served.http)


async def test_a_copy_is_wished_for_beside_openai_s_fields(tmp_path: Path) -> None:
    async with batching(tmp_path) as (_, user):
        file = await user.upload(jsonl([completion_line(1)]))
        for wrong in ({"copies": 0}, {"copies": 3}, {"copies": "two"}, 2):
            answer = await user.create(file["id"], edgepipe=wrong)
            assert answer.status_code == 400, wrong
            assert "edgepipe" in answer.json()["error"]["param"]
        plain = (await user.create(file["id"])).json()
        assert plain["edgepipe"] == {"note": "", "copies": 1, "copy": ""}
        batch = (await user.create(file["id"], edgepipe={"copies": 2})).json()
        assert batch["edgepipe"]["copies"] == 2
        ended = await user.ended(batch["id"])
        assert ended["status"] == "completed"
        assert ended["edgepipe"]["note"] == "no other machine holds a copy: no other machine is in the cluster"
        refused = await user.http.post(f"/v1/batches/{batch['id']}/take_over")
        assert refused.status_code == 400
        assert "owns" in refused.json()["error"]["edgepipe"]["what"]
        unknown = await user.http.post("/v1/batches/batch_none/take_over")
        assert "no machine that answers holds a copy" in unknown.json()["error"]["edgepipe"]["what"]


async def test_openai_s_client_from_upload_to_download(tmp_path: Path) -> None:
    questions = {f"q{number}": f"question {number}" for number in range(30)}
    lines: list[dict[str, Any] | str] = [
        {
            "custom_id": name,
            "method": "POST",
            "url": CHAT,
            "body": {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 60},
        }
        for name, text in questions.items()
    ]
    lines[7:7] = ["", "{broken", json.dumps({"custom_id": "hot", "method": "POST", "url": CHAT, "body": {"n": 99}})]
    async with (
        batching(tmp_path) as (served, _),
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="x", max_retries=0) as client,
    ):
        file = await client.files.create(file=("night.jsonl", io.BytesIO(jsonl(lines))), purpose="batch")
        assert (file.bytes, file.filename, file.status) == (len(jsonl(lines)), "night.jsonl", "processed")
        assert (await client.files.content(file.id)).text == jsonl(lines).decode()
        batch = await client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"night": "first"}
        )
        while batch.status not in ("completed", "failed"):
            await asyncio.sleep(0.02)
            batch = await client.batches.retrieve(batch.id)
        assert batch.status == "completed"
        assert batch.metadata == {"night": "first"}
        assert batch.request_counts is not None
        assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (32, 30, 2)
        assert batch.usage is not None
        assert batch.output_file_id is not None
        assert batch.error_file_id is not None
        entries = [json.loads(line) for line in (await client.files.content(batch.output_file_id)).text.splitlines()]
        answers = {each["custom_id"]: each["response"]["body"]["choices"][0]["message"]["content"] for each in entries}
        assert answers == {name: answer_to(f"user: {text}\nassistant:") for name, text in questions.items()}
        assert batch.usage.output_tokens == sum(len(text) for text in answers.values())
        errors = [json.loads(line) for line in (await client.files.content(batch.error_file_id)).text.splitlines()]
        assert sorted((each["line"], each["custom_id"], each["error"]["code"]) for each in errors) == [
            (9, None, "invalid_json"),
            (10, "hot", "invalid_value"),
        ]
        listed = [each.id async for each in client.files.list(purpose="batch_output")]
        assert sorted(listed) == sorted([batch.output_file_id, batch.error_file_id])
        assert [each.id async for each in client.batches.list()] == [batch.id]
        assert (await client.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(file.id)


async def test_lines_run_behind_interactive_requests_in_a_bounded_window(tmp_path: Path) -> None:
    engine = EchoEngine(stop_after=10)
    lines = [
        completion_line(number, prompt=f"{number} " + "x" * 400, max_tokens=500) for number in range(400)
    ]  # for the child
    async with batching(tmp_path, engine, admission=AdmissionLimits(max_beginning_tokens=1 << 20)) as (_, user):
        batch_id = await user.begin(jsonl(lines))
        await until(lambda: engine.num_running >= 192)
        await user.until(batch_id, "in_progress", num_done=10)
        assert {submit.priority for submit in engine.submits} == {1}
        assert engine.most_running == 192
        engine.release.set()
        ended = await user.ended(batch_id)
        assert texts_of(await user.entries(ended["output_file_id"])) == expected(lines)
        assert len(engine.prompts) == 400
        assert ended["request_counts"]["failed"] == 0


async def test_tokens_of_lines_come_in_groups_and_none_counts_behind_a_stop_string(tmp_path: Path) -> None:
    engine = EchoEngine()
    lines = [completion_line(1, prompt="plain"), completion_line(2, prompt="fed|cba", stop="|")]
    async with batching(tmp_path, engine) as (served, user):
        ended = await user.ended(await user.begin(jsonl(lines)))
        assert texts_of(await user.entries(ended["output_file_id"])) == {"id-1": "<nialp>", "id-2": "<abc"}
        assert ended["usage"]["output_tokens"] == len("<nialp>") + len("<abc|")
        grouped = {bytes(submit.prompt).decode(): submit.group_tokens for submit in engine.submits}
        assert grouped["plain"] > grouped["fed|cba"] > 1
        for stream in (True, False):
            body = {"prompt": "shown", "service_tier": "flex", "stream": stream}
            assert (await served.http.post("/v1/completions", json=body)).status_code == 200
            assert engine.submits[-1].group_tokens == 0


async def test_each_key_sees_its_own_files_and_batches(tmp_path: Path) -> None:
    rules = AccessRules.of(keys=KEYS, key_on_loopback=True)
    async with batching(tmp_path, rules=rules) as (served, _):
        users = [
            BatchUser(
                httpx.AsyncClient(
                    base_url=served.http.base_url,
                    headers={"Authorization": f"Bearer {key}"},
                    trust_env=False,
                    verify=False,
                )
            )
            for key in KEYS
        ]
        batch_id = await users[0].begin(jsonl([completion_line(1)]))
        ended = await users[0].ended(batch_id)
        for path in (
            f"/v1/files/{ended['input_file_id']}",
            f"/v1/files/{ended['output_file_id']}/content",
            f"/v1/batches/{batch_id}",
        ):
            assert (await users[0].http.get(path)).status_code == 200
            hidden = await users[1].http.get(path)
            assert (hidden.status_code, "stored here for this key" in hidden.text) == (404, True)
        assert (await users[1].http.post(f"/v1/batches/{batch_id}/cancel")).status_code == 404
        assert (await users[1].http.delete(f"/v1/files/{ended['output_file_id']}")).status_code == 404
        assert (await users[1].create(ended["input_file_id"])).status_code == 400
        for path in ("/v1/files", "/v1/batches"):
            assert (await users[1].http.get(path)).json()["data"] == []
            assert (await users[0].http.get(path)).json()["data"]
        assert (await served.http.get("/v1/files")).status_code == 401
        for user in users:
            await user.http.aclose()


@pytest.mark.parametrize(
    ("lines", "code", "word"),
    [
        ([completion_line(1), completion_line(2), completion_line(1)], "duplicate_custom_id", "line 1"),
        (["", " "], "empty_file", "no line"),
        (["{", "[]"], "invalid_line", "JSON"),
        ([completion_line(1, model="other")], "model_not_found", "other"),
    ],
)
async def test_inputs_that_fail_as_a_whole(
    tmp_path: Path, lines: list[dict[str, Any] | str], code: str, word: str
) -> None:
    engine = EchoEngine()
    async with batching(tmp_path, engine) as (_, user):
        ended = await user.ended(await user.begin(jsonl(lines)))
        assert ended["status"] == "failed"
        assert ended["errors"]["data"][0]["code"] == code
        assert word in ended["errors"]["data"][0]["message"]
        assert engine.prompts == []


async def test_requests_that_are_refused(tmp_path: Path) -> None:
    async with batching(tmp_path) as (served, user):
        file = await user.upload(jsonl([completion_line(1)]))
        for wanted, param in (
            ({"endpoint": "/v1/embeddings"}, "endpoint"),
            ({"endpoint": "/v1/responses"}, "endpoint"),
            ({"completion_window": "soon"}, "completion_window"),
            ({"completion_window": "400d"}, "completion_window"),
        ):
            answer = await user.create(file["id"], **wanted)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert "no embeddings" in (await user.create(file["id"], endpoint="/v1/embeddings")).text
        assert (await user.create("file-unknown")).json()["error"]["param"] == "input_file_id"
        form = {"file": ("in.jsonl", b"{}")}
        for data, files, status in (
            ({"purpose": "fine-tune"}, form, 400),
            ({}, form, 400),
            ({"purpose": "batch"}, {"other": ("x", b"{}")}, 400),
            ({"purpose": "batch"}, {"file": ("x", b"")}, 400),
            ({"purpose": "x" * 2000}, form, 400),
            ({"purpose": "batch", "expires_after[seconds]": "5"}, form, 400),
        ):
            assert (await served.http.post("/v1/files", data=data, files=files)).status_code == status
        plain = await served.http.post("/v1/files", json={"purpose": "batch"})
        assert (plain.status_code, plain.json()["error"]["code"]) == (400, "invalid_form")
        assert len((await served.http.get("/v1/files")).json()["data"]) == 1
        for path in ("/v1/files?limit=0", "/v1/files?order=up", "/v1/files?after=x", "/v1/batches?limit=101"):
            assert (await served.http.get(path)).status_code == 400
        assert sorted(path.name for path in (tmp_path / "batches" / "files").iterdir()) == [file["id"]]


async def test_pages_of_batches(tmp_path: Path) -> None:
    async with batching(tmp_path) as (served, user):
        made = [await user.begin(jsonl([completion_line(number)])) for number in range(5)]
        first = (await served.http.get("/v1/batches", params={"limit": "3"})).json()
        assert [batch["id"] for batch in first["data"]] == made[:1:-1]
        assert first["has_more"]
        rest = (await served.http.get("/v1/batches", params={"limit": "3", "after": first["last_id"]})).json()
        assert [batch["id"] for batch in rest["data"]] == made[1::-1]
        assert not rest["has_more"]
        for batch_id in made:
            assert (await user.ended(batch_id))["status"] == "completed"


async def test_a_cancelled_batch_keeps_what_was_finished(tmp_path: Path) -> None:
    engine = EchoEngine(stop_after=5)
    lines = [completion_line(number) for number in range(40)]
    async with batching(tmp_path, engine) as (served, user):
        batch_id = await user.begin(jsonl(lines))
        batch = await user.until(batch_id, "in_progress", num_done=5)
        used = await served.http.delete(f"/v1/files/{batch['input_file_id']}")
        assert (used.status_code, used.json()["error"]["code"]) == (409, "file_in_use")
        assert (await served.http.post(f"/v1/batches/{batch_id}/cancel")).json()["status"] == "cancelling"
        ended = await user.ended(batch_id)
        assert (ended["status"], ended["request_counts"]["completed"]) == ("cancelled", 5)
        answers = texts_of(await user.entries(ended["output_file_id"]))
        assert answers.items() <= expected(lines).items()
        assert len(answers) == 5
        await until(lambda: len(engine.cancels) >= len(engine.prompts) - 5)
        again = await served.http.post(f"/v1/batches/{batch_id}/cancel")
        assert (again.status_code, again.json()["error"]["code"]) == (409, "batch_not_cancellable")
        assert (await served.http.delete(f"/v1/files/{batch['input_file_id']}")).status_code == 200


async def test_lines_that_did_not_run_in_time_are_in_the_error_file(tmp_path: Path) -> None:
    engine, clock = EchoEngine(stop_after=6), FakeClock()
    lines = [completion_line(number) for number in range(300)]
    async with batching(tmp_path, engine, clock=clock) as (_, user):
        batch_id = await user.begin(jsonl(lines), completion_window="2h")
        await user.until(batch_id, "in_progress", num_done=6)
        clock.advance(2 * 3600)
        ended = await user.ended(batch_id)
        assert (ended["status"], ended["request_counts"]) == ("expired", {"total": 300, "completed": 6, "failed": 294})
        answers = texts_of(await user.entries(ended["output_file_id"]))
        late = await user.entries(ended["error_file_id"])
        assert {each["error"]["code"] for each in late} == {"batch_expired"}
        assert sorted([*answers, *(each["custom_id"] for each in late)]) == sorted(line["custom_id"] for line in lines)


async def test_files_expire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgepipe.gateway.batches import service

    monkeypatch.setattr(service, "_SWEEP_S", 0.02)
    clock = FakeClock()
    async with batching(tmp_path, clock=clock) as (served, user):
        ended = await user.ended(await user.begin(jsonl([completion_line(1)])))
        short = await user.upload(b"{}", **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "7200"})
        assert short["expires_at"] == short["created_at"] + 7200
        clock.advance(7201)

        async def is_gone() -> bool:
            return (await served.http.get(f"/v1/files/{short['id']}")).status_code == 404

        async def all_are_gone() -> bool:
            return not (await served.http.get("/v1/files")).json()["data"]

        await until_true(is_gone)
        assert (await served.http.get(f"/v1/files/{ended['output_file_id']}")).status_code == 200
        clock.advance(30 * 24 * 3600)
        await until_true(all_are_gone)
        assert list((tmp_path / "batches" / "files").iterdir()) == []


async def test_a_stopped_gateway_s_batch_goes_on_in_the_next_one(tmp_path: Path) -> None:
    """Three gateways one after the other; each ends in the middle of the batch."""
    lines = [completion_line(number) for number in range(120)]
    engines: list[EchoEngine] = []
    batch_id, done = "", 0
    for stop_after in (25, 40, None):
        engines.append(EchoEngine(stop_after=stop_after))
        async with batching(tmp_path, engines[-1]) as (_, user):
            batch_id = batch_id or await user.begin(jsonl(lines))
            if stop_after is not None:
                done += stop_after
                await user.until(batch_id, "in_progress", num_done=done)
                continue
            ended = await user.ended(batch_id)
            assert texts_of(await user.entries(ended["output_file_id"])) == expected(lines)
            assert ended["request_counts"] == {"total": 120, "completed": 120, "failed": 0}
    finished = [prompt for engine in engines for prompt in engine.answered]
    assert len(finished) == len(set(finished)) == 120


async def test_a_batch_waits_for_its_model(tmp_path: Path) -> None:
    engine = EchoEngine(stop_after=8)
    lines = [completion_line(number) for number in range(30)]
    async with batching(tmp_path, engine) as (served, user):
        batch_id = await user.begin(jsonl(lines))
        await user.until(batch_id, "in_progress", num_done=8)
        served.gateway.update(view_of(served.address, state="stopping"))
        await user.until_noted(batch_id, "stopped")
        engine.release.set()
        served.gateway.update(view_of(served.address))
        ended = await user.ended(batch_id)
        assert texts_of(await user.entries(ended["output_file_id"])) == expected(lines)
        assert ended["request_counts"]["failed"] == 0


async def test_a_full_disk_pauses_a_batch_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgepipe.gateway.batches import run

    monkeypatch.setattr(run, "_STORE_PAUSE_S", 0.05)
    real = store_module._check_free
    engine = EchoEngine(stop_after=3)
    lines = [completion_line(number) for number in range(300)]
    async with batching(tmp_path, engine) as (served, user):
        batch_id = await user.begin(jsonl(lines))
        await user.until(batch_id, "in_progress", num_done=3)

        def full(folder: Path, least_free_bytes: int) -> None:
            real(folder, 1 << 60)

        monkeypatch.setattr(store_module, "_check_free", full)
        engine.release.set()
        await user.until_noted(batch_id, "the disk is full")
        refused = await served.http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("x", b"{}")})
        assert (refused.status_code, refused.json()["error"]["code"]) == (507, "disk_full")
        assert len(engine.prompts) < 300
        monkeypatch.setattr(store_module, "_check_free", real)
        ended = await user.ended(batch_id)
        assert texts_of(await user.entries(ended["output_file_id"])) == expected(lines)
        assert len(engine.prompts) == 300


async def test_the_disk_s_quota_bounds_uploads_and_pauses_batches(tmp_path: Path) -> None:
    files = kept(tmp_path, most_bytes=120_000)
    async with batching(tmp_path, files=files) as (served, user):
        form = {"file": ("x", b"x" * 90_001)}
        large = await served.http.post("/v1/files", data={"purpose": "batch"}, files=form)
        assert (large.status_code, large.json()["error"]["code"]) == (413, "disk_quota")
        lines = [completion_line(number) for number in range(400)]
        batch_id = await user.begin(jsonl(lines))
        batch = await user.until_noted(batch_id, "are in use")
        assert 0 < batch["request_counts"]["completed"] < 400
        await served.http.post(f"/v1/batches/{batch_id}/cancel")
        ended = await user.ended(batch_id)
        assert texts_of(await user.entries(ended["output_file_id"])).items() <= expected(lines).items()
        for file_id in (ended["input_file_id"], ended["output_file_id"]):
            assert (await served.http.delete(f"/v1/files/{file_id}")).status_code == 200
        assert await served.http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("x", b"x" * 90_000)})


async def test_errors_of_single_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that fails twice is repeated, one that always fails ends its line; the other lines are answered."""
    from edgepipe.gateway.batches import window

    monkeypatch.setattr(window, "_FIRST_PAUSE_S", 0.01)
    engine = EchoEngine(
        errors={
            "twice": (StepFailed("it broke"), 2),
            "always": (StepFailed("it broke"), 99),
            "long": (PromptTooLong("too long"), 99),
        }
    )
    lines = [completion_line(number) for number in range(10)]
    lines += [completion_line(20 + place, prompt=word) for place, word in enumerate(("twice", "always", "long"))]
    lines.append(completion_line(30, model="another"))
    lines.append(completion_line(31, temperature=9))
    async with batching(tmp_path, engine) as (_, user):
        ended = await user.ended(await user.begin(jsonl(lines)))
        assert ended["request_counts"] == {"total": 15, "completed": 11, "failed": 4}
        assert texts_of(await user.entries(ended["output_file_id"])) == expected(lines[:11])
        errors = {each["custom_id"]: each for each in await user.entries(ended["error_file_id"])}
        assert engine.prompts.count("always") == 3
        assert errors["id-21"]["response"]["body"]["error"]["code"] == "step_failed"
        assert errors["id-22"]["response"]["status_code"] == 400
        assert errors["id-22"]["line"] == 13
        assert errors["id-30"]["error"]["code"] == "other_model"
        assert "temperature" in errors["id-31"]["error"]["message"]


async def test_a_second_batch_of_a_user_begins_after_the_first(tmp_path: Path) -> None:
    engine = EchoEngine(stop_after=0)
    async with batching(tmp_path, engine) as (_, user):
        first = await user.begin(jsonl([completion_line(1)]))
        second = await user.begin(jsonl([completion_line(2)]))
        await user.until(first, "in_progress")
        assert (await user.show(second))["edgepipe"]["note"] == f"it begins after {first}"
        engine.release.set()
        for batch_id in (first, second):
            assert (await user.ended(batch_id))["status"] == "completed"
        assert engine.answered == ["prompt 1", "prompt 2"]


async def test_a_gateway_without_a_folder_keeps_no_files() -> None:
    async with serving(EchoEngine()) as served:
        for path in ("/v1/files", "/v1/batches"):
            answer = await served.http.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (501, "feature_missing")
