"""The cluster as the page draws it (PURE): bounded, without certificates, with texts that are safe to show.

``docs/architecture/page.md`` describes the fields. Figures are rounded, so that a view changes when a person would see
a difference.
"""

from __future__ import annotations

from typing import Any

from edgepipe.errors import EdgepipeError
from edgepipe.safe_text import one_line
from edgepipe.versions import are_near, newest
from edgepipe.wire.engines import EngineState, Quarantined, StageState
from edgepipe.wire.nodes import AbsentNode, ClusterView, MemberState, ServedModel, Transfer

MOST_MACHINES = 64
_MOST_MODELS = 16
_MOST_STAGES = 64
_MOST_DEVICES = 8
_MOST_TRANSFERS = 8
_MOST_LOADABLE = 256
_NAME_CHARS = 64
_TEXT_CHARS = 400


def page_view(view: ClusterView, *, node_name: str, edgepipe_version: str) -> dict[str, Any]:
    """Build the view from what the daemon reports."""
    served = [entry for entry in view.served if entry.engine.state != "stopping"][:_MOST_MODELS]
    engines = [entry.engine for entry in served]
    latest = newest(member.node.edgepipe_version for member in view.members)
    return {
        "node": {"name": _name(node_name), "version": edgepipe_version},
        "newest": _name(latest),
        "machines": [_machine(member, engines, latest) for member in view.members[:MOST_MACHINES]],
        "absent": [_absent(node) for node in view.absent[:MOST_MACHINES]],
        "models": [_model(entry) for entry in served],
        "loadable": [_name(model) for model in view.loadable[:_MOST_LOADABLE]],
    }


def _machine(member: MemberState, engines: list[EngineState], latest: str) -> dict[str, Any]:
    node = member.node
    return {
        "id": _name(node.node_id),
        "name": _name(node.name),
        "self": member.self,
        "state": _name(member.state),
        "rtt_ms": round(member.rtt_ms, 1),
        "version": _name(node.edgepipe_version),
        "apart": not are_near(node.edgepipe_version, latest),
        "platform": _name(node.platform),
        "leaving": node.leaving,
        "draining": node.draining,
        "disk_free_bytes": round(node.disk_free_bytes, -8),
        "devices": [
            {
                "name": _name(device.profile.name if device.profile is not None else ""),
                "backend": _name(device.profile.backend if device.profile is not None else ""),
                "state": _name(device.state),
                "error": _error(device.error),
            }
            for device in node.devices[:_MOST_DEVICES]
        ],
        "memory": _memory(member, engines),
        "transfers": [_transfer(transfer) for transfer in node.transfers[:_MOST_TRANSFERS]],
    }


def _memory(member: MemberState, engines: list[EngineState]) -> dict[str, int]:
    """Return the bytes of the machine's devices by use. ``other`` is reserved and holds neither weights nor KV."""
    weights, kv_used, kv = 0, 0, 0
    for engine in engines:
        used = 1 - engine.free_blocks / engine.num_blocks if engine.num_blocks else 0.0
        for stage in engine.stages:
            if stage.node_id == member.node.node_id:
                weights += stage.weight_bytes
                kv += stage.kv_bytes
                kv_used += round(stage.kv_bytes * used)
    reserved = sum(device.reserved_bytes for device in member.node.devices)
    free = sum(device.free_bytes for device in member.node.devices)
    other = max(0, reserved - weights - kv)
    return {"weights": weights, "kv_used": kv_used, "kv_free": kv - kv_used, "other": other, "free": free}


def _transfer(transfer: Transfer) -> dict[str, Any]:
    return {
        "model": _name(transfer.model),
        "source": _name(transfer.source),
        "bytes_done": transfer.bytes_done,
        "bytes_total": transfer.bytes_total,
        "copy": transfer.copy,
    }


def _absent(node: AbsentNode) -> dict[str, Any]:
    name, state = _name(node.name), _name(node.state)
    return {"id": _name(node.node_id), "name": name, "state": state, "since_s": node.since_us // 1_000_000}


def _model(entry: ServedModel) -> dict[str, Any]:
    engine = entry.engine
    return {
        "name": _name(engine.model),
        "title": _name(engine.title),
        "names": [_name(name) for name in engine.names[:_MOST_DEVICES]],
        "state": _name(engine.state),
        "message": _text(engine.message),
        "progress": round(engine.progress, 2),
        "error": _error(engine.error),
        "starts_at_s": engine.starts_at_us // 1_000_000,
        "context": engine.context_length,
        "running": engine.running,
        "waiting": engine.waiting,
        "micro_batches": engine.micro_batches,
        "in_flight": engine.in_flight,
        "why": _text(engine.why),
        "bottleneck": _name(engine.bottleneck),
        "tokens_per_s": round(engine.tokens_per_s, 1),
        "predicted_tokens_per_s": round(engine.predicted_tokens_per_s, 1),
        "latency_ms": round(engine.latency_ms, 1),
        "kv_tokens": engine.num_blocks * engine.block_size,
        "kv_used_tokens": (engine.num_blocks - engine.free_blocks) * engine.block_size,
        "epoch": engine.epoch.counter,
        "recoveries": engine.recoveries,
        "stall_ms": engine.stall_ms,
        "advice": _text(engine.advice.why) if engine.advice is not None else "",
        "left_out": [_quarantined(each) for each in engine.left_out[:_MOST_DEVICES]],
        "stages": [_stage(stage) for stage in engine.stages[:_MOST_STAGES]],
    }


def _stage(stage: StageState) -> dict[str, Any]:
    return {
        "machine": _name(stage.node_id),
        "name": _name(stage.node_name),
        "device": _name(stage.device or stage.backend),
        "layers": ",".join(part.layers.shown for part in stage.slices[:_MOST_DEVICES]),
        "num_layers": sum(len(part.layers) for part in stage.slices),
        "weight_bytes": stage.weight_bytes,
        "kv_bytes": stage.kv_bytes,
        "busy": round(stage.busy, 2),
        "step_ms": round(stage.decode_ms or stage.step_ms, 1),
        "one_way_ms": round(stage.one_way_ms, 2),
        "upload_ms": round(stage.decode_upload_ms or stage.upload_ms, 2),
    }


def _quarantined(entry: Quarantined) -> dict[str, Any]:
    link = _name(entry.other_name) if entry.other_id else ""
    return {"machine": _name(entry.node_name), "link_to": link, "reason": _text(entry.reason)}


def _error(error: EdgepipeError | None) -> dict[str, str] | None:
    if error is None:
        return None
    return {"what": _text(error.what), "fact": _text(error.fact), "next_step": _text(error.next_step)}


def _name(text: str) -> str:
    return one_line(text, most_chars=_NAME_CHARS)


def _text(text: str) -> str:
    return one_line(text, most_chars=_TEXT_CHARS)
