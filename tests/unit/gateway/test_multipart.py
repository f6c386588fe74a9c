"""Forms with files: the cut of the body changes nothing, and broken forms are refused."""

from __future__ import annotations

import email
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.gateway.batches.multipart import MultipartInvalid, MultipartReader, PartBegins, boundary_of

BOUNDARY = b"cut-here"
Field = tuple[str, str | None, bytes]
DATA = st.binary(max_size=60) | st.lists(
    st.sampled_from((b"\r", b"\n", b"-", b"--", b"cut", b"-here", b"\r\n--cut-her", b"\r\n--")), max_size=8
).map(b"".join)
FIELDS = st.lists(
    st.tuples(
        st.sampled_from(("file", "purpose", "x y")),
        st.none() | st.sampled_from(("a.jsonl", 'a "b".jsonl', "ä.jsonl", "")),
        DATA.filter(lambda data: b"\r\n--" + BOUNDARY not in b"\r\n" + data),
    ),
    max_size=5,
)


def form(fields: list[Field]) -> bytes:
    """The body of a form."""
    parts: list[bytes] = []
    for name, filename, data in fields:
        quoted = "" if filename is None else filename.replace("\\", "\\\\").replace('"', '\\"')
        more = "" if filename is None else f'; filename="{quoted}"'
        head = f'Content-Disposition: form-data; name="{name}"{more}\r\nContent-Type: text/plain\r\n\r\n'
        parts.append(b"--" + BOUNDARY + b"\r\n" + head.encode() + data + b"\r\n")
    return b"".join(parts) + b"--" + BOUNDARY + b"--\r\n"


def read(body: bytes, cuts: list[int]) -> list[Field]:
    """The fields of a body that arrives in pieces."""
    reader = MultipartReader(BOUNDARY)
    found: list[tuple[str, str | None, list[bytes]]] = []
    for start, end in pairwise([0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]):
        for event in reader.push(body[start:end]):
            if isinstance(event, PartBegins):
                found.append((event.name, event.filename, []))
            else:
                found[-1][2].append(event.data)
    if not reader.is_complete:
        raise MultipartInvalid("incomplete")
    return [(name, filename, b"".join(parts)) for name, filename, parts in found]


@given(FIELDS, st.lists(st.integers(0, 10**6), max_size=12))
def test_any_cut_gives_the_same_fields(fields: list[Field], cuts: list[int]) -> None:
    assert read(form(fields), cuts) == fields
    assert read(b"a preamble\r\n" + form(fields) + b"an epilogue", cuts) == fields


@given(FIELDS.filter(bool), st.integers(0, 10**6))
def test_a_form_that_ends_early_is_not_complete(fields: list[Field], cut: int) -> None:
    body = form(fields)
    with pytest.raises(MultipartInvalid):
        read(body[: cut % (len(body) - 3)], [])


def test_python_reads_the_same() -> None:
    body = form([("purpose", None, b"batch"), ("file", "a.jsonl", b"{}\n{}\n")])
    head = b'Content-Type: multipart/form-data; boundary="cut-here"\r\n\r\n'
    message = email.message_from_bytes(head + body)
    parts = [part.get_payload(decode=True) for part in message.walk() if not part.is_multipart()]
    assert parts == [data for _, _, data in read(body, [9, 80])]


@pytest.mark.parametrize(
    "body",
    [
        b"--cut-here\r\n\r\ndata\r\n--cut-here--",
        b"--cut-here\r\nX: " + b"y" * 9000 + b"\r\n\r\n",
        b"--cut-here and more\r\n",
        b"--cut-here" + b" " * 100,
        form([("x", None, b"")] * 33),
    ],
)
def test_broken_forms_are_refused(body: bytes) -> None:
    with pytest.raises(MultipartInvalid):
        read(body, [])


def test_boundaries() -> None:
    assert boundary_of('multipart/form-data; charset=utf-8; boundary="a b"') == b"a b"
    assert boundary_of("Multipart/Form-Data;boundary=xyz") == b"xyz"
    for wrong in ("application/json", "multipart/form-data", f"multipart/form-data; boundary={'x' * 71}"):
        with pytest.raises(MultipartInvalid):
            boundary_of(wrong)
