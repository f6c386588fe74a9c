"""Metrics for Prometheus: this gateway's requests; engines, stages and links from the daemon's view."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from math import ceil, log2

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from edgepipe.clock import Clock
from edgepipe.gateway.request_ring import Cancel, RequestRecord, RequestRing
from edgepipe.telemetry import HOP_LATENCY_S
from edgepipe.wire.engines import EngineState, StageState
from edgepipe.wire.nodes import ClusterView, MemberState, NodeState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)
_BETWEEN_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5)
_WHOLE_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280)
_WAIT_S = (0.001, 0.01, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class RequestMetrics:
    """Counts and durations of requests. One registry per gateway; nothing is global."""

    def __init__(self, registry: CollectorRegistry, clock: Clock) -> None:
        self.clock = clock
        labels = ("model",)

        def histogram(name: str, description: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"edgepipe_{name}_seconds", description, labels, buckets=buckets, registry=registry)

        self.prompt_tokens = Counter("edgepipe_prompt_tokens", "Prompt tokens accepted.", labels, registry=registry)
        self.output_tokens = Counter("edgepipe_generation_tokens", "Tokens generated.", labels, registry=registry)
        self.succeeded = Counter(
            "edgepipe_request_success",
            "Choices that ended without an error.",
            (*labels, "finished_reason"),
            registry=registry,
        )
        self.failed = Counter(
            "edgepipe_request_failures", "Requests that ended in an error.", (*labels, "code"), registry=registry
        )
        self.first_token = histogram(
            "time_to_first_token", "Time from accepting a request to its first token.", _FIRST_TOKEN_S
        )
        self.between = histogram("inter_token_latency", "Time between two tokens of a choice.", _BETWEEN_S)
        self.whole = histogram("e2e_request_latency", "Time from accepting a request to its end.", _WHOLE_S)
        self.queued = histogram("request_queue_time", "Time in this gateway's queue.", _WAIT_S)
        self.prefill = histogram(
            "request_prefill_time", "Time from sending a request to the engine to its first token.", _FIRST_TOKEN_S
        )
        self.decode = histogram("request_decode_time", "Time from the first token to the last.", _WHOLE_S)

        self.ring = RequestRing()
        self._of_models: dict[str, ModelMetrics] = {}

    def begin(self, model: str, *, request_id: str, num_prompt_tokens: int, cancel: Cancel) -> RequestMeter:
        """Count a newly accepted request. ``cancel`` ends it with an error."""
        found = self._of_models.get(model)
        if found is None:
            found = self._of_models[model] = ModelMetrics(self, model)
        found.prompt_tokens.inc(num_prompt_tokens)
        record = RequestRecord(
            request_id=request_id,
            model=model,
            prompt_tokens=num_prompt_tokens,
            accepted_wall_s=self.clock.wall_s(),
            accepted_s=self.clock.monotonic_s(),
            cancel=cancel,
        )
        self.ring.add(record)
        return RequestMeter(found, self.clock, self.ring, record)


class ModelMetrics:
    """Metrics of one model, looked up by label once: a lookup costs more than counting."""

    def __init__(self, metrics: RequestMetrics, model: str) -> None:
        self.prompt_tokens = metrics.prompt_tokens.labels(model)
        self.output_tokens = metrics.output_tokens.labels(model)
        self.first_token = metrics.first_token.labels(model)
        self.between = metrics.between.labels(model)
        self.whole = metrics.whole.labels(model)
        self.queued = metrics.queued.labels(model)
        self.prefill = metrics.prefill.labels(model)
        self.decode = metrics.decode.labels(model)
        self._model = model
        self._succeeded = metrics.succeeded
        self._failed = metrics.failed

    def succeeded(self, reason: str) -> None:
        """Count a choice that ended without an error."""
        self._succeeded.labels(self._model, reason).inc()

    def failed(self, code: str) -> None:
        """Count a request that ended in an error."""
        self._failed.labels(self._model, code).inc()


class RequestMeter:
    """Meter of one request. Times are the clock's monotonic seconds."""

    def __init__(self, metrics: ModelMetrics, clock: Clock, ring: RequestRing, record: RequestRecord) -> None:
        self._metrics = metrics
        self._clock = clock
        self._ring = ring
        self._record = record
        self._started_s = record.accepted_s
        self._last_s: dict[int, float] = {}  # one time per choice
        self._reason = ""  # finish reason of the last choice that ended

    def started(self) -> None:
        """Record that the request goes to the engine."""
        self._started_s = self._record.started_s = self._clock.monotonic_s()
        self._metrics.queued.observe(self._started_s - self._record.accepted_s)
        self._ring.changed()

    def tokens(self, choice: int, count: int) -> None:
        """Record ``count`` new tokens of a choice; tokens that arrive together share the time since the last ones."""
        now_s = self._clock.monotonic_s()
        self._metrics.output_tokens.inc(count)
        record = self._record
        record.output_tokens += count
        record.last_s = now_s
        if record.first_s is None:
            record.first_s = now_s
            self._metrics.first_token.observe(now_s - record.accepted_s)
            self._metrics.prefill.observe(now_s - self._started_s)
            self._ring.changed()
        last_s = self._last_s.get(choice)
        if last_s is not None:
            for _ in range(count):
                self._metrics.between.observe((now_s - last_s) / count)
        self._last_s[choice] = now_s

    def choice_ended(self, reason: str) -> None:
        """Record the end of a choice."""
        self._reason = reason
        self._metrics.succeeded(reason)

    def ended(self) -> None:
        """Record the end of the request without an error."""
        now_s = self._clock.monotonic_s()
        self._metrics.whole.observe(now_s - self._record.accepted_s)
        if self._record.first_s is not None:
            self._metrics.decode.observe(now_s - self._record.first_s)
        self._end(self._reason)

    def failed(self, code: str) -> None:
        """Record the end of the request in an error."""
        self._metrics.failed(code)
        self._end(code, failed=True)

    def left(self) -> None:
        """Record that the client has left, unless the request has ended."""
        if self._record.ended_s is None:
            self._end("client_left")

    def _end(self, end: str, *, failed: bool = False) -> None:
        record = self._record
        record.ended_s, record.end, record.failed = self._clock.monotonic_s(), end, failed
        if record.recovering_since_s is not None:
            record.recovery_s += record.ended_s - record.recovering_since_s
            record.recovering_since_s = None
        self._ring.changed()


