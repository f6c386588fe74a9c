"""An engine that has turned costs its own request an error, and the gateway nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from edgepipe.wire.v1 import common_pb2, engine_pb2
from tests.support.gateways.fake_engine import FakeEngine
from tests.support.gateways.server import serving


@dataclass(slots=True)
class Rogue(FakeEngine):
    """Reports what a test gives it, of its first request; answers the others."""

    reports: Sequence[engine_pb2.EngineEvent] = field(default_factory=list[engine_pb2.EngineEvent])

    async def _answer(
        self, submit: engine_pb2.Submit, have: Sequence[int], outbox: asyncio.Queue[engine_pb2.EngineEvent | None]
    ) -> None:
        if len(self.submits) > 1:
            await super(Rogue, self)._answer(submit, have, outbox)
            return
        for event in self.reports:
            for report in (*event.tokens, *event.ended, *event.prompt_scores, *event.prompt_reads):
                report.request_id, report.attempt = submit.request_id, submit.attempt
            outbox.put_nowait(event)


SCORE = common_pb2.TokenLogprobs(logprob=-1.0, top_ids=[1, 2, 3], top_logprobs=[-1.0, -2.0, -3.0])
SCORES = [
    engine_pb2.EngineEvent(prompt_scores=[engine_pb2.PromptScores(position=1 + 100 * each, logprobs=[SCORE] * 100)])
    for each in range(3)
]


@pytest.mark.parametrize(
    ("reports", "fact"),
    [
        (SCORES, "log-probabilities"),
        ([engine_pb2.EngineEvent(tokens=[engine_pb2.Tokens(ids=[65], logprobs=[SCORE])])], "log-probabilities"),
        ([engine_pb2.EngineEvent(tokens=[engine_pb2.Tokens(ids=[65], choice=1 << 31)])], "choice"),
        ([engine_pb2.EngineEvent(ended=[engine_pb2.Ended(reason="stop", choice=(1 << 32) - 1)])], "choice"),
        ([engine_pb2.EngineEvent(ended=[engine_pb2.Ended(reason="stop", num_tokens=9)])], "another token"),
        ([engine_pb2.EngineEvent(ended=[engine_pb2.Ended(reason="stop", cached_prompt_tokens=99)])], "cache"),
    ],
    ids=["scores of the prompt", "scores of a token", "choice", "ended choice", "ended elsewhere", "cached"],
)
async def test_an_engine_that_reports_what_cannot_be_ends_that_request_alone(
    reports: Sequence[engine_pb2.EngineEvent], fact: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(Rogue(reports=reports)) as served:
        with caplog.at_level(logging.WARNING, logger="edgepipe.gateway.generation"):
            refused = await served.complete("hello", max_tokens=3)
            assert refused.status_code >= 500
            assert fact in refused.text
            assert len([line for line in caplog.records if "breaks the protocol" in line.message]) == 1
        answered = await served.complete("hello", max_tokens=3)
        assert answered.status_code == 200
        assert answered.json()["choices"][0]["text"] == "The"
