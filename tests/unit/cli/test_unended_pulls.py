"""Interrupted pulls on the screen."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.models.killed_pulls import old_library_files
from tests.support.processes.command_line import Run


def test_interrupted_pulls_are_listed_and_removed(run: Run, tmp_path: Path) -> None:
    staging = old_library_files(tmp_path / "data" / "models")
    listed = run("models", "list").out

    assert "org/tiny" in listed
    assert "5.0 MB" in listed
    assert "pull interrupted" in listed
    assert "edgepipe models rm org/tiny" in listed
    (row,) = json.loads(run("models", "list", "--json").out)
    assert (row["model"], row["size_bytes"], row["whole"], row["pull"]) == ("org/tiny", 5_000_000, False, "interrupted")
    removed = run("models", "rm", "tiny")
    assert removed.code == 0, removed.err
    assert "5.0 MB are free again" in removed.out
    assert not staging.exists()
