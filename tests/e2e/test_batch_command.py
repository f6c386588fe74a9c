"""``edgepipe batch`` against a real node."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import httpx
import pytest

from edgepipe.cli.main import main
from tests.support.gateways.batch_files import jsonl
from tests.support.processes.nodes import Node, Nodes
from tests.support.processes.streams import answers, expected, slow_cluster

TOKENS = 12


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[Nodes]:
    made = Nodes(folder=tmp_path, cluster=f"test-{tmp_path.name}-{id(tmp_path)}")
    yield made
    await made.end()


def line(number: int, **fields: Any) -> dict[str, Any]:
    body = {"prompt": [number + 1, 7, 9], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True} | fields
    return {"custom_id": f"id-{number}", "method": "POST", "url": "/v1/completions", "body": body}


async def start(node: Node, *words: str) -> asyncio.subprocess.Process:
    command = [sys.executable, "-P", "-m", "edgepipe.cli", *words, "--data-dir", str(node.data_dir)]
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, start_new_session=True)


async def run(node: Node, *words: str) -> tuple[int, str, str]:
    """Exit code and output of a command, run in this process."""
    out, err = io.StringIO(), io.StringIO()

    def command() -> int:
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
            main([*words, "--data-dir", str(node.data_dir)])
        return int(ended.value.code or 0)

    async with asyncio.timeout(60):
        code = await asyncio.to_thread(command)
    return code, out.getvalue(), err.getvalue()


def answered(path: Path) -> dict[str, list[int]]:
    entries = map(json.loads, path.read_text().splitlines())
    return {each["custom_id"]: each["response"]["body"]["choices"][0]["token_ids"] for each in entries}


async def test_a_batch_by_command_line(nodes: Nodes, tmp_path: Path) -> None:
    (node,) = await slow_cluster(nodes, "a")
    await node.serve("tiny")
    await answers(node)
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"

    source.write_bytes(jsonl([line(number) for number in range(5)]))
    code, out, err = await run(node, "batch", "run", str(source), "-o", str(output))
    assert code == 0, err
    assert "5 of 5 lines answered, 0 failed" in out
    assert answered(output) == {f"id-{number}": expected([number + 1, 7, 9], TOKENS) for number in range(5)}
    assert not (tmp_path / "out.errors.jsonl").exists()

    source.write_bytes(jsonl([line(0), line(1, temperature=9)]))
    code, _, err = await run(node, "batch", "run", str(source), "-o", str(output))
    assert code == 2
    assert "1 of 2 lines failed" in err
    assert "temperature" in (tmp_path / "out.errors.jsonl").read_text()

    source.write_bytes(jsonl([line(number, max_tokens=250) for number in range(40)]))
    output.unlink()
    process = await start(node, "batch", "run", str(source), "-o", str(output), "--window", "1h", "--copies", "2")
    running = await _running(node)
    process.send_signal(signal.SIGINT)
    async with asyncio.timeout(20):
        _, errors = await process.communicate()
    assert process.returncode == 130
    assert f"edgepipe batch show {running} -o {output}" in errors.decode()
    assert f"edgepipe batch cancel {running}" in errors.decode()
    listed = (await run(node, "batch", "list"))[1]
    assert running in listed
    assert "COPY" in listed
    assert "no other machine holds a copy" in (await run(node, "batch", "show", running))[1]
    code, _, err = await run(node, "batch", "take-over", running)
    assert (code, f"this machine owns {running} already" in err) == (2, True)
    code, out, err = await run(node, "batch", "show", running, "-o", str(output))
    assert code == 0, err
    assert len(answered(output)) == 40
    assert out.startswith(f"{running} is completed")

    source.write_text("{}\n")
    code, _, err = await run(node, "batch", "run", str(source), "-o", str(output))
    assert (code, "no request of a batch" in err) == (2, True)
    code, _, err = await run(node, "batch", "cancel", running)
    assert (code, "only a batch that has not ended" in err) == (2, True)


async def _running(node: Node) -> str:
    """The id of the batch that runs, once one does."""
    async with (
        asyncio.timeout(30),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{node.http_port}", trust_env=False, verify=False) as http,
    ):
        while True:
            for each in (await http.get("/v1/batches")).json()["data"]:
                if each["status"] == "in_progress":
                    return each["id"]
            await asyncio.sleep(0.02)