class ClusterMetrics(Collector):
    """Collector of the daemon's newest view, read at every scrape."""

    def __init__(self, view: Callable[[], ClusterView], own: Callable[[], dict[str, float]], version: str) -> None:
        """``own`` returns this gateway's gauges by name."""
        self._view = view
        self._own = own
        self._version = version

    def describe(self) -> list[Metric]:
        """Return no metrics: their names are known once a view has arrived."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield every family with its samples."""
        build = GaugeMetricFamily("edgepipe_build_info", "Version of edgepipe.", labels=("version",))
        build.add_metric((self._version,), 1)
        yield build
        for name, value in self._own().items():
            yield GaugeMetricFamily(
                f"edgepipe_gateway_{name}", name.replace("_", " ").capitalize() + " in this gateway.", value=value
            )
        view = self._view()
        engines = [entry.engine for entry in view.served if entry.engine.state in ("ready", "recovering")]
        yield from _engine_families(engines)
        yield from _stage_families(engines)
        yield from _hop_families(engines)
        yield _expert_family(engines)
        yield from _kv_families(engines)
        yield from _node_families(view, engines)


_ENGINE_GAUGES: tuple[tuple[str, str, Callable[[EngineState], float]], ...] = (
    ("num_requests_running", "Running sequences.", lambda e: e.running),
    ("num_requests_waiting", "Sequences waiting in the engine.", lambda e: e.waiting),
    ("kv_cache_blocks", "KV blocks per stage.", lambda e: e.num_blocks),
    ("state_slots", "Slots per stage for the states of recurrent layers.", lambda e: e.state_slots),
    ("state_slots_free", "Slots of states that no sequence holds, snapshots included.", lambda e: e.free_slots),
    ("kv_host_blocks", "KV blocks per stage that host memory has room for.", lambda e: e.host_blocks),
    (
        "kv_host_blocks_usable",
        "Of these, those that other programs leave memory for now.",
        lambda e: e.host_bound_blocks,
    ),
    ("kv_host_blocks_used", "KV blocks per stage in host memory.", lambda e: e.used_host_blocks),
    ("kv_disk_blocks", "KV blocks per stage that the disk has room for.", lambda e: e.disk_blocks),
    ("kv_disk_blocks_used", "KV blocks per stage on disk.", lambda e: e.used_disk_blocks),
    ("kv_disk_off", "1 while the disk for idle KV rests after a problem.", lambda e: float(bool(e.disk_problem))),
    ("micro_batches", "Micro-batches kept in flight (M).", lambda e: e.micro_batches),
    ("steps_in_flight", "Planned steps that have not retired.", lambda e: e.in_flight),
    ("tokens_per_second", "Tokens generated in the last seconds.", lambda e: e.tokens_per_s),
    (
        "predicted_tokens_per_second",
        "Predicted rate for M and the running sequences.",
        lambda e: e.predicted_tokens_per_s,
    ),
    (
        "ring_latency_seconds",
        "One-way delays, sampling and return of a turn of the ring.",
        lambda e: e.latency_ms / 1e3,
    ),
    (
        "draft_factor",
        "Tokens per second over those without drafts, of the last windows, as predicted; 0 without a window.",
        lambda e: e.drafts.factor if e.drafts else 0.0,
    ),
    ("epoch", "Counter of the pipeline's epoch.", lambda e: e.epoch.counter),
)
_ENGINE_COUNTERS: tuple[tuple[str, str, Callable[[EngineState], float]], ...] = (
    ("num_preemptions", "Sequences preempted for lack of KV blocks.", lambda e: e.preemptions),
    ("draft_windows", "Rows that verified drafts of tokens.", lambda e: e.drafts.windows if e.drafts else 0),
    ("drafts_verified", "Drafts of tokens that were verified.", lambda e: e.drafts.drafted if e.drafts else 0),
    ("drafts_accepted", "Drafts of tokens that were right.", lambda e: e.drafts.accepted if e.drafts else 0),
    ("state_snapshots_missed", "Snapshots of states not taken for lack of slots.", lambda e: e.missed_snapshots),
    (
        "prefix_cache_queries_tokens",
        "Tokens of admitted sequences looked up in the prefix cache.",
        lambda e: e.admitted_tokens,
    ),
    ("prefix_cache_hits_tokens", "Tokens of admitted sequences found in the prefix cache.", lambda e: e.cached_tokens),
    ("kv_host_restored_tokens", "Tokens whose KV came back from host memory.", lambda e: e.restored_tokens),
    ("kv_disk_fetched_tokens", "Tokens whose KV came from disk to host memory.", lambda e: e.fetched_tokens),
    ("recoveries", "Epochs that replaced a failed one.", lambda e: e.recoveries),
    ("recovery_stall_seconds", "Time from each failure to the next token.", lambda e: e.stall_ms / 1e3),
    ("recovery_kept_tokens", "Tokens of interrupted sequences kept in the KV cache.", lambda e: e.kept_tokens),
    (
        "recovery_replayed_tokens",
        "Tokens of interrupted sequences that only some stages computed again.",
        lambda e: e.replayed_tokens,
    ),
)
_STAGE_COUNTERS: tuple[tuple[str, str, Callable[[StageState], float]], ...] = (
    ("stage_busy_seconds", "Time that the stage's device computed.", lambda s: s.computed_s),
    ("stage_bubble_seconds", "Time that the stage waited while steps were in flight.", lambda s: s.bubble_s),
)
_STAGE_GAUGES: tuple[tuple[str, str, Callable[[StageState], float]], ...] = (
    ("stage_busy_ratio", "Share of the last seconds that the stage computed.", lambda s: s.busy),
    ("stage_step_seconds", "Compute time of a step, smoothed.", lambda s: s.step_ms / 1e3),
    ("stage_weight_bytes", "Weights that the stage holds.", lambda s: s.weight_bytes),
    ("stage_kv_bytes", "KV cache that the stage holds.", lambda s: s.kv_bytes),
)
_NODE_GAUGES: tuple[tuple[str, str, Callable[[MemberState], float]], ...] = (
    ("node_up", "Whether the node answers.", lambda m: m.state == "alive"),
)
_NODE_COUNTERS: tuple[tuple[str, str, Callable[[MemberState], float]], ...] = (
    (
        "fenced_messages",
        "Dropped plans and frames of replaced epochs.",
        lambda m: sum(device.fenced_messages for device in m.node.devices),
    ),
)
# Figures of the way from this node to another.
_PEER_GAUGES: tuple[tuple[str, str, Callable[[MemberState], float]], ...] = (
    ("link_rtt_seconds", "Round trip from this node.", lambda m: m.rtt_ms / 1e3),
    (
        "heartbeat_gap_p99_seconds",
        "99th percentile of the time between heartbeats, over two minutes.",
        lambda m: m.gap_ms / 1e3,
    ),
)


