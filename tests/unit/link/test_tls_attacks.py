"""Who is kept out: strangers, forgers, members who overstep, the removed, and those who only want to disturb."""

from __future__ import annotations

import asyncio
import datetime
import os
import ssl
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from edgepipe.errors import (
    AccessDenied,
    ConnectTimeout,
    EdgepipeError,
    LinkError,
    PairingRejected,
    PeerClosed,
    SendTimeout,
)
from edgepipe.link.channels import MAX_MESSAGE_BYTES, MAX_STREAMS, is_refused, make_channel
from edgepipe.security.access import ProcessKind, allowed
from edgepipe.security.certificates import Certificate, KeyPair, make_key_pair
from edgepipe.security.mutual_tls import MAX_CALLS_PER_CALLER, Credentials, MutualTls, who_answers
from tests.support.network.ports import free_port
from tests.support.network.tcp_proxy import tcp_proxy
from tests.support.network.tls_ends import PREFIX, Party, listening, until_closed

ONE_OF_EACH = {
    ProcessKind.NODE: "Node/Heartbeat",
    ProcessKind.ENGINE: "Node/Prepare",
    ProcessKind.GATEWAY: "Engine/Generate",
    ProcessKind.STAGE: "Stage/Ring",
}
METHODS = ["Node/Heartbeat", "Node/Prepare", "Node/StartEngine", "Weights/ReadTensor", "Engine/Generate"]
METHODS += ["Stage/Control", "Stage/Ring", "Admin/Shutdown", "Children/Attach", "Node/NoSuchThing"]


async def test_a_member_is_let_in_and_nobody_else() -> None:
    member, stranger = Party(), Party()
    async with listening(member) as process:
        assert await process.say(member, "Node/Heartbeat") == b"x"
        with pytest.raises(LinkError):
            await process.say(stranger, "Node/Heartbeat")
        assert process.echo.calls == ["Node/Heartbeat"]
        assert process.security.refused_handshakes == 1


async def test_without_a_certificate_or_without_tls_nobody_gets_far() -> None:
    member = Party()
    async with listening(member) as process:
        pinned = process.party.pair.certificate

        no_client = Credentials(server_name=pinned.dns_name, tls=grpc.ssl_channel_credentials(pinned.pem))
        for credentials in (no_client, Credentials()):
            async with make_channel(process.address, credentials) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await channel.unary_unary(PREFIX + "Node/Release")(b"", timeout=10)
                assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert process.echo.calls == []


