"""Who may call what: every method that is reached over the network has a rule, and nothing else has."""

from __future__ import annotations

from edgepipe.security.access import ProcessKind, allowed
from edgepipe.wire.v1 import engine_pb2, node_pb2, stage_pb2, trust_pb2

UNIX_ONLY = {"Admin", "Children", "TrustAdmin"}


def methods() -> dict[str, str]:
    """Full names of all methods, with their services."""
    services = [
        service
        for file in (node_pb2, engine_pb2, stage_pb2, trust_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
    ]
    return {f"/{service.full_name}/{method.name}": service.name for service in services for method in service.methods}


def test_every_method_of_the_network_has_a_rule_and_no_other_has() -> None:
    for method, service in methods().items():
        assert bool(allowed(method)) is (service not in UNIX_ONLY), method


def test_what_is_not_listed_is_denied() -> None:
    for method in ("", "/", "/edgepipe.wire.v1.Node/Rest", "Node", "/other.Node/Heartbeats", "/edgepipe.wire.v1.Node/"):
        assert allowed(method) == frozenset()


def test_gateways_reach_no_stage_and_of_nodes_the_batches_that_they_keep() -> None:
    reachable = {method for method in methods() if ProcessKind.GATEWAY in allowed(method)}
    beside_engines = {method for method in reachable if method.split("/")[1] != "edgepipe.wire.v1.Engine"}
    assert beside_engines == {"/edgepipe.wire.v1.Node/ReadBatch"}  # which gives the batches that the caller keeps


def test_stages_reach_stages_only() -> None:
    reachable = {method for method in methods() if ProcessKind.STAGE in allowed(method)}
    assert reachable == {"/edgepipe.wire.v1.Stage/Ring"}