def _used(engine: EngineState) -> float:
    return 1 - engine.free_blocks / engine.num_blocks if engine.num_blocks else 0.0


def _labels(engines: list[EngineState]) -> tuple[str, ...]:
    """Return the labels that tell engines apart: the replica, too, where a model has several."""
    return ("model", "replica") if any(engine.replica for engine in engines) else ("model",)


def _values(engine: EngineState, engines: list[EngineState]) -> tuple[str, ...]:
    """Return the values of ``_labels``."""
    return (engine.model, str(engine.replica or ""))[: len(_labels(engines))]


def _engine_families(engines: list[EngineState]) -> Iterator[Metric]:
    for name, description, read in _ENGINE_GAUGES:
        gauge = GaugeMetricFamily(f"edgepipe_{name}", description, labels=_labels(engines))
        for engine in engines:
            gauge.add_metric(_values(engine, engines), read(engine))
        yield gauge
    for name, description, read in _ENGINE_COUNTERS:
        counter = CounterMetricFamily(f"edgepipe_{name}", description, labels=_labels(engines))
        for engine in engines:
            counter.add_metric(_values(engine, engines), read(engine))
        yield counter


def _stage_families(engines: list[EngineState]) -> Iterator[Metric]:
    labels = (*_labels(engines), "node", "stage")
    for name, description, read in _STAGE_GAUGES:
        yield _of_stages(GaugeMetricFamily(f"edgepipe_{name}", description, labels=labels), engines, read)
    for name, description, read in _STAGE_COUNTERS:
        yield _of_stages(CounterMetricFamily(f"edgepipe_{name}", description, labels=labels), engines, read)