def tls_context(pair: KeyPair, folder: Path, newest: ssl.TLSVersion) -> ssl.SSLContext:
    """A client's that shows a member's certificate, checks nobody's, and speaks no newer version."""
    (folder / "key.pem").write_bytes(pair.key_pem)
    (folder / "cert.pem").write_bytes(pair.certificate.pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    context.maximum_version = newest
    context.set_alpn_protocols(["h2"])
    return context


@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_member_that_speaks_an_older_tls_reaches_no_handler(newest: ssl.TLSVersion, tmp_path: Path) -> None:
    """gRPC's own floor is 1.2. Where the environment was prepared in time the handshake is refused, else the call."""
    member = Party()
    async with (
        listening(member) as process,
        tcp_proxy(process.address, tls=tls_context(member.pair, tmp_path, newest)) as proxy,
        make_channel(proxy.address, Credentials()) as channel,
    ):
        call: Any = channel.stream_stream(PREFIX + "Node/Heartbeat")(timeout=10)
        try:
            await call.write(b"x")
            assert await call.read() == b"x"
        except grpc.aio.AioRpcError:
            assert newest is ssl.TLSVersion.TLSv1_2
            assert process.echo.calls == []
        else:
            assert newest is ssl.TLSVersion.TLSv1_3


async def test_an_older_tls_is_denied_and_said() -> None:
    member = Party()
    async with listening(member) as process:
        security = process.security

        class Older:
            """The context of a call that came over TLS 1.2, else as it should be."""

            def peer(self) -> str:
                return "ipv4:10.0.0.1:5"

            def auth_context(self) -> dict[str, list[bytes]]:
                return {"x509_pem_cert": [member.pair.certificate.pem], "ssl_tls_version": [b"TLSv1.2"]}

        context: Any = Older()
        with pytest.raises(AccessDenied, match=r"not TLS 1\.3"):
            with security.entering(PREFIX + "Node/Heartbeat", context, lambda _: None):
                pytest.fail("it was let in")
        assert "not TLS 1.3" in process.denials[0].what


async def test_a_call_whose_deadline_has_passed_is_not_run() -> None:
    member, late_s = Party(), 0.05
    async with listening(member) as process:
        find_handler = process.echo.service

        def busy(details: Any) -> Any:
            """The process is held up while the call waits for its handler."""
            began_s = time.monotonic()
            while time.monotonic() < began_s + late_s:
                pass
            return find_handler(details)

        process.echo.service = busy  # type: ignore[method-assign]
        with pytest.raises(SendTimeout):
            await process.say(member, "Node/Heartbeat", data=b"", timeout=late_s)
        process.echo.service = find_handler  # type: ignore[method-assign]
        assert await process.say(member, "Node/Heartbeat") == b"x"
        assert process.echo.calls == ["Node/Heartbeat"]


@pytest.mark.parametrize("kind", ProcessKind)
async def test_roles_cannot_be_overstepped(kind: ProcessKind) -> None:
    caller = Party(kind=kind)
    async with listening(caller) as process:
        for method in METHODS:
            if kind in allowed(PREFIX + method):
                assert await process.say(caller, method) == b"x"
            else:
                with pytest.raises(AccessDenied):
                    await process.say(caller, method, data=b"")
        assert set(process.echo.calls) == {method for method in METHODS if kind in allowed(PREFIX + method)}
        assert len(process.denials) == len(METHODS) - len(process.echo.calls)
        assert {denial.who for denial in process.denials} == {caller.pair.fingerprint}


async def test_a_kind_that_has_no_business_here_is_not_even_let_through_the_handshake() -> None:
    gateway = Party(kind=ProcessKind.GATEWAY)
    async with listening(gateway, callers=(ProcessKind.NODE,)) as process:
        with pytest.raises(LinkError):
            await process.say(gateway, "Engine/Generate")


async def test_a_server_in_anothers_place_is_not_spoken_to() -> None:
    member, real = Party(), make_key_pair()
    async with listening(member) as impostor:
        with pytest.raises(LinkError):
            await impostor.say(member, "Node/Heartbeat", expected=real)
        assert impostor.echo.calls == []


def forged_by(member: KeyPair, victim: Certificate, *, ca: bool, key_usage: bool) -> KeyPair:
    """A new key under a certificate in the victim's name that ``member`` signed."""
    key = ec.generate_private_key(ec.SECP256R1())
    signer = serialization.load_pem_private_key(member.key_pem, password=None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    issuer = x509.load_pem_x509_certificate(member.certificate.pem).subject
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, victim.fingerprint)]))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(5)
        .not_valid_before(datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC))
        .not_valid_after(datetime.datetime(2049, 12, 31, tzinfo=datetime.UTC))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(victim.dns_name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
    )
    if key_usage:
        usage = x509.load_pem_x509_certificate(victim.pem).extensions.get_extension_for_class(x509.KeyUsage).value
        builder = builder.add_extension(usage, critical=True)
    certificate = builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    key_pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    # The chain that the forger shows: the forged one and the member's own.
    shown = Certificate(pem=certificate + member.certificate.pem, fingerprint=victim.fingerprint)
    return KeyPair(key_pem=key_pem, certificate=shown)


@pytest.mark.parametrize("ca", [False, True])
@pytest.mark.parametrize("key_usage", [False, True])
async def test_a_member_cannot_sign_a_certificate_in_anothers_name(ca: bool, key_usage: bool) -> None:
    member, victim = Party(), Party()
    forger = Party(pair=forged_by(member.pair, victim.pair.certificate, ca=ca, key_usage=key_usage))
    async with listening(member, victim) as process:
        with pytest.raises(EdgepipeError):
            await process.say(forger, "Node/Heartbeat")
        assert process.echo.calls == []
        assert await process.say(member, "Node/Heartbeat") == b"x"


async def end_code(call: Any) -> grpc.StatusCode:
    async with asyncio.timeout(20):
        return await call.code()


async def test_a_removed_peers_open_stream_is_cut_and_it_does_not_come_back() -> None:
    member, other = Party(kind=ProcessKind.ENGINE), Party(kind=ProcessKind.ENGINE)
    async with listening(member, other) as process, process.stream(other, "Node/Prepare") as kept:
        await kept.write(b"1")
        assert await kept.read() == b"1"
        async with process.stream(member, "Node/Prepare") as call:
            await call.write(b"1")
            assert await call.read() == b"1"
            process.security.introduce([other.peer], nodes=())
            assert await end_code(call) is grpc.StatusCode.PERMISSION_DENIED
        with pytest.raises(LinkError):
            await process.say(member, "Node/Prepare")
        await kept.write(b"2")  # the others' streams go on
        assert await kept.read() == b"2"
        assert process.echo.running == 1
        assert [denial.what for denial in process.denials] == [PREFIX + "Node/Prepare: it was removed while it ran"]


