"""A draft model's real process: it answers, dies, hangs, cannot load, and always ends with its stage."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from edgepipe_emulated import emulated_model_config
from edgepipe_emulated.drafting import SingleTokens

from edgepipe.stage import draft_process
from edgepipe.stage.draft_child import DraftLaunch
from edgepipe.stage.draft_process import DraftProcess, Reply
from edgepipe.weights.emulated_folder import write_model_folder

CONFIG = emulated_model_config(num_layers=2)
TOKENS = [5, 6, 7]
PATIENCE_S = 60.0  # a busy machine starts Python slowly


def until(true: Callable[[], object]) -> None:
    ends_s = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < ends_s
        time.sleep(0.01)


def guesses(tokens: list[int], count: int) -> tuple[int, ...]:
    seen = SingleTokens(CONFIG, tokens)
    found: list[int] = []
    while len(found) < count:
        found.append(seen.next_token())
        seen.append(found[-1])
    return tuple(found)


def launch(folder: Path) -> DraftLaunch:
    return DraftLaunch(
        path=str(folder), backend="emulated", settings={"time_factor": "0"}, vocab_size=CONFIG.vocab_size
    )


@pytest.fixture
def model(tmp_path: Path) -> Iterator[DraftProcess]:
    write_model_folder(tmp_path / "draft", CONFIG)
    process = DraftProcess(launch(tmp_path / "draft"), pause_s=0.01)
    process.start()
    yield process
    process.close()
    assert process.pid is None
    assert not [child for child in psutil.Process().children() if "draft_child" in " ".join(child.cmdline())]


def test_it_answers_dies_and_answers_again(model: DraftProcess) -> None:
    assert model.ask(TOKENS, 3, within_s=1.0) == Reply(sent=False), "it is still loading"
    until(lambda: model.pid)
    reply = model.ask(TOKENS, 3, within_s=PATIENCE_S)
    assert (reply.sent, reply.ids) == (True, guesses(TOKENS, 3))
    first = model.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    until(lambda: model.pid not in (None, first))
    longer = [*TOKENS, 9, 9]
    assert model.ask(longer, 5, within_s=PATIENCE_S).ids == guesses(longer, 5)


def test_a_process_that_hangs_delays_a_question_by_its_time(
    model: DraftProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    until(lambda: model.pid)
    first = model.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    began_s = time.monotonic()
    assert model.ask(TOKENS, 3, within_s=0.05) == Reply(sent=True), "it may answer later"
    assert model.ask(TOKENS, 3, within_s=PATIENCE_S) == Reply(sent=False), "one question at a time"
    assert time.monotonic() - began_s < PATIENCE_S / 2
    monkeypatch.setattr(draft_process, "_HANG_S", 0.0)
    assert model.ask(TOKENS, 3, within_s=PATIENCE_S) == Reply(sent=False), "and now it is ended"
    until(lambda: model.pid not in (None, first))
    assert model.ask(TOKENS, 3, within_s=PATIENCE_S).ids == guesses(TOKENS, 3)


def test_a_question_that_is_not_read_ends_the_process(model: DraftProcess) -> None:
    """A pipe holds 64 KiB; a long conversation is more."""
    until(lambda: model.pid)
    first = model.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    assert model.ask([1] * 100_000, 3, within_s=PATIENCE_S) == Reply(sent=False)
    until(lambda: model.pid not in (None, first))


def test_what_cannot_be_loaded_is_tried_a_few_times(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_process, "_MOST_CRASHES", 1)
    process = DraftProcess(launch(tmp_path / "nothing"), pause_s=0.0)
    process.start()
    process._thread.join(timeout=PATIENCE_S)
    assert not process._thread.is_alive()
    assert process.ask(TOKENS, 1, within_s=1.0) == Reply(sent=False)
    starts = [each for each in caplog.messages if "starts again in" in each]
    assert len(starts) == 1
    assert "does not start again after 2 crashes: 'nothing' is not a model" in caplog.messages[-1]
    process.close()
