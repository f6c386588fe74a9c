"""What a member that has turned can try, one function each. It returns what was let through and should not have been.

The numbers R1 to R7 are those of ``docs/security.md``. An attack ends by itself; what it announced is taken back by
``Rogue.behave``, so that they can run one after another against one cluster.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from edgepipe.backend.types import DEFAULT_SETTINGS
from edgepipe.config import Timeouts
from edgepipe.daemon.files.transfer import WeightsClient
from edgepipe.errors import AccessDenied, RequestInvalid
from edgepipe.link.channels import make_channel
from edgepipe.security.access import ProcessKind
from edgepipe.security.certificates import make_key_pair
from edgepipe.security.mutual_tls import MutualTls, Peer
from edgepipe.security.trust_view import Role
from edgepipe.weights.manifest import METADATA_LIMITS, TOKENIZER_FILE, FileEntry, Manifest
from edgepipe.wire.codec import from_wire, to_wire
from edgepipe.wire.nodes import NodeState
from edgepipe.wire.v1 import common_pb2, engine_pb2, node_pb2_grpc, trust_pb2
from edgepipe.wire.v1 import node_pb2 as pb
from tests.support.faults.rogue.claims import claim_numbers, claim_tokens
from tests.support.faults.rogue.member import BEAT_S, Line, Rogue, signed

MODEL = "other"  # on an honest node's disk, and not served: the attacks on tokenizers and manifests are about it
_SERVE_CONTEXT = b"edgepipe-serve-1"
_HELD_S = 1.0  # how long a thing is announced: some beats
_FLOOD_S = 2.0
_NASTY = "\x1b]0;owned\x07\x1b[2J\x1b[1;31m\r\nERROR node: forged line\n\u202e\u2028"
_FAR = 1 << 52  # beyond every step that a receiver accepts, and within what a message may say
_MANY = 5000

Attack = Callable[[Rogue], Awaitable[list[str]]]


async def promote_accomplice(rogue: Rogue) -> list[str]:
    """R1: a removed owner makes a new key an owner, which removes the founder and everybody else."""
    for number in (0, 1, _FAR):
        accomplice = make_key_pair()
        certificate = accomplice.certificate.pem
        statements = [
            rogue.statement(
                rogue.former_owner,
                number=number,
                add=trust_pb2.Add(certificate=certificate, role=Role.OWNER, node_name="accomplice"),
            ),
            rogue.statement(
                accomplice,
                number=number,
                add=trust_pb2.Add(certificate=rogue.pair.certificate.pem, role=Role.OWNER, node_name="rogue"),
            ),
        ]
        gone = [rogue.former_owner.fingerprint, *(line.node_id for line in rogue.lines)]
        for signer in (accomplice, rogue.former_owner, rogue.pair):
            statements += [
                rogue.statement(signer, number=number, remove=trust_pb2.Remove(node_id=node_id))
                for node_id in gone
                if node_id != signer.fingerprint
            ]
        await rogue.tell_statements(statements, piece=len(statements))
    await asyncio.sleep(_HELD_S)
    return []


async def fill_trust(rogue: Rogue) -> list[str]:
    """R2: an owner's key says what no store has room for: 4,093 removals of nobody, and statements with padding."""
    junk = [_junk_id(index) for index in range(4093)]
    statements = [
        rogue.statement(rogue.owner, number=index + 1, remove=trust_pb2.Remove(node_id=node_id))
        for index, node_id in enumerate(junk)
    ]
    for index in range(64):
        body = trust_pb2.TrustBody(
            cluster_id=rogue.store.cluster_id,
            signer=rogue.owner.fingerprint,
            number=1 << 32 | index,
            remove=trust_pb2.Remove(node_id=_junk_id(index), kept=[os.urandom(32)] * 90),
        )
        statements.append(signed(body, rogue.owner))
        padded = trust_pb2.TrustBody.FromString(body.SerializeToString() + _unknown_field(3000))
        statements.append(signed(padded, rogue.owner))
    await rogue.tell_statements(statements, piece=256)
    await asyncio.sleep(_HELD_S)
    return []


