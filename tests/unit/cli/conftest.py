"""Runs command lines in this process."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from edgepipe.cli.main import main
from tests.support.processes.command_line import Result, Run


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """``run("status")`` -> exit code and output; settings come from an empty folder only."""
    monkeypatch.setenv("EDGEPIPE_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")

    def command(*args: str, app: typer.Typer | None = None) -> Result:
        with pytest.raises(SystemExit) as ended:
            main(list(args), app=app)
        code = ended.value.code
        captured = capsys.readouterr()
        return Result(code if isinstance(code, int) else 0, captured.out, captured.err)

    return command
