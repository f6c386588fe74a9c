"""Statuses, counts and turns of batches, over random histories."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.errors import (
    ClusterError,
    EdgepipeError,
    KVCacheFull,
    ModelUnknown,
    PromptTooLong,
    QueueFull,
    StageLost,
    StepFailed,
)
from edgepipe.gateway.batches.records import (
    FINAL,
    Batch,
    BatchError,
    CheckedInput,
    IllegalChange,
    TokenUsage,
    in_turn,
    window_s,
)
from edgepipe.gateway.batches.window import Window, ends_line, is_fault

BATCH = Batch(
    batch_id="batch_1",
    owner="a",
    endpoint="/v1/chat/completions",
    input_file="file-1",
    completion_window="24h",
    created_s=1_000_000,
    expires_s=1_086_400,
    output_file="file-2",
    error_file="file-3",
    kept_s=3600,
    entered_s={"validating": 1_000_000},
)
NEXT = {
    "validating": {"failed", "in_progress", "cancelling"},
    "in_progress": {"finalizing", "cancelling"},
    "finalizing": {"completed", "expired"},
    "cancelling": {"cancelled"},
}
LINES = 9
STEPS = st.sampled_from(("check", "check badly", "count", "fail", "all done", "expire", "cancel", "end"))


def step(batch: Batch, name: str, now_s: int) -> Batch:
    """What one event makes of a batch."""
    match name:
        case "check":
            return batch.checked(CheckedInput(num_lines=LINES, model="tiny"), now_s=now_s)
        case "check badly":
            return batch.checked(CheckedInput(errors=(BatchError(code="x", message="y", line=2),)), now_s=now_s)
        case "count" | "fail":
            good = name == "count"
            return batch.counted(
                completed=good,
                failed=not good,
                usage=TokenUsage(prompt=2, completion=3),
                output_bytes=batch.output_bytes + 10 * good,
                error_bytes=batch.error_bytes + 7 * (not good),
            )
        case "all done":
            return batch.finalizing("completed", now_s=now_s)
        case "expire":
            return batch.finalizing("expired", now_s=now_s)
        case "cancel":
            return batch.cancelled(now_s=now_s)
        case _:
            return batch.ended(now_s=now_s)


@given(st.lists(STEPS, max_size=30))
def test_statuses_follow_the_picture_whatever_happens(names: list[str]) -> None:
    batch, entries = BATCH, 0
    for place, name in enumerate(names):
        try:
            after = step(batch, name, 1_000_001 + place)
        except IllegalChange:
            continue
        entries += name in ("count", "fail")
        assert after.status == batch.status or after.status in NEXT[batch.status]
        assert batch.status not in FINAL or after == batch
        assert after.completed + after.failed == entries
        assert (after.output_bytes, after.error_bytes) == (10 * after.completed, 7 * after.failed)
        assert after.entered_s[after.status] <= 1_000_001 + place
        assert Batch.from_text(after.to_text()) == after
        batch = after
    shown = batch.to_json()
    assert shown["status"] == batch.status
    assert (shown["output_file_id"] is not None) == (batch.is_final and bool(batch.completed))
    assert [name for name in FINAL if shown[f"{name}_at"]] == ([batch.status] if batch.is_final else [])
    json.dumps(shown)


def test_a_cancelled_check_is_not_undone() -> None:
    cancelled = BATCH.cancelled(now_s=1_000_001)
    assert cancelled.checked(CheckedInput(num_lines=3), now_s=1_000_002) == cancelled
    assert cancelled.cancelled(now_s=1_000_003) == cancelled
    assert cancelled.ended(now_s=1_000_004).status == "cancelled"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("24h", 86_400), ("90m", 5_400), ("7d", 604_800), ("30d", 2_592_000), ("31d", None), ("0h", None), ("h", None)],
)
def test_windows(text: str, seconds: int | None) -> None:
    assert window_s(text) == seconds


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), max_size=12), st.integers(1, 4))
def test_each_user_has_one_running_batch_and_cancelled_ones_end_at_once(
    wanted: list[tuple[str, bool]], most: int
) -> None:
    batches = [
        replace(BATCH, batch_id=f"batch_{place}", owner=owner, status="cancelling" if leaves else "in_progress")
        for place, (owner, leaves) in enumerate(wanted)
    ]
    chosen = in_turn(batches, most=most)
    running = [batch for batch in chosen if batch.status == "in_progress"]
    assert len(running) == min(most, len({batch.owner for batch in batches if batch.status == "in_progress"}))
    for batch in running:
        earlier = batches[: batches.index(batch)]
        assert not any(other.owner == batch.owner and other.status == "in_progress" for other in earlier)
    assert [batch for batch in chosen if batch.status == "cancelling"] == [
        batch for batch in batches if batch.status == "cancelling"
    ]


@given(st.lists(st.sampled_from(("answered", "refused", "failed")), max_size=60), st.integers(1, 40))
def test_a_window_never_closes_and_never_grows_beyond_its_limit(events: list[str], most: int) -> None:
    window = Window(most_lines=most, most_bytes=1000)
    pauses: list[float] = []
    for event in events:
        match event:
            case "answered":
                window.answered()
                pauses = []
            case "refused":
                window.refused(num_lines=window.limit - 1)
            case _:
                pauses.append(window.failed())
                assert window.limit == 1
        assert 1 <= window.limit <= most
        assert pauses == sorted(pauses)
        assert all(1.0 <= pause <= 30.0 for pause in pauses)
        assert window.has_room(num_lines=0, num_bytes=0, next_bytes=10**9)
        assert not window.has_room(num_lines=window.limit, num_bytes=0, next_bytes=1)
        assert not window.has_room(num_lines=1, num_bytes=900, next_bytes=200)


def test_each_pipeline_of_a_model_gets_a_whole_window() -> None:
    window = Window(most_lines=20)
    window.widen(num_engines=3)
    assert window.limit == 60
    window.widen(num_engines=1)
    assert window.limit == 20
    window.failed()
    window.widen(num_engines=2)
    assert window.limit == 1, "the cluster cannot answer now"
    for _ in range(50):
        window.answered()
    assert window.limit == 40


def test_a_window_is_full_again_after_as_many_answers() -> None:
    window = Window(most_lines=20)
    window.failed()
    for _ in range(19):
        window.answered()
    assert window.limit == 20


@pytest.mark.parametrize(
    ("error", "fault", "ends"),
    [
        (PromptTooLong("x"), False, True),
        (StepFailed("x"), True, False),
        (KVCacheFull("x"), True, False),
        (StageLost("x"), False, False),
        (ModelUnknown("x"), False, False),
        (QueueFull("x"), False, False),
        (ClusterError("x"), False, False),
    ],
)
def test_what_the_cluster_lacks_ends_no_line(error: EdgepipeError, fault: bool, ends: bool) -> None:
    assert is_fault(error) is fault
    assert ends_line(error, attempts=1) is ends
    assert ends_line(error, attempts=3) is (ends or fault)


def test_a_batch_s_usage_is_the_sum_of_its_lines() -> None:
    usage = TokenUsage(prompt=5, cached=2, completion=3, reasoning=1) + TokenUsage(prompt=2, completion=4)
    assert usage.to_json() == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 2},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 1},
        "total_tokens": 14,
    }