async def take_pipeline(rogue: Rogue) -> list[str]:
    """R3: the honest pipeline, at an epoch that nobody can replace, from an engine here, with records that say so."""
    honest, engine, record = rogue.heard()
    state = rogue.state()
    claimed = state.engines.add()
    claimed.CopyFrom(engine)
    claimed.epoch.counter = _FAR
    claimed.address, claimed.certificate = state.address, rogue.pair.certificate.pem
    for version in (1, 1 << 20, _FAR):
        for signer in (rogue.node_id, honest.node_id):
            body = pb.ServeBody.FromString(record.body)
            body.engine_node, body.signer, body.begun = rogue.node_id, signer, True
            body.version += version
            data = body.SerializeToString(deterministic=True)
            state.serves.add(body=data, signature=rogue.pair.sign(_SERVE_CONTEXT + data))
    rogue.template.state.CopyFrom(state)
    let_through = await _direct(rogue, engine, state.serves[0])
    await asyncio.sleep(_HELD_S)
    return let_through


async def _direct(rogue: Rogue, engine: engine_pb2.EngineState, record: pb.ServeRecord) -> list[str]:
    """Calls about the honest pipeline, in the rogue's own name and by its genuine certificate."""
    pipeline_id, spec = engine.pipeline_id, pb.ServeBody.FromString(record.body).spec
    epoch = common_pb2.Epoch(counter=_FAR, engine_id="rogue")
    about: dict[str, Any] = {"hello": rogue.hello, "pipeline_id": pipeline_id}
    requests: dict[str, Any] = {
        "StartEngine": pb.StartEngineRequest(**about, spec=spec, record=record),
        "Release": pb.ReleaseRequest(**about, epoch=epoch),
        "Rebalance": pb.RebalanceRequest(**about, num_nodes=1),
        "KeepCopy": pb.KeepCopyRequest(hello=rogue.hello, model=MODEL, manifest_hash="0" * 64, parts=[0]),
    }
    wanted = [(line, method, request) for line in rogue.lines for method, request in requests.items()]
    for line in rogue.lines:
        if any(engine.pipeline_id == pipeline_id for engine in line.state.engines):
            wanted.append((line, "StopEngine", pb.StopEngineRequest(**about, record=record)))
    codes = await asyncio.gather(*(rogue.refused(*call) for call in wanted))
    return [f"{method} at {line.address}" for (line, method, _), code in zip(wanted, codes, strict=True) if not code]


async def prepare_as_engine(rogue: Rogue) -> list[str]:
    """R3: an engine of the rogue's, announced and so let in, asks for the honest pipeline's stages."""
    _, engine, record = rogue.heard()
    spec = pb.ServeBody.FromString(record.body).spec
    pair = make_key_pair()
    rogue.template.state.engines.add(pipeline_id="mine", model=spec.model, certificate=pair.certificate.pem)
    await asyncio.sleep(3 * BEAT_S)
    tls = MutualTls(pair, callers=())
    peers = [
        Peer(node_id=peer.node_id, kind=ProcessKind.NODE, certificate=peer.certificate)
        for peer in rogue.store.peers.values()
    ]
    tls.introduce([], nodes=peers)
    request = pb.PrepareRequest(
        hello=rogue.hello,
        pipeline_id=engine.pipeline_id,
        epoch=common_pb2.Epoch(counter=_FAR, engine_id="rogue"),
        model=spec.model,
        manifest_hash=spec.manifest_hash,
        placement=spec.stages[0],
        settings=spec.settings,
        kv_tokens=_FAR,
    )
    codes = await asyncio.gather(
        *(rogue.refused(line, "Prepare", request, credentials=tls.to_node(line.node_id)) for line in rogue.lines)
    )
    denied = AccessDenied.code
    return [f"Prepare at {line.address}" for line, code in zip(rogue.lines, codes, strict=True) if code != denied]


async def swap_tokenizer(rogue: Rogue) -> list[str]:
    """R4: a model with its genuine hash, whose tokenizer is another one."""
    manifest, files = await _genuine(rogue)
    tokenizer = json.loads(files[TOKENIZER_FILE])
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    files[TOKENIZER_FILE] = json.dumps(tokenizer).encode()
    rogue.files = files
    rogue.manifest = replace(manifest, files=tuple(_with_bytes(entry, files) for entry in manifest.files)).to_json()
    rogue.template.state.CopyFrom(_announcing(rogue, {MODEL: manifest.hash}))
    await asyncio.sleep(_HELD_S)
    return []