def _of_stages(
    family: GaugeMetricFamily | CounterMetricFamily,
    engines: list[EngineState],
    read: Callable[[StageState], float],
) -> Metric:
    for engine in engines:
        for index, stage in enumerate(engine.stages):
            family.add_metric((*_values(engine, engines), stage.node_name, str(index)), read(stage))
    return family


def _expert_family(engines: list[EngineState]) -> Metric:
    """Return the share of experts by size of steps. Labels are powers of two, so that series last."""
    family = GaugeMetricFamily(
        "edgepipe_step_expert_ratio",
        "Share of a layer's experts that steps of up to so many tokens read, and more than half as many.",
        labels=(*_labels(engines), "tokens"),
    )
    for engine in engines:
        for each in engine.expert_shares:
            family.add_metric((*_values(engine, engines), str(1 << ceil(log2(each.tokens)))), each.share)
    return family


def _hop_families(engines: list[EngineState]) -> Iterator[Metric]:
    """Yield the families of the hops from each stage to the next."""
    labels = (*_labels(engines), "src", "dst")
    upload = GaugeMetricFamily(
        "edgepipe_hop_upload_seconds", "Time to put a step on the link, smoothed.", labels=labels
    )
    latency = HistogramMetricFamily("edgepipe_hop_latency_seconds", "One-way latency of a step's hop.", labels=labels)
    sent = CounterMetricFamily("edgepipe_hop_bytes", "Activations sent.", labels=labels)
    for engine in engines:
        for stage, following in zip(engine.stages, engine.stages[1:], strict=False):
            hop = (*_values(engine, engines), stage.node_name, following.node_name)
            upload.add_metric(hop, stage.upload_ms / 1e3)
            latency.add_metric(hop, _buckets(stage.hop_latency_counts), stage.hop_latency_s)
            sent.add_metric(hop, stage.hop_bytes)
    yield from (upload, latency, sent)


