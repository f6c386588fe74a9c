"""Runs checks in order within a time budget, prints results as they come, and keeps all of them in one JSON file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar


class Figure(Protocol):
    """A row of a table, such as ``figures.Row``."""

    @property
    def met(self) -> bool | None:
        """Whether the row meets its target; None without one."""
        ...

    def _asdict(self) -> dict[str, Any]: ...


FigureT = TypeVar("FigureT", bound=Figure)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check(Generic[FigureT]):
    """One entry of a series."""

    name: str
    limit_s: float  # the check starts only if so much time is left
    run: Callable[[float], Iterable[FigureT]]  # takes its limit in seconds; any exception is a failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Series(Generic[FigureT]):
    """Checks by worth, the most valuable first."""

    checks: Sequence[Check[FigureT]]
    facts: dict[str, Any]  # what all results depend on, such as device and commit
    path: Path  # path of the JSON file
    budget_s: float
    now_s: Callable[[], float]
    show: Callable[[FigureT], None]
    say: Callable[[str], None]

    def run(self, *, start: str | None = None) -> bool:
        """Run the checks from ``start`` on (None: all). Return whether all in the file passed.

        Earlier results stay in the file if they have the same facts. Raises ValueError for an unknown name.
        """
        names = [check.name for check in self.checks]
        if start is not None and start not in names:
            raise ValueError(f"unknown check '{start}', choose one of: {', '.join(names)}")
        first = 0 if start is None else names.index(start)
        results = self._earlier(names[:first])
        began_s = self.now_s()
        for check in self.checks[first:]:
            left_s = began_s + self.budget_s - self.now_s()
            if left_s < check.limit_s:
                self.say(f"{left_s:.0f} s are left, too few for '{check.name}': go on with --from {check.name}")
                break
            self._write([*results, {"name": check.name, "state": "running"}])
            results.append(self._run(check))
            self._write(results)
        return [result["name"] for result in results if result["state"] == "passed"] == names

    def _run(self, check: Check[FigureT]) -> dict[str, Any]:
        self.say(f"{check.name}:")
        started_s = self.now_s()
        rows: list[FigureT] = []
        error = ""
        try:
            for row in check.run(check.limit_s):
                rows.append(row)
                self.show(row)
        except Exception as exc:  # the other checks run all the same
            error = f"{type(exc).__name__}: {exc}"
            self.say(f"  failed: {error}")
        missed = any(row.met is False for row in rows)
        return {
            "name": check.name,
            "state": "failed" if error else "missed" if missed else "passed",
            "seconds": round(self.now_s() - started_s, 1),
            "rows": [row._asdict() for row in rows],
            "error": error,
        }

    def _earlier(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the finished results of these checks with the same facts, in order."""
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return []
        if any(found.get(key) != value for key, value in self.facts.items()):
            return []
        results = {result["name"]: result for result in found["checks"] if result["state"] != "running"}
        return [results[name] for name in names if name in results]

    def _write(self, results: Sequence[dict[str, Any]]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({**self.facts, "checks": results}, indent=1) + "\n", encoding="utf-8")
        new.replace(self.path)
