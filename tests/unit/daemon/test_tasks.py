"""Tasks: which commands may run, how many at once, and what becomes of what they print."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.daemon.page_tickets import TICKET_S, PageTickets
from edgepipe.daemon.tasks.book import MOST_RUNNING, MOST_TASKS, TaskBook
from edgepipe.daemon.tasks.commands import COMMANDS, arguments_of
from edgepipe.daemon.tasks.output import MOST_RESULT_CHARS, TaskOutput, progress_line
from edgepipe.daemon.tasks.runner import Tasks
from edgepipe.errors import QueueFull, RequestInvalid
from edgepipe.system import RandomIds
from edgepipe.testing.clock import START_S
from edgepipe.wire.tasks import NO_CHOICES, ServeChoices, TaskState

FOLDERS = {"data_dir": Path("/data"), "models_dir": Path("/models")}
UNSAFE = [
    "",
    "--yes",
    "-y",
    "a/../b",
    "../secret",
    "/etc/passwd",
    "~/x",
    "a;b",
    "a\nb",
    "a--b",
    "$(x)",
    "x" * 257,
    "..",
    "é",
]


@pytest.mark.parametrize("name", UNSAFE)
@pytest.mark.parametrize("kind", [kind for kind, command in COMMANDS.items() if command.takes_model])
def test_no_name_becomes_an_option_or_a_path(kind: str, name: str) -> None:
    with pytest.raises(RequestInvalid):
        arguments_of(kind, name, NO_CHOICES, **FOLDERS)


@pytest.mark.parametrize("kind", ["", "rm", "models rm", "node stop", "__class__"])
def test_only_listed_commands_run(kind: str) -> None:
    with pytest.raises(RequestInvalid):
        arguments_of(kind, "qwen3:8b", NO_CHOICES, **FOLDERS)


@pytest.mark.parametrize("name", ["qwen3:8b", "org/name:Q4_K_M@main", "Llama 3.3 70B", "https://huggingface.co/a/b"])
def test_a_model_comes_after_two_dashes(name: str) -> None:
    words = arguments_of("pull", name, NO_CHOICES, **FOLDERS)
    assert words[-2:] == ("--", name)
    assert words[words.index("--models-dir") + 1] == "/models"
    with pytest.raises(RequestInvalid):
        arguments_of("doctor", name, NO_CHOICES, **FOLDERS)


def test_choices_of_serving_become_flags_of_serve_and_plan() -> None:
    chosen = ServeChoices(kv="8bit", context=4096, concurrency=3, draft="mtp")
    flags = ("--kv", "8bit", "--context", "4096", "--concurrency", "3", "--draft", "mtp")
    for kind in ("serve", "plan"):
        words = arguments_of(kind, "qwen3:8b", chosen, **FOLDERS)
        assert words[words.index("--kv") : words.index("--data-dir")] == flags
    assert "--kv" not in arguments_of("serve", "qwen3:8b", NO_CHOICES, **FOLDERS)
    assert "--draft" in arguments_of("serve", "qwen3:8b", ServeChoices(draft="lookup"), **FOLDERS)


@pytest.mark.parametrize(
    ("kind", "choices"),
    [
        ("pull", ServeChoices(context=1)),
        ("serve", ServeChoices(kv="--yes")),
        ("serve", ServeChoices(draft="fast")),
        ("plan", ServeChoices(draft="lookup")),
    ],
)
def test_other_choices_are_refused(kind: str, choices: ServeChoices) -> None:
    with pytest.raises(RequestInvalid):
        arguments_of(kind, "qwen3:8b", choices, **FOLDERS)


def test_a_plan_with_other_choices_is_another_task() -> None:
    book = TaskBook()
    first = book.add("1", kind="plan", model="m", now_us=1)
    assert book.add("2", kind="plan", model="m", now_us=1) == first
    assert book.add("3", kind="plan", model="m", choices=ServeChoices(kv="8bit"), now_us=1).task_id == "3"


@given(st.lists(st.tuples(st.sampled_from(["add", "end", "start"]), st.integers(0, 30)), max_size=200))
def test_a_book_runs_four_remembers_a_hundred_and_forgets_none_that_runs(moves: list[tuple[str, int]]) -> None:
    book, ids = TaskBook(), itertools.count()
    for move, number in moves:
        if move == "add":
            before = {task.task_id: task for task in book.list()}
            task = book.add(f"task-{next(ids)}", kind="pull", model=f"m{number}", now_us=1)
            twins = [each for each in before.values() if each.model == task.model and not each.ended]
            assert task in twins or not twins
        elif move == "start":
            for task in book.startable():
                book.started(task.task_id)
        elif running := [task for task in book.list() if task.state == "running"]:
            book.ended(running[number % len(running)].task_id, state="done", now_us=2)
        tasks = book.list()
        assert sum(task.state == "running" for task in tasks) <= MOST_RUNNING
        assert len(tasks) <= MOST_TASKS


def test_the_oldest_ended_task_is_forgotten_and_a_full_book_refuses() -> None:
    book = TaskBook()
    for number in range(MOST_TASKS):
        book.add(f"task-{number}", kind="pull", model=f"m{number}", now_us=1)
    with pytest.raises(QueueFull):
        book.add("more", kind="pull", model="more", now_us=1)
    book.ended("task-7", state="cancelled", now_us=2)
    book.add("more", kind="pull", model="more", now_us=1)
    with pytest.raises(RequestInvalid):
        book.get("task-7")
    assert len(book.list()) == MOST_TASKS


def test_output_is_progress_then_one_document_within_bounds() -> None:
    output = TaskOutput()
    progress = output.line(progress_line(phase="download", bytes_done=3, bytes_total=9) + "\n")
    assert progress is not None
    assert (progress.phase, progress.bytes_done, progress.bytes_total) == ("download", 3, 9)
    assert output.line('{"progress": "of another version"}\n') is None
    for line in json.dumps({"model": "a\u202eb", "n": [1, 2]}, indent=2).splitlines(keepends=True):
        assert output.line(line) is None
    assert json.loads(output.result) == {"model": "a\u202eb", "n": [1, 2]}
    assert output.result.isascii()
    assert b"\n" not in output.result
    for number in range(50):
        output.error_line(f"line {number}\x1b[0m\n")
    assert output.error[-1] == "line 49\\x1b[0m"
    assert len(output.error) == 12
    output.line("x" * (MOST_RESULT_CHARS + 1))
    assert len(output.result) < 100


class _Clock:
    def monotonic_s(self) -> float:
        return START_S

    def wall_s(self) -> float:
        return START_S


PROGRAM = """
import sys, time
print('{"progress":{"phase":"download","bytes_done":1,"bytes_total":4}}', flush=True)
if "hang" in sys.argv[-1]:
    try: time.sleep(60)
    except KeyboardInterrupt: print("3 MB are kept", file=sys.stderr); sys.exit(130)