def _buckets(counts: Sequence[int]) -> list[tuple[str, float]]:
    """Convert counts to Prometheus' buckets: cumulative, named by their upper bounds."""
    bounds = [*map(str, HOP_LATENCY_S), "+Inf"]
    return list(zip(bounds, accumulate(counts or [0] * len(bounds)), strict=False))


def _kv_families(engines: list[EngineState]) -> Iterator[Metric]:
    """Yield the KV usage, equal on all nodes of a pipeline: its stages share one numbering of blocks."""
    used = GaugeMetricFamily(
        "edgepipe_kv_cache_usage_ratio", "Share of the KV blocks in use.", labels=(*_labels(engines), "node")
    )
    for engine in engines:
        for node in {stage.node_name: None for stage in engine.stages}:
            used.add_metric((*_values(engine, engines), node), _used(engine))
    yield used


def _node_families(view: ClusterView, engines: list[EngineState]) -> Iterator[Metric]:
    for name, description, read in _NODE_GAUGES:
        yield _of_nodes(GaugeMetricFamily(f"edgepipe_{name}", description, labels=("node",)), view, read)
    for name, description, read in _NODE_COUNTERS:
        yield _of_nodes(CounterMetricFamily(f"edgepipe_{name}", description, labels=("node",)), view, read)
    own = next((member.node.name for member in view.members if member.self), "")
    for name, description, read in _PEER_GAUGES:
        gauge = GaugeMetricFamily(f"edgepipe_{name}", description, labels=("src", "dst"))
        for member in view.members:
            if not member.self and member.rtt_ms:
                gauge.add_metric((own, member.node.name), read(member))
        yield gauge
    memory = GaugeMetricFamily("edgepipe_node_memory_bytes", "Device memory.", labels=("node", "kind"))
    for member in view.members:
        for kind, num_bytes in _memory(member.node, engines).items():
            memory.add_metric((member.node.name, kind), num_bytes)
    yield memory


def _of_nodes(
    family: GaugeMetricFamily | CounterMetricFamily, view: ClusterView, read: Callable[[MemberState], float]
) -> Metric:
    for member in view.members:
        family.add_metric((member.node.name,), read(member))
    return family


def _memory(node: NodeState, engines: list[EngineState]) -> dict[str, int]:
    """Return the device memory of a node in bytes, by use."""
    stages = [stage for engine in engines for stage in engine.stages if stage.node_id == node.node_id]
    weights, kv = sum(stage.weight_bytes for stage in stages), sum(stage.kv_bytes for stage in stages)
    reserved = sum(device.reserved_bytes for device in node.devices)
    free = sum(device.free_bytes for device in node.devices)
    return {"weights": weights, "kv": kv, "other": max(0, reserved - weights - kv), "free": free}


class Metrics:
    """Registry of one gateway."""

    def __init__(
        self,
        *,
        clock: Clock,
        view: Callable[[], ClusterView],
        own: Callable[[], dict[str, float]],
        version: str,
    ) -> None:
        self._registry = CollectorRegistry()
        self.requests = RequestMetrics(self._registry, clock)
        self._registry.register(ClusterMetrics(view, own, version))

    def exposition(self) -> bytes:
        """Return the text format of Prometheus."""
        return generate_latest(self._registry)
