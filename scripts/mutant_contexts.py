"""A pytest plugin for ``scripts/mutants``: coverage notes which test runs a line; a file holds each test's seconds."""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path

import coverage  # pyright: ignore[reportMissingImports]
import pytest

_seconds: dict[str, float] = {}  # seconds of the tests that passed


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    measured = coverage.Coverage.current()
    assert measured is not None, "coverage runs pytest"
    measured.switch_context(item.nodeid)
    result = yield
    measured.switch_context("")
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
        _seconds[report.nodeid] = report.duration


def pytest_sessionfinish() -> None:
    Path(os.environ["MUTANTS_SECONDS"]).write_text(json.dumps(_seconds), encoding="utf-8")
