"""Requests made from our own document, good and bad: none may be answered with a mistake of ours."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from edgepipe.gateway.batches.store import FilesSettings
from tests.support.gateways.fake_engine import FakeEngine
from tests.support.gateways.server import serving

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


@pytest.mark.parametrize(
    ("phases", "examples"),
    [
        ("examples,fuzzing", 3),
        pytest.param("examples,coverage,fuzzing", 150, marks=[pytest.mark.long, pytest.mark.timeout(900)]),
    ],
    ids=["few", "many"],
)
async def test_requests_made_from_the_document(phases: str, examples: int, tmp_path: Path) -> None:
    files = FilesSettings(folder=tmp_path / "batches", least_free_bytes=0)
    async with serving(FakeEngine(group=64), files=files) as served:
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"http://127.0.0.1:{served.port}/openapi.json"]
        command += ["--checks", CHECKS, "--max-examples", str(examples), "--seed", "4", "--no-color"]
        command += ["--phases", phases, "--request-timeout", "20", "--generation-deterministic"]
        command += ["--suppress-health-check", "all"]
        process = await asyncio.create_subprocess_exec(
            *command, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        output, _ = await process.communicate()
        text = output.decode(errors="replace")
        assert process.returncode == 0, text[-6000:]
        assert "Passed" in text or "passed" in text, text[-2000:]
        assert (await served.chat()).status_code == 200
