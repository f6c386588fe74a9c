"""The log-probabilities in ``tests/data`` are what transformers computes today."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from edgepipe.store.store import StoredModel
from tests.support.numerics.prompt_reference import prompt_logprobs, reference_model, scored_texts


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Keep torch's threads from waiting for one another on a busy machine."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("one_thread")
def test_the_kept_log_probabilities_are_those_of_transformers(demo_model: StoredModel) -> None:
    pytest.importorskip("transformers")
    model = reference_model(demo_model.open_weights())
    for text in scored_texts():
        assert demo_model.tokenizer().encode(text.text) == list(text.ids)
        assert prompt_logprobs(model, text.ids) == pytest.approx(text.logprobs, abs=1e-4)
