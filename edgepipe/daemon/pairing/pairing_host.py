"""The pairing port of a running node: open during an invitation, for one machine."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import suppress

from edgepipe.addresses import with_port
from edgepipe.clock import Clock
from edgepipe.cluster.codes import CODE_DIGITS, SECRET_BYTES, host_pake, show_code, show_string
from edgepipe.cluster.pairing import NONCE_BYTES, Greeting, HostPairing, Party
from edgepipe.cluster.pairing_exchange import ACCEPT_S, Attempt, PairingWindow
from edgepipe.cluster.tries import MAX_TRIES, Tries
from edgepipe.cluster.trust import TrustStore, require_owner
from edgepipe.cluster.trust_keeper import TrustKeeper
from edgepipe.config import PAIRING_OFFSET
from edgepipe.daemon.offers import Contacts
from edgepipe.errors import ConfigInvalid, PairingRejected, QueueFull
from edgepipe.ids import NodeId
from edgepipe.security.trust_view import Role
from edgepipe.telemetry.audit import AuditKind
from edgepipe.wire.common import Hello
from edgepipe.wire.trust import (
    InviteAnswer,
    InviteAsks,
    InviteCommand,
    InviteEvent,
    InviteFailed,
    InviteJoined,
    InviteOpened,
    InviteStart,
)

CODE_S = 300
_MOST_CODE_S = 3600
_MOST_STRING_S = 24 * 3600  # a long string cannot be guessed in any time
_WINDOWS_PER_HOUR = 10
_HOUR_S = 3600.0


class PairingHost:
    """Opens one pairing window at a time. Writes joins and failures to the audit log."""

    def __init__(
        self,
        *,
        trust: TrustKeeper,
        hello: Hello,
        host: str,
        port: int,
        contacts: Contacts,
        clock: Clock,
    ) -> None:
        self._trust = trust
        self._hello = hello
        self._host = host
        self._port = port  # the node's configured port; 0: any
        self._contacts = contacts
        self._clock = clock
        self._opened: deque[float] = deque(maxlen=_WINDOWS_PER_HOUR)
        self._open = asyncio.Lock()

    async def invite(self, commands: AsyncIterator[InviteCommand]) -> AsyncGenerator[InviteEvent]:
        """Run one window from its first command to its end. Raises TrustInvalid on a node that is no owner, QueueFull
        while another window is open or after too many, PortInUse, PairingRejected when no machine joined."""
        first = await anext(commands, None)
        if first is None or not isinstance(first.command, InviteStart):
            raise ConfigInvalid("an invitation begins with its options")
        require_owner(self._trust.store, self._trust.node_id)
        if self._open.locked():
            raise QueueFull("this node is inviting already", next_step="use the code of the other 'node invite'")
        async with self._open:
            self._count()
            async for event in self._window(first.command, commands):
                yield event

    def _count(self) -> None:
        now = self._clock.monotonic_s()
        if len(self._opened) == _WINDOWS_PER_HOUR and now - self._opened[0] < _HOUR_S:
            wait_min = int((_HOUR_S - (now - self._opened[0])) / 60) + 1
            raise QueueFull(
                f"this node has invited {_WINDOWS_PER_HOUR} times within an hour", next_step=f"wait {wait_min} minutes"
            )
        self._opened.append(now)

    async def _window(self, start: InviteStart, commands: AsyncIterator[InviteCommand]) -> AsyncGenerator[InviteEvent]:
        invitation = _Invitation(start, commands, self._trust, self._hello, self._contacts)
        port = await invitation.window.open(host=self._host, port=self._port + PAIRING_OFFSET if self._port else 0)
        running = asyncio.create_task(invitation.run(), name="pairing")
        try:
            await self._contacts.announce_pairing(port)
            yield invitation.opened(self._host, port, usual_port=bool(self._port))
            while (event := await invitation.events.get()) is not None:
                yield event
            await running
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.wait([running])
            await invitation.window.close()
            await self._contacts.announce_pairing(0)


class _Invitation:
    """One code, and the events while it is valid."""

    def __init__(
        self,
        start: InviteStart,
        commands: AsyncIterator[InviteCommand],
        trust: TrustKeeper,
        hello: Hello,
        contacts: Contacts,
    ) -> None:
        self.events: asyncio.Queue[InviteEvent | None] = asyncio.Queue()
        self.window = PairingWindow(
            make_pairing=self._pairing,
            ask=self._ask,
            let_in=self._let_in,
            on_attempt=self._tell,
            tries=Tries(guessable=not start.long_string),
        )
        self._start = start
        self._commands = commands
        self._trust = trust
        self._hello = hello
        self._contacts = contacts
        self._joined = False
        self._given_name = ""  # name of the machine that joins
        self._role = _role(start.role, trust.store)
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._digits = f"{secrets.randbelow(10**CODE_DIGITS):0{CODE_DIGITS}}"
        self._valid_s = min(start.valid_s or CODE_S, _MOST_STRING_S if start.long_string else _MOST_CODE_S)

    def opened(self, host: str, port: int, *, usual_port: bool) -> InviteEvent:
        """Return the first event."""
        code = show_code(self._digits)
        if self._start.long_string:
            code = show_string(host=host, port=port, node_id=self._trust.node_id, secret=self._secret)
        opened = InviteOpened(
            code=code,
            address=with_port(host, port),
            valid_s=self._valid_s,
            cluster_name=self._hello.cluster_name,
            usual_port=usual_port,
        )
        return InviteEvent(event=opened)

    async def run(self) -> None:
        """Wait for the window's end. Raises PairingRejected if no machine joined."""
        try:
            await self.window.until_over(valid_s=self._valid_s)
            if not self._joined:
                raise _nobody_joined(self.window.tries)
        finally:
            self.events.put_nowait(None)

    def _pairing(self) -> HostPairing:
        party = Party(
            code=self._secret if self._start.long_string else self._digits.encode(),
            key_pair=self._trust.key_pair,
            hello=self._hello,
            nonce=secrets.token_bytes(NONCE_BYTES),
        )
        return HostPairing(party, host_pake)

    async def _ask(self, greeting: Greeting, address: str) -> bool:
        if self._start.accept_all:
            return True
        asks = InviteAsks(name=greeting.name, address=address, node_id=greeting.node_id, at_most_s=ACCEPT_S)
        self.events.put_nowait(InviteEvent(event=asks))
        answer = await anext(self._commands, None)
        return answer is not None and isinstance(answer.command, InviteAnswer) and answer.command.accept

    async def _let_in(self, greeting: Greeting) -> tuple[TrustStore, Mapping[str, str]]:
        self._given_name = self._trust.store.name_for(greeting.node_id, greeting.name)
        await self._trust.add(greeting.certificate, role=self._role, name=self._given_name)
        return self._trust.store, self._contacts.known_addresses()

    def _tell(self, attempt: Attempt) -> None:
        who = f"{attempt.name} {attempt.node_id} {attempt.address}".strip()
        if attempt.error is not None:
            self._trust.audit.record(AuditKind.PAIRING_FAILED, who=who, detail=attempt.error.what)
            failed = InviteFailed(
                address=attempt.address, name=attempt.name, error=attempt.error, tries_left=attempt.tries_left
            )
            self.events.put_nowait(InviteEvent(event=failed))
            return
        self._joined = True
        self._trust.audit.record(AuditKind.PAIRED, who=who, detail=f"as {self._role}")
        joined = InviteJoined(
            name=self._given_name,
            address=attempt.address,
            node_id=NodeId(attempt.node_id),
            role=self._role,
            silent=attempt.silent,
            wanted_name=attempt.name if attempt.name != self._given_name else "",
        )
        self.events.put_nowait(InviteEvent(event=joined))


def _nobody_joined(tries: Tries) -> PairingRejected:
    if not tries.used_up:
        return PairingRejected(
            "no machine joined",
            fact="the code is not valid any more",
            next_step="edgepipe node invite makes a new code",
        )
    return PairingRejected(
        "no machine joined",
        fact=f"{MAX_TRIES} wrong codes were given, by {' and '.join(tries.wrong_from())}",
        next_step="edgepipe node invite makes a new code; one with --long cannot be used up by strangers",
    )


def _role(asked: str, store: TrustStore) -> Role:
    """Return the new member's role. The second machine is an owner: else one lost machine locks its owner out."""
    if not asked:
        return Role.OWNER if len(store.peers) == 1 else Role.MEMBER
    if asked not in list(Role):
        raise ConfigInvalid(f"'{asked}' is no role", next_step="give owner or member")
    return Role(asked)
