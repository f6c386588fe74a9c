"""Pairing by a short code: who knows it joins; who does not, or stands in the middle, learns nothing and is told no."""

from __future__ import annotations

import random
import re

import pytest

from edgepipe.cluster.codes import joiner_pake, read_code, show_code, show_string
from edgepipe.cluster.pairing import HostPairing, JoinerPairing, waiting
from edgepipe.cluster.trust import found_cluster
from edgepipe.errors import (
    CertificateInvalid,
    ConfigInvalid,
    PairingRejected,
    RemoteProtocolError,
    TrustInvalid,
    VersionMismatch,
    all_errors,
)
from edgepipe.ids import NodeId
from edgepipe.security.certificates import make_key_pair
from edgepipe.wire.v1 import trust_pb2 as pb
from tests.support.cluster.pairing import CODE, PairingLab, fuzz_exchange


@pytest.fixture
def lab() -> PairingLab:
    return PairingLab.make()


@pytest.fixture
def quick() -> PairingLab:
    return PairingLab.make(stubbed=True)


def must(reply: bytes | None) -> bytes:
    assert reply is not None
    return reply


def until_confirmed(host: HostPairing, joiner: JoinerPairing) -> None:
    """Greetings, elements, confirmations."""
    data: bytes | None = joiner.hello
    while data is not None:
        data = joiner.receive(must(host.receive(data)))


def test_who_knows_the_code_joins(lab: PairingLab) -> None:
    host, joiner = lab.host(), lab.joiner()
    until_confirmed(host, joiner)
    assert host.confirmed
    assert host.other is not None
    assert (host.other.name, host.other.node_id) == ("studio", lab.joiner_key.fingerprint)
    assert joiner.receive(waiting(60)) is None
    assert joiner.waiting_s == 60
    assert joiner.receive(host.welcome(lab.with_joiner(), {lab.host_key.fingerprint: "10.0.0.1:7117"})) is None
    assert joiner.store is not None
    assert joiner.store.digest == lab.with_joiner().digest
    assert joiner.addresses == {lab.host_key.fingerprint: "10.0.0.1:7117"}
    host.receive(joiner.done())
    assert host.done


def test_a_wrong_code_is_a_wrong_try_and_both_sides_say_what_it_may_mean(lab: PairingLab) -> None:
    host, joiner = lab.host(), lab.joiner(code=b"48219038")
    with pytest.raises(PairingRejected, match="wrong code") as raised:
        until_confirmed(host, joiner)
    assert host.guessed
    assert "tampering" in raised.value.fact
    assert not host.confirmed


class Middle:
    """Somebody who swaps certificates, and knows neither code nor keys."""

    def __init__(self) -> None:
        self.pair = make_key_pair()

    def swap(self, hello: bytes) -> bytes:
        message = pb.PairMessage.FromString(hello)
        message.hello.certificate = self.pair.certificate.pem
        return message.SerializeToString()


@pytest.mark.parametrize("side", ["joiner", "host", "both"])
def test_a_swapped_certificate_gives_another_key(lab: PairingLab, side: str) -> None:
    host, joiner, middle = lab.host(), lab.joiner(), Middle()
    hello = middle.swap(joiner.hello) if side != "host" else joiner.hello
    answer = must(host.receive(hello))
    element = must(joiner.receive(middle.swap(answer) if side != "joiner" else answer))
    confirmation = must(joiner.receive(must(host.receive(element))))
    with pytest.raises(PairingRejected, match="wrong code") as raised:
        host.receive(confirmation)
    assert "tampering" in raised.value.fact


def test_the_joiner_finds_out_too_when_the_host_is_not_who_it_seems(lab: PairingLab) -> None:
    host, joiner = lab.host(code=b"11111111"), lab.joiner()
    answer = must(host.receive(joiner.hello))
    joiner.receive(must(host.receive(must(joiner.receive(answer)))))
    with pytest.raises(PairingRejected, match="wrong code"):
        joiner.receive(pb.PairMessage(confirmation=bytes(32)).SerializeToString())


