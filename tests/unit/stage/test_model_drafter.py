"""What a sequence asks its draft model, and what it does without an answer."""

from __future__ import annotations

from collections.abc import Sequence

from edgepipe.backend.drafting import NO_DRAFTS, Drafts, DraftSource
from edgepipe.stage.draft_process import Reply
from edgepipe.stage.drafting import LookupFirst, ModelDrafter

MODEL = DraftSource.MODEL
REPEATED = [1, 2, 3, 4, 5, 1, 2, 3]  # a lookup says 4, 5


class Asked:
    """A draft model that notes its questions and replies as told."""

    def __init__(self, *replies: Reply) -> None:
        self.replies = list(replies)
        self.questions: list[tuple[list[int], int, bool]] = []  # tokens, guesses, whether the answer was waited for

    def ask(self, tokens: Sequence[int], count: int, *, within_s: float) -> Reply:
        self.questions.append((list(tokens), count, within_s > 0))
        return self.replies.pop(0)


def test_each_question_brings_the_whole_sequence() -> None:
    model = Asked(Reply(True, (7, 8), 40), Reply(True, (9,)))
    drafter = ModelDrafter([1, 2], model)
    assert drafter.propose([3], 2) == Drafts((7, 8), (MODEL, MODEL), 40)
    assert drafter.propose([4, 5], 0) == NO_DRAFTS, "none is wanted, and nothing is asked"
    assert drafter.propose([6], 1) == Drafts((9,), (MODEL,))
    assert model.questions == [([1, 2, 3], 2, True), ([1, 2, 3, 4, 5, 6], 1, True)]


def test_nothing_waits_for_a_long_prompt() -> None:
    model = Asked(Reply(sent=True), Reply(sent=False), Reply(True, (7,)))
    drafter = ModelDrafter([1] * 1000, model)
    assert drafter.propose([2], 3) == NO_DRAFTS
    assert drafter.propose([3], 3) == NO_DRAFTS, "the model still computes the prompt"
    assert drafter.propose([4], 3).ids == (7,)
    assert [waited for _, _, waited in model.questions] == [False, True, True]


def test_a_prompt_that_did_not_reach_the_model_is_sent_again() -> None:
    model = Asked(Reply(sent=False), Reply(sent=True))
    drafter = ModelDrafter([1] * 1000, model)
    drafter.propose([2], 3)
    drafter.propose([3], 3)
    assert [waited for _, _, waited in model.questions] == [False, False]


def test_drafts_come_from_a_lookup_while_the_model_has_none() -> None:
    model = Asked(Reply(sent=False), Reply(True, (9,), 5))
    drafter = LookupFirst(REPEATED[:-1], ModelDrafter(REPEATED[:-1], model))
    found = drafter.propose(REPEATED[-1:], 2)
    assert found == Drafts((4, 5), (DraftSource.LOOKUP_SHORT,) * 2)
    assert drafter.propose([4], 1) == Drafts((9,), (MODEL,), 5), "the model goes before a short match"
    assert model.questions[-1][0] == [*REPEATED, 4]


def test_a_long_match_costs_no_question() -> None:
    text = list(range(20)) + list(range(10))
    model = Asked()
    assert LookupFirst(text[:-1], ModelDrafter(text[:-1], model)).propose(text[-1:], 3).ids == (10, 11, 12)
    assert not model.questions