async def test_a_stream_that_is_cut_while_its_first_reply_is_under_way_ends_with_the_reason() -> None:
    """The caller has the reply before the server's own send is over; the status must not be lost behind it."""
    member, other = Party(kind=ProcessKind.ENGINE), Party(kind=ProcessKind.ENGINE)
    async with listening(member, other) as process:
        for _ in range(40):
            process.security.introduce([member.peer, other.peer], nodes=())
            async with process.stream(member, "Node/Prepare") as call:
                await call.write(b"1")
                assert await call.read() == b"1"
                process.security.introduce([other.peer], nodes=())
                assert await end_code(call) is grpc.StatusCode.PERMISSION_DENIED


async def test_a_stream_with_tasks_beside_it_is_cut_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    member = Party(kind=ProcessKind.ENGINE)
    async with listening(member) as process:
        async with process.stream(member, "Stage/Control") as call:
            await call.write(b"1")
            assert await call.read() == b"1"
            process.security.introduce([], nodes=())
            assert await end_code(call) is grpc.StatusCode.PERMISSION_DENIED
    assert [record for record in caplog.records if record.exc_info] == []


async def test_a_removed_nodes_heartbeat_may_hear_why_and_ends_within_two_seconds() -> None:
    member = Party()
    async with listening(member) as process:
        async with process.stream(member, "Node/Heartbeat") as call:
            await call.write(b"1")
            assert await call.read() == b"1"
            process.security.introduce([], nodes=())
            await call.write(b"2")
            assert await call.read() == b"2"
            assert await end_code(call) is grpc.StatusCode.PERMISSION_DENIED


async def test_a_connection_that_stood_before_the_removal_makes_no_further_call() -> None:
    member = Party()
    async with listening(member) as process:
        async with make_channel(process.address, process.credentials(member)) as channel:
            ask: Any = channel.stream_stream(PREFIX + "Node/Heartbeat")
            call = ask()
            await call.write(b"1")
            assert await call.read() == b"1"
            process.security.introduce([], nodes=())
            late = ask(timeout=5)
            assert (await late.code()).name == "PERMISSION_DENIED"


async def test_neighbours_count_while_they_are_told_and_their_nodes_are_members() -> None:
    node = Party()
    stage = Party(kind=ProcessKind.STAGE, node=node.pair.fingerprint)
    async with listening(node) as process:
        with pytest.raises(LinkError):
            await process.say(stage, "Stage/Ring")
        process.security.set_neighbours([stage.peer])
        assert await process.say(stage, "Stage/Ring") == b"x"
        other = Party(kind=ProcessKind.STAGE, node=node.pair.fingerprint)
        process.security.set_neighbours([other.peer])
        with pytest.raises(LinkError):
            await process.say(stage, "Stage/Ring")
        process.security.introduce([], nodes=())
        with pytest.raises(LinkError):
            await process.say(other, "Stage/Ring")


async def test_nobody_speaks_in_anothers_name() -> None:
    member, victim = Party(), Party()
    seen: list[Any] = []
    async with listening(member, victim) as process:
        original = process.echo.service

        def service(details: Any) -> Any:
            handler: Any = original(details)

            async def check(messages: Any, context: Any) -> Any:
                process.security.require_node(context, member.pair.fingerprint)
                seen.append(process.security.caller(context, ProcessKind.NODE))
                process.security.require_node(context, victim.pair.fingerprint)
                async for message in messages:
                    yield message

            return handler._replace(stream_stream=check)

        process.echo.service = service  # type: ignore[method-assign]
        with pytest.raises(AccessDenied, match="in the name of"):
            await process.say(member, "Node/Heartbeat", data=b"")
        assert seen == [member.peer]


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "noise": bytes(range(256)) * 8,
    "http2 without tls": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(64),
    "half a hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(20),
}


async def test_garbage_half_handshakes_and_silence_are_closed_while_members_are_served() -> None:
    """All at once: what never becomes a handshake has 3 s."""
    member = Party()
    async with listening(member) as process:
        opened = [await process.connect() for _ in range(100)]
        for data in GARBAGE.values():
            reader, writer = await process.connect()
            writer.write(data)
            opened.append((reader, writer))
        assert await process.say(member, "Node/Heartbeat") == b"x"
        answers = await asyncio.gather(*(until_closed(reader, timeout_s=15) for reader, _ in opened))
        for _, writer in opened:
            writer.close()
        assert max(map(len, answers)) < 1024
        assert await process.say(member, "Node/Heartbeat") == b"x"
        assert process.security.refused_handshakes == len(opened)


