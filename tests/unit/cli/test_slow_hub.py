"""A hub that takes its time: a line says what a pull waits for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from edgepipe.cli import waiting
from tests.support.models.fake_hub import FakeHub, running
from tests.support.models.files import write_hf_folder
from tests.support.processes.command_line import Run

REPO = "org/tiny"


class DueTimer:
    """A timer whose time has passed when the hub answers, unless it was cancelled."""

    last: DueTimer | None = None

    def __init__(self, seconds: float, function: Callable[[], None]) -> None:
        assert seconds == 5.0
        self.daemon, self._function = False, function
        DueTimer.last = self

    def start(self) -> None:
        """Nothing happens yet."""

    def cancel(self) -> None:
        self._function = lambda: None

    def fire(self) -> None:
        self._function()


class SlowHub(FakeHub):
    """Answers the API five seconds late, by the timer's clock."""

    def listing(self) -> dict[str, object]:
        timer = DueTimer.last
        assert timer is not None, "nobody measures how long the hub takes"
        timer.fire()
        return super().listing()


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_a_slow_answer_of_the_hub_gets_a_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    write_hf_folder(tmp_path / "source")
    files = {path.name: path.read_bytes() for path in (tmp_path / "source").iterdir()}
    monkeypatch.setattr(waiting, "Timer", DueTimer)
    with running(SlowHub(repo=REPO, files=files)) as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
        template = f"{hub.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        done = run("models", "pull", REPO, *options)
    assert done.code == 0, done.err
    assert "the hub has not answered for 5 s" in done.err


def test_a_quick_answer_gets_none(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "Timer", DueTimer)
    with waiting.line_if_slow("late") as answered:
        answered()
        assert DueTimer.last is not None
        DueTimer.last.fire()
    assert capsys.readouterr().err == ""
