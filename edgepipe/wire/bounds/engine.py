"""Bounds of ``engine.proto``: between gateways, engines, nodes and their command lines."""

from __future__ import annotations

from edgepipe.sampling.bounds import Within
from edgepipe.wire.bounds.rules import (
    BLOCK,
    BLOCKS,
    BY_SIZE,
    BYTES,
    CHATS,
    COUNT,
    MEASURED,
    PERCENT,
    RATE,
    SECONDS,
    SHARE,
    TOKENS,
    Checked,
    Most,
    Tables,
)

_SUBMISSION = Checked("edgepipe.wire.intake:submission_refusal")
_ATTEMPT = Checked("edgepipe.engine.table:RequestTable.submit")
_CANCEL = Checked("edgepipe.engine.table:RequestTable.cancel")
_LOG = Checked("edgepipe.gateway.log:RequestLog.append")
_PROMPT_LOG = Checked("edgepipe.gateway.log:RequestLog.add_prompt_logprobs")
_GENERATION = Checked("edgepipe.gateway.generation:Generation.apply")
_ENDING = Checked("edgepipe.gateway.log:RequestLog.check_ending")
_MOST_CHOICES = 128  # limit of edgepipe.wire.intake

ENGINE: Tables = {
    "GatewayMessage": {},
    "Submit": {
        "attempt": _ATTEMPT,
        "prompt": _SUBMISSION,
        "num_choices": _SUBMISSION,
        "generated": _SUBMISSION,
        "max_tokens": _SUBMISSION,
        "stop_token_ids": _SUBMISSION,
        "priority": _SUBMISSION,
    },
    "Generated": {"ids": _SUBMISSION},
    "Cancel": {"attempt": _CANCEL, "choice": _CANCEL, "at_position": _CANCEL},
    "Resume": {
        "attempt": Checked("edgepipe.engine.table:RequestTable.resume"),
        "have": Most(_MOST_CHOICES, Checked("edgepipe.engine.table:RequestTable.resume")),
    },
    "EngineEvent": {"tokens": BY_SIZE, "ended": BY_SIZE, "prompt_scores": BY_SIZE, "prompt_reads": BY_SIZE},
    "Welcome": {},
    "Tokens": {"attempt": _GENERATION, "choice": _LOG, "position": _LOG, "ids": _LOG, "logprobs": _LOG},
    "PromptScores": {
        "attempt": _GENERATION,
        "choice": _PROMPT_LOG,
        "position": _PROMPT_LOG,
        "tokens": _PROMPT_LOG,
    },
    "PromptRead": {"attempt": _GENERATION, "choice": _GENERATION, "num_tokens": _GENERATION},
    "Ended": {
        "attempt": _GENERATION,
        "choice": _ENDING,
        "num_tokens": _ENDING,
        "cached_prompt_tokens": _ENDING,
    },
    "DescribeEngine": {},
    "TraceEngine": {"after_step": Checked("edgepipe.engine.recorder:StepRecorder.steps")},
    "EngineTrace": {"steps": Most(4096), "now_us": COUNT, "preemptions": COUNT},
    "StepTrace": {
        "step": COUNT,
        "decode_rows": COUNT,
        "prefill_tokens": COUNT,
        "micro_batches": COUNT,
        "planned_us": COUNT,
        "used_blocks": BLOCKS,
        "spans": Most(256),
    },
    "DeviceSpan": {"begin_us": COUNT, "end_us": COUNT},
    "PromptSteps": {"in_flight": COUNT, "num_tokens": TOKENS, "ms": MEASURED, "over_goal_ms": MEASURED},
    "EngineState": {
        "micro_batches": COUNT,
        "in_flight": COUNT,
        "running": CHATS,
        "waiting": CHATS,
        "num_blocks": BLOCKS,
        "free_blocks": BLOCKS,
        "block_size": BLOCK,
        "tokens_per_s": RATE,
        "stages": Most(256),
        "names": Most(256),
        "context_length": TOKENS,
        "progress": MEASURED,
        "predicted_tokens_per_s": RATE,
        "latency_ms": MEASURED,
        "preemptions": COUNT,
        "admitted_tokens": COUNT,
        "cached_tokens": COUNT,
        "decode_rows": MEASURED,
        "starts_at_us": COUNT,
        "recoveries": COUNT,
        "stall_ms": COUNT,
        "kept_tokens": COUNT,
        "replayed_tokens": COUNT,
        "left_out": Most(1024),
        "moves": COUNT,
        "move_pause_ms": COUNT,
        "expert_shares": Most(256),
        "state_slots": BLOCKS,
        "free_slots": BLOCKS,
        "missed_snapshots": COUNT,
    },
    "ExpertShare": {"tokens": Within(0.0, 1e9), "share": SHARE},
    "Quarantined": {"seconds": SECONDS},
    "Advice": {"gain": MEASURED, "pause_s": MEASURED},
    "StageState": {
        "slices": Most(256),
        "weight_bytes": BYTES,
        "kv_bytes": BYTES,
        "busy": MEASURED,
        "step_ms": MEASURED,
        "upload_ms": MEASURED,
        "one_way_ms": MEASURED,
        "decode_ms": MEASURED,
        "decode_upload_ms": MEASURED,
        "products": Most(256),
        "computed_s": MEASURED,
        "bubble_s": MEASURED,
        "hop_bytes": BYTES,
        "hop_latency_counts": Most(64, COUNT),
        "hop_latency_s": MEASURED,
        "ram_percent": PERCENT,
    },
}