async def test_too_large_a_message_ends_its_call_alone() -> None:
    member = Party()
    async with listening(member) as process, process.stream(member, "Node/Heartbeat") as other:
        async with make_channel(process.address, process.credentials(member)) as channel:
            call: Any = channel.unary_unary(
                PREFIX + "Node/Heartbeat", request_serializer=lambda _: bytes(MAX_MESSAGE_BYTES + 1)
            )

            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call(b"", timeout=10)
            assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await other.write(b"fine")
        assert await other.read() == b"fine"


async def test_large_metadata_is_refused() -> None:
    member = Party()
    async with listening(member) as process:
        with pytest.raises(EdgepipeError):
            await process.say(member, "Node/Heartbeat", metadata=(("x-large", "y" * 65536),))
        assert await process.say(member, "Node/Heartbeat") == b"x"


async def test_streams_without_number_keep_to_their_own_connection() -> None:
    """Who opens more streams than one connection may have waits; others are served; nothing grows for ever."""
    greedy, other = Party(), Party()
    async with listening(greedy, other) as process:
        async with make_channel(process.address, process.credentials(greedy)) as channel:
            before = psutil.Process(os.getpid()).memory_info().rss
            calls: list[Any] = [channel.stream_stream(PREFIX + "Node/Heartbeat")() for _ in range(1000)]
            answers = {asyncio.create_task(_first_answer(call)) for call in calls}
            waiting, answered = answers, set[Any]()
            while len(answered) < MAX_STREAMS:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=10)
                assert done, "none is served any more"
                answered |= done
            assert process.echo.running <= MAX_STREAMS
            assert await process.say(other, "Node/Heartbeat") == b"x"
            for task in answers:
                task.cancel()
            await asyncio.wait(answers)
            for call in calls:
                call.cancel()
            assert psutil.Process(os.getpid()).memory_info().rss - before < 64 << 20
        assert await process.say(other, "Node/Heartbeat") == b"x"


async def test_one_caller_has_so_many_calls_at_once_over_all_its_connections() -> None:
    """The rest are refused at once, and others are served meanwhile."""
    greedy, other = Party(), Party()
    async with listening(greedy, other) as process, AsyncExitStack() as stack:
        calls: list[Any] = []
        for _ in range(MAX_CALLS_PER_CALLER // MAX_STREAMS + 1):
            channel = await stack.enter_async_context(make_channel(process.address, process.credentials(greedy)))
            calls += [channel.stream_stream(PREFIX + "Node/Heartbeat")() for _ in range(MAX_STREAMS)]
        answers = await asyncio.gather(*map(_first_answer, calls), return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
        assert [answer for answer in answers if answer not in refused] == [b"1"] * MAX_CALLS_PER_CALLER
        assert len(refused) == MAX_STREAMS
        assert {answer.code() for answer in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert await process.say(other, "Node/Heartbeat") == b"x"
        for call in calls:
            call.cancel()


async def _first_answer(call: Any) -> bytes:
    await call.write(b"1")
    return await call.read()


async def test_rapid_resets_do_not_stop_others() -> None:
    greedy, other = Party(), Party()
    async with listening(greedy, other) as process:
        async with make_channel(process.address, process.credentials(greedy)) as channel:
            for _ in range(10):
                for call in [channel.stream_stream(PREFIX + "Node/Heartbeat")() for _ in range(100)]:
                    call.cancel()
                assert await process.say(other, "Node/Heartbeat") == b"x"


async def test_an_address_tells_whose_it_is_and_only_members_are_dialled() -> None:
    member, stranger = Party(), Party()
    async with listening(member) as process:
        node = process.party.pair
        assert await who_answers(process.address, timeout_s=5) == node.fingerprint
        known = MutualTls(member.pair, callers=())
        known.introduce([], nodes=[process.party.peer])
        credentials = await known.to_address(process.address, node_id="", timeout_s=5)
        assert credentials.node_id == node.fingerprint
        unknown = MutualTls(stranger.pair, callers=())
        with pytest.raises(PairingRejected, match="not in this cluster"):
            await unknown.to_address(process.address, node_id="", timeout_s=5)


async def test_an_address_of_nobody_or_of_another_program() -> None:
    with pytest.raises(ConnectTimeout) as nobody:
        await who_answers(f"127.0.0.1:{free_port('127.0.0.1')}", timeout_s=5)
    assert nobody.value.fact == "no program listens there"
    assert is_refused(nobody.value)

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail\r\n")
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with server:
        with pytest.raises((PairingRejected, ConnectTimeout, PeerClosed)):
            await who_answers(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout_s=5)


async def test_a_new_process_knows_nobody() -> None:
    for kind in ProcessKind:
        async with listening() as process:
            with pytest.raises(LinkError):
                await process.say(Party(kind=kind), ONE_OF_EACH[kind])
