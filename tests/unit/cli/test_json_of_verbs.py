"""What scripts read of the verbs that change something."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgepipe_emulated import emulated_model_config

from edgepipe.store.store import ModelStore
from edgepipe.weights.emulated_folder import write_model_folder
from edgepipe.wire.codec import to_wire
from edgepipe.wire.serving import ServeEvent
from edgepipe.wire.v1 import node_pb2 as pb
from tests.support.daemon.admin_server import FakeNode, answering
from tests.support.processes.command_line import Run, make_engine, make_status


class ServingNode(FakeNode):
    """Serves every model at once."""

    def Serve(self, request: pb.ServeRequest, context: Any) -> Iterator[pb.ServeEvent]:
        yield to_wire(ServeEvent(message="loading", progress=0.5), pb.ServeEvent)
        stages, count = make_status().engines[0].stages, request.options.num_replicas
        replicas = [
            make_engine(request.options.model, stages=stages, num_replicas=count, replica=number)
            for number in (range(1, count + 1) if count else [0])
        ]
        yield to_wire(ServeEvent(engines=tuple(replicas)), pb.ServeEvent)


def test_serve_and_stop_tell_scripts_what_they_did(run: Run, tmp_path: Path) -> None:
    with answering(tmp_path / "data", ServingNode(status=make_status())):
        served = json.loads(run("serve", "tiny", "--json").out)
        assert (served["model"], served["state"]) == ("tiny", "ready")
        assert [stage["node_name"] for stage in served["stages"]] == ["gamer", "studio"]
        both = json.loads(run("serve", "tiny", "--replicas", "2", "--json").out)
        assert [engine["replica"] for engine in both] == [1, 2]
        said = run("serve", "tiny", "--replicas", "2").out.splitlines()
        assert [line.partition(":")[0] for line in said] == ["tiny replica 1/2 is ready", "tiny replica 2/2 is ready"]
        assert json.loads(run("stop", "tiny", "--json").out) == {"stopped": ["tiny"]}


def test_rm_tells_scripts_what_is_free_again(run: Run, tmp_path: Path) -> None:
    write_model_folder(tmp_path / "tiny", emulated_model_config(num_layers=2))
    model = ModelStore(tmp_path / "data" / "models").pull(str(tmp_path / "tiny"))
    printed = json.loads(run("models", "rm", "tiny", "--json").out)
    assert (printed["model"], printed["still_on"]) == (model.model_id, [])
    assert printed["freed_bytes"] > 0
    assert json.loads(run("models", "list", "--json").out) == []


def test_a_degraded_cluster_is_exit_8_also_as_json(run: Run, tmp_path: Path) -> None:
    with answering(tmp_path / "data", FakeNode(status=make_status())):
        shown = run("status")
        assert (shown.code, shown.out.startswith("home · degraded")) == (8, True)
        as_json = run("status", "--json")
        assert (as_json.code, json.loads(as_json.out)["cluster_name"]) == (8, "home")
