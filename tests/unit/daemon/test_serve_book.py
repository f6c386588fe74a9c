"""What the cluster serves, as nodes remember and agree on it; and what nobody believes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgepipe.daemon.serving.serve_rules import MAX_RUNNING_PER_MEMBER, MAX_VERSION_STEP, Facts, order, refusal
from edgepipe.errors import AccessDenied
from edgepipe.ids import EngineId, Epoch, PipelineId
from edgepipe.security.certificates import KeyPair
from edgepipe.security.trust_view import Role
from edgepipe.wire.engines import EngineState
from edgepipe.wire.serving import ServeBody, ServeRecord
from edgepipe.wire.signed import serve_body_to_bytes
from tests.support.daemon.serve_books import BookNode, NodeTrust, all_hear, node, nodes, shared, spec
from tests.support.processes.waiting import until

P = PipelineId("p")


def signed(key: KeyPair, body: ServeBody) -> ServeRecord:
    """Whatever a key signs, with no regard for what it may."""
    data = serve_body_to_bytes(replace(body, signer=key.fingerprint))
    return ServeRecord(body=data, signature=key.sign(b"edgepipe-serve-1" + data))


def served_by_b(folder: Path, *, owners: str = "a") -> tuple[dict[str, BookNode], dict[str, KeyPair]]:
    """b, a plain member, had "tiny" served; its engine is on b, it has answered, and everybody knows."""
    trust, everybody = nodes(folder, owners=owners, members="".join(set("abcd") - set(owners)))
    b = everybody["b"]
    b.book.ask(P, spec(), engine_node=b.node_id)
    b.book.note_served("p", spec())
    for member in everybody.values():
        member.engines[b.node_id, "p"] = "ready"
    all_hear(everybody)
    return everybody, trust.keys


def test_what_a_member_has_served_everybody_knows_and_its_stop_as_well(tmp_path: Path) -> None:
    everybody, _ = served_by_b(tmp_path)
    b = everybody["b"]
    assert all(member.held == {"tiny": (b.node_id, False)} for member in everybody.values())
    assert [record.pipeline_id for record in everybody["d"].book.served()] == ["p"]
    b.book.note_stopped("tiny")
    all_hear(everybody)
    assert all(member.book.served() == [] for member in everybody.values())
    everybody["c"].book.ask(PipelineId("p2"), spec(), engine_node=b.node_id)
    all_hear(everybody)
    assert [member.book.held("p2") is not None for member in everybody.values()] == [True] * 4


def test_who_may_stop_it(tmp_path: Path) -> None:
    everybody, _ = served_by_b(tmp_path)
    with pytest.raises(AccessDenied, match="on another node's request") as caught:
        everybody["c"].book.note_stopped("tiny")
    assert "owner" in caught.value.fact
    everybody["a"].book.note_stopped("tiny")  # the owner
    all_hear(everybody)
    assert all(member.book.served() == [] for member in everybody.values())


def test_who_was_away_while_a_node_took_its_engine_over_is_believed_once_that_node_is_gone(tmp_path: Path) -> None:
    """c had the engine and was away; b took it over, then b was lost as c came back. No owner is there to decide."""
    _, cluster = nodes(tmp_path, owners="o", members="abc")
    a, b, c = (cluster[name] for name in "abc")
    c.book.ask(P, spec(), engine_node=c.node_id)
    c.book.note_served("p", spec())
    for member in (a, b, c):
        member.engines[c.node_id, "p"] = "ready"
    all_hear(cluster, but="o")
    for member in (a, b):
        member.gone.add(c.node_id)
    b.book.take_over("p")
    all_hear(cluster, but="oc")
    for member in (a, b):
        member.gone.discard(c.node_id)
    (rival,) = c.hears(a)
    c.book.reassert(rival)
    assert [member.held["tiny"][0] for member in (a, b, c)] == [b.node_id, b.node_id, c.node_id], (
        "b is there: it decides"
    )
    for member in (a, c):
        member.gone.add(b.node_id)
    a.hears(c)
    assert a.held["tiny"][0] == b.node_id
    (rival,) = c.hears(a)
    c.book.reassert(rival)
    all_hear(cluster, but="ob")
    assert [member.held["tiny"][0] for member in (a, c)] == [c.node_id, c.node_id]
    assert c.hears(a) == []


def test_what_a_person_wants_is_on_request_no_longer_whatever_its_engine_says(tmp_path: Path) -> None:
    _, everybody = nodes(tmp_path, owners="a", members="b")
    a, b = everybody["a"], everybody["b"]
    loaded = replace(spec(), on_request=True)
    b.book.ask(P, loaded, engine_node=b.node_id)
    b.book.note_served("p", loaded)
    all_hear(everybody)
    assert a.book.is_on_request("p")
    a.book.note_kept("tiny")
    all_hear(everybody)
    b.book.note_served("p", loaded)
    all_hear(everybody)
    assert [member.book.is_on_request("p") for member in (a, b)] == [False, False]
    before = [member.book.held("p") for member in (a, b)]
    a.book.note_kept("tiny")
    a.book.note_kept("other")
    assert [member.book.held("p") for member in (a, b)] == before


def test_a_member_that_claims_another_s_pipeline_is_not_believed(tmp_path: Path) -> None:
    """R3, whatever its number."""
    everybody, keys = served_by_b(tmp_path)
    held = everybody["a"].book.held("p")
    assert held is not None
    for version in (held.version + 1, held.version + MAX_VERSION_STEP, 1 << 62):
        for change in (
            {"engine_node": keys["c"].fingerprint},
            {"engine_node": keys["c"].fingerprint, "asker": keys["c"].fingerprint},
            {"engine_node": keys["c"].fingerprint, "pipeline_id": "p9", "asker": keys["c"].fingerprint},
            {"stopped": True},
        ):
            record = signed(keys["c"], replace(held, version=version, **change))
            for member in everybody.values():
                member.book.merge(keys["c"].fingerprint, [record])
    forged = replace(held, version=held.version + 1, engine_node=keys["c"].fingerprint)
    by_c = signed(keys["c"], forged)
    by_a = serve_body_to_bytes(replace(forged, signer=keys["a"].fingerprint))
    for member in everybody.values():
        member.book.merge("c", [ServeRecord(body=by_a, signature=by_c.signature)])
        assert member.held == {"tiny": (keys["b"].fingerprint, False)}


def test_an_engine_counts_where_its_record_says_with_that_content_alone(tmp_path: Path) -> None:
    everybody, keys = served_by_b(tmp_path)
    book, (b, c) = everybody["d"].book, (keys["b"].fingerprint, keys["c"].fingerprint)
    engine = EngineState(pipeline_id=P, model="tiny", manifest_hash="h", epoch=Epoch(1, EngineId("e")), state="ready")
    assert book.binds(b, engine)
    assert not book.binds(c, engine)
    assert not book.binds(b, replace(engine, manifest_hash="other"))
    assert not book.binds(b, replace(engine, model="large"))
    assert not book.binds(c, replace(engine, pipeline_id=PipelineId("p9")))


def test_who_knows_that_the_engine_s_node_is_gone_believes_another_engine(tmp_path: Path) -> None:
    everybody, keys = served_by_b(tmp_path, owners="d")
    b, c, d = (everybody[name] for name in "bcd")
    with pytest.raises(AccessDenied):
        c.book.take_over("p")
    for member in (c, d):
        member.gone.add(b.node_id)
    c.book.take_over("p")
    everybody["a"].hears(c)
    assert everybody["a"].held["tiny"][0] == b.node_id, "a still hears b"
    d.hears(c)
    assert d.held["tiny"][0] == c.node_id
    everybody["a"].hears(d)  # an owner's node has said what it knows
    assert everybody["a"].held["tiny"][0] == c.node_id
    b.hears(d)
    assert b.held["tiny"][0] == c.node_id
    assert keys


def test_after_a_partition_an_owner_s_node_says_which_engine_counts(tmp_path: Path) -> None:
    """The owner is on the side of the old engine; on the other c took over."""
    everybody, _ = served_by_b(tmp_path)
    a, b, c, d = (everybody[name] for name in "abcd")
    for member in (c, d):
        member.gone.update((a.node_id, b.node_id))
    c.book.take_over("p")
    d.hears(c)
    assert d.held["tiny"][0] == c.node_id
    for member in (c, d):
        member.gone.clear()
    assert a.hears(c)
    for member in everybody.values():
        member.hears(a)
    assert {member.held["tiny"][0] for member in everybody.values()} == {b.node_id}


def test_without_an_owner_the_newer_claim_yields(tmp_path: Path) -> None:
    everybody, _ = served_by_b(tmp_path)
    _, b, c, d = (everybody[name] for name in "abcd")
    for member in (c, d):
        member.gone.add(b.node_id)
    c.book.take_over("p")
    d.hears(c)
    for member in (c, d):
        member.gone.clear()
    (rival,) = c.hears(b)
    held = c.book.held("p")
    assert held is not None
    assert c.book.is_unconfirmed(held)
    c.book.hand_back(rival)
    for member in (b, d):
        member.hears(c)
    assert {member.held["tiny"][0] for member in (b, c, d)} == {b.node_id}


def test_after_a_partition_an_owner_s_node_confirms_a_stop_that_others_refuse(tmp_path: Path) -> None:
    """c and d lost b and believe c's engine, so b's word is nothing to them. The owner has heard b's stop alone."""
    everybody, _ = served_by_b(tmp_path)
    a, b, c, d = (everybody[name] for name in "abcd")
    for member in (c, d):
        member.gone.add(b.node_id)
    c.book.take_over("p")
    d.hears(c)
    b.book.note_stopped("tiny")
    a.hears(b)
    for member in (c, d):
        member.gone.clear()
        member.engines[c.node_id, "p"] = "ready"
    all_hear(everybody)
    assert [member.held["tiny"] for member in everybody.values()] == [(b.node_id, True)] * 4


