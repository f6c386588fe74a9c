"""Bounds of ``stage.proto``: between an engine and its stages, and from stage to stage."""

from __future__ import annotations

from edgepipe.backend.drafting import MOST_DRAFTS
from edgepipe.sampling.bounds import Within
from edgepipe.wire.bounds.rules import (
    BLOCK,
    BLOCKS,
    BYTES,
    COUNT,
    LAYERS,
    MEASURED,
    TOKENS,
    WIRE_MAX,
    Checked,
    Harmless,
    Most,
    Tables,
)

_PLAN = Checked("edgepipe.stage.plan_check:check_plan")
_SLOTS = Checked("edgepipe.backend.step_layout:check_states")
_TABLE = Checked("edgepipe.stage.sequences:SequenceTable.apply")
_COLUMNS = Checked("edgepipe.wire.plans:plan_from_wire")
_FRAME = Checked("edgepipe.link.receiver:RingReceiver.frame")
_CREDIT = Checked("edgepipe.link.outbox:Outbox.grant")
_DISK = Checked("edgepipe.stage.disk_tier:check_copies")
_BACK = Checked("edgepipe.stage.host_bound:check_places")
_DISK_ANSWER = Checked("edgepipe.engine.disk_answers:DiskAnswers.note")
_KEYS = Checked("edgepipe.stage.held_keys:HeldKeys.name")
_HELD = Checked("edgepipe.engine.held_reports:HeldReport.note")
_DONE = Checked("edgepipe.engine.pump:Pump.on_report")
_REGISTRATION = Checked("edgepipe.wire.intake:registration_fault")
_HOUR_US = 3_600_000_000  # far beyond every deadline of a step

_DURATION_US = Within(0, _HOUR_US)

STAGE: Tables = {
    "ControlMessage": {"next_plans": Checked("edgepipe.wire.plans:commands_from_wire")},
    # A stage compares hidden sizes with its shard's.
    "OpenPipeline": {
        "slices": Most(256),
        "num_slices": Within(1, 1 << 16),
        "hidden_size": Within(1, WIRE_MAX),
        "num_blocks": Within(1, BLOCKS.highest),
        "block_size": Within(1, BLOCK.highest),
        "max_in_flight": Within(1, 1 << 16),
        "step_deadline_ms": Within(1, 86_400_000),
        "window_blocks": Most(64, BLOCKS),
        "state_slots": BLOCKS,
        "host_places": Most(66, BLOCKS),
        "disk_places": Most(66, BLOCKS),
    },
    "Plan": {
        "step": COUNT,
        "last_slice": _PLAN,
        "sequence": _TABLE,
        "position": _TABLE,
        "num_tokens": _TABLE,
        "sample": _TABLE,
        "block_row": _COLUMNS,
        "block_start": _TABLE,
        "block_count": _TABLE,
        "token_ids": _PLAN,
        "registers": _TABLE,
        "frees": _TABLE,
        "copies": _TABLE,
        "windows": _TABLE,
        "state_read": _SLOTS,
        "state_row": _COLUMNS,
        "state_after": _SLOTS,
        "state_slot": _SLOTS,
        "after": _PLAN,
        "draft": _COLUMNS,
        "move_class": _TABLE,
        "move_place": _TABLE,
        "move_kept": _TABLE,
        "move_out": _COLUMNS,
        "lot": Within(0, MOST_DRAFTS),
        "key_class": _KEYS,
        "key_place": _KEYS,
    },
    "NewKeys": {"key_class": _KEYS, "key_place": _KEYS},
    "DiskCopies": {"number": COUNT, "memory_class": _DISK, "host_places": _DISK, "disk_places": _DISK},
    "PlacesBack": {"memory_class": _BACK, "places": _BACK},
    "HeldPlaces": {"memory_class": _HELD, "tier": Within(0, 2), "places": _HELD},
    "HostRoom": {"permille": Within(0, 1000), "available_bytes": BYTES},
    "WindowBlocks": {"row": _COLUMNS, "place": _TABLE, "start": _TABLE, "count": _TABLE},
    "Registrations": {"sequences": Checked("edgepipe.stage.sequences:SequenceTable.tell")},
    "Register": {
        "sequence": _TABLE,
        "choice": _REGISTRATION,
        "prompt_tokens": _REGISTRATION,
        "prompt": _REGISTRATION,
        "generated": _REGISTRATION,
        "end_ids": _REGISTRATION,
        "seen_steps": _REGISTRATION,
    },
    "BlockCopy": {"source": _TABLE, "target": _TABLE},
    "OpenRing": {"slice": LAYERS, "hidden_size": Within(1, WIRE_MAX)},
    "Frame": {
        "step": _FRAME,
        "chunk": _FRAME,
        "sent_us": Harmless("it goes back to its sender in a LinkSample"),
        "passage_us": Harmless("only emulated networks read it"),
    },
    "Credit": {
        "step": _CREDIT,
        "credits": _CREDIT,
        "bulk_step": _CREDIT,
        "bulk_credits": _CREDIT,
        "received": Checked("edgepipe.link.pacing:Pacing.received"),
    },
    "LinkSample": {
        "step": COUNT,
        "num_bytes": Within(0, 1 << 40),
        "first_sent_us": COUNT,
        "first_received_us": COUNT,
        "last_received_us": COUNT,
        "told_us": COUNT,
        "acknowledged_us": COUNT,
        "spread_bytes": Within(0, 1 << 40),
    },
    "StageReport": {"crashed_step": Checked("edgepipe.engine.pump:Pump.sequences_of")},
    "StepDone": {
        "step": _DONE,
        "ids": _DONE,
        "timings": Most(256),
        "logprobs": _DONE,
        "prompt_logprobs": _DONE,
        "failures": _DONE,
        "num_ids": Checked("edgepipe.wire.reports:done_from_wire"),
        "drafts": _DONE,
        "draft_sources": _DONE,
        "num_drafts": Checked("edgepipe.wire.reports:done_from_wire"),
    },
    "Drafted": {
        "step": _DONE,
        "sequence": Checked("edgepipe.scheduler.scheduler:Scheduler.add_drafts"),
        "position": Checked("edgepipe.scheduler.flights:DraftChain.add"),
        "ids": _DONE,
        "sources": _DONE,
        "took_us": _DURATION_US,
    },
    "DiskCopied": {"number": _DISK_ANSWER, "failed": _DISK_ANSWER, "took_us": COUNT},
    "SampleFailure": {"index": _DONE},
    "SampledLogprobs": {"index": _DONE},
    "PromptLogprobs": {
        "sequence": Checked("edgepipe.engine.table:RequestTable.note_step"),
        "position": Checked("edgepipe.engine.requests:Choice.add_prompt_logprobs"),
        "tokens": Checked("edgepipe.engine.requests:Choice.add_prompt_logprobs"),
    },
    "StageTimings": {"timings": Most(1024), "links": Most(1024), "home": Most(1024)},
    "HomeTokens": {"step": _DONE, "ids": _DONE},
    "StepTiming": {
        "step": _DONE,
        "slice_index": _DONE,
        "num_tokens": TOKENS,
        "num_rows": TOKENS,
        "started_us": COUNT,
        "wait_us": _DURATION_US,
        "prepare_us": _DURATION_US,
        "compute_us": _DURATION_US,
        "sample_us": _DURATION_US,
        "send_queue_us": _DURATION_US,
        "upload_us": _DURATION_US,
        "queued_us": _DURATION_US,
        "expert_share": MEASURED,
        "upload_bytes": Within(0, 1 << 40),
        "draft_us": _DURATION_US,
    },
}
