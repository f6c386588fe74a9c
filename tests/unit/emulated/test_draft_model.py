"""The emulated draft model: right as often as asked for, and as slow."""

from __future__ import annotations

import time

import pytest
from edgepipe_emulated import emulated_model_config
from edgepipe_emulated.drafting import EmulatedDraftModel
from edgepipe_emulated.oracle import generate

from edgepipe.backend.drafting import Acceptance
from edgepipe.errors import ConfigInvalid

CONFIG = emulated_model_config(num_layers=2, windows=(None, 8))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
def test_so_many_drafts_are_right(share: float) -> None:
    answer = generate([1, 2, 3], 600, CONFIG, ignore_eos=True)
    drafter = EmulatedDraftModel(CONFIG, Acceptance(str(share)), token_s=0.0, seed=4).drafter([1, 2, 3])
    tried = right = at = 0
    new: list[int] = []
    while at + 8 < len(answer):
        drafts = drafter.propose(new, 4)
        assert len(drafts.ids) == len(drafts.sources) == 4
        accepted = 0
        while accepted < 4 and drafts.ids[accepted] == answer[at + accepted]:
            accepted += 1
        tried, right = tried + min(accepted + 1, 4), right + accepted
        new = answer[at : at + accepted + 1]
        at += accepted + 1
    assert right / tried == pytest.approx(share, abs=0.05)


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_drafts_behind_drafts_are_those_of_one_window(share: float) -> None:
    answer = generate([1, 2, 3], 200, CONFIG, ignore_eos=True)
    model = EmulatedDraftModel(CONFIG, Acceptance(str(share)), token_s=0.0, seed=4)
    some, other = model.drafter([1, 2, 3]), model.drafter([1, 2, 3])
    new: list[int] = []
    at = 0
    while at + 12 < len(answer):
        wanted = other.propose(new, 6).ids
        chain: list[int] = []
        for count in (1, 3, 2):
            chain += some.go_on(new, chain, count).ids
            new = []
        assert chain == [*wanted]
        right = next((place for place in range(6) if chain[place] != answer[at + place]), 6)
        new = answer[at : at + right + 1]
        at += right + 1


def test_drafts_go_on_while_the_first_of_them_become_known() -> None:
    answer = generate([1, 2, 3], 60, CONFIG, ignore_eos=True)
    drafter = EmulatedDraftModel(CONFIG, Acceptance("1"), token_s=0.0, seed=4).drafter([1, 2, 3])
    chain = [*drafter.go_on([], [], 4).ids]
    for at in range(0, 40, 2):
        chain = [*chain[2:], *drafter.go_on(answer[at : at + 2], chain[2:], 2).ids]
        assert chain == answer[at + 2 : at + 6]


def test_the_share_may_change_along_the_text() -> None:
    acceptance = Acceptance("0.8:100,0.1")
    assert [acceptance.at(position) for position in (0, 99, 100, 5000)] == [0.8, 0.8, 0.1, 0.1]


@pytest.mark.parametrize("text", ["", "1.5", "0.8:100", "0.8,0.1", "a", "0.8:x,0.1"])
def test_other_shares_are_refused(text: str) -> None:
    with pytest.raises(ConfigInvalid, match="drafts cannot be right"):
        Acceptance(text)


def test_drafts_take_their_time() -> None:
    drafter = EmulatedDraftModel(CONFIG, Acceptance("1"), token_s=0.005, seed=0).drafter([1])
    began_s = time.monotonic()
    drafter.propose([], 4)
    assert time.monotonic() - began_s >= 0.02
