"""A series of GPU checks runs in order, stays within its time, resumes, and leaves a file of results at all times."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from scripts.check_series import Check, Series

FACTS = {"device": "H100", "commit": "abc"}


class Row(NamedTuple):
    name: str
    met: bool | None = None


class Bench:
    """A series of three checks on a clock that only checks move."""

    def __init__(self, path: Path, *, budget_s: float = 100.0) -> None:
        self.path = path
        self.time_s = 0.0
        self.budget_s = budget_s
        self.facts: dict[str, Any] = FACTS
        self.events: list[str] = []
        self.work: dict[str, Callable[[], Iterable[Row]]] = {}

    def run(self, *, start: str | None = None) -> bool:
        self.events.clear()
        names = ("decode", "batch", "gap")
        checks = [Check(name=name, limit_s=30, run=lambda _limit_s, name=name: self._rows(name)) for name in names]
        return Series(
            checks=checks,
            facts=self.facts,
            path=self.path,
            budget_s=self.budget_s,
            now_s=lambda: self.time_s,
            show=lambda row: self.events.append(str(row._asdict()["name"])),
            say=self.events.append,
        ).run(start=start)

    def results(self) -> dict[str, str]:
        return {result["name"]: result["state"] for result in self.file()["checks"]}

    def file(self) -> dict[str, Any]:
        return json.loads(self.path.read_text(encoding="utf-8"))

    def _rows(self, name: str) -> Iterable[Row]:
        self.time_s += 20
        yield from self.work.get(name, lambda: [Row(f"{name} figure", True)])()


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "build" / "results.json")


def test_checks_run_in_order_and_rows_come_at_once(bench: Bench) -> None:
    def two() -> Iterable[Row]:
        yield Row("first")
        assert bench.events[-1] == "first"
        assert bench.results() == {"decode": "running"}
        yield Row("second", True)

    bench.work["decode"] = two
    assert bench.run()
    assert bench.events == ["decode:", "first", "second", "batch:", "batch figure", "gap:", "gap figure"]
    assert bench.results() == dict.fromkeys(("decode", "batch", "gap"), "passed")


def test_the_file_has_facts_rows_and_seconds(bench: Bench) -> None:
    bench.run()
    found = bench.file()
    assert {key: found[key] for key in FACTS} == FACTS
    assert found["checks"][0] == {
        "name": "decode",
        "state": "passed",
        "seconds": 20.0,
        "rows": [{"name": "decode figure", "met": True}],
        "error": "",
    }


def test_a_missed_target_and_a_failure_end_no_series(bench: Bench) -> None:
    def fail() -> Iterable[Row]:
        yield Row("before", True)
        raise RuntimeError("CUDA error")

    bench.work = {"decode": lambda: [Row("slow", False)], "batch": fail}
    assert not bench.run()
    assert bench.results() == {"decode": "missed", "batch": "failed", "gap": "passed"}
    assert bench.file()["checks"][1]["rows"] == [{"name": "before", "met": True}]
    assert bench.file()["checks"][1]["error"] == "RuntimeError: CUDA error"


def test_a_check_without_enough_time_left_is_named_and_can_be_resumed(bench: Bench) -> None:
    bench.budget_s = 60
    assert not bench.run()
    assert bench.results() == {"decode": "passed", "batch": "passed"}
    assert "--from gap" in bench.events[-1]
    assert bench.run(start="gap")
    assert bench.events == ["gap:", "gap figure"]
    assert bench.results() == dict.fromkeys(("decode", "batch", "gap"), "passed")


def test_a_series_that_was_killed_resumes_at_the_check_that_ran(bench: Bench) -> None:
    def killed() -> Iterable[Row]:
        raise KeyboardInterrupt

    bench.work["batch"] = killed
    with pytest.raises(KeyboardInterrupt):
        bench.run()
    assert bench.results() == {"decode": "passed", "batch": "running"}
    bench.work.clear()
    assert bench.run(start="batch")


def test_resuming_repeats_that_check_and_later_ones(bench: Bench) -> None:
    bench.run()
    bench.work = {"batch": lambda: [Row("slow", False)]}
    assert not bench.run(start="batch")
    assert bench.results() == {"decode": "passed", "batch": "missed", "gap": "passed"}


@pytest.mark.parametrize("key", FACTS)
def test_results_of_another_device_or_commit_are_dropped(bench: Bench, key: str) -> None:
    bench.run()
    bench.facts = FACTS | {key: "other"}
    assert not bench.run(start="gap")
    assert bench.results() == {"gap": "passed"}


def test_a_file_that_is_no_json_counts_as_missing(bench: Bench) -> None:
    bench.path.parent.mkdir()
    bench.path.write_text("{", encoding="utf-8")
    assert not bench.run(start="batch")
    assert bench.results() == {"batch": "passed", "gap": "passed"}


def test_an_unknown_name_lists_the_known_ones(bench: Bench) -> None:
    with pytest.raises(ValueError, match="decode, batch, gap"):
        bench.run(start="prefill")