def test_a_member_may_have_so_many_models_served_and_no_more(tmp_path: Path) -> None:
    _, everybody = nodes(tmp_path)
    b = everybody["b"]
    for number in range(MAX_RUNNING_PER_MEMBER):
        b.book.ask(PipelineId(f"p{number}"), spec(f"m{number}"), engine_node=b.node_id)
    with pytest.raises(AccessDenied):
        b.book.ask(P, spec("m"), engine_node=b.node_id)
    everybody["a"].book.ask(P, spec("m"), engine_node=b.node_id)


def test_stopped_models_of_one_member_push_out_nobody_else_s(tmp_path: Path) -> None:
    trust, everybody = nodes(tmp_path)
    a, b, c = (everybody[name] for name in "abc")
    c.book.ask(PipelineId("pc"), spec("of c"), engine_node=c.node_id)
    c.book.note_served("pc", spec("of c"))
    all_hear(everybody)
    c.book.note_stopped("of c")
    all_hear(everybody)
    for number in range(100):
        trust.clock.advance(60)  # records that come in masses are not all checked
        b.book.ask(PipelineId(f"p{number}"), spec(f"m{number}"), engine_node=b.node_id)
        b.book.note_served(f"p{number}", spec(f"m{number}"))
        a.hears(b)
        b.book.note_stopped(f"m{number}")
        a.hears(b)
    assert a.held["of c"] == (c.node_id, True)
    assert len(a.held) == 64
    assert a.held["m99"] == (b.node_id, True)


