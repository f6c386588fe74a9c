"""Identity and trust store as files: rights, damage, and the keeper that lives on them."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from edgepipe.cluster.founding import TrustFolders, adopt_cluster, found_local_cluster, open_trust
from edgepipe.cluster.identity import load_identity
from edgepipe.cluster.trust_file import TrustFile
from edgepipe.cluster.trust_keeper import TrustKeeper
from edgepipe.errors import ConfigInvalid, TrustInvalid
from edgepipe.ids import NodeId
from edgepipe.security.certificates import make_key_pair
from edgepipe.security.trust_view import Role
from edgepipe.telemetry.audit import AuditKind, AuditLog, read_audit
from edgepipe.testing.clock import FakeClock
from edgepipe.wire.trust import TrustStatement
from tests.support.processes.waiting import until


def keeper(data_dir: Path, *, cluster: str = "", name: str = "") -> TrustKeeper:
    return open_trust(data_dir, cluster=cluster, node_name=name or data_dir.name, clock=FakeClock())


def three(tmp_path: Path) -> list[TrustKeeper]:
    """a owns the cluster, b and c are members."""
    folders = [tmp_path / name for name in "abc"]
    found_local_cluster(folders, name="home")
    return [keeper(folder) for folder in folders]


async def tell(speaker: TrustKeeper, hearer: TrustKeeper) -> None:
    """``other`` hears what ``one`` knows."""
    await hearer.take_in(speaker.node_id, digest=speaker.digest, statements=speaker.store.signed())


def names(keeper: TrustKeeper) -> set[str]:
    return {peer.name for peer in keeper.outbound()}


def kinds(data_dir: Path) -> list[str]:
    return [entry.kind for entry in read_audit(TrustFolders(data_dir).audit, last=99)]


def test_a_first_start_makes_a_private_identity_and_a_cluster_of_its_own(tmp_path: Path) -> None:
    first = keeper(tmp_path / "a", cluster="attic")
    assert (first.store.cluster_name, names(first)) == ("attic", {"a"})
    key = tmp_path / "a" / "identity" / "key.pem"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE(key.parent.stat().st_mode) == 0o700
    again = keeper(tmp_path / "a")
    assert (again.node_id, again.store.cluster_id) == (first.node_id, first.store.cluster_id)
    with pytest.raises(ConfigInvalid, match="belongs to cluster 'attic'"):
        keeper(tmp_path / "a", cluster="cellar")


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o620, 0o604])
def test_a_key_that_others_may_touch_is_refused_with_the_command_that_mends_it(tmp_path: Path, mode: int) -> None:
    load_identity(tmp_path / "identity")
    key = tmp_path / "identity" / "key.pem"
    key.chmod(mode)
    with pytest.raises(ConfigInvalid, match="others may") as raised:
        load_identity(tmp_path / "identity")
    assert raised.value.next_step == f"chmod 600 '{key}'"


def test_a_linked_or_foreign_key_is_refused(tmp_path: Path) -> None:
    load_identity(tmp_path / "identity")
    key = tmp_path / "identity" / "key.pem"
    key.rename(tmp_path / "elsewhere.pem")
    key.symlink_to(tmp_path / "elsewhere.pem")
    with pytest.raises(ConfigInvalid) as raised:
        load_identity(tmp_path / "identity")
    assert raised.value.fact == "it is a symbolic link"
    key.unlink()
    key.mkdir()
    with pytest.raises(ConfigInvalid):
        load_identity(tmp_path / "identity")


def test_a_certificate_of_another_key_is_refused(tmp_path: Path) -> None:
    load_identity(tmp_path / "identity")
    (tmp_path / "identity" / "certificate.pem").write_bytes(make_key_pair().certificate.pem)
    with pytest.raises(ConfigInvalid, match="damaged"):
        load_identity(tmp_path / "identity")


@pytest.mark.parametrize("content", [b"", b"\0" * 400, b"edgepipe trust 1\n", None])
async def test_a_damaged_store_lets_nobody_in_until_a_member_was_asked(tmp_path: Path, content: bytes | None) -> None:
    a, b, c = three(tmp_path)
    await a.remove(a.find("c"), keep_added=None)
    await tell(a, b)  # b knows of the removal, and its file is damaged before it has written that
    path = TrustFile(TrustFolders(tmp_path / "b").trust).path
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    b = keeper(tmp_path / "b")
    assert b.damage
    assert b.member(a.node_id) is None
    assert b.member(c.node_id) is None
    assert b.inbound() == ()
    assert {peer.node_id for peer in b.outbound()} >= {a.node_id}  # it may ask
    await tell(a, b)
    assert not b.damage
    assert names(b) == {"a", "b"}
    assert b.member(c.node_id) is None
    assert kinds(tmp_path / "b")[-3:] == ["store damaged", "store mended", "removed"]


def test_a_store_without_anything_to_save_says_how_to_go_on(tmp_path: Path) -> None:
    three(tmp_path)
    for path in (tmp_path / "b" / "trust").iterdir():
        path.write_bytes(b"\0\0\0")
    with pytest.raises(ConfigInvalid, match="damaged, and so is the version before") as raised:
        keeper(tmp_path / "b")
    assert "edgepipe node join" in raised.value.next_step


def test_a_lone_node_goes_on_with_what_was_saved(tmp_path: Path) -> None:
    first = keeper(tmp_path / "a")
    (tmp_path / "a" / "trust" / "statements").write_bytes(b"")
    again = keeper(tmp_path / "a")
    assert not again.damage
    assert again.store.cluster_id == first.store.cluster_id
    assert "store damaged" in kinds(tmp_path / "a")


async def test_a_removal_reaches_the_removed_and_everybody_and_lasts(tmp_path: Path) -> None:
    a, b, c = three(tmp_path)
    await a.remove(a.find("c"), keep_added=None)
    await tell(a, b)
    await tell(a, c)
    assert (names(a), names(b)) == ({"a", "b"}, {"a", "b"})
    assert not c.belongs
    assert c.outbound() == ()
    await tell(c, b)  # with all that it knew
    assert names(b) == {"a", "b"}
    assert names(keeper(tmp_path / "a")) == {"a", "b"}


async def test_owners_apart_agree_when_they_meet_and_removals_win(tmp_path: Path) -> None:
    a, b, c = three(tmp_path)
    await a.promote(a.find("b"))
    await tell(a, b)
    await a.remove(a.find("c"), keep_added=None)
    await b.add(make_key_pair().certificate, role=Role.MEMBER, name="d")
    await b.add(c.key_pair.certificate, role=Role.OWNER, name="c")
    await tell(b, a)
    await tell(a, b)
    assert names(a) == names(b) == {"a", "b", "d"}
    assert a.digest == b.digest


async def test_removing_an_owner_asks_what_becomes_of_those_it_let_in(tmp_path: Path) -> None:
    a, b, _ = three(tmp_path)
    await a.promote(a.find("b"))
    await tell(a, b)
    with pytest.raises(ConfigInvalid, match="alone added other nodes") as raised:
        await b.remove(b.find("a"), keep_added=None)
    assert "c" in raised.value.fact
    assert [peer.name for peer in await b.remove(b.find("a"), keep_added=True)] == ["c"]
    assert names(b) == {"b", "c"}


async def test_whoever_is_dropped_with_an_owner_stays_out(tmp_path: Path) -> None:
    a, b, c = three(tmp_path)
    await a.promote(a.find("b"))
    await tell(a, b)
    await b.remove(b.find("a"), keep_added=False)
    assert names(b) == {"b"}
    with pytest.raises(TrustInvalid, match="stays out"):
        await b.add(c.key_pair.certificate, role=Role.MEMBER, name="c")


async def test_a_node_does_not_remove_itself_and_a_member_removes_nobody(tmp_path: Path) -> None:
    a, b, _ = three(tmp_path)
    with pytest.raises(TrustInvalid, match="cannot remove itself"):
        await a.remove(a.find("a"), keep_added=None)
    with pytest.raises(TrustInvalid, match="only an owner") as raised:
        await b.remove(b.find("c"), keep_added=None)
    assert "owners: a" in raised.value.fact


def test_peers_are_found_by_name_or_the_beginning_of_their_id(tmp_path: Path) -> None:
    a, b, _ = three(tmp_path)
    assert a.find("b").node_id == a.find(b.node_id[:6]).node_id == b.node_id
    for text in ("x", b.node_id[:5], ""):
        with pytest.raises(ConfigInvalid, match="no peer") as raised:
            a.find(text)
        assert raised.value.exit_code == 2


async def test_bad_statements_are_in_the_audit_log_and_change_nothing(tmp_path: Path) -> None:
    a, b, c = three(tmp_path)
    await a.remove(a.find("c"), keep_added=None)
    statements = [replace(statement, signature=b"x") for statement in a.store.signed()]
    await b.take_in(c.node_id, digest=b"x", statements=[*statements, TrustStatement(body=b"\xff")])
    assert names(b) == {"a", "b", "c"}
    assert kinds(tmp_path / "b") == ["bad statement"]


async def test_who_tells_too_much_or_what_nobody_signed_is_not_listened_to_for_a_while(tmp_path: Path) -> None:
    """R6: 17,000 badly signed statements in one beat cost nothing, and as many in small pieces not much more."""
    a, _, c = three(tmp_path)
    clock = FakeClock()
    b = open_trust(tmp_path / "b", cluster="", node_name="b", clock=clock)
    await a.remove(a.find("c"), keep_added=None)
    news = a.store.signed()
    bad = [TrustStatement(body=news[-1].body + bytes([at % 256, at // 256])) for at in range(17_000)]
    checked = 0
    take_in = b.take_in

    async def counting(source: NodeId, *, digest: bytes, statements: Sequence[TrustStatement]) -> None:
        nonlocal checked
        checked += len(statements)
        await take_in(source, digest=digest, statements=statements)

    b.take_in = counting
    running = asyncio.create_task(b.run())
    b.hear(c.node_id, digest=b"x", statements=bad)
    b.hear(c.node_id, digest=b"x", statements=news)
    assert not b._sources[c.node_id].pieces, "nothing is kept for checking"
    assert checked == 0
    assert names(b) == {"a", "b", "c"}
    clock.advance(300)
    for start in range(0, 17_000, 100):
        b.hear(c.node_id, digest=b"x", statements=bad[start : start + 100])
        await asyncio.sleep(0)
    await until(lambda: not b._sources[c.node_id].pieces)
    assert checked <= 1024
    b.hear(a.node_id, digest=a.digest, statements=news)  # another member is heard at once
    await until(lambda: names(b) == {"a", "b"}, timeout_s=5)
    running.cancel()
    await asyncio.wait([running])


async def test_listeners_hear_of_changes_and_the_store_is_written(tmp_path: Path) -> None:
    a, b, _ = three(tmp_path)
    await a.remove(a.find("c"), keep_added=None)
    heard = asyncio.Event()

    async def listen() -> None:
        async for _ in b.changes():
            if len(b.outbound()) == 2:
                heard.set()

    async with asyncio.timeout(5):
        listening, running = asyncio.create_task(listen()), asyncio.create_task(b.run())
        await asyncio.sleep(0)
        await tell(a, b)
        await heard.wait()
        await until(lambda: names(keeper(tmp_path / "b")) == {"a", "b"})
    for task in (listening, running):
        task.cancel()
    await asyncio.wait([listening, running])


def test_a_joiner_keeps_the_cluster_it_was_let_into(tmp_path: Path) -> None:
    a, _, _ = three(tmp_path)
    alone = keeper(tmp_path / "d")
    fresh = make_key_pair()
    adopt_cluster(tmp_path / "d", a.store, fresh)
    joined = keeper(tmp_path / "d")
    assert joined.node_id == NodeId(fresh.fingerprint) != alone.node_id
    assert joined.store.cluster_id == a.store.cluster_id


def test_the_audit_log_is_bounded_and_counts_what_repeats(tmp_path: Path) -> None:
    clock = FakeClock()
    log = AuditLog(tmp_path / "audit.log", clock.wall_s)
    for _ in range(1000):
        log.record(AuditKind.DENIED, who="x", detail="y")
    clock.advance(61)
    log.record(AuditKind.DENIED, who="x", detail="z")
    assert [(entry.times, entry.detail) for entry in read_audit(tmp_path / "audit.log", last=9)] == [
        (1, "y"),
        (1000, "z"),
    ]
    for index in range(9_000):
        log.record(AuditKind.PAIRING_FAILED, who=f"{index} {'w' * 300}")
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 3 << 20
    assert stat.S_IMODE((tmp_path / "audit.log").stat().st_mode) == 0o600
    with (tmp_path / "audit.log").open("a") as file:
        file.write('{"at_s": 1, "ki')
    assert read_audit(tmp_path / "audit.log", last=1) == []