def test_a_replayed_exchange_fails_at_the_confirmation(lab: PairingLab) -> None:
    host, joiner = lab.host(nonce=b"a" * 16), lab.joiner()
    said = [joiner.hello]
    said.append(must(joiner.receive(must(host.receive(said[0])))))
    said.append(must(joiner.receive(must(host.receive(said[1])))))
    host.receive(said[2])
    again = lab.host(nonce=b"b" * 16)
    again.receive(said[0])
    again.receive(said[1])
    with pytest.raises(PairingRejected):
        again.receive(said[2])
    assert again.guessed


def test_a_reflected_element_is_refused(lab: PairingLab) -> None:
    joiner = lab.joiner()
    element = must(joiner.receive(must(lab.host().receive(joiner.hello))))
    with pytest.raises(PairingRejected):
        joiner.receive(element)


@pytest.mark.parametrize(
    "element",
    [b"", b"A" + bytes(32), b"A" + b"\xff" * 32, b"A" + bytes(31), b"B" + bytes(32), b"A\x01" + bytes(31)],
    ids=["empty", "zero", "not in the group", "32 bytes", "wrong side", "neutral"],
)
def test_an_element_that_is_none_counts_as_a_wrong_try(lab: PairingLab, element: bytes) -> None:
    host = lab.host()
    host.receive(lab.joiner().hello)
    with pytest.raises(PairingRejected):
        host.receive(pb.PairMessage(element=element).SerializeToString())
    assert host.guessed


@pytest.mark.parametrize(
    "certificate",
    [
        b"",
        b"x" * (1 << 20),
        b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
    ],
)
def test_a_certificate_that_is_none_ends_it_at_the_greeting(quick: PairingLab, certificate: bytes) -> None:
    message = pb.PairMessage.FromString(quick.joiner().hello)
    message.hello.certificate = certificate
    host = quick.host()
    with pytest.raises(CertificateInvalid):
        host.receive(message.SerializeToString())
    assert not host.guessed


def test_another_protocol_version_is_told_to_both(quick: PairingLab) -> None:
    message = pb.PairMessage.FromString(quick.joiner().hello)
    message.hello.protocol_version = 99
    with pytest.raises(VersionMismatch, match="different versions"):
        quick.host().receive(message.SerializeToString())


def test_a_machine_does_not_pair_with_itself(quick: PairingLab) -> None:
    message = pb.PairMessage.FromString(must(quick.host().receive(quick.joiner().hello)))
    message.hello.certificate = quick.joiner_key.certificate.pem
    with pytest.raises(PairingRejected, match="itself"):
        quick.joiner().receive(message.SerializeToString())


def test_names_that_move_the_cursor_are_refused(quick: PairingLab) -> None:
    message = pb.PairMessage.FromString(quick.joiner().hello)
    message.hello.node_name = "\x1b[2Jroot"
    with pytest.raises(RemoteProtocolError):
        quick.host().receive(message.SerializeToString())


def test_messages_out_of_order_end_it(quick: PairingLab) -> None:
    for message in (
        pb.PairMessage(element=b"x"),
        pb.PairMessage(confirmation=bytes(32)),
        pb.PairMessage(sealed=bytes(32)),
        pb.PairMessage(waiting=pb.PairWaiting()),
        pb.PairMessage(),
    ):
        host = quick.host()
        with pytest.raises(RemoteProtocolError):
            host.receive(message.SerializeToString())
        with pytest.raises(RemoteProtocolError):  # and it stays ended
            host.receive(quick.joiner().hello)