def test_what_was_served_is_believed_by_who_joins_after_its_signer_was_removed(tmp_path: Path) -> None:
    trust, everybody = nodes(tmp_path)
    a, b, c = (everybody[name] for name in "abc")
    b.book.ask(P, spec(), engine_node=c.node_id)
    a.hears(b)
    trust.remove("b", by="a")
    late = everybody["d"]
    late.hears(a)
    assert late.held == {}
    a.book.renew()
    late.hears(a)
    assert late.held == {"tiny": (c.node_id, False)}


def test_a_removed_machine_s_records_are_nobody_s(tmp_path: Path) -> None:
    everybody, keys = served_by_b(tmp_path)
    trust = everybody["a"].book._trust
    assert isinstance(trust, NodeTrust)
    trust.shared.remove("c", by="a")
    body = ServeBody(
        cluster_id=trust.cluster_id,
        pipeline_id=PipelineId("x"),
        spec=spec("new"),
        version=1,
        asker="c",
        engine_node=keys["c"].fingerprint,
    )
    everybody["a"].book.merge(keys["c"].fingerprint, [signed(keys["c"], body)])
    assert set(everybody["a"].held) == {"tiny"}


def test_records_that_come_in_masses_are_not_all_checked(tmp_path: Path) -> None:
    everybody, keys = served_by_b(tmp_path)
    book = everybody["a"].book
    for number in range(300):
        body = ServeBody(
            cluster_id=book._trust.cluster_id,
            pipeline_id=PipelineId(f"x{number}"),
            spec=spec(f"m{number}"),
            version=1,
            asker=keys["c"].fingerprint,
            engine_node=keys["c"].fingerprint,
        )
        book.merge(keys["c"].fingerprint, [signed(keys["c"], body)])
    assert len(book._checked) < 100
    assert len(book.records()) == 1 + MAX_RUNNING_PER_MEMBER


