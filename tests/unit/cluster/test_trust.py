"""The trust store: what counts, whoever hears it first; and what does not, whoever says it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgepipe.cluster.standing import MAX_BYTES_PER_SIGNER, MAX_OWNERS, MAX_PER_SIGNER
from edgepipe.cluster.statements import NONCE_BYTES, decode, sign
from edgepipe.cluster.trust import (
    MAX_IDLE_BYTES,
    TrustStore,
    add_statement,
    found_cluster,
    merge,
    read_store,
    removal_statements,
)
from edgepipe.errors import TrustInvalid
from edgepipe.ids import NodeId
from edgepipe.security.certificates import KeyPair, make_key_pair
from edgepipe.security.trust_view import Role
from edgepipe.wire.signed import trust_body_to_bytes, trust_set_to_bytes
from edgepipe.wire.trust import Add, Found, Remove, TrustBody, TrustStatement

A, B, C, D, E = (make_key_pair() for _ in range(5))
NAMES: dict[str, str] = {pair.fingerprint: name for pair, name in zip((A, B, C, D, E), "abcde", strict=True)}
NONCE = bytes(NONCE_BYTES)


def founded(by: KeyPair = A, name: str = "home") -> TrustStore:
    return found_cluster(name=name, node_name=NAMES[by.fingerprint], founder=by, nonce=NONCE, now_ms=1)


def add(store: TrustStore, who: KeyPair, *, by: KeyPair, role: Role = Role.MEMBER, ms: int = 2) -> TrustStatement:
    name = NAMES[who.fingerprint]
    return add_statement(store, signer=by, certificate=who.certificate, role=role, name=name, now_ms=ms)


def remove(store: TrustStore, who: KeyPair, *, by: KeyPair) -> TrustStatement:
    """The removal alone, without what its signer would say besides of those who go with it."""
    return removal_statements(store, signer=by, node_id=NodeId(who.fingerprint), now_ms=3)[0]


def said(store: TrustStore, by: KeyPair, statement: Add | Remove, *, number: int = 99) -> TrustStatement:
    """Whatever ``by`` signs, with no regard for what it may."""
    body = TrustBody(cluster_id=store.cluster_id, signer=by.fingerprint, number=number, statement=statement)
    return sign(body, by)


def adds(who: KeyPair, role: Role = Role.OWNER) -> Add:
    return Add(certificate=who.certificate.pem, role=role, node_name=NAMES.get(who.fingerprint, "x"))


def removes(who: KeyPair) -> Remove:
    return Remove(node_id=NodeId(who.fingerprint))


def with_(store: TrustStore, *statements: TrustStatement) -> TrustStore:
    return merge(store, statements).store


def roles(store: TrustStore) -> dict[str, Role]:
    return {NAMES[node_id]: peer.role for node_id, peer in store.peers.items()}


def two_owners() -> TrustStore:
    """a founded, b is an owner too, c and d were let in by a."""
    store = founded()
    store = with_(store, add(store, B, by=A, role=Role.OWNER))
    return with_(store, add(store, C, by=A), add(store, D, by=A))


def test_the_founder_owns_a_cluster_of_one() -> None:
    assert roles(founded()) == {"a": Role.OWNER}
    assert founded().cluster_name == "home"
    assert founded(A).cluster_id != founded(B).cluster_id


def test_who_an_owner_adds_belongs_and_whom_a_member_adds_does_not() -> None:
    store = founded()
    store = with_(store, add(store, C, by=A))
    assert roles(store) == {"a": Role.OWNER, "c": Role.MEMBER}
    with pytest.raises(TrustInvalid, match="only an owner"):
        add(store, D, by=C)


def test_what_one_owner_removed_does_not_come_back_through_the_other() -> None:
    together = two_owners()
    at_a = with_(together, remove(together, C, by=A))
    at_b = with_(together, add(together, C, by=B), add(together, E, by=B))  # b knows of no removal
    for store, other in ((at_a, at_b), (at_b, at_a)):
        merged = with_(store, *other.signed())
        assert "c" not in roles(merged)
        assert roles(merged)["e"] is Role.MEMBER
    with pytest.raises(TrustInvalid, match="stays out"):
        add(at_a, C, by=A)


def test_of_two_owners_who_remove_each_other_the_elder_stays_whoever_is_heard_first() -> None:
    together = two_owners()
    at_a, at_b = with_(together, remove(together, B, by=A)), with_(together, remove(together, A, by=B))
    for store, other in ((at_a, at_b), (at_b, at_a)):
        merged = with_(store, *other.signed())
        assert roles(merged) == {"a": Role.OWNER, "c": Role.MEMBER, "d": Role.MEMBER}
    siblings = with_(founded(), add(founded(), B, by=A, role=Role.OWNER))
    siblings = with_(siblings, add(siblings, C, by=A, role=Role.OWNER))
    both = with_(siblings, remove(siblings, B, by=C), remove(siblings, C, by=B))
    assert roles(both) == {"a": Role.OWNER, "b": Role.OWNER}, "b was let in before c"


def test_a_removed_owner_cannot_come_back_by_an_owner_of_its_own_making() -> None:
    """R1: b, removed, makes c an owner; c removes b and so, once, stood by itself; then it removed the founder."""
    before = two_owners()
    gone = with_(before, remove(before, B, by=A))
    rogue = make_key_pair()
    attack = [
        said(before, B, adds(rogue)),
        said(before, B, adds(rogue), number=0),
        said(before, rogue, removes(B)),
        said(before, rogue, removes(B), number=0),
        said(before, rogue, removes(A)),
        said(before, B, removes(A)),
        said(before, B, removes(A), number=0),
        said(before, B, removes(D)),
        said(before, B, adds(B)),
    ]
    for order in (attack, attack[::-1]):
        assert roles(with_(gone, *order)) == roles(gone)
        fooled = with_(before, *order)  # one that has not heard of the removal
        assert roles(with_(fooled, *gone.signed())) == roles(gone)


def test_a_former_owner_s_removals_count_as_far_as_its_own_removal_says() -> None:
    store = two_owners()
    store = with_(store, remove(store, D, by=B))
    gone = with_(store, *removal_statements(store, signer=A, node_id=NodeId(B.fingerprint), now_ms=4))
    assert roles(gone) == {"a": Role.OWNER, "c": Role.MEMBER}, "what b removed while it was an owner stays out"
    late = said(store, B, removes(C))
    assert roles(with_(gone, late)) == roles(gone)


def test_whom_only_somebody_dropped_had_removed_stays_removed() -> None:
    store = two_owners()
    store = with_(store, add(store, E, by=B, role=Role.OWNER))
    store = with_(store, remove(store, D, by=E))
    gone = with_(store, *removal_statements(store, signer=A, node_id=NodeId(B.fingerprint), now_ms=4))
    assert roles(gone) == {"a": Role.OWNER, "c": Role.MEMBER}


def test_a_signer_that_says_too_much_takes_nobody_else_s_room() -> None:
    """R2."""
    store = two_owners()
    junk = [
        said(
            store,
            B,
            Remove(
                node_id=NodeId(f"{number:052d}".replace("0", "a").replace("1", "b").replace("8", "c").replace("9", "d"))
            ),
            number=number,
        )
        for number in range(1, 1200)
    ]
    full = with_(store, *junk)
    mine = [statement for statement in full.statements.values() if statement.signer == B.fingerprint]
    assert MAX_PER_SIGNER <= len(mine) <= 2 * MAX_PER_SIGNER
    most_bytes = MAX_OWNERS * MAX_BYTES_PER_SIGNER + MAX_IDLE_BYTES + (256 << 10)  # with signatures; below 4 MB
    assert len(trust_set_to_bytes(full.signed())) < most_bytes < 4_000_000
    gone = with_(full, remove(full, B, by=A))
    assert "b" not in roles(gone)
    assert roles(with_(gone, add(gone, E, by=A)))["e"] is Role.MEMBER
    idle = sum(len(statement.body) for statement in gone.statements.values() if statement not in gone.standing.counting)
    assert idle < MAX_IDLE_BYTES + 4096
    again = with_(with_(store, *junk[600:]), *junk[:600])
    assert with_(again, *full.signed()).digest == with_(full, *again.signed()).digest


def test_nothing_rides_along_in_a_statement() -> None:
    store = two_owners()
    padded = said(store, A, adds(E)).body + b"\xfa\x3f\x03abc"  # field 1023
    assert "fields unknown" in refused(store, [TrustStatement(body=padded, signature=b"x")])
    longer = replace(adds(E), certificate=E.certificate.pem + b"# and more")
    assert "more than a certificate" in refused(store, [said(store, A, longer)])


def expelled(store: TrustStore, who: KeyPair, *, by: KeyPair, keep_added: bool = False) -> TrustStore:
    """With all that its remover says."""
    node_id = NodeId(who.fingerprint)
    return with_(store, *removal_statements(store, signer=by, node_id=node_id, now_ms=3, keep_added=keep_added))


def test_whom_only_a_removed_owner_vouched_for_goes_with_it_or_is_kept() -> None:
    together = two_owners()
    assert roles(expelled(together, A, by=B)) == {"b": Role.OWNER}
    assert roles(expelled(together, A, by=B, keep_added=True)) == {"b": Role.OWNER, "c": Role.MEMBER, "d": Role.MEMBER}
    only = {
        NAMES[peer.node_id] for peer in together.added_only_by(NodeId(A.fingerprint), remover=NodeId(B.fingerprint))
    }
    assert only == {"c", "d"}


def test_whom_another_owner_let_in_too_stays() -> None:
    together = two_owners()
    before = with_(together, add(together, D, by=B))
    assert roles(expelled(before, A, by=B)) == {"b": Role.OWNER, "d": Role.MEMBER}


def test_an_owner_that_a_removed_owner_made_does_not_outlive_it_by_itself() -> None:
    store = two_owners()
    store = with_(store, add(store, E, by=B, role=Role.OWNER))
    store = with_(store, add(store, C, by=E))
    gone = with_(store, remove(store, B, by=A))
    assert roles(gone) == {"a": Role.OWNER, "d": Role.MEMBER, "c": Role.MEMBER}  # e is out; a let c in before


def test_a_name_that_another_peer_has_gets_a_number_and_keeps_it() -> None:
    store, node_id, other = founded(), NodeId(B.fingerprint), NodeId(C.fingerprint)
    assert store.name_for(node_id, "b") == "b"
    assert store.name_for(node_id, "a") == "a-2"
    assert store.name_for(NodeId(A.fingerprint), "a") == "a"
    numbered = add_statement(store, signer=A, certificate=B.certificate, role=Role.MEMBER, name="a-2", now_ms=2)
    store = with_(store, numbered)
    assert store.name_for(node_id, "a") == "a-2"
    assert store.name_for(other, "a") == "a-3"
    assert store.name_for(node_id, "b") == "b", "its settings name it anew"
    assert len(store.name_for(other, "x" * 63)) == 63
    long = add_statement(store, signer=A, certificate=D.certificate, role=Role.MEMBER, name="x" * 63, now_ms=2)
    assert len(with_(store, long).name_for(other, "x" * 63)) <= 63


def test_the_name_of_a_removed_machine_is_free_for_its_next_key() -> None:
    store = founded()
    for pair in (B, C, D):
        assert store.name_for(NodeId(pair.fingerprint), "studio") == "studio"
        named = add_statement(store, signer=A, certificate=pair.certificate, role=Role.MEMBER, name="studio", now_ms=2)
        store = with_(store, named)
        store = with_(store, remove(store, pair, by=A))


def test_a_member_becomes_an_owner_and_stays_one() -> None:
    store = two_owners()
    promoted = with_(store, add(store, C, by=B, role=Role.OWNER))
    assert roles(promoted)["c"] is Role.OWNER
    assert roles(with_(promoted, add(promoted, C, by=A, ms=9)))["c"] is Role.OWNER


def everything() -> list[TrustStatement]:
    store = two_owners()
    store = with_(store, add(store, E, by=B, role=Role.OWNER))
    store = with_(store, remove(store, D, by=E), add(store, C, by=B))
    return list(with_(store, remove(store, B, by=A)).signed())


@settings(max_examples=20, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 5))
def test_the_order_and_grouping_of_what_is_heard_make_no_difference(rng: random.Random, parts: int) -> None:
    statements = everything()
    whole = read_store(statements)
    founding = [statement for statement in statements if decode(statement).founds]
    rng.shuffle(statements)
    store = read_store(founding)
    groups = [statements[i::parts] for i in range(parts)]
    for group in itertools.chain(groups, groups, groups, groups):  # at every connect again
        store = merge(store, group).store
    assert store.digest == whole.digest
    assert roles(store) == roles(whole)
    assert store.removed == whole.removed


def test_an_old_set_replayed_changes_nothing() -> None:
    old, new = two_owners(), None
    new = with_(old, remove(old, C, by=A))
    merged = merge(new, old.signed())
    assert (merged.new, merged.refused) == ((), ())
    assert merged.store is new


def refused(store: TrustStore, statements: Iterable[TrustStatement]) -> str:
    merged = merge(store, statements)
    assert merged.store is store
    return " ".join(merged.refused)


def test_statements_with_a_bad_signature_are_refused_and_said() -> None:
    store = two_owners()
    good = remove(store, B, by=A)
    other = remove(store, C, by=A)
    assert "bad signature" in refused(store, [TrustStatement(body=good.body, signature=other.signature)])
    assert "bad signature" in refused(store, [TrustStatement(body=good.body, signature=b"")])
    changed = good.body.replace(B.fingerprint.encode(), C.fingerprint.encode())
    assert "bad signature" in refused(store, [TrustStatement(body=changed, signature=good.signature)])


def test_a_member_cannot_remove_nor_speak_in_an_owners_name() -> None:
    store = two_owners()
    body = TrustBody(cluster_id=store.cluster_id, signer=C.fingerprint, statement=removes(A))
    own = trust_body_to_bytes(body)
    assert "no owner" in refused(store, [TrustStatement(body=own, signature=C.sign(b"edgepipe-trust-1" + own))])
    forged = trust_body_to_bytes(replace(body, signer=A.fingerprint, statement=removes(D)))
    refusal = refused(store, [TrustStatement(body=forged, signature=C.sign(b"edgepipe-trust-1" + forged))])
    assert "bad signature" in refusal


def test_statements_of_another_cluster_mean_nothing_here() -> None:
    store, other = two_owners(), founded(A, "elsewhere")
    assert "another cluster" in refused(store, [add(other, E, by=A)])
    assert "another cluster" in refused(store, other.signed())


def test_a_store_needs_its_founder() -> None:
    statements = everything()
    with pytest.raises(TrustInvalid, match="no founding"):
        read_store(statement for statement in statements if not decode(statement).founds)
    with pytest.raises(TrustInvalid, match="no founding"):
        read_store(statements, cluster_id="another")
    statements = [
        replace(statement, signature=b"x") if decode(statement).founds else statement for statement in statements
    ]
    with pytest.raises(TrustInvalid, match="not signed"):
        read_store(statements)


@pytest.mark.parametrize(
    "body",
    [
        TrustBody(),
        TrustBody(statement=Add(certificate=b"x", role="member")),
        TrustBody(statement=Add(certificate=C.certificate.pem, role="king")),
        TrustBody(statement=Add(certificate=C.certificate.pem, role="member", node_name="\x1b[2J")),
        TrustBody(statement=Add(certificate=C.certificate.pem, role="member", node_name="x" * 64)),
        TrustBody(statement=Remove(node_id=NodeId("x" * 5000))),
        TrustBody(signer=A.fingerprint, statement=Found(certificate=A.certificate.pem, nonce=b"short")),
        TrustBody(signer=B.fingerprint, statement=Found(certificate=A.certificate.pem, nonce=NONCE)),
    ],
)
def test_statements_of_the_wrong_form_are_refused(body: TrustBody) -> None:
    with pytest.raises(TrustInvalid):
        decode(TrustStatement(body=trust_body_to_bytes(body), signature=b"x"))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=600), st.binary(max_size=80))
def test_no_bytes_break_the_reader(body: bytes, signature: bytes) -> None:
    merged = merge(founded(), [TrustStatement(body=body, signature=signature)])
    assert not merged.new
    assert merged.refused
