"""What ``edgepipe batch`` shows: rates, and names of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgepipe.cli.batch import endpoint_of, errors_path
from edgepipe.cli.batch_client import BatchView
from edgepipe.cli.views.batch_progress import Rates
from edgepipe.errors import RemoteProtocolError, RequestInvalid
from edgepipe.gateway.batches.records import Batch, BatchError, CheckedInput


def view(**changes: int) -> BatchView:
    batch = Batch(
        batch_id="batch_1",
        owner="a",
        endpoint="/v1/completions",
        input_file="file-1",
        completion_window="24h",
        created_s=1_000_000,
        expires_s=1_086_400,
        output_file="file-2",
        error_file="file-3",
        kept_s=3600,
    )
    shown = batch.checked(CheckedInput(num_lines=1000), now_s=1_000_001).to_json()
    shown["request_counts"]["completed"] = changes.get("completed", 0)
    shown["usage"]["output_tokens"] = changes.get("tokens", 0)
    return BatchView.of(shown)


def test_rates_are_those_of_the_last_minute() -> None:
    rates = Rates()
    assert rates.text(view(), now_s=1_000_000.0) == ""
    assert rates.text(view(completed=100, tokens=2000), now_s=1_000_010.0) == "200 tok/s · 1 min 30 s left"
    text = ""
    for second in range(20, 200, 10):
        slow = view(completed=100 + second // 10, tokens=2000 + second)
        text = rates.text(slow, now_s=1_000_000.0 + second)
    assert text.startswith("1 tok/s")


def test_errors_of_a_failed_batch_name_their_lines() -> None:
    body = {"errors": {"object": "list", "data": [{"code": "c", "message": "it is wrong", "line": 7}]}}
    failed = Batch(
        batch_id="batch_1",
        owner="a",
        endpoint="/v1/completions",
        input_file="file-1",
        completion_window="24h",
        created_s=1_000_000,
        expires_s=1_086_400,
        output_file="file-2",
        error_file="file-3",
        kept_s=3600,
    ).checked(CheckedInput(errors=(BatchError(code="c", message="it is wrong", line=7),)), now_s=1_000_001)
    assert BatchView.of(failed.to_json()).errors == ("line 7: it is wrong",)
    with pytest.raises(RemoteProtocolError):
        BatchView.of(body)


def test_the_first_line_names_the_endpoint(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {}}\n')
    assert endpoint_of(path) == "/v1/completions"
    for text in ("", "{", '{"url": "/v1/embeddings"}', '["url"]'):
        path.write_text(text)
        with pytest.raises(RequestInvalid, match="no request of a batch"):
            endpoint_of(path)


def test_names_of_error_files() -> None:
    assert errors_path(Path("a/out.jsonl")) == Path("a/out.errors.jsonl")
    assert errors_path(Path("out")) == Path("out.errors.jsonl")