async def test_it_outlives_its_process_and_a_damaged_file_is_an_empty_book(tmp_path: Path) -> None:
    trust = shared("a", "")
    a = node(trust, "a", tmp_path)
    a.book.ask(P, spec(), engine_node=a.node_id)
    a.book.note_served("p", spec())
    writing = asyncio.create_task(a.book.run())
    file = tmp_path / "a" / "served.bin"
    await until(lambda: file.exists())
    writing.cancel()
    assert [record.pipeline_id for record in node(trust, "a", tmp_path).book.served()] == ["p"]
    file.write_bytes(b"\xff\xff")
    assert node(trust, "a", tmp_path).book.records() == ()


async def test_who_asks_for_a_stage_waits_until_this_node_believes_its_record(tmp_path: Path) -> None:
    everybody, _ = served_by_b(tmp_path)
    b, c, d = (everybody[name] for name in "bcd")
    await d.book.until_engine("p", b.node_id, "h", timeout_s=1)
    for node_id, content in ((c.node_id, "h"), (b.node_id, "other")):
        with pytest.raises(AccessDenied):
            await d.book.until_engine("p", node_id, content, timeout_s=0.01)
    waiting = asyncio.create_task(d.book.until_engine("p", c.node_id, "h", timeout_s=5))
    await asyncio.sleep(0)  # it begins to wait
    assert not waiting.done()
    for member in (c, d):
        member.gone.add(b.node_id)
    c.book.take_over("p")
    d.hears(c)
    await waiting


def test_an_engine_that_its_node_took_over_and_never_ran_goes_to_another_node(tmp_path: Path) -> None:
    """b's node dies, d signs that it has the engine and runs none. No owner's node insists on it."""
    everybody, _ = served_by_b(tmp_path)
    a, b, c, d = (everybody[name] for name in "abcd")
    for member in (a, c, d):
        member.gone.add(b.node_id)
    d.book.take_over("p")
    all_hear(everybody, but="b")
    assert {member.held["tiny"][0] for member in (a, c, d)} == {d.node_id}
    with pytest.raises(AccessDenied):
        c.book.take_over("p")
    for member in (a, c, d):
        member.idle.add((d.node_id, "p"))
    c.book.take_over("p")
    all_hear(everybody, but="b")
    assert {member.held["tiny"][0] for member in (a, c, d)} == {c.node_id}


def test_an_engine_that_keeps_crashing_is_moved_by_its_own_node_only(tmp_path: Path) -> None:
    everybody, _ = served_by_b(tmp_path)
    b, c, d = (everybody[name] for name in "bcd")
    c.book.move_engine("p", d.node_id)
    all_hear(everybody)
    assert {member.held["tiny"][0] for member in everybody.values()} == {b.node_id}
    b.book.move_engine("p", c.node_id)
    all_hear(everybody)
    assert {member.held["tiny"][0] for member in everybody.values()} == {c.node_id}


NAMES = st.sampled_from("abc")


