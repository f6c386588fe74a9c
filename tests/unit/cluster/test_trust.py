"""The trust store: what counts, whoever hears it first; and what does not, whoever says it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgepipe.cluster.trust import (
    NONCE_BYTES,
    TrustStore,
    add_statement,
    decode,
    found_cluster,
    merge,
    read_store,
    remove_statement,
)
from edgepipe.errors import TrustInvalid
from edgepipe.ids import NodeId
from edgepipe.link.certificates import KeyPair, make_key_pair
from edgepipe.link.trust_view import Role
from edgepipe.wire.v1 import trust_pb2 as pb

A, B, C, D, E = (make_key_pair() for _ in range(5))
NAMES: dict[str, str] = {pair.fingerprint: name for pair, name in zip((A, B, C, D, E), "abcde", strict=True)}
NONCE = bytes(NONCE_BYTES)


def founded(by: KeyPair = A, name: str = "home") -> TrustStore:
    return found_cluster(name=name, node_name=NAMES[by.fingerprint], founder=by, nonce=NONCE, now_ms=1)


def add(store: TrustStore, who: KeyPair, *, by: KeyPair, role: Role = Role.MEMBER, ms: int = 2) -> pb.TrustStatement:
    name = NAMES[who.fingerprint]
    return add_statement(store, signer=by, certificate=who.certificate, role=role, name=name, now_ms=ms)


def remove(store: TrustStore, who: KeyPair, *, by: KeyPair) -> pb.TrustStatement:
    return remove_statement(store, signer=by, node_id=NodeId(who.fingerprint), now_ms=3)


def with_(store: TrustStore, *statements: pb.TrustStatement) -> TrustStore:
    return merge(store, statements).store


def roles(store: TrustStore) -> dict[str, Role]:
    return {NAMES[node_id]: peer.role for node_id, peer in store.peers.items()}


def two_owners() -> TrustStore:
    """a founded, b is an owner too, c and d were let in by a."""
    store = founded()
    store = with_(store, add(store, B, by=A, role=Role.OWNER))
    return with_(store, add(store, C, by=A), add(store, D, by=A))


def test_the_founder_owns_a_cluster_of_one():
    assert roles(founded()) == {"a": Role.OWNER}
    assert founded().cluster_name == "home"
    assert founded(A).cluster_id != founded(B).cluster_id


def test_who_an_owner_adds_belongs_and_whom_a_member_adds_does_not():
    store = founded()
    store = with_(store, add(store, C, by=A))
    assert roles(store) == {"a": Role.OWNER, "c": Role.MEMBER}
    with pytest.raises(TrustInvalid, match="only an owner"):
        add(store, D, by=C)


def test_what_one_owner_removed_does_not_come_back_through_the_other():
    together = two_owners()
    at_a = with_(together, remove(together, C, by=A))
    at_b = with_(together, add(together, C, by=B), add(together, E, by=B))  # b knows of no removal
    for one, other in ((at_a, at_b), (at_b, at_a)):
        merged = with_(one, *other.to_wire().statements)
        assert "c" not in roles(merged)
        assert roles(merged)["e"] is Role.MEMBER
    with pytest.raises(TrustInvalid, match="stays out"):
        add(at_a, C, by=A)


def test_two_owners_who_remove_each_other_are_both_gone():
    together = two_owners()
    at_a, at_b = with_(together, remove(together, B, by=A)), with_(together, remove(together, A, by=B))
    merged = with_(at_a, *at_b.to_wire().statements)
    assert not {"a", "b"} & set(roles(merged))


def test_whom_only_a_removed_owner_vouched_for_stops_counting():
    together = two_owners()
    store = with_(together, remove(together, A, by=B))
    assert roles(store) == {"b": Role.OWNER}
    assert {NAMES[one.node_id] for one in together.added_only_by(NodeId(A.fingerprint))} >= {"c", "d"}


def test_another_owner_can_vouch_for_them_anew():
    together = two_owners()
    gone = with_(together, remove(together, A, by=B))
    assert roles(with_(gone, add(gone, C, by=B))) == {"b": Role.OWNER, "c": Role.MEMBER}
    before = with_(together, add(together, D, by=B))
    assert roles(with_(before, remove(before, A, by=B))) == {"b": Role.OWNER, "d": Role.MEMBER}


def test_an_owner_that_a_removed_owner_made_does_not_outlive_it_by_itself():
    store = two_owners()
    store = with_(store, add(store, E, by=B, role=Role.OWNER))
    store = with_(store, add(store, C, by=E))
    gone = with_(store, remove(store, B, by=A))
    assert roles(gone) == {"a": Role.OWNER, "d": Role.MEMBER, "c": Role.MEMBER}  # e is out; a let c in before


def test_a_name_that_another_peer_has_gets_a_number_and_keeps_it():
    store, one, other = founded(), NodeId(B.fingerprint), NodeId(C.fingerprint)
    assert store.name_for(one, "b") == "b"
    assert store.name_for(one, "a") == "a-2"
    assert store.name_for(NodeId(A.fingerprint), "a") == "a"
    numbered = add_statement(store, signer=A, certificate=B.certificate, role=Role.MEMBER, name="a-2", now_ms=2)
    store = with_(store, numbered)
    assert store.name_for(one, "a") == "a-2"
    assert store.name_for(other, "a") == "a-3"
    assert store.name_for(one, "b") == "b", "its settings name it anew"
    assert len(store.name_for(other, "x" * 63)) == 63
    long = add_statement(store, signer=A, certificate=D.certificate, role=Role.MEMBER, name="x" * 63, now_ms=2)
    assert len(with_(store, long).name_for(other, "x" * 63)) <= 63


def test_a_member_becomes_an_owner_and_stays_one():
    store = two_owners()
    promoted = with_(store, add(store, C, by=B, role=Role.OWNER))
    assert roles(promoted)["c"] is Role.OWNER
    assert roles(with_(promoted, add(promoted, C, by=A, ms=9)))["c"] is Role.OWNER


def everything() -> list[pb.TrustStatement]:
    store = two_owners()
    store = with_(store, add(store, E, by=B, role=Role.OWNER))
    store = with_(store, remove(store, D, by=E), add(store, C, by=B))
    return list(with_(store, remove(store, B, by=A)).to_wire().statements)


@settings(max_examples=20, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 5))
def test_the_order_and_grouping_of_what_is_heard_make_no_difference(rng: random.Random, parts: int):
    statements = everything()
    whole = read_store(statements)
    founding = [one for one in statements if decode(one).founds]
    rng.shuffle(statements)
    store = read_store(founding)
    groups = [statements[i::parts] for i in range(parts)]
    for group in itertools.chain(groups, groups, groups, groups):  # at every connect again
        store = merge(store, group).store
    assert store.digest == whole.digest
    assert roles(store) == roles(whole)
    assert store.removed == whole.removed


def test_an_old_set_replayed_changes_nothing():
    old, new = two_owners(), None
    new = with_(old, remove(old, C, by=A))
    merged = merge(new, old.to_wire().statements)
    assert (merged.new, merged.refused) == ((), ())
    assert merged.store is new


def refused(store: TrustStore, statements: Iterable[pb.TrustStatement]) -> str:
    merged = merge(store, statements)
    assert merged.store is store
    return " ".join(merged.refused)


def test_statements_with_a_bad_signature_are_refused_and_said():
    store = two_owners()
    good = remove(store, B, by=A)
    other = remove(store, C, by=A)
    assert "bad signature" in refused(store, [pb.TrustStatement(body=good.body, signature=other.signature)])
    assert "bad signature" in refused(store, [pb.TrustStatement(body=good.body, signature=b"")])
    changed = good.body.replace(B.fingerprint.encode(), C.fingerprint.encode())
    assert "bad signature" in refused(store, [pb.TrustStatement(body=changed, signature=good.signature)])


def test_a_member_cannot_remove_nor_speak_in_an_owners_name():
    store = two_owners()
    body = pb.TrustBody(cluster_id=store.cluster_id, signer=C.fingerprint, remove=pb.Remove(node_id=A.fingerprint))
    own = body.SerializeToString()
    assert "no owner" in refused(store, [pb.TrustStatement(body=own, signature=C.sign(b"edgepipe-trust-1" + own))])
    body.signer = A.fingerprint
    forged = body.SerializeToString()
    told = refused(store, [pb.TrustStatement(body=forged, signature=C.sign(b"edgepipe-trust-1" + forged))])
    assert "bad signature" in told


def test_statements_of_another_cluster_mean_nothing_here():
    store, other = two_owners(), founded(A, "elsewhere")
    assert "another cluster" in refused(store, [add(other, E, by=A)])
    assert "another cluster" in refused(store, other.to_wire().statements)


def test_a_store_needs_its_founder():
    statements = everything()
    with pytest.raises(TrustInvalid, match="no founding"):
        read_store(one for one in statements if not decode(one).founds)
    with pytest.raises(TrustInvalid, match="no founding"):
        read_store(statements, cluster_id="another")
    founding = next(one for one in statements if decode(one).founds)
    founding.signature = b"x"
    with pytest.raises(TrustInvalid, match="not signed"):
        read_store(statements)


@pytest.mark.parametrize(
    "body",
    [
        pb.TrustBody(),
        pb.TrustBody(add=pb.Add(certificate=b"x", role="member")),
        pb.TrustBody(add=pb.Add(certificate=C.certificate.pem, role="king")),
        pb.TrustBody(add=pb.Add(certificate=C.certificate.pem, role="member", node_name="\x1b[2J")),
        pb.TrustBody(add=pb.Add(certificate=C.certificate.pem, role="member", node_name="x" * 64)),
        pb.TrustBody(remove=pb.Remove(node_id="x" * 5000)),
        pb.TrustBody(signer=A.fingerprint, found=pb.Found(certificate=A.certificate.pem, nonce=b"short")),
        pb.TrustBody(signer=B.fingerprint, found=pb.Found(certificate=A.certificate.pem, nonce=NONCE)),
    ],
)
def test_statements_of_the_wrong_form_are_refused(body: pb.TrustBody):
    with pytest.raises(TrustInvalid):
        decode(pb.TrustStatement(body=body.SerializeToString(), signature=b"x"))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=600), st.binary(max_size=80))
def test_no_bytes_break_the_reader(body: bytes, signature: bytes):
    merged = merge(founded(), [pb.TrustStatement(body=body, signature=signature)])
    assert not merged.new
    assert merged.refused
