"""The shell around ``membership``: streams to every known address, beats four times a second, round trips by echo."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import grpc.aio

from edgepipe.clock import Clock
from edgepipe.cluster.admission import GreetingChecks
from edgepipe.cluster.beats import BeatPace, Conversation, SharedTrust, Speaker
from edgepipe.cluster.membership import (
    Command,
    Dial,
    HangUp,
    HeardBeat,
    IdentityTaken,
    MemberChanged,
    Membership,
    Probe,
)
from edgepipe.cluster.reported_states import MAX_BEAT_BYTES, MAX_ENTRIES, MAX_KNOWN, check_size, check_state, is_address
from edgepipe.cluster.trust_keeper import MAX_PIECE_STATEMENTS
from edgepipe.config import Timeouts
from edgepipe.errors import ConnectTimeout, EdgepipeError, LinkError, PairingRejected, PeerClosed, RemoteProtocolError
from edgepipe.ids import NodeId
from edgepipe.link.channels import is_refused, make_channel, translated
from edgepipe.plain_words import plain_call
from edgepipe.security.mutual_tls import Context, Credentials, Security
from edgepipe.wire.bounds import check_numbers
from edgepipe.wire.codec import from_wire, to_wire
from edgepipe.wire.common import Hello, hello_from_wire
from edgepipe.wire.nodes import Beat, NodeState
from edgepipe.wire.sizes import count_entries
from edgepipe.wire.trust import TrustStatement
from edgepipe.wire.v1 import node_pb2 as pb
from edgepipe.wire.v1 import node_pb2_grpc

logger = logging.getLogger(__name__)

_SPREAD_S = 1.0


class Heartbeats:
    """Keeps this node's streams and feeds the membership. ``run`` owns all tasks; call other methods on its loop."""

    def __init__(
        self,
        *,
        membership: Membership,
        hello: Hello,
        trust: SharedTrust,
        security: Security,
        state: Callable[[], NodeState],
        clock: Clock,
        timeouts: Timeouts,
        on_change: Callable[[MemberChanged], None],
        on_identity_taken: Callable[[str], None],
    ) -> None:
        self.clock_skews_ms: dict[NodeId, float] = {}  # each member's wall clock minus ours, at its last report
        self._membership = membership
        self._admission = GreetingChecks(hello)
        self._speaker = Speaker(
            membership=membership, hello=hello, trust=trust, state=state, clock=clock, timeouts=timeouts
        )
        self._pace = BeatPace()
        self._trust = trust
        self._security = security
        self._state = state
        self._clock = clock
        self._timeouts = timeouts
        self._on_change = on_change
        self._on_identity_taken = on_identity_taken
        self._doubtful: set[str] = set()  # dialled addresses where no node has proved its identity yet
        self._known_versions: dict[NodeId, int] = {}  # newest version of this node's state that a member confirmed
        self._called_s: dict[NodeId, float] = {}  # last beat of members over connections that they opened
        self._confirmed_more = asyncio.Event()  # set, and replaced, when a member confirms more
        self._converted: tuple[NodeState, pb.NodeState] | None = None  # this node's newest state, and its message
        self._dials: dict[str, asyncio.Task[None]] = {}
        self._wakes: dict[int, asyncio.Event] = {}
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._waiting: list[Command] = []  # commands from before ``run``

    @property
    def refusals(self) -> Mapping[str, EdgepipeError]:
        """Why discovered nodes do not join, by address or name."""
        return self._admission.refusals

    async def run(self) -> None:
        """Tick and dial until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            waiting, self._waiting = self._waiting, []
            self._perform(waiting)
            tasks.create_task(self._follow_trust(), name="trust")
            while True:
                await asyncio.sleep(self._timeouts.tick_s)
                self._perform(self._membership.on_tick(now=self._clock.monotonic_s()))

    def found(self, address: str, *, node_id: str = "", manual: bool = False, remembered: bool = False) -> None:
        """Take an address from discovery, memory or a person. From the network only members' addresses count."""
        if not manual and NodeId(node_id) not in self._trusted():
            return
        commands = self._membership.on_address(address, node_id=node_id, manual=manual, answered=remembered)
        self._perform(commands)

    def is_called_by(self, node_id: NodeId) -> bool:
        """Return whether a member has opened a connection to this node and still sends beats over it."""
        called_s = self._called_s.get(node_id, float("-inf"))
        return self._clock.monotonic_s() - called_s < self._timeouts.dead_max_s

    def announce(self) -> None:
        """Send this node's changed state to all members now."""
        for wake in self._wakes.values():
            wake.set()

    def sleeps(self, *, sleeping: bool) -> None:
        """Tell all members that this machine is about to sleep, or that it is awake."""
        self._speaker.sleeping = sleeping
        self.announce()

    async def leave(self) -> None:
        """Tell all members that this node leaves; return when the streams have ended or after 500 ms."""
        self._speaker.leaving = True
        self.announce()
        dials = list(self._dials.values())
        if dials:
            await asyncio.wait(dials, timeout=0.5)

    async def spread(self) -> None:
        """Return when every reachable member has confirmed this node's present state, or after a second. A member that
        did not confirm gets the state as soon as it is heard again."""
        wanted = self._state().version
        self.announce()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SPREAD_S):
                while any(
                    self._known_versions.get(member.node.node_id, 0) < wanted for member in self._membership.reachable()
                ):
                    await self._confirmed_more.wait()

    async def answer(self, beats: AsyncIterator[pb.Beat], context: Context) -> AsyncGenerator[pb.Beat]:
        """Serve ``Node.Heartbeat``: answer each beat with one beat.

        Raises VersionMismatch, PairingRejected, AccessDenied to a caller that gives another node's id, and
        RemoteProtocolError for numbers beyond their bounds.
        """
        conversation = Conversation()
        node_id = ""
        async for beat in beats:
            if not node_id:
                hello = hello_from_wire(beat.hello)
                node_id = self._admission.admit(hello)
                self._admission.require(self._trust.member(node_id), hello)
                self._security.require_node(context, node_id)
            if self._trust.member(node_id) is None:
                yield self._message(self._speaker.farewell(conversation))
                raise PairingRejected(f"{node_id} was removed from the cluster")
            self._hear(conversation, beat, NodeId(node_id), dialled="")
            self._called_s[NodeId(node_id)] = self._clock.monotonic_s()
            yield self._message(self._speaker.beat(conversation))
            await self._pause(NodeId(node_id))

    async def _pause(self, node_id: NodeId) -> None:
        """Wait after a member's beat if the member sends more than it may."""
        if wait_s := self._pace.wait_s(node_id, now_s=self._clock.monotonic_s()):
            await asyncio.sleep(wait_s)

    def _message(self, beat: Beat) -> pb.Beat:
        """Convert a beat. The node's state is converted once per version, not for every member."""
        message = to_wire(replace(beat, state=None), pb.Beat)
        if beat.state is not None:
            if self._converted is None or self._converted[0] is not beat.state:
                self._converted = beat.state, to_wire(beat.state, pb.NodeState)
            message.state.CopyFrom(self._converted[1])
        return message

    def _trusted(self) -> set[NodeId]:
        return {peer.node_id for peer in self._trust.outbound()}

    async def _follow_trust(self) -> None:
        """Send changes of trust at once; drop removed nodes."""
        async for _ in self._trust.changes():
            trusted = self._trusted()
            self.announce()
            for node_id in self._membership.node_ids():
                if node_id not in trusted:
                    self._perform(self._membership.on_expelled(node_id))

    def _perform(self, commands: Iterable[Command]) -> None:
        for command in commands:
            if self._tasks is None:
                self._waiting.append(command)
            elif isinstance(command, Dial):
                self._start_dial(command.address, self._tasks)
            elif isinstance(command, HangUp):
                self._doubtful.discard(command.address)
                self._admission.refusals.pop(command.address, None)
                if task := self._dials.pop(command.address, None):
                    task.cancel()
            elif isinstance(command, Probe):
                self._start_probe(command.address, self._tasks)
            elif isinstance(command, IdentityTaken):
                self._on_identity_taken(command.address)
            else:
                self._on_change(command)

    def _start_dial(self, address: str, tasks: asyncio.TaskGroup) -> None:
        if address not in self._dials and not self._speaker.leaving:
            self._dials[address] = tasks.create_task(self._dial(address), name=f"dial:{address}")

    def _start_probe(self, address: str, tasks: asyncio.TaskGroup) -> None:
        if address not in self._probes and not self._speaker.leaving:
            self._probes[address] = tasks.create_task(self._probe(address), name=f"probe:{address}")

    async def _probe(self, address: str) -> None:
        """Exchange one beat over a new connection: a thin TCP stream waits seconds for a packet lost twice, a new
        connection does not."""
        try:
            credentials = await self._credentials(address)
            async with make_channel(address, credentials, max_received_bytes=MAX_BEAT_BYTES) as channel:
                with translated(address):
                    call = node_pb2_grpc.NodeStub(channel).Heartbeat()
                    conversation = Conversation()
                    await call.write(self._message(self._speaker.beat(conversation)))
                    first = await self._first_answer(call, address)
                    node_id = self._reached(credentials, hello_from_wire(first.hello))
                    self._hear(conversation, first, node_id, dialled="")
        except EdgepipeError as error:
            logger.debug("probe failed address=%s: %s", address, error)
        finally:
            self._probes.pop(address, None)

    async def _dial(self, address: str) -> None:
        """Hold a stream to ``address``; dial again whenever it ends."""
        wait_s, held_s = self._timeouts.redial_min_s, self._clock.monotonic_s()
        while not self._speaker.leaving:
            began_s = self._clock.monotonic_s()
            try:
                await self._converse(address)
            except ConnectTimeout as error:
                if is_refused(error):
                    self._perform(self._membership.on_refused(address, now=self._clock.monotonic_s()))
                logger.debug("dial failed address=%s: %s", address, error)
            except PeerClosed as error:
                logger.debug("stream ended address=%s: %s", address, error)
            except EdgepipeError as error:
                self._admission.refuse(address, error)
            now_s = self._clock.monotonic_s()
            if now_s - began_s > 2 * self._timeouts.connect_s:
                held_s = now_s
            urgent = held_s == now_s or self._membership.expects(address)
            away = now_s - held_s >= self._timeouts.forget_s
            longest_s = self._timeouts.redial_away_s if away else self._timeouts.redial_max_s
            wait_s = self._timeouts.redial_min_s if urgent else min(2 * wait_s, longest_s)
            await asyncio.sleep(0 if self._speaker.leaving else wait_s)

    async def _converse(self, address: str) -> None:
        """Run one stream to its end. Raises the reason of the end; PeerClosed for a clean end by the far side."""
        credentials = await self._credentials(address)
        async with make_channel(address, credentials, max_received_bytes=MAX_BEAT_BYTES) as channel:
            with translated(address):
                call = node_pb2_grpc.NodeStub(channel).Heartbeat()
                conversation = Conversation()
                await call.write(self._message(self._speaker.beat(conversation)))
                first = await self._first_answer(call, address)
                hello = hello_from_wire(first.hello)
                node_id = self._reached(credentials, hello)
                trusted = {peer.node_id: peer for peer in self._trust.outbound()}
                self._admission.require(trusted.get(node_id), hello)
                self._admission.refusals.pop(address, None)
                self._hear(conversation, first, node_id, dialled=address)
                async with asyncio.TaskGroup() as tasks:
                    sender = tasks.create_task(self._send(call, conversation), name=f"beats:{address}")
                    try:
                        while (beat := await _next_beat(call)) is not None:
                            self._hear(conversation, beat, node_id, dialled=address)
                            await self._pause(node_id)
                    except grpc.aio.AioRpcError:
                        pass  # the call's code is read below
                    sender.cancel()
                if await call.code() is not grpc.StatusCode.OK:
                    fact = plain_call((await call.code()).name, await call.details() or "")
                    raise PeerClosed(f"{address} closed the connection", fact=fact)

    async def _credentials(self, address: str) -> Credentials:
        """Return credentials for the expected node; after a failure, for any member at that address."""
        expected = "" if address in self._doubtful else self._membership.owner(address)
        self._doubtful.discard(address)
        if expected:
            self._doubtful.add(address)  # the address is doubtful until a node has answered
        return await self._security.to_address(address, node_id=expected, timeout_s=self._timeouts.connect_s)

    def _reached(self, credentials: Credentials, hello: Hello) -> NodeId:
        """Return the id of the node that answered. Raises RemoteProtocolError if it gives another id for its own."""
        node_id = self._admission.admit(hello)
        if credentials.node_id and node_id != credentials.node_id:
            raise RemoteProtocolError(f"node {credentials.node_id} says that it is {node_id}")
        return NodeId(node_id)

    async def _first_answer(self, call: Any, address: str) -> pb.Beat:
        try:
            async with asyncio.timeout(self._timeouts.connect_s):
                first = await _next_beat(call)
        except TimeoutError as exc:
            raise ConnectTimeout(f"{address} does not answer", fact=f"waited {self._timeouts.connect_s:.0f} s") from exc
        if first is None:
            raise LinkError(f"{address} ended the stream without an answer")
        self._doubtful.discard(address)
        return first

    async def _send(self, call: Any, conversation: Conversation) -> None:
        """Send a beat every interval, and at once when the state changed."""
        self._wakes[id(conversation)] = conversation.wake
        try:
            while True:
                try:
                    async with asyncio.timeout(self._timeouts.beat_interval_s):
                        await conversation.wake.wait()
                except TimeoutError:
                    pass
                conversation.wake.clear()
                await call.write(self._message(self._speaker.beat(conversation)))
                if self._speaker.leaving:
                    await call.done_writing()
                    return
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reader reports why the stream broke
        finally:
            self._wakes.pop(id(conversation), None)

    def _hear(self, conversation: Conversation, beat: pb.Beat, node_id: NodeId, *, dialled: str) -> None:
        check_numbers(beat)
        now = self._clock.monotonic_s()
        conversation.heard, conversation.heard_at_s = beat.sequence, now
        trusted = self._trusted()
        state = self._state_of(beat, node_id)
        conversation.incarnation = state.incarnation if state is not None else conversation.incarnation
        heard = HeardBeat(
            node_id=node_id,
            state=state,
            incarnation=conversation.incarnation,
            known=tuple(
                (node.node_id, node.address)
                for node in beat.known[:MAX_KNOWN]
                if node.node_id in trusted and is_address(node.address)
            ),
            leaving=beat.leaving,
            sleeping=beat.sleeping,
            dialled=dialled,
        )
        if beat.trust_digest:
            conversation.heard_digest = beat.trust_digest
            # One beyond the limit shows that there are too many.
            pieces = beat.trust.statements[: MAX_PIECE_STATEMENTS + 1]
            statements = [from_wire(statement, TrustStatement) for statement in pieces]
            conversation.heard_statements(statements)
            self._trust.hear(node_id, digest=beat.trust_digest, statements=statements)
        if beat.trust_keys:
            conversation.heard_keys(beat.trust_keys)
        self._perform(self._membership.on_beat(heard, now=now))
        if beat.echo >= conversation.sent_in > 0:
            self._note_known(node_id, conversation.sent_version)
        if beat.wall_ms and node_id in trusted:
            self.clock_skews_ms[node_id] = beat.wall_ms - self._clock.wall_s() * 1e3
        sent_s = conversation.sent_at_s.get(beat.echo)
        if dialled and sent_s is not None:
            rtt_ms = max(0.0, (now - sent_s) * 1e3 - beat.echo_delay_us / 1e3)
            self._membership.on_rtt(node_id, rtt_ms=rtt_ms)

    def _state_of(self, beat: pb.Beat, node_id: NodeId) -> NodeState | None:
        """Return the sender's own state from a beat, if it is within the limits."""
        if not beat.HasField("state") or beat.state.node_id != node_id:
            return None
        try:
            return read_state(beat.state)
        except EdgepipeError as error:
            refusal = RemoteProtocolError("its state is refused", fact=error.what)
            self._admission.refuse(f"node {node_id}", refusal)
            return None

    def _note_known(self, node_id: NodeId, version: int) -> None:
        if self._known_versions.get(node_id, 0) < version:
            self._known_versions[node_id] = version
            confirmed, self._confirmed_more = self._confirmed_more, asyncio.Event()
            confirmed.set()


async def _next_beat(call: Any) -> pb.Beat | None:
    """Read the next beat of a call; None at the stream's end. Raises AioRpcError."""
    beat = await call.read()
    return None if beat is grpc.aio.EOF else beat


def read_state(message: pb.NodeState) -> NodeState:
    """Convert a member's state. Raises EdgepipeError if it is beyond the limits or impossible."""
    check_size(num_bytes=message.ByteSize(), num_entries=count_entries(message, most=MAX_ENTRIES))
    state = from_wire(message, NodeState)
    check_state(state)
    return state