def test_the_welcome_must_hold_both_and_the_announced_cluster(quick: PairingLab) -> None:
    for store in (
        quick.store,  # without the joiner
        found_cluster(name="home", node_name="x", founder=make_key_pair(), nonce=bytes(16), now_ms=0),
    ):
        host, joiner = quick.host(), quick.joiner()
        until_confirmed(host, joiner)
        with pytest.raises((PairingRejected, TrustInvalid)):
            joiner.receive(host.welcome(store, {}))
        assert joiner.store is None


def test_a_changed_welcome_does_not_open(quick: PairingLab) -> None:
    host, joiner = quick.host(), quick.joiner()
    until_confirmed(host, joiner)
    message = pb.PairMessage.FromString(host.welcome(quick.with_joiner(), {}))
    message.sealed = message.sealed[:-1] + bytes([message.sealed[-1] ^ 1])
    with pytest.raises(PairingRejected, match="changed on the way"):
        joiner.receive(message.SerializeToString())


def test_a_refusal_is_told_in_printable_text(quick: PairingLab) -> None:
    said = pb.PairMessage()
    said.refusal.code, said.refusal.what = "pairing_rejected", "no\x1b[2J way"
    with pytest.raises(PairingRejected) as raised:
        quick.joiner().receive(said.SerializeToString())
    assert raised.value.what == "no\\x1b[2J way"


@pytest.mark.parametrize("text", ["4821-9037", "48219037", " 4821 9037 "])
def test_a_code_is_read_as_people_type_it(text: str) -> None:
    assert read_code(text).secret == CODE
    assert show_code("48219037") == "4821-9037"


@pytest.mark.parametrize(
    "text", ["", "1234567", "123456789", "４８２１９０３７", "EP1-", "EP1-AAAA", "ep1-!!", "join me"]
)
def test_what_is_no_code_is_said_before_anything_is_tried(text: str) -> None:
    with pytest.raises(ConfigInvalid):
        read_code(text)


def test_a_long_string_names_the_host_and_only_that_one_may_answer(quick: PairingLab) -> None:
    node_id, secret = NodeId(quick.host_key.fingerprint), bytes(range(16))
    text = show_string(host="192.168.1.20", port=7133, node_id=node_id, secret=secret)
    assert re.fullmatch(r"EP1-[A-Z2-7]+", text)
    code = read_code(text.lower())
    assert (code.host, code.port, code.node_id, code.secret) == ("192.168.1.20", 7133, node_id, secret)
    for i in range(4, len(text)):
        with pytest.raises(ConfigInvalid):
            read_code(text[:i] + ("A" if text[i] != "A" else "B") + text[i + 1 :])
    joiner = quick.joiner(host=make_key_pair().fingerprint)
    with pytest.raises(PairingRejected, match="another machine"):
        joiner.receive(must(quick.host().receive(joiner.hello)))


def test_the_code_itself_is_never_sent(lab: PairingLab) -> None:
    host, joiner = lab.host(), lab.joiner()
    said = [joiner.hello]
    while len(said) < 6:
        reply = (host if len(said) % 2 else joiner).receive(said[-1])
        if reply is None:
            break
        said.append(reply)
    assert len(said) == 6
    assert all(CODE not in message for message in said)
    assert joiner_pake(CODE, b"a", b"b").start() != joiner_pake(CODE, b"a", b"b").start()


@pytest.mark.parametrize("count", [2000, pytest.param(100_000, marks=pytest.mark.long)])
def test_damaged_exchanges_end_in_an_error_of_ours(quick: PairingLab, count: int) -> None:
    rng, ends = random.Random(7), dict[str, int]()
    for _ in range(count):
        end = fuzz_exchange(quick, rng)
        ends[end] = ends.get(end, 0) + 1
    assert ends["joined"] < count / 2
    assert ends.keys() <= {"joined", "stuck", *(cls.code for cls in all_errors())}


def test_a_long_string_carries_an_address_of_ipv6_too() -> None:
    text = show_string(host="fd00:77::11", port=7133, node_id=NodeId("a" * 51 + "q"), secret=bytes(16))
    assert read_code(text).host == "fd00:77::11"
