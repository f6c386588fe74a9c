"""Lines of a batch's input: any text, any place to go on from, and the check of the whole input."""

from __future__ import annotations

import io
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.gateway.batches import lines as lines_module
from edgepipe.gateway.batches.checking import check_input
from edgepipe.gateway.batches.line_bodies import LINE_KINDS
from edgepipe.gateway.batches.lines import (
    Place,
    RawLine,
    answer_entry,
    custom_id_of,
    error_entry,
    line_fault,
    read_lines,
)
from edgepipe.gateway.strict_body import validate

CHAT = "/v1/chat/completions"


def line(custom_id: str = "a", **changes: Any) -> bytes:
    """A good line, with changes."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body} | changes).encode()


def read_all(data: bytes, place: Place | None = None) -> tuple[list[RawLine], Place]:
    """The lines from a place on, and the place behind them."""
    found = list(read_lines(io.BytesIO(data), place or Place()))
    return [each for each, _ in found if each is not None], found[-1][1] if found else place or Place()


@given(st.lists(st.text(st.characters(blacklist_characters="\r\n", codec="utf-8"), max_size=12), max_size=12))
def test_lines_keep_their_numbers_and_reading_goes_on_anywhere(texts: list[str]) -> None:
    data = "\n".join(texts).encode()
    whole, end = read_all(data)
    assert [(each.number, each.data) for each in whole] == [
        (number, text.encode().strip()) for number, text in enumerate(texts, start=1) if text.encode().strip()
    ]
    assert end.offset == len(data)
    for _, place in read_lines(io.BytesIO(data), Place()):
        assert read_all(data, place)[0] == [each for each in whole if each.number >= place.number]


def test_a_line_without_end_costs_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "MAX_LINE_BYTES", 100)
    found, _ = read_all(b"x" * 100 + b"\n" + b"y" * 101 + b"\n" + b"z" * 5_000_000 + b"\nend")
    assert [(each.number, each.data is None) for each in found] == [(1, False), (2, True), (3, True), (4, False)]


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (None, "longer"),
        (b"{", "JSON"),
        (b"[" * 100_000, "JSON"),
        (b"[1]", "object"),
        (line(""), "custom_id"),
        (line("x" * 513), "custom_id"),
        (line(custom_id=7), "custom_id"),  # pyright: ignore[reportArgumentType]
        (line(method="GET"), "method"),
        (line(url="/v1/embeddings"), "embeddings"),
        (line(url="/v1/completions"), "url"),
        (line(body=[]), "body"),
    ],
)
def test_faults_of_lines(data: bytes | None, word: str) -> None:
    assert word in line_fault(data, endpoint=CHAT)


def test_good_lines_of_both_endpoints() -> None:
    assert line_fault(line(), endpoint=CHAT) == ""
    chat = validate(LINE_KINDS[CHAT], json.loads(line()))
    assert chat.body.model == "tiny"
    text = line(url="/v1/completions", body={"prompt": "x"})
    assert line_fault(text, endpoint="/v1/completions") == ""
    assert validate(LINE_KINDS["/v1/completions"], json.loads(text)).custom_id == "a"


@given(st.text(min_size=1, max_size=40))
def test_the_id_of_a_broken_line_is_found(custom_id: str) -> None:
    good = json.dumps({"custom_id": custom_id, "body": {"text": '"custom_id": "other"'}}).encode()
    assert custom_id_of(good) == custom_id
    assert custom_id_of(good[:-2]) == custom_id
    assert custom_id_of(b'{"custom": 1') is None
    assert custom_id_of(None) is None


@given(st.text(max_size=20), st.text(max_size=20))
def test_entries_are_one_line_of_json(custom_id: str, message: str) -> None:
    answered = answer_entry(
        entry_id="batch_req_1", custom_id=custom_id, status=200, request_id="req-1", body=b'{"id":"x"}'
    )
    refused = error_entry(entry_id="batch_req_1", custom_id=custom_id, number=7, code="c", message=message)
    for entry in (answered, refused):
        assert entry.count(b"\n") == 1
        assert json.loads(entry)["custom_id"] == custom_id
    assert json.loads(answered)["response"] == {"status_code": 200, "request_id": "req-1", "body": {"id": "x"}}
    assert json.loads(answered)["error"] is None
    assert json.loads(refused)["error"] == {"code": "c", "message": f"line 7: {message}"}
    assert json.loads(refused)["line"] == 7


def checked(tmp_path: Path, *texts: bytes, most_lines: int = 100) -> Any:
    """The result of checking these lines."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join(texts))
    return check_input(path, endpoint=CHAT, most_lines=most_lines)


def test_a_check_counts_lines_and_finds_the_model(tmp_path: Path) -> None:
    result = checked(tmp_path, b"\xef\xbb\xbf" + line("a"), b"", b"{", line("b"), b"  ")
    assert (result.num_lines, result.model, result.errors) == (3, "tiny", ())


def test_a_check_refuses_what_cannot_run(tmp_path: Path) -> None:
    assert checked(tmp_path, b"", b"  ").errors[0].code == "empty_file"
    assert checked(tmp_path, *[line(str(each)) for each in range(5)], most_lines=4).errors[0].code == "too_many_lines"
    bad = checked(tmp_path, b"{", line("a", method="GET"))
    assert [(error.code, error.line) for error in bad.errors] == [("invalid_line", 1), ("invalid_line", 2)]


@given(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=12))
def test_equal_ids_are_found(ids: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        errors = checked(Path(folder), *map(line, ids)).errors
    firsts = {name: ids.index(name) for name in ids}
    again = [place + 1 for place, name in enumerate(ids) if firsts[name] != place]
    assert [error.line for error in errors] == again[:10]
    for error in errors:
        assert ids[int(error.message.split()[1]) - 1] == ids[(error.line or 0) - 1]
