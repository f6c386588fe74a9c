"""The gateway as one object: takes cluster views, answers HTTP."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from edgepipe import __version__
from edgepipe.clock import Clock
from edgepipe.cluster.absence import absence_text, continuing_text, joined
from edgepipe.errors import ClusterError, EdgepipeError, PortInUse, StageLost
from edgepipe.gateway.access import AccessRules, local_users
from edgepipe.gateway.admission import Admission, AdmissionLimits
from edgepipe.gateway.app import make_app
from edgepipe.gateway.assets import load_assets
from edgepipe.gateway.batches.copying import CopySettings
from edgepipe.gateway.batches.line_runner import LineRunner
from edgepipe.gateway.batches.service import BatchService
from edgepipe.gateway.batches.store import FilesSettings
from edgepipe.gateway.bodies import BodyReader
from edgepipe.gateway.completion_service import CompletionService
from edgepipe.gateway.connections import MAX_HEADER_BYTES, SEND_BUFFER_BYTES, ConnectionLimits, Connections
from edgepipe.gateway.engine_link import EngineLink, LinkLimits
from edgepipe.gateway.engine_types import RoutedModel, served_models
from edgepipe.gateway.grammar_trial import GrammarTrial
from edgepipe.gateway.key_tries import KeyTries
from edgepipe.gateway.loading import ModelLoads
from edgepipe.gateway.metrics import Metrics
from edgepipe.gateway.models import AssetLoader, ModelEntry, ModelTable, News
from edgepipe.gateway.pieced import PiecedAnswers
from edgepipe.gateway.protocols.answering import Answering
from edgepipe.gateway.replica_links import ReplicaLinks
from edgepipe.gateway.shares import request_shares
from edgepipe.gateway.status_handlers import StatusHandlers
from edgepipe.gateway.streams import StreamTimeouts
from edgepipe.gateway.structured import GrammarCompiler
from edgepipe.gateway.turns import Turns
from edgepipe.gateway.ui.feed import PageFeed
from edgepipe.gateway.ui.managing import Managing
from edgepipe.gateway.ui.page import Page
from edgepipe.gateway.ui.sessions import Sessions
from edgepipe.gateway.unloading import KeepAlives
from edgepipe.ids import IdSource, PipelineId
from edgepipe.link.admin_client import Admin
from edgepipe.plain_words import plain
from edgepipe.security.mutual_tls import Security
from edgepipe.wire.batches import BatchReport
from edgepipe.wire.children import KeptModels, LoadQueue
from edgepipe.wire.common import Hello
from edgepipe.wire.nodes import ClusterView

logger = logging.getLogger(__name__)
_BACKLOG = 1024  # connections that the kernel queues while the event loop is busy


class Gateway:
    """The gateway of a process. ``run`` owns the engine links, ``serve`` the HTTP port; ``update`` takes views."""

    def __init__(
        self,
        *,
        node_id: str,
        node_name: str,
        security: Security,
        clock: Clock,
        ids: IdSource,
        new_seed: Callable[[], int],
        load: AssetLoader = load_assets,
        load_model: Callable[[str, str], None] = lambda _model, _owner: None,
        unload_model: Callable[[str], None] = lambda _: None,
        admin: Admin | None = None,
        new_token: Callable[[], str] = secrets.token_urlsafe,
        keep_models: Callable[[KeptModels], None] = lambda _: None,
        report_batches: Callable[[BatchReport], None] = lambda _: None,
        limits: LinkLimits | None = None,
        rules: AccessRules | None = None,
        admission: AdmissionLimits | None = None,
        connections: ConnectionLimits | None = None,
        timeouts: StreamTimeouts | None = None,
        files: FilesSettings | None = None,
    ) -> None:
        """
        load_model    requests to serve a model of the view's ``loadable`` for the owner of a key, see ``owner_of``;
                      ``loads_changed`` reports when its load begins, ``not_loaded`` its failure
        admin         reaches the node, for the page's actions
        new_token     returns an unguessable text
        unload_model  requests to stop a model that was loaded on request
        keep_models   takes the times of ``keep_alive`` whenever they change, for ``keep_as_before`` of a later gateway
        report_batches  takes which batches have and keep copies, after each change, for the node's daemon
        files         where files and batches are kept; None: nowhere, and no batch is taken
        """
        self._clock = clock
        self._hello = Hello(role="gateway", node_id=node_id, node_name=node_name)
        self._security = security
        self._load = load
        self._limits = limits or LinkLimits()
        self._models = ModelTable(wall_s=clock.wall_s)
        self._view: list[RoutedModel] = []
        self._changed = asyncio.Event()
        self._entries: dict[PipelineId, ModelEntry] = {}  # replicas of a model share one
        self._runners: dict[PipelineId, asyncio.Task[None]] = {}
        self._movers: dict[ModelEntry, asyncio.Task[None]] = {}  # move requests between replicas
        self._closing: set[ModelEntry] = set()
        self._away: dict[PipelineId, asyncio.Task[None]] = {}  # removes pipelines without an engine
        self._newest = ClusterView()
        self._connections = Connections(connections or ConnectionLimits())
        self._admission = Admission(admission or AdmissionLimits())
        self._loads = ModelLoads(self._models, load=load_model)
        self._grammar_trial = GrammarTrial()
        self._keep_alives = KeepAlives(self._models, clock=clock, unload=unload_model, report=keep_models)
        answers = PiecedAnswers(turns=Turns(), timeouts=timeouts or StreamTimeouts())
        metrics = Metrics(clock=clock, view=lambda: self._newest, own=self._gauges, version=__version__)
        service = self._new_service(answers, metrics, ids=ids, new_seed=new_seed)
        status_handlers = StatusHandlers(models=self._models, metrics=metrics, answers=answers, threads=service.threads)
        self._bodies = BodyReader(models=self._models, body_s=self._connections.limits.body_s)
        self._admin = admin
        self._requests = metrics.requests.ring
        sessions = Sessions(now_s=clock.monotonic_s, new_token=new_token)
        tries = KeyTries(now_s=clock.monotonic_s)
        self._page = self._new_page(answers, sessions, tries)
        copying = CopySettings(
            hello=self._hello, security=security, report=report_batches, users=local_users(rules or AccessRules())
        )
        self._batches = BatchService(
            settings=files,
            lines=LineRunner(answering=Answering(service=service, bodies=self._bodies, answers=answers)),
            models=self._models,
            loads=self._loads,
            clock=clock,
            ids=ids,
            copying=copying,
        )
        self.app: ASGIApp = make_app(
            service=service,
            bodies=self._bodies,
            status_handlers=status_handlers,
            rules=rules or AccessRules(),
            sessions=sessions,
            tries=tries,
            answers=answers,
            page=self._page,
            batches=self._batches,
            requests=request_shares(self._connections.limits.max_connections),
            memory=self._admission.memory,
        )

    def _new_service(
        self, answers: PiecedAnswers, metrics: Metrics, *, ids: IdSource, new_seed: Callable[[], int]
    ) -> CompletionService:
        return CompletionService(
            models=self._models,
            loads=self._loads,
            keep_alives=self._keep_alives,
            clock=self._clock,
            ids=ids,
            new_seed=new_seed,
            admission=self._admission,
            metrics=metrics.requests,
            compiler=GrammarCompiler(self._grammar_trial.check),
            turns=answers.turns,
        )

    def _new_page(self, answers: PiecedAnswers, sessions: Sessions, tries: KeyTries) -> Page:
        feed = PageFeed(node_name=self._hello.node_name, edgepipe_version=__version__, clock=self._clock)
        return Page(
            feed=feed,
            models=self._models,
            managing=Managing(admin=self._admin, feed=feed, requests=self._requests, sessions=sessions, tries=tries),
            requests=self._requests,
            security=self._security,
            turns=answers.turns,
            timeouts=answers.timeouts,
        )

    def update(self, view: ClusterView) -> None:
        """Store the daemon's newest view; ``run`` applies it."""
        self._newest = view
        self._view = served_models(view)
        self._loads.update(view.loadable)
        self._page.feed.update(view)
        self._batches.update(view)
        self._changed.set()

    def not_loaded(self, model: str, error: EdgepipeError) -> None:
        """Report that a model of ``load_model`` is not served, with the error."""
        self._loads.failed(model, error)

    def loads_changed(self, queue: LoadQueue) -> None:
        """Report which requested models load and which wait."""
        self._loads.queue = queue

    def keep_as_before(self, kept: KeptModels) -> None:
        """Take the times of ``keep_alive`` that an earlier gateway of this node reported."""
        self._keep_alives.restore(kept)

    async def run(self) -> None:
        """Keep one link per engine of the view, and unload models whose time is over. Ends by cancellation only."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._keep_alives.run(), name="keep-alives")
                tasks.create_task(self._page.feed.run(), name="page-samples")
                tasks.create_task(self._batches.run(), name="batches")
                if self._admin is not None:
                    tasks.create_task(self._page.feed.follow_node(self._admin), name="page-node")
                while True:
                    await self._changed.wait()
                    self._changed.clear()
                    self._reconcile(tasks)
        finally:
            await self._bodies.child.close()
            await self._grammar_trial.child.close()
            for entry in (*self._movers, *self._closing):
                await entry.close()

    async def serve(self, *sockets: socket.socket) -> None:
        """Answer HTTP on listening sockets until cancelled; running answers get ``stop_s`` to end, then an error.

        ``run`` must continue until this has ended.
        """
        limits = self._connections.limits
        config = uvicorn.Config(
            self.app,
            http=self._connections.protocol(),  # based on h11, which checks more than httptools
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # the client is the TCP peer; ignores X-Forwarded-For and the environment
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_keep_alive=round(limits.idle_s),
            timeout_graceful_shutdown=math.ceil(limits.stop_s) + 1,  # one more, to send errors to unfinished answers
        )
        server = _Server(config)
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(server.serve(sockets=list(sockets)), name="http")
            try:
                await asyncio.shield(serving)
            except asyncio.CancelledError:
                server.should_exit = True
                self._page.feed.end()
                await asyncio.wait((serving,), timeout=limits.stop_s)
                for entry in self._movers:
                    entry.link.fail_all(_stopped())
                await serving
                raise

    def _gauges(self) -> dict[str, float]:
        return {
            "connections": len(self._connections),
            "prompts_running": self._admission.num_running,
            "requests_waiting": self._admission.num_waiting,
            "request_bytes": self._admission.memory.held,
            "batch_lines_running": self._batches.num_lines,
            "batch_file_bytes": self._batches.disk.held,
        }

    def _reconcile(self, tasks: asyncio.TaskGroup) -> None:
        """Keep one link per pipeline. Without an engine, the link stays for a while: a new engine may continue."""
        ready = self._ready()
        for key, served in ready.items():
            if key not in self._entries:
                self._add(served, tasks)
            entry = self._entries[key]
            entry.update(served, self._news(served))
            entry.link.update(key, served)
            if (expiry := self._away.pop(key, None)) is not None:
                expiry.cancel()
        for key in [key for key in self._entries if key not in ready]:
            if (over := self._over(key)) is not None:
                self._drop(key, over, tasks)
            elif key not in self._away:
                self._entries[key].link.update(key, None)
                self._entries[key].tell(key, News(recovering=True, text=self._absence()))
                self._away[key] = tasks.create_task(self._expire(key, tasks), name=f"away:{key}")
        for entry in self._movers:
            works = any(key in ready and ready[key].state == "ready" for key in entry.pipelines)
            self._note_recovery(entry.served.name, is_so=not works)
        self._models.replace(list(self._movers), self._view)

    def _add(self, served: RoutedModel, tasks: asyncio.TaskGroup) -> None:
        """Add a pipeline, to the entry of its model's other replicas if there are some."""
        key = served.pipeline_id
        entry = next((entry for entry in self._movers if _are_replicas(entry.served, served)), None)
        if entry is None:
            entry = ModelEntry(ReplicaLinks(self._limits), self._load)
            entry.update(served, self._news(served))
            self._movers[entry] = tasks.create_task(entry.link.run(), name=f"replicas:{served.name}")
            tasks.create_task(_preload(entry), name=f"preload:{served.name}")
        self._entries[key] = entry
        link = EngineLink(served, hello=self._hello, security=self._security, limits=self._limits)
        entry.link.add(key, link)
        self._runners[key] = tasks.create_task(link.run(), name=f"engine-link:{served.name}")

    def _note_recovery(self, model: str, *, is_so: bool) -> None:
        self._requests.recovering(model, is_so=is_so, now_s=self._clock.monotonic_s())

    def _news(self, served: RoutedModel) -> News:
        engines = [entry.engine for entry in self._newest.served if entry.engine.pipeline_id == served.pipeline_id]
        going_on = joined(*map(continuing_text, engines)) if self._newest.absent else ""
        return News(recovering=served.state == "recovering", text=joined(self._absence(), going_on))

    def _absence(self) -> str:
        return absence_text(self._newest.absent, now_s=self._clock.wall_s())

    def _ready(self) -> dict[PipelineId, RoutedModel]:
        """Return the engine of each pipeline; of two, as after a network partition, the one with the higher epoch."""
        ready: dict[PipelineId, RoutedModel] = {}
        for served in self._view:
            known = ready.get(served.pipeline_id)
            if served.ready and (known is None or known.epoch < served.epoch):
                ready[served.pipeline_id] = served
        return ready

    def _over(self, key: PipelineId) -> EdgepipeError | None:
        """Return the known reason why the pipeline's requests cannot continue, else None."""
        for served in self._view:
            if served.pipeline_id == key and served.state in ("failed", "waiting", "stopping"):
                return served.refusal(wall_s=self._clock.wall_s()) or _ended(served)
        if key in self._newest.stopped:
            return _was_stopped(self._entries[key].served.name)
        return None

    def _is_stopped(self, key: PipelineId) -> bool:
        """Return whether a person stopped the pipeline."""
        stopping = any(served.pipeline_id == key and served.state == "stopping" for served in self._view)
        return stopping or key in self._newest.stopped

    async def _expire(self, key: PipelineId, tasks: asyncio.TaskGroup) -> None:
        await asyncio.sleep(self._limits.resume_window_s)
        self._away.pop(key, None)
        self._drop(key, _ended(self._entries[key].served_by(key)), tasks)
        self._models.replace(list(self._movers), self._view)

    def _drop(self, key: PipelineId, error: EdgepipeError, tasks: asyncio.TaskGroup) -> None:
        self._runners.pop(key).cancel()
        entry = self._entries.pop(key)
        # Without all of its pipelines the model was stopped: then requests go on nowhere.
        moves = not all(self._is_stopped(each) for each in entry.pipelines)
        entry.link.remove(key, error, moves=moves)
        entry.remove(key)
        if (expiry := self._away.pop(key, None)) is not None:
            expiry.cancel()
        if not entry.link.links:
            self._movers.pop(entry).cancel()
            self._closing.add(entry)
            tasks.create_task(self._close(entry), name=f"close:{entry.served.name}")

    async def _close(self, entry: ModelEntry) -> None:
        await entry.close()
        self._closing.discard(entry)


