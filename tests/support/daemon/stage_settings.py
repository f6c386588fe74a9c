"""Settings of a stage process, as a node makes them; no test of those that use them depends on any."""

from __future__ import annotations

from edgepipe.workers.settings import ChildSettings

STAGE_SETTINGS = ChildSettings(
    kind="stage",
    child_id="child-1",
    socket="/tmp/socket",
    host="127.0.0.1",
    ports=(0,),
    http_port=0,
    node_id="node-a",
    node_name="a",
    cluster_id="c",
    address="127.0.0.1:1",
    log_level="info",
    progress_s=0.25,
)
