"""Records of the models that the cluster serves, on every node's disk: served models continue after machines were off,
and stopped models stay stopped. Every record is signed; ``serve_rules`` decides which signers a node believes."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from edgepipe.clock import Clock
from edgepipe.cluster.changes import Changes
from edgepipe.cluster.private_files import read_private, write_private
from edgepipe.cluster.trust_keeper import WRITE_AGAIN_S
from edgepipe.daemon.offers import EngineSigns, PublishedState
from edgepipe.daemon.serving.replica_facts import ReplicaFacts, as_recorded, with_facts_of
from edgepipe.daemon.serving.serve_rules import (
    MAX_BODY_BYTES,
    Facts,
    Place,
    counts_beside,
    is_far_ahead,
    lead,
    order,
    place_of,
    refusal,
    same_engine,
)
from edgepipe.errors import AccessDenied, ConfigInvalid, PlanInvalid, RemoteProtocolError
from edgepipe.ids import PipelineId
from edgepipe.plain_words import plain
from edgepipe.security.certificates import KeyPair
from edgepipe.security.trust_view import Role, TrustedPeer
from edgepipe.store.further_names import allowed_names
from edgepipe.telemetry.log import Once
from edgepipe.wire.engines import EngineState, ServeSpec
from edgepipe.wire.serving import ServeBody, ServeRecord
from edgepipe.wire.signed import (
    serve_body_from_bytes,
    serve_body_to_bytes,
    serve_records_from_bytes,
    serve_records_to_bytes,
)

logger = logging.getLogger(__name__)
_once = Once(logger)

_MOST_BYTES = 8 << 20
_MOST_RECORDS = 64  # pipelines of all models, including stopped ones
_MOST_CHECKED = 512  # remembered results of signature checks
_MOST_WAITING = 64  # new records of one node that are checked at once; then the rate below applies
_CHECKS_PER_S = 4.0
_SETTLE_S = 5.0  # pause between two statements of an owner's node on one model's engine
_CONTEXT = b"edgepipe-serve-1"  # a signature made for records is valid for nothing else


class ServeTrust(Protocol):
    """The part of the trust store that a book needs; ``TrustKeeper`` implements it."""

    @property
    def key_pair(self) -> KeyPair:
        """This node's key pair."""
        ...

    @property
    def cluster_id(self) -> str:
        """The id of this node's cluster."""
        ...

    def known(self, node_id: str) -> TrustedPeer | None:
        """Return a member of the cluster; None if the node is no member."""
        ...


@dataclass(slots=True)
class _Checks:
    """How many more signatures from one node may be checked."""

    left: float
    as_of_s: float