def _are_replicas(served: RoutedModel, other: RoutedModel) -> bool:
    """Return whether two pipelines answer for one model."""
    return (
        bool(served.replica and other.replica)
        and served.pipeline_id != other.pipeline_id
        and (served.name, served.manifest_hash) == (other.name, other.manifest_hash)
    )


def _ended(served: RoutedModel) -> EdgepipeError:
    if served.state == "stopping":
        return _was_stopped(served.name)
    return StageLost(
        "the model's engine ended while the request ran",
        next_step="see 'edgepipe status', then send the request again",
    )


def _was_stopped(model: str) -> EdgepipeError:
    return ClusterError(f"'{model}' was stopped", next_step="serve it again with: edgepipe serve MODEL")


def _stopped() -> EdgepipeError:
    return ClusterError("this node was stopped", next_step="send the request again, if necessary to another node")


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers: its process decides when to end."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


async def _preload(entry: ModelEntry) -> None:
    """Read tokenizer and template before the first request, which reports any error."""
    try:
        await entry.assets()
    except EdgepipeError as exc:
        logger.warning("cannot read the tokenizer: model=%s error=%s", entry.served.name, exc)


def listen(*, host: str, port: int) -> socket.socket:
    """Open a listening socket for ``serve``. Raises PortInUse."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # else asyncio leaves Nagle's algorithm on
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # accepted sockets inherit it
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError as exc:
        sock.close()
        raise PortInUse(
            f"port {port} on {host} cannot be used for HTTP",
            fact=plain(exc),
            next_step="choose another port with --http-port (0: any free port), or stop the other program",
        ) from exc
    return sock
