"""Numbers that a member which has turned claims: as a gateway of an honest engine, and in its beats."""

from __future__ import annotations

import asyncio
import random
from typing import Any, cast

import grpc.aio
from google.protobuf.descriptor import Descriptor

from edgepipe.errors import EdgepipeError
from edgepipe.ids import RequestId
from edgepipe.link.channels import make_channel, translated
from edgepipe.sampling import SamplingParams
from edgepipe.security.certificates import make_key_pair
from edgepipe.security.mutual_tls import MutualTls
from edgepipe.wire.common import Hello, hello_to_wire
from edgepipe.wire.requests import Resumption, Submission, command_to_wire
from edgepipe.wire.v1 import engine_pb2, engine_pb2_grpc
from edgepipe.wire.v1 import node_pb2 as pb
from tests.support.cluster.fuzz_messages import MessageFuzzer
from tests.support.faults.rogue.member import BEAT_S, Rogue

_ANSWER_S = 10.0  # an engine on a busy machine
_BEATS = 150


async def claim_tokens(rogue: Rogue) -> list[str]:
    """Resume its own requests at an honest engine, and repeat them, with more tokens than there are.

    Each gets an ending; what else happens is a complaint.
    """
    _, engine, _ = rogue.heard()
    pair = make_key_pair()
    rogue.template.state.gateways.append(pair.certificate.pem)
    await asyncio.sleep(3 * BEAT_S)
    tls = MutualTls(pair, callers=())
    hello = Hello(role="gateway", node_id=rogue.node_id, node_name="rogue", cluster_id=rogue.store.cluster_id)
    held_up: list[str] = []
    for number, extra in enumerate((0, 1, 100_000, (1 << 32) - 1, -1)):
        try:
            async with (
                asyncio.timeout(_ANSWER_S),
                make_channel(engine.address, tls.to_process(engine.certificate)) as channel,
            ):
                with translated(engine.address):
                    call: Any = engine_pb2_grpc.EngineStub(channel).Generate(wait_for_ready=True)
                    await call.write(engine_pb2.GatewayMessage(hello=hello_to_wire(hello)))
                    await _claim(call, f"claim-{number}", extra)
        except TimeoutError:
            held_up.append(f"the engine did not answer a claim of {extra} more tokens")
        except EdgepipeError as error:
            held_up.append(f"the engine answered a claim of {extra} more tokens with {error!r}")
    return held_up


async def _claim(call: Any, name: str, extra: int) -> None:
    """Ask, read some tokens, claim ``extra`` more (-1: in a repeated request), and read until the request ends."""
    asked = Submission(
        request_id=RequestId(name),
        prompt=(1, 2, 3),
        max_tokens=20,
        ignore_eos=True,
        sampling=SamplingParams(temperature=0.0),
    )
    await call.write(command_to_wire(asked))
    have = 0
    while not have:
        have = sum(len(tokens.ids) for tokens in (await call.read()).tokens)
    if extra < 0:
        again = engine_pb2.GatewayMessage(submit=command_to_wire(asked).submit)
        again.submit.generated.add(ids=[1] * (have + 50))
        await call.write(again)
    else:
        claimed = min(have + extra, (1 << 32) - 1)
        await call.write(command_to_wire(Resumption(request_id=asked.request_id, have=(claimed,))))
    while (event := await call.read()) is not grpc.aio.EOF and not event.ended:
        pass
    call.cancel()


async def claim_numbers(rogue: Rogue) -> list[str]:
    """Beats with numbers near those of the honest nodes, and near every edge of what a number can be."""
    rng = random.Random(7)
    states = [line.state for line in rogue.lines]
    near = {
        "incarnation": [state.incarnation for state in states],
        "version": [state.version for state in states],
        "counter": [engine.epoch.counter for state in states for engine in state.engines],
        "sequence": [1, 1000],
        "echo": [1, 1000],
    }
    samples = [rogue.beat_with(rogue.state()), *(pb.Beat(state=state) for state in states)]
    kind = cast("Descriptor", pb.Beat.DESCRIPTOR)
    fuzzer = MessageFuzzer(kind, samples, rng, near=lambda field: near.get(field, ()))
    for _ in range(_BEATS):
        beat: Any = fuzzer.message()
        beat.leaving = beat.sleeping = False
        beat.state.node_id, beat.state.address = rogue.node_id, rogue.state().address
        beat.state.ClearField("engines")  # other attacks announce those
        await rogue.say_all(beat)
    return []
