"""Versions in their order, as ``status`` and the page compare them."""

from __future__ import annotations

import itertools

import pytest

import edgepipe
from edgepipe.versions import are_near, is_behind, newest

IN_ORDER = ("0.1.0", "0.2.0.dev3", "0.2.0a1", "0.2.0b1", "0.2.0rc1", "0.2.0rc2", "0.2.0", "0.2.0.post1", "0.10", "1.0")


def test_versions_have_an_order() -> None:
    for older, newer in itertools.combinations(IN_ORDER, 2):
        assert is_behind(older, newer)
        assert not is_behind(newer, older)
        assert newest([newer, older]) == newest([older, newer]) == newer


@pytest.mark.parametrize("same", ["0.1", "0.1.0.0", "0.1.0+local"])
def test_other_spellings_of_a_version_are_equal(same: str) -> None:
    assert not is_behind(same, "0.1.0")
    assert not is_behind("0.1.0", same)


@pytest.mark.parametrize(
    ("version", "other", "near"),
    [
        ("0.1.0", "0.1.9", True),
        ("0.1.0", "0.2.0rc1", True),
        ("0.1.0", "0.3.0", False),
        ("1.0.0", "1.1.0", True),
        ("0.9.0", "1.0.0", False),
        ("1", "1.1", True),
        ("0.1.0", "unknown", True),
    ],
)
def test_versions_at_most_one_minor_apart_are_near(version: str, other: str, near: bool) -> None:
    assert are_near(version, other) is near
    assert are_near(other, version) is near


@pytest.mark.parametrize("text", ["", "unknown", "1.x", "1" * 5000, "0.1.0 <script>"])
def test_what_is_no_version_is_neither_behind_nor_newest(text: str) -> None:
    assert not is_behind(text, "9.9")
    assert not is_behind("0.1", text)
    assert newest([text, "0.1"]) == "0.1"
    assert newest([text]) == ""


def test_the_present_version_can_be_read() -> None:
    assert newest([edgepipe.__version__]) == edgepipe.__version__