async def announce_models(rogue: Rogue) -> list[str]:
    """R5: engines in hundreds, of models with thousands of files, or with files as large as they may be."""
    entries = [
        FileEntry(name=name, num_bytes=limit, sha256="0" * 64, metadata=True, content="1" * 64)
        for name, limit in METADATA_LIMITS.items()
    ]
    many = [
        FileEntry(name=f"file-{index}", num_bytes=64 << 20, sha256="0" * 64, metadata=True) for index in range(4000)
    ]
    models = [f"model-{index}" for index in range(300)]
    for files in (tuple(many), tuple(entries)):
        manifest = Manifest(model_id=models[0], source="", tensors=(), files=files)
        rogue.manifest, rogue.files = manifest.to_json(), {}
        rogue.template.state.CopyFrom(_announcing(rogue, dict.fromkeys(models, manifest.hash)))
        await asyncio.sleep(_HELD_S)
    return []


async def sign_badly(rogue: Rogue) -> list[str]:
    """R6: 17,000 statements with bad signatures in one beat, and then many in small pieces."""
    founder = rogue.store.founding.signer
    statements = [
        trust_pb2.TrustStatement(
            body=trust_pb2.TrustBody(
                cluster_id=rogue.store.cluster_id,
                signer=founder,
                number=index + 1,
                remove=trust_pb2.Remove(node_id=_junk_id(index)),
            ).SerializeToString(deterministic=True),
            signature=bytes(70),
        )
        for index in range(17_000)
    ]
    await rogue.tell_statements(statements, piece=len(statements))
    await _repeated(_FLOOD_S, lambda: rogue.tell_statements(statements[:200], piece=40))
    rest = iter(range(200, len(statements), 20))
    await _repeated(_FLOOD_S, lambda: rogue.tell_statements(_slice(statements, next(rest, 200)), piece=20))
    return []


async def ask_for_trust(rogue: Rogue) -> list[str]:
    """Beats that ask for the whole trust store again, hundreds of times a second, and keys that no store has."""

    async def ask() -> None:
        beat = rogue.beat()
        beat.trust_digest = os.urandom(32)
        beat.trust_keys.extend(os.urandom(32) for _ in range(64))
        await rogue.say_all(beat)

    await _repeated(_FLOOD_S, ask)
    beat = rogue.beat()
    beat.trust_digest = bytes(32)
    beat.trust_keys.extend(os.urandom(32) for _ in range(100_000))
    await rogue.say_all(beat)
    return []


async def write_escapes(rogue: Rogue) -> list[str]:
    """R7: escape sequences and line breaks in every text that a beat, a state, a greeting and an error have."""
    beat = pb.Beat()
    _fill(beat, _NASTY)
    own = rogue.state()
    beat.state.node_id, beat.state.address = own.node_id, own.address
    beat.state.incarnation, beat.state.version = own.incarnation, 0
    beat.hello.CopyFrom(rogue.hello)
    beat.hello.edgepipe_version = beat.hello.node_name = beat.hello.role = beat.hello.cluster_name = _NASTY
    beat.leaving = beat.sleeping = False
    rogue.template = beat
    rogue.error = RequestInvalid(_NASTY, fact=_NASTY, next_step=_NASTY, node=_NASTY)
    for line in rogue.lines:
        for name in ("cluster_id", "node_id"):
            first = rogue.beat(first=True)
            setattr(first.hello, name, _NASTY)
            await rogue.converse(line, [first])
        await rogue.refused(line, "Vouch", pb.VouchRequest(hello=rogue.hello, pipeline_id=_NASTY, node_id=_NASTY))
    await asyncio.sleep(_HELD_S)
    return []


