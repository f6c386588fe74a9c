"""An engine over stages of real backends: chats cross host memory and the disk, and their answers stay the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgepipe.backend.loader import create_backend
from edgepipe.backend.types import BackendOptions
from edgepipe.errors import BackendUnavailable
from edgepipe.spec.facts import ModelConfig
from edgepipe.testing.tiny_model import TinyWeights, tiny_config
from tests.support.engine.lab import engine_lab, submission
from tests.support.models.recurrent_layers import MODELS

CHATS, LENGTH, ANSWER = 4, 170, 6
CONTEXT = tiny_config(vocab_size=300, context_length=512)
STATES = replace(next(iter(MODELS.values())), vocab_size=300, context_length=512)


class Turns:
    """What two rounds of chats gave: answers, tokens that came from disk, and tokens of the second round not read."""

    def __init__(self) -> None:
        self.answers: list[list[int]] = []
        self.fetched_tokens = 0
        self.known_tokens = 0


async def turns(backend: str, config: ModelConfig, *, blocks: int, host_blocks: int) -> Turns:
    options = BackendOptions(device="cpu", threads=1)
    found = Turns()
    async with engine_lab(
        max_blocks=blocks,
        max_host_blocks=host_blocks,
        max_disk_blocks=400 if host_blocks else 0,
        contiguous_kv=True,
        config=config,
        make_backend=lambda _: create_backend(backend, options),
        weights=TinyWeights(config),
        constraints={"draft": "off"},
    ) as lab:
        gateway = await lab.gateway()
        known = [[(chat * 37 + 7 * place) % 241 for place in range(LENGTH)] for chat in range(CHATS)]
        for turn in range(2 * CHATS):
            chat, name = turn % CHATS, f"turn-{turn}"
            gateway.send(submission(name, [*known[chat], turn], ANSWER))
            answer = await gateway.ended(name)
            assert answer.error is None
            assert answer.ended is not None
            known[chat] += [turn, *answer.ids]
            found.answers.append(list(answer.ids))
            found.known_tokens += answer.ended.cached_prompt_tokens if turn >= CHATS else 0
        found.fetched_tokens = lab.engine.state().fetched_tokens
    return found


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        ("torch", "context"),
        ("mlx", "context"),
        ("mlx", "states"),
        pytest.param("torch", "states", marks=pytest.mark.long),
    ],
)
async def test_chats_that_come_from_disk_have_the_answers_of_chats_that_stayed(backend: str, name: str) -> None:
    config = {"context": CONTEXT, "states": STATES}[name]
    try:
        stayed = await turns(backend, config, blocks=300, host_blocks=0)
    except BackendUnavailable as exc:
        pytest.skip(exc.what)
    crossed = await turns(backend, config, blocks=20, host_blocks=24)
    assert crossed.answers == stayed.answers
    assert crossed.fetched_tokens > LENGTH
    assert crossed.known_tokens > 0.7 * CHATS * LENGTH
