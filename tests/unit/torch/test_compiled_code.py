"""Compiled code is kept on disk and checked when it is read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from edgepipe_torch.layers.compiled_code import CodeCache, KernelsUnavailable


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


def _writable_folder(folder: Path) -> None:
    folder.chmod(0o777)


def _writable_file(folder: Path) -> None:
    next(folder.iterdir()).chmod(0o666)


def _writable_parent(folder: Path) -> None:
    folder.parent.chmod(0o777)


def _linked_file(folder: Path) -> None:
    (path,) = folder.iterdir()
    path.symlink_to(path.rename(folder.parent / "elsewhere"))


def _linked_folder(folder: Path) -> None:
    folder.symlink_to(folder.rename(folder.parent / "elsewhere"))


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        (_writable_folder, "rm -r {folder}"),
        (_writable_file, "rm {folder}/"),
        (_writable_parent, "chmod go-w {folder.parent}"),
        (_linked_file, "rm {folder}/"),
        (_linked_folder, "rm {folder}"),
    ],
)
def test_code_that_another_user_may_change_is_never_run(
    change: Callable[[Path], None], remedy: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, compiler = tmp_path / "cache" / "kernels", Uppercase()
    cache = CodeCache(folder, "this CPU", suffix=".o")
    cache.get("a", compiler)
    (path,) = folder.iterdir()
    evil = Uppercase()
    CodeCache(tmp_path / "evil", "this CPU", suffix=".o").get("evil", evil)
    path.write_bytes(next((tmp_path / "evil").iterdir()).read_bytes())  # whole, by its digest
    change(folder)
    assert [cache.get("a", compiler) for _ in "12"] == [b"A", b"A"]
    (record,) = caplog.records
    assert remedy.format(folder=folder) in record.getMessage()


def test_kept_code_is_used_again_once_the_folder_is_mended(tmp_path: Path) -> None:
    folder, compiler = tmp_path / "kernels", Uppercase()
    cache = CodeCache(folder, "this CPU", suffix=".o")
    cache.get("a", compiler)
    folder.chmod(0o777)
    cache.get("a", compiler)
    folder.chmod(0o700)
    cache.get("a", compiler)
    assert compiler.compiled == ["a", "a"]


def test_new_folders_are_private_whatever_the_mask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        CodeCache(tmp_path / "cache" / "edgepipe" / "kernels", "this CPU", suffix=".o").get("a", str.encode)
    finally:
        os.umask(before)
    made = list((tmp_path / "cache").rglob("*"))
    assert {path.stat().st_mode & 0o777 for path in made if path.is_dir()} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in made if path.is_file()} == {0o600}


def test_a_reason_is_one_line_of_limited_length() -> None:
    found = KernelsUnavailable("a log\n" + 9999 * "x", remedy="pip install it").instead("torch")
    assert (found.by, found.remedy) == ("torch", "pip install it")
    assert "\n" not in found.reason
    assert len(found.reason) == 200