class ServeBook:
    """One record per pipeline of a model. Call methods on the event loop; ``run`` writes the disk."""

    def __init__(
        self,
        path: Path,
        *,
        trust: ServeTrust,
        signs: EngineSigns,
        clock: Clock,
        local: PublishedState,
        write_again_s: float = WRITE_AGAIN_S,
    ) -> None:
        """``write_again_s``: from a failed write to the next."""
        self._write_again_s = write_again_s
        self._path = path
        self._trust = trust
        self._signs = signs
        self._clock = clock
        self._local = local
        self._records: dict[Place, tuple[ServeBody, ServeRecord]] = {}
        self._checked: OrderedDict[bytes, bool] = OrderedDict()  # signatures, by the hash of the whole record
        self._checks: dict[str, _Checks] = {}  # one per node that sends records
        self._settled_at_s: dict[Place, float] = {}
        self._changed = asyncio.Event()
        self.unwritten = ""  # why the last write failed; empty: the disk has all records
        self._changes = Changes()
        self._load()

    def records(self) -> tuple[ServeRecord, ...]:
        """Return all records, for other nodes."""
        return tuple(record for _, record in self._records.values())

    def bodies(self) -> list[ServeBody]:
        """Return the bodies of all records that count, see ``serve_rules.lead``."""
        return [body for body, _ in self._records.values() if self._counts(body)]

    def served(self) -> list[ServeBody]:
        """Return the models that are wanted and have answered."""
        return [body for body in self.bodies() if not body.stopped and body.begun]

    def stopped(self) -> list[str]:
        """Return the stopped pipelines."""
        return [body.pipeline_id for body, _ in self._records.values() if body.stopped]

    def replicas(self, model: str) -> list[ServeBody]:
        """Return all pipelines of the model that are not stopped, by the numbers of the replicas."""
        wanted = [body for body, _ in self._records.values() if body.spec.model == model and not body.stopped]
        return sorted(wanted, key=lambda body: place_of(body.spec))

    def nodes_of_others(self, pipeline_id: str) -> frozenset[str]:
        """Return the nodes that the model's other pipelines use: replicas share no machine."""
        own = self.held(pipeline_id)
        others = self.replicas(own.spec.model) if own is not None else []
        return frozenset(
            stage.node_id for body in others if body.pipeline_id != pipeline_id for stage in body.spec.stages
        )

    def held(self, pipeline_id: str) -> ServeBody | None:
        """Return the body of a pipeline's record, running or stopped."""
        return next((body for body, _ in self._records.values() if body.pipeline_id == pipeline_id), None)

    def is_on_request(self, pipeline_id: str) -> bool:
        """Return whether a request loaded the model and no person wants it served."""
        held = self.held(pipeline_id)
        return held is not None and held.spec.on_request

    def names(self) -> dict[str, tuple[str, ...]]:
        """Return the further names of served models, by pipeline; replicas of a model share them.

        Of two models that want one name the one that an owner's node asked for has it, else none: no member draws the
        requests for another model's name to itself.
        """
        ranked: dict[str, list[tuple[bool, str]]] = {}
        for body in self.served():
            for name in allowed_names(body.spec.names):
                ranked.setdefault(name.lower(), []).append((self._is_owner(body.asker), body.spec.model))
        granted: dict[str, str] = {}
        for name, wanted in ranked.items():
            first = {model for owned, model in wanted if owned} or {model for _, model in wanted}
            if len(first) == 1:
                granted[name] = first.pop()
        return {
            body.pipeline_id: tuple(
                name for name in allowed_names(body.spec.names) if granted.get(name.lower()) == body.spec.model
            )
            for body in self.served()
        }

    def note_named(self, model: str, names: tuple[str, ...]) -> None:
        """Record the further names of a served model. Raises AccessDenied if this node may not change them."""
        for body in self.replicas(model):
            if body.spec.names != names:
                self._say(replace(body, spec=replace(body.spec, names=names)))

    def numbered(self, engine: EngineState) -> EngineState:
        """Return an engine's state with what the records say of its model's pipelines."""
        return as_recorded(engine, self.held(engine.pipeline_id), lead(self.replicas(engine.model)))

    def record(self, pipeline_id: str) -> ServeRecord | None:
        """Return a pipeline's signed record."""
        return next((record for body, record in self._records.values() if body.pipeline_id == pipeline_id), None)

    def binds(self, node_id: str, engine: EngineState) -> bool:
        """Return whether the engine that a node reports is the recorded one, with the recorded content."""
        body = self.held(engine.pipeline_id)
        return (
            body is not None
            and self._counts(body)
            and (body.engine_node, body.spec.model) == (node_id, engine.model)
            and engine.manifest_hash in ("", body.spec.manifest_hash)
        )

    def is_here(self, pipeline_id: str) -> bool:
        """Return whether the pipeline's recorded engine is on this node."""
        body = self.held(pipeline_id)
        return body is not None and not body.stopped and body.engine_node == self._own

    async def until_engine(self, pipeline_id: str, node_id: str, manifest_hash: str, *, timeout_s: float) -> None:
        """Wait until the pipeline's recorded engine is on that node with that content. Raises AccessDenied after
        ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                async for _ in self._changes.watch():
                    body = self.held(pipeline_id)
                    known = (body.engine_node, body.spec.manifest_hash) if body is not None else None
                    if known == (node_id, manifest_hash) and body is not None and not body.stopped:
                        if self._counts(body):
                            return
        except TimeoutError as exc:
            raise AccessDenied(
                "the pipeline's engine is another one",
                fact=f"node {node_id} asked for {pipeline_id}",
                next_step="serve the model again",
            ) from exc

    def require_director(self, node_id: str, pipeline_id: str) -> None:
        """Raise AccessDenied unless the node may place a pipeline's stages: it asked for the model, has its engine, or
        owns the cluster."""
        body = self.held(pipeline_id)
        if not self._is_owner(node_id) and (body is None or node_id not in (body.asker, body.engine_node)):
            raise AccessDenied(
                "only the node that had a model served, its engine's node or an owner may place it anew",
                fact=f"node {node_id} asked",
            )

    def require_content(self, node_id: str, manifest_hash: str) -> None:
        """Raise AccessDenied unless a model with that content is served, or the node owns the cluster."""
        if not self._is_owner(node_id) and all(body.spec.manifest_hash != manifest_hash for body in self.served()):
            raise AccessDenied("only an owner may copy a model that is not served", fact=f"node {node_id} asked")

    def ask(self, pipeline_id: PipelineId, spec: ServeSpec, *, engine_node: str) -> ServeRecord:
        """Record that this node's user wants a model served. Raises AccessDenied if others had it served already."""
        return self._say(ServeBody(pipeline_id=pipeline_id, spec=spec, engine_node=engine_node, asker=self._own))

    def note_served(self, pipeline_id: str, spec: ServeSpec) -> None:
        """Record that this node's engine answers, with the stages in ``spec``."""
        held = self.held(pipeline_id)
        if held is None or held.stopped or held.engine_node != self._own:
            return
        own = held.spec  # an engine does not decide who wants the model, how it is called, nor what its replicas are
        spec = replace(with_facts_of(spec, own), on_request=own.on_request, names=own.names)
        body = replace(held, begun=True, spec=spec)
        if body != held:
            self._say_if_believed(body)

    def note_kept(self, model: str) -> None:
        """Record that a person wants the model served: until now it was only loaded for a request."""
        for body in self.replicas(model):
            if body.spec.on_request:
                self._say_if_believed(replace(body, spec=replace(body.spec, on_request=False)))

    def note_stopped(self, model: str) -> None:
        """Record that all pipelines of a model are stopped. Raises AccessDenied if this node may not stop one that
        counts; then all go on."""
        stops = [(replace(body, stopped=True), self._counts(body)) for body in self.replicas(model)]
        for body, counts in stops:
            if counts:
                self._check_may_say(body)
        for body, _ in stops:
            with contextlib.suppress(AccessDenied):  # what does not count runs nowhere
                self._say(body)

    def note_replicas(self, model: str, facts: ReplicaFacts) -> None:
        """Record which pipelines the model has. Raises AccessDenied if this node may not say so."""
        for body in self.replicas(model):
            if body.pipeline_id in facts.pipelines:
                spec = facts.of(body.spec, body.pipeline_id, place=place_of(body.spec)[1])
                if spec != body.spec:
                    self._say(replace(body, spec=spec))

    def note_ended(self, pipeline_id: str) -> None:
        """Record that one pipeline of a model ends; its others go on. Raises AccessDenied if this node may not."""
        body = self.held(pipeline_id)
        if body is not None and not body.stopped:
            self._say(replace(body, stopped=True))

    def take_over(self, pipeline_id: str) -> None:
        """Record that the pipeline's engine is here. Raises AccessDenied unless the recorded node has lost it."""
        held = self.held(pipeline_id)
        if held is not None and held.engine_node != self._own:
            self._say(replace(held, engine_node=self._own))

    def is_unconfirmed(self, body: ServeBody) -> bool:
        """Return whether only this node's record names this node for a pipeline's engine."""
        return (body.engine_node, body.signer) == (self._own, self._own) and not self._is_owner(self._own)

    def hand_back(self, other: ServeBody) -> None:
        """Yield this node's engine to the one that another node reported. Raises AccessDenied."""
        body, _ = self._records.get(place_of(other.spec), (None, None))
        if body is not None:
            self._say(replace(body, engine_node=other.engine_node))

    def move_engine(self, pipeline_id: str, node_id: str) -> None:
        """Record that another node has this node's engine from now on. Raises AccessDenied."""
        held = self.held(pipeline_id)
        if held is not None and held.engine_node == self._own and not held.stopped:
            self._say(replace(held, engine_node=node_id))

    def reassert(self, rival: ServeBody) -> None:
        """Repeat that the pipeline's engine is here, above a refused record whose engine's node has lost it.

        While this node was away another node took the engine over, and the others believe that node. Once it is gone,
        too, they believe this one, but only a newer record. Raises AccessDenied.
        """
        held = self.held(rival.pipeline_id)
        if held is None or held.stopped or rival.stopped or held.engine_node != self._own:
            return
        if rival.signer != rival.engine_node:  # only a takeover calls for an answer
            return
        if order(rival) > order(held) and not is_far_ahead(held, rival) and self._has_lost(rival):
            self._say(held, above=rival.version)

    def merge(self, source: str, records: Iterable[ServeRecord]) -> list[ServeBody]:
        """Take another node's records if the rules allow their signers to make them.

        Returns the refused ones that name another engine for a model held here."""
        rivals: list[ServeBody] = []
        known = {record.body for _, record in self._records.values()}
        for record in list(records)[:_MOST_RECORDS]:
            body = self._read(source, record) if record.body not in known else None
            if body is None:
                continue
            held = self._records.get(place_of(body.spec))
            why = self._refusal(body)
            if not why:
                self._take(body, record)
            elif held is not None and order(body) > order(held[0]) and not same_engine(body, held[0]):
                _once.log(logging.WARNING, f"{source} {why}", "record of model=%s refused: %s", body.spec.model, why)
                rivals.append(body)
                self._settle(held[0], body)
            elif held is not None and not same_engine(body, held[0]) and body.pipeline_id == held[0].pipeline_id:
                rivals.append(body)
                if not self._is_owner(held[0].signer):  # the other node may refuse its signer's record
                    self._settle(held[0], body)
        return rivals

    def renew(self) -> None:
        """Sign records again that later members would not believe, as an owner's node.

        They are those of removed signers, and plain members' records with a version that a newcomer refuses.
        """
        if not self._is_owner(self._own):
            return
        for body, _ in list(self._records.values()):
            lasts = self._is_owner(body.signer) or not is_far_ahead(None, body)
            if self._trust.known(body.signer) is None or not lasts:
                self._say_if_believed(body)

    async def run(self) -> None:
        """Write every change to the disk, until cancelled; retry what a full disk refused."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            data = serve_records_to_bytes(self.records())
            try:
                await asyncio.to_thread(write_private, self._path, data)
                self.unwritten = ""
            except OSError as exc:
                logger.error("the records of served models were not written: %s", exc)
                self.unwritten = plain(exc)
                asyncio.get_running_loop().call_later(self._write_again_s, self._changed.set)

    @property
    def _own(self) -> str:
        return self._trust.key_pair.fingerprint

    def _counts(self, body: ServeBody) -> bool:
        """Return whether a record counts beside those of the model's other pipelines."""
        return counts_beside(body, lead(self.replicas(body.spec.model)))

    def _is_owner(self, node_id: str) -> bool:
        peer = self._trust.known(node_id)
        return peer is not None and peer.role is Role.OWNER

    def _say(self, body: ServeBody, *, above: int = 0) -> ServeRecord:
        """Sign ``body`` as a record newer than the held one. Raises AccessDenied if others would refuse it."""
        body = self._check_may_say(body, above=above)
        data = serve_body_to_bytes(body)
        record = ServeRecord(body=data, signature=self._trust.key_pair.sign(_CONTEXT + data))
        self._take(body, record)
        return record

    def _check_may_say(self, body: ServeBody, *, above: int = 0) -> ServeBody:
        """Return ``body`` as this node's next version. Raises AccessDenied if others would refuse it."""
        held = self._records.get(place_of(body.spec))
        body = replace(
            body,
            cluster_id=self._trust.cluster_id,
            signer=self._own,
            version=1 + max(above, held[0].version if held is not None else 0),
        )
        if why := self._refusal(body):
            raise AccessDenied(
                f"'{body.spec.model}' is served on another node's request",
                fact=why,
                next_step="run the command where it was served, or on an owner's machine: see 'edgepipe peers'",
            )
        return body

    def _say_if_believed(self, body: ServeBody) -> None:
        """Sign a record that no user asked for. Only log a refusal: this node may have been removed."""
        try:
            self._say(body)
        except AccessDenied as error:
            _once.log(logging.WARNING, f"{body.spec.model} {error.fact}", "record not signed: %s", error)

    def _refusal(self, body: ServeBody) -> str:
        place = place_of(body.spec)
        held = self._records.get(place)
        signer = self._trust.known(body.signer)
        running = sum(
            other.asker == body.signer for at, (other, _) in self._records.items() if not other.stopped and at != place
        )
        facts = Facts(
            role=signer.role if signer is not None else None,
            lost=self._has_lost,
            running=running,
            runs=self._seems_to_run,
        )
        return refusal(held[0] if held is not None else None, body, facts)

    def _has_lost(self, body: ServeBody) -> bool:
        """Return whether a recorded engine's node is gone, or has long been without the engine."""
        return self._signs.is_gone(body.engine_node) or self._signs.lacks_engine(body.engine_node, body.pipeline_id)

    def _seems_to_run(self, body: ServeBody) -> bool:
        state = self._signs.engine_state(body.engine_node, body.pipeline_id)
        return state != "failed" and (body.begun or bool(state))

    def _settle(self, held: ServeBody, rival: ServeBody) -> None:
        """State as an owner's node which engine counts."""
        now_s, place = self._clock.monotonic_s(), place_of(held.spec)
        if not self._is_owner(self._own) or self._has_lost(held) or self._trust.known(rival.signer) is None:
            return
        if is_far_ahead(held, rival):  # all nodes refuse it; an answer would only raise the version
            return
        if now_s - self._settled_at_s.get(place, -_SETTLE_S) < _SETTLE_S:
            return
        self._settled_at_s[place] = now_s
        self._say(held, above=rival.version)

    def _read(self, source: str, record: ServeRecord) -> ServeBody | None:
        """Return a record's body if its signature is valid, else None."""
        if not record.body or len(record.body) > MAX_BODY_BYTES:
            return None
        try:
            body = serve_body_from_bytes(record.body)
        except (RemoteProtocolError, PlanInvalid):
            return None
        signer = self._trust.known(body.signer)
        if signer is None or body.cluster_id != self._trust.cluster_id or not body.spec.model:
            return None
        digest = hashlib.sha256(record.body + record.signature).digest()
        if digest not in self._checked:
            if not self._may_check(source):
                return None
            self._checked[digest] = signer.certificate.verifies(record.signature, _CONTEXT + record.body)
            if len(self._checked) > _MOST_CHECKED:
                self._checked.popitem(last=False)
        return body if self._checked[digest] else None

    def _may_check(self, source: str) -> bool:
        now_s = self._clock.monotonic_s()
        if source not in self._checks:
            known = self._trust.known
            self._checks = {key: budget for key, budget in self._checks.items() if known(key) is not None}
        checks = self._checks.setdefault(source, _Checks(float(_MOST_WAITING), now_s))
        checks.left = min(_MOST_WAITING, checks.left + _CHECKS_PER_S * (now_s - checks.as_of_s)) - 1
        checks.as_of_s = now_s
        checks.left = max(checks.left, -1.0)
        return checks.left >= 0

    def _take(self, body: ServeBody, record: ServeRecord) -> None:
        place = place_of(body.spec)
        before = self._records.pop(place, None)
        self._records[place] = (body, record)
        while len(self._records) > _MOST_RECORDS and (old := self._forgettable()) is not None:
            del self._records[old]
        self._changes.notify()
        self._changed.set()
        self._local.refresh()
        moved = before is not None and before[0].engine_node != body.engine_node
        if moved and not self._is_owner(body.signer) and self._is_owner(self._own):
            self._say(body)  # nodes that cannot see the loss themselves believe an owner

    def _forgettable(self) -> Place | None:
        """Return the oldest stopped record of the signer with most of them: no signer displaces others' records."""
        stopped = {place: body.signer for place, (body, _) in self._records.items() if body.stopped}
        most = [signer for signer, _ in Counter(stopped.values()).most_common(1)]
        return next((place for place, signer in stopped.items() if signer in most), None)

    def _load(self) -> None:
        """Load the records; they were checked on arrival."""
        try:
            for record in serve_records_from_bytes(read_private(self._path, most_bytes=_MOST_BYTES)):
                body = serve_body_from_bytes(record.body)
                self._records[place_of(body.spec)] = (body, record)
        except FileNotFoundError:
            return
        except (ConfigInvalid, RemoteProtocolError, PlanInvalid) as exc:
            self._records.clear()
            logger.warning("the records of served models are lost: %s", exc)