if sys.argv[-1] == "fail": print("error: no such model", file=sys.stderr); sys.exit(7)
if sys.argv[-1] == "found": print('{"level": "warning"}'); sys.exit(8)
print('{"model":', flush=True); print('"x"}', flush=True)
"""


def _arguments(kind: str, model: str, choices: ServeChoices) -> Sequence[str]:
    if kind != "pull":
        raise RequestInvalid("no such task")
    return [sys.executable, "-c", PROGRAM, model]


@asynccontextmanager
async def _running() -> AsyncIterator[Tasks]:
    async with asyncio.TaskGroup() as group:
        tasks = Tasks(arguments=_arguments, clock=_Clock(), ids=RandomIds(), tasks=group)
        yield tasks
        await tasks.stop()


async def _until(tasks: Tasks, task_id: str, *states: str) -> TaskState:
    async with asyncio.timeout(30), aclosing(tasks.watch()) as changes:
        async for _ in changes:
            if tasks.get(task_id).state in states:
                return tasks.get(task_id)
    raise AssertionError


async def test_commands_run_and_what_they_print_is_kept() -> None:
    async with _running() as tasks:
        started = [tasks.start("pull", model).task_id for model in ("good", "fail", "found")]
        good, failed, found = [await _until(tasks, each, "done", "failed") for each in started]
        assert (good.state, json.loads(good.result), good.bytes_total) == ("done", {"model": "x"}, 4)
        assert (failed.state, failed.error) == ("failed", ("error: no such model",))
        assert (found.state, json.loads(found.result)) == ("done", {"level": "warning"})
        with pytest.raises(RequestInvalid):
            tasks.start("rm", "good")


async def test_four_run_the_fifth_waits_and_a_cancelled_one_is_interrupted() -> None:
    async with _running() as tasks:
        names = [f"hang{number}" for number in range(5)]
        started = [tasks.start("pull", name) for name in names]
        again = tasks.start("pull", names[0])
        assert again.task_id == started[0].task_id
        waiting = started[4].task_id
        assert tasks.get(waiting).state == "waiting"
        assert tasks.cancel(waiting).state == "cancelled"


async def test_a_running_command_gets_sigint_and_says_what_it_keeps() -> None:
    async with _running() as tasks:
        task_id = tasks.start("pull", "hang").task_id
        async with asyncio.timeout(30), aclosing(tasks.watch()) as changes:
            async for _ in changes:
                if tasks.get(task_id).phase:
                    break
        tasks.cancel(task_id)
        cancelled = await _until(tasks, task_id, "cancelled", "failed", "done")
        assert (cancelled.state, cancelled.error) == ("cancelled", ("3 MB are kept",))
        assert tasks.cancel(task_id).state == "cancelled"
        with pytest.raises(RequestInvalid):
            tasks.cancel("task-unknown")


async def test_tasks_end_with_their_node() -> None:
    async with _running() as tasks:
        task_id = tasks.start("pull", "hang").task_id
    assert tasks.get(task_id).state == "cancelled"


def test_a_ticket_opens_once_and_for_a_minute() -> None:
    now = START_S
    tokens = itertools.count()
    tickets = PageTickets(now_s=lambda: now, new_token=lambda: f"t{next(tokens)}")
    first, second = tickets.issue(), tickets.issue()
    assert tickets.redeem(first)
    assert not tickets.redeem(first)
    assert not tickets.redeem("of another node")
    now += TICKET_S
    assert not tickets.redeem(second)
    many = [tickets.issue() for _ in range(100)]
    assert tickets.redeem(many[-1])
    assert not tickets.redeem(many[0])
