"""Compiled code is kept on disk and checked when it is read."""

from __future__ import annotations

from pathlib import Path

from edgepipe_torch.compiled_code import CodeCache, KernelsUnavailable


class Uppercase:
    """A compiler that notes what it compiled."""

    def __init__(self) -> None:
        self.compiled: list[str] = []

    def __call__(self, text: str) -> bytes:
        """Compile a text."""
        self.compiled.append(text)
        return text.upper().encode()


def test_code_is_kept_by_its_text_and_its_target(tmp_path: Path) -> None:
    cache, compiler = CodeCache(tmp_path / "new", "this CPU", suffix=".o"), Uppercase()
    assert [cache.get(text, compiler) for text in "aab"] == [b"A", b"A", b"B"]
    assert CodeCache(tmp_path / "new", "another CPU", suffix=".o").get("a", compiler) == b"A"
    assert compiler.compiled == ["a", "b", "a"]
    assert {path.suffix for path in (tmp_path / "new").iterdir()} == {".o"}


def test_damaged_code_is_compiled_again(tmp_path: Path) -> None:
    cache, compiler = CodeCache(tmp_path, "this CPU", suffix=".o"), Uppercase()
    cache.get("a", compiler)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole + b"x", b"", whole[:-1] + b"B"):
        path.write_bytes(damaged)
        assert cache.get("a", compiler) == b"A"
        assert path.read_bytes() == whole
    assert compiler.compiled == ["a"] * 5


def test_code_is_compiled_where_nothing_can_be_kept(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert CodeCache(tmp_path / "file", "this CPU", suffix=".o").get("a", str.encode) == b"a"


def test_a_reason_is_one_line_of_limited_length() -> None:
    found = KernelsUnavailable("a log\n" + 9999 * "x", remedy="pip install it").instead("torch")
    assert (found.by, found.remedy) == ("torch", "pip install it")
    assert "\n" not in found.reason
    assert len(found.reason) == 200
