"""Bounds of ``node.proto``: between daemons, their children and the command line."""

from __future__ import annotations

from edgepipe.sampling.bounds import Within
from edgepipe.wire.bounds.rules import (
    BLOCKS,
    BY_SIZE,
    BYTES,
    CHATS,
    COUNT,
    FEW,
    LAYERS,
    MEASURED,
    NAMES,
    NODES,
    PERCENT,
    PORT,
    RATE,
    SECONDS,
    SHARE,
    SHOWN,
    TOKENS,
    Checked,
    Most,
    Tables,
)

_HEARD = Checked("edgepipe.cluster.heartbeats:Heartbeats.answer")
_STATE_LISTS = Checked("edgepipe.cluster.reported_states:check_size")

_BEATS: Tables = {
    "Beat": {
        "sequence": _HEARD,
        "echo": _HEARD,
        "echo_delay_us": COUNT,
        "state": Checked("edgepipe.cluster.heartbeats:read_state"),
        "known": _HEARD,
        "trust": _HEARD,
        "trust_keys": _HEARD,
        "wall_ms": COUNT,
    },
    "NodeState": {
        "incarnation": COUNT,
        "devices": _STATE_LISTS,
        "engines": _STATE_LISTS,
        "models": _STATE_LISTS,
        "transfers": _STATE_LISTS,
        "http_port": PORT,
        "version": COUNT,
        "gateways": _STATE_LISTS,
        "serves": _STATE_LISTS,
        "silent": _STATE_LISTS,
        "disk_free_bytes": BYTES,
    },
    "DeviceState": {
        "reserved_bytes": BYTES,
        "free_bytes": BYTES,
        "reserved": NAMES,
        "fenced_messages": COUNT,
        "ram_free_bytes": BYTES,
    },
    "Reserved": {"num_bytes": BYTES, "ram_bytes": BYTES},
    "ModelOnDisk": {"num_bytes": BYTES, "parts": NAMES},
    "Transfer": {"bytes_done": BYTES, "bytes_total": BYTES},
}

_CALLS: Tables = {
    "PrepareRequest": {
        "kv_tokens": Within(0, 1 << 53),
    },
    "PrepareProgress": {"bytes_done": BYTES, "bytes_total": BYTES},
    "Prepared": {
        "max_blocks": BLOCKS,
        "kv_block_bytes": BYTES,
        "weight_bytes": BYTES,
        "products": FEW,
        "window_block_bytes": Most(64, BYTES),
        "crashed_epoch": COUNT,
        "crashed_step": COUNT,
    },
    "StagePlacement": {"slices": FEW, "ram_percent": PERCENT},
    "ServeSpec": {
        "stages": FEW,
        "micro_batches": Within(0, 1 << 16),
        "kv_tokens": COUNT,  # the node compares them with its memory, and says what is possible
        "concurrency": CHATS,
        "num_nodes": NODES,
        "exclude": NAMES,
        "names": FEW,
    },
    "StartEngineRequest": {"nodes": NAMES},
    "RebalanceRequest": {"num_nodes": NODES},
    "ServeBody": {"version": COUNT},
    "ServeRecords": {"records": NAMES},
    "ReadTensorRequest": {"offset": BYTES, "bytes_per_s": RATE},
    "KeepCopyRequest": {"parts": Most(4096, LAYERS)},
    "ReadFileRequest": {"offset": BYTES},
    "DataChunk": {"offset": Checked("edgepipe.daemon.files.transfer:WeightsClient.file")},
    "ProfilePoint": {"size": Within(0.0, 1e9), "seconds": SECONDS, "expert_share": SHARE},
    "LayerProfile": {
        "base_s": SECONDS,
        "decode": FEW,
        "prefill": FEW,
        "head": FEW,
        "kv_token_s": SECONDS,
        "decode_context": TOKENS,
        "measured_ms": COUNT,
    },
    "ProfileLinksRequest": {"node_ids": NAMES},
    "LinkProfile": {"one_way_s": SECONDS, "bytes_per_s": RATE},
    "ProfileLinksReply": {"links": BY_SIZE, "unreached": NAMES},
}

_CHILDREN: Tables = {
    "Introduced": {"version": COUNT},
    "KeptModels": {"models": NAMES},
    "KeptModel": {"keep_s": MEASURED, "idle_since_s": MEASURED},
    "LoadQueue": {"loading": NAMES, "waiting": NAMES},
    "PlanWanted": {"left_out": NAMES, "question": COUNT},
    "PlanMade": {"nodes": NAMES, "question": COUNT},
    "Reachable": {"nodes": NAMES, "leaving": NAMES},
    "ChildStarted": {"port": PORT},
    "ChildProgress": {
        "received": COUNT,
        "started": COUNT,
        "finished": COUNT,
        "sent": COUNT,
        "limit_ms": Within(0, 86_400_000),
        "refused_handshakes": COUNT,
        "fenced": COUNT,
    },
    "ShardLoaded": {
        "weight_bytes": BYTES,
        "kv_block_bytes": BYTES,
        "memory_free_bytes": BYTES,
        "products": FEW,
        "window_block_bytes": Most(64, BYTES),
    },
    "RunEngine": {"nodes": NAMES, "epoch_counter": COUNT},
    "IntroducedPeers": {"version": COUNT, "peers": BY_SIZE},
    "ClusterView": {
        "members": NAMES,
        "served": NAMES,
        "absent": NAMES,
        "loadable": BY_SIZE,
        "stopped": NAMES,
    },
}

_ADMIN: Tables = {
    "ReplicateRequest": {"copies": NODES},
    "ReplicateEvent": {"copies": NAMES},
    "CopyProgress": {"bytes_done": BYTES, "bytes_total": BYTES},
    "MemberState": {"rtt_ms": MEASURED, "gap_ms": MEASURED, "clock_skew_ms": Within(-1e16, 1e16)},
    "ClusterStatus": {
        "members": NAMES,
        "engines": NAMES,
        "uptime_ms": COUNT,
        "children": NAMES,
        "refused": NAMES,
        "refused_handshakes": COUNT,
        "absent": NAMES,
        "broken_links": BY_SIZE,
        "neighbours": NAMES,
        "unwritten": NAMES,
        "num_tasks": COUNT,
    },
    "ForeignNode": {"protocol_version": SHOWN, "pairing_port": PORT},
    "AbsentNode": {"since_us": COUNT},
    "ChildState": {"pid": SHOWN},
    "SurveyedMachine": {
        "free_bytes": BYTES,
        "taken_bytes": BYTES,
        "value_bytes": Within(0, 16),
        "ram_free_bytes": BYTES,
    },
    "SurveyReply": {"machines": NAMES, "links": BY_SIZE, "unusable": NAMES, "broken": BY_SIZE},
    "ServeEvent": {"progress": MEASURED},
    "StopModelReply": {"stopped": NAMES},
    "DrainEvent": {"stages": NAMES, "engines": NAMES},
    "LogsRequest": {"lines": Checked("edgepipe.daemon.services:AdminService.Logs")},
}

NODE: Tables = {**_BEATS, **_CALLS, **_CHILDREN, **_ADMIN}