async def forge_states(rogue: Rogue) -> list[str]:
    """Beats with other nodes' states, with their farewells, and with states of millions of bytes or of entries."""
    for line in rogue.lines:
        for notice in ({}, {"leaving": True}, {"sleeping": True}):
            forged = pb.NodeState()
            forged.CopyFrom(line.state)
            forged.incarnation, forged.version = forged.incarnation + 1, _FAR
            await rogue.say_all(rogue.beat_with(forged, **notice))
            rogue.behave()
    for state in _huge_states(rogue):
        for _ in range(4):
            await rogue.say_all(rogue.beat_with(state))
        await asyncio.sleep(BEAT_S)
        rogue.behave()
    return []


async def change_all_the_time(rogue: Rogue) -> list[str]:
    """Another state in every beat, as fast as they go: other names, other certificates, other addresses."""
    pems = [make_key_pair().certificate.pem for _ in range(32)]
    count = 0

    async def change() -> None:
        nonlocal count
        count += 1
        state = rogue.state()
        state.name = f"rogue-{count}"
        state.address = f"127.0.0.1:{1024 + count % 60_000}"
        state.gateways.extend(pems[count % 32 :])
        state.engines.extend(engine_pb2.EngineState(certificate=pem, pipeline_id=f"{count}") for pem in pems)
        await rogue.say_all(rogue.beat_with(state))

    await _repeated(_FLOOD_S, change)
    return []


async def flood_addresses(rogue: Rogue) -> list[str]:
    """Introductions of honest nodes at thousands of addresses where nobody is, or that are none."""
    for _ in range(3):
        beat = rogue.beat()
        for index in range(_MANY):
            line = rogue.lines[index % len(rogue.lines)]
            beat.known.add(node_id=line.node_id, address=f"127.0.0.1:{1024 + index}")
            beat.known.add(node_id=line.node_id, address=("unix:/tmp/x", "x" * 500, "dns:///localhost:1")[index % 3])
        await rogue.say_all(beat)
        await asyncio.sleep(BEAT_S)
    return []


async def hold_calls(rogue: Rogue) -> list[str]:
    """As many calls at once as six connections carry: nobody else may be kept out by them."""
    request = pb.ReleaseRequest(hello=rogue.hello, pipeline_id="x" * 100_000)
    async with asyncio.TaskGroup() as tasks:
        for line in rogue.lines:
            for _ in range(6):
                tasks.create_task(_hold(rogue, line, request))
    return []


async def _hold(rogue: Rogue, line: Line, request: pb.ReleaseRequest) -> None:
    """100 heartbeat streams and 20 calls over one connection."""
    async with make_channel(line.address, rogue.tls.to_node(line.node_id)) as channel:
        stub = node_pb2_grpc.NodeStub(channel)
        streams: list[Any] = [stub.Heartbeat() for _ in range(100)]
        calls = [stub.Release(request) for _ in range(20)]
        writes = [asyncio.ensure_future(stream.write(rogue.beat(first=True))) for stream in streams]
        await asyncio.sleep(_FLOOD_S)
        for write in writes:
            write.cancel()
        await asyncio.gather(*writes, return_exceptions=True)  # refused, or still waiting for room
        for call in (*streams, *calls):
            call.cancel()


async def live_long(rogue: Rogue) -> list[str]:
    """The highest incarnation and version that there are. The rogue is stale afterwards, so this is its last."""
    for incarnation, version in ((1 << 63, 1), ((1 << 64) - 1, (1 << 64) - 1)):
        state = rogue.state()
        state.incarnation, state.version = incarnation, version
        beat = rogue.beat_with(state, echo=(1 << 64) - 1, echo_delay_us=(1 << 64) - 1, wall_ms=(1 << 64) - 1)
        await rogue.say_all(beat)
        await asyncio.sleep(BEAT_S)
    return []


ATTACKS: Mapping[str, Attack] = {
    attack.__name__: attack
    for attack in (
        promote_accomplice,
        fill_trust,
        take_pipeline,
        prepare_as_engine,
        swap_tokenizer,
        announce_models,
        sign_badly,
        ask_for_trust,
        write_escapes,
        forge_states,
        change_all_the_time,
        flood_addresses,
        hold_calls,
        claim_tokens,
        claim_numbers,
        live_long,
    )
}