@settings(max_examples=300, deadline=None)
@given(
    held=st.none() | st.tuples(NAMES, NAMES, st.integers(0, 5), st.booleans()),
    new=st.tuples(NAMES, NAMES, NAMES, st.integers(0, 1 << 63), st.booleans(), st.sampled_from(("p", "q"))),
    gone=st.sets(NAMES),
)
def test_no_plain_member_takes_what_runs_from_a_node_that_is_there(
    held: tuple[str, str, int, bool] | None, new: tuple[str, str, str, int, bool, str], gone: set[str]
) -> None:
    before = None
    if held is not None:
        asker, engine, version, stopped = held
        before = ServeBody(
            pipeline_id=P,
            spec=spec(),
            asker=asker,
            engine_node=engine,
            version=version,
            stopped=stopped,
            begun=True,
            signer=asker,
        )
    signer, asker, engine, version, stopped, pipeline = new
    after = ServeBody(
        pipeline_id=PipelineId(pipeline),
        spec=spec(),
        asker=asker,
        engine_node=engine,
        version=version,
        stopped=stopped,
        signer=signer,
    )
    facts = Facts(role=Role.MEMBER, lost=lambda body: body.engine_node in gone, running=0, runs=lambda _: True)
    if refusal(before, after, facts):
        return
    assert before is None or order(after) > order(before)
    if before is None or before.stopped or before.engine_node in (signer, *gone):
        return
    assert after.engine_node == before.engine_node
    assert after.pipeline_id == before.pipeline_id
    assert not after.stopped or signer == before.asker


def test_records_of_far_versions_are_answered_by_nobody_and_the_last_word_reaches_newcomers(tmp_path: Path) -> None:
    trust, everybody = nodes(tmp_path, members="bcde")
    newcomer, a, b, c = everybody.pop("e"), everybody["a"], everybody["b"], everybody["c"]
    b.book.ask(P, spec(), engine_node=b.node_id)
    for member in everybody.values():
        member.engines[b.node_id, "p"] = "ready"
    all_hear(everybody)
    for step in (1 << 62, (1 << 64) - 2, MAX_VERSION_STEP):
        before = a.book.held("p")
        assert before is not None
        body = replace(before, engine_node=c.node_id, version=min(before.version + step, (1 << 64) - 1))
        a.book.merge(c.node_id, [signed(trust.keys["c"], body)])
        assert (a.book.held("p") == before) == (step > MAX_VERSION_STEP)  # the owner's node answers the last one alone
    all_hear(everybody)
    moved = replace(spec(), kv_tokens=7)
    b.book.note_served("p", moved)  # said by a plain member, with a version that a newcomer would not take from it
    all_hear(everybody)
    a.book.renew()
    all_hear(everybody)
    newcomer.hears(a)
    held = newcomer.book.held("p")
    assert held is not None
    assert held == a.book.held("p")
    assert held.spec.kv_tokens == 7


def test_further_names_go_to_every_node_and_an_engine_does_not_change_them(tmp_path: Path) -> None:
    _, everybody = nodes(tmp_path, owners="a", members="bc")
    a, b, c = (everybody[name] for name in "abc")
    a.book.ask(P, replace(spec(), names=("home", "qwen3:8b")), engine_node=b.node_id)
    all_hear(everybody)
    b.book.note_served("p", spec())
    all_hear(everybody)
    assert [member.book.names() for member in (a, b, c)] == [{"p": ("home",)}] * 3, (
        "a known model's name is no further name"
    )
    a.book.note_named("tiny", ("house",))
    all_hear(everybody)
    assert [member.book.names() for member in (a, b, c)] == [{"p": ("house",)}] * 3
    with pytest.raises(AccessDenied):
        c.book.note_named("tiny", ("mine",))


def test_a_member_draws_no_requests_by_a_name_that_another_model_has(tmp_path: Path) -> None:
    _, everybody = nodes(tmp_path, owners="a", members="bc")
    a, b, c = (everybody[name] for name in "abc")
    for member, pipeline, model in ((b, "q", "large"), (c, "r", "third")):
        member.book.ask(PipelineId(pipeline), replace(spec(), model=model, names=("Home",)), engine_node=member.node_id)
        member.book.note_served(pipeline, replace(spec(), model=model))
    all_hear(everybody)
    assert all(member.book.names() == {"q": (), "r": ()} for member in (a, b, c)), (
        "of two plain members' models neither"
    )
    a.book.ask(P, replace(spec(), names=("home",)), engine_node=a.node_id)
    a.book.note_served("p", spec())
    all_hear(everybody)
    assert all(member.book.names() == {"p": ("home",), "q": (), "r": ()} for member in (a, b, c)), "the owner's has it"