async def _repeated(seconds: float, act: Callable[[], Awaitable[None]]) -> None:
    """As often as it goes."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + seconds
    while loop.time() < end_s:
        await act()


def _slice(statements: list[trust_pb2.TrustStatement], start: int) -> list[trust_pb2.TrustStatement]:
    return statements[start : start + 20]


def _junk_id(index: int) -> str:
    """What looks like a node's id."""
    return base64.b32encode(hashlib.sha256(str(index).encode()).digest()).decode().lower().rstrip("=")


def _unknown_field(num_bytes: int) -> bytes:
    """Serialised: field 999, of which nobody knows anything."""
    tag = 999 << 3 | 2
    return bytes([tag & 0x7F | 0x80, tag >> 7, num_bytes & 0x7F | 0x80, num_bytes >> 7]) + bytes(num_bytes)


def _with_bytes(entry: FileEntry, files: Mapping[str, bytes]) -> FileEntry:
    data = files.get(entry.name)
    if data is None:
        return entry
    return replace(entry, num_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


async def _genuine(rogue: Rogue) -> tuple[Manifest, dict[str, bytes]]:
    """The manifest and the metadata files of the model, as an honest node hands them out to every member."""
    client = WeightsClient(hello=rogue.greeting, security=rogue.tls, timeouts=Timeouts.loopback())
    state = next(line.state for line in rogue.lines if any(model.model == MODEL for model in line.state.models))
    source = from_wire(state, NodeState)
    manifest = await client.manifest(source, MODEL)
    files: dict[str, bytes] = {}
    for entry in manifest.metadata_files:
        files[entry.name] = b"".join([data async for data in client.file(source, manifest, entry.name)])
    return manifest, files


def _announcing(rogue: Rogue, models: Mapping[str, str]) -> pb.NodeState:
    """A state with an engine and a record for each model, given by its hash."""
    state = rogue.state()
    for model, manifest_hash in models.items():
        pipeline_id = f"rogue-{model}"
        settings = to_wire(DEFAULT_SETTINGS, common_pb2.StageSettings)
        spec = pb.ServeSpec(model=model, manifest_hash=manifest_hash, settings=settings)
        body = pb.ServeBody(
            cluster_id=rogue.store.cluster_id,
            signer=rogue.node_id,
            pipeline_id=pipeline_id,
            spec=spec,
            version=1,
            engine_node=rogue.node_id,
            asker=rogue.node_id,
        )
        data = body.SerializeToString(deterministic=True)
        state.serves.add(body=data, signature=rogue.pair.sign(_SERVE_CONTEXT + data))
        state.engines.add(
            model=model,
            pipeline_id=pipeline_id,
            manifest_hash=manifest_hash,
            state="ready",
            address=state.address,
            certificate=rogue.pair.certificate.pem,
        )
    return state


def _huge_states(rogue: Rogue) -> list[pb.NodeState]:
    """Each with another field that is far too large."""
    states: list[pb.NodeState] = []
    for field in pb.NodeState.DESCRIPTOR.fields:
        if field.name in ("node_id", "incarnation", "version"):
            continue
        state = rogue.state()
        if field.is_repeated:
            values = getattr(state, field.name)
            if field.type == FieldDescriptor.TYPE_MESSAGE:
                for _ in range(_MANY):
                    values.add()
            else:
                text = _NASTY * 10
                values.extend([text if field.type == FieldDescriptor.TYPE_STRING else text.encode()] * _MANY)
        elif field.type == FieldDescriptor.TYPE_STRING:
            setattr(state, field.name, "x" * 3_900_000)
        else:
            continue
        states.append(state)
    return states


def _fill(message: Message, text: str) -> None:
    """Put ``text`` into every text of the message, one entry into every list."""
    for field in message.DESCRIPTOR.fields:
        if field.type == FieldDescriptor.TYPE_STRING:
            if field.is_repeated:
                getattr(message, field.name).append(text)
            else:
                setattr(message, field.name, text)
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            _fill(getattr(message, field.name).add() if field.is_repeated else _set(message, field.name), text)


def _set(message: Message, name: str) -> Message:
    part: Message = getattr(message, name)
    part.SetInParent()
    return part
