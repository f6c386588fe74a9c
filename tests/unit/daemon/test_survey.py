"""What a plan is made of: asked from nodes, measured where it is not known; nodes that go meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NoReturn, cast

import pytest
from edgepipe_emulated import emulated_model_config

from edgepipe.backend.types import DEFAULT_SETTINGS, DeviceProfile, StageSettings
from edgepipe.daemon.network.link_probes import LinkProbes, sending_s
from edgepipe.daemon.serving.serving import Serving
from edgepipe.daemon.serving.survey import Surveyor
from edgepipe.errors import BackendUnavailable, ConnectTimeout, ModelUnknown, NodeUnreachable
from edgepipe.ids import NodeId
from edgepipe.planner.layer_profile import LayerProfile, Point
from edgepipe.testing.clock import FakeClock
from edgepipe.weights.mixes import named_model
from edgepipe.wire.children import ProfileLayerRequest
from edgepipe.wire.nodes import DeviceState, NodeState
from edgepipe.wire.serving import LinkProfile, ProfileLinksReply
from edgepipe.wire.surveys import cluster_of

LAYER = LayerProfile(
    base_s=0.0,
    decode=(Point(1, 1),),
    prefill=(Point(32, 2),),
    head=(Point(1, 1),),
    kv_token_s=0.0,
    decode_context=0,
)
DEVICE = DeviceProfile(
    backend="torch",
    device="cuda:0",
    name="GPU",
    compute_dtype="float32",
    memory_total_bytes=0,
    memory_free_bytes=0,
    bandwidth_bytes_per_s=0,
    flops=0,
)
KV_IN_8_BITS = StageSettings(kv="8bit")
MODEL = cast(
    "Any",
    type("Model", (), {"name": "m", "config": emulated_model_config(), "config_json": "{}", "weights_json": ""})(),
)


class FakePeers:
    """Nodes a, b, c on three machines; ``gone`` do not answer, ``unknown`` have measured nothing."""

    def __init__(self) -> None:
        self.own_id = "a"
        self.gone: set[str] = set()
        self.unknown: set[str] = set()
        self.silent: set[str] = set()  # they take no new connection
        self.shut: set[tuple[str, str]] = set()  # ways that take no new connection
        self.swapped: dict[str, str] = {}  # node to the node whose address it has now
        self.forms: dict[str, tuple[str, ...]] = {}  # forms of KV, by node
        self.layers: list[tuple[str, bool, bool]] = []
        self.kv: list[str] = []  # KV of the measurements
        self.links: list[tuple[str, tuple[str, ...], bool]] = []

    def nodes(self) -> list[NodeState]:
        return [self.node(name) for name in "abc"]

    def node(self, node_id: str) -> NodeState:
        return NodeState(
            node_id=NodeId(node_id),
            name=node_id,
            address=f"10.0.0.{ord(self.swapped.get(node_id, node_id))}:7117",
            devices=(DeviceState(profile=self._profile(node_id), state="idle", free_bytes=10**9),),
        )

    def _profile(self, node_id: str) -> DeviceProfile:
        return replace(DEVICE, kv_forms=self.forms.get(node_id, ()))

    def broken_links(self) -> frozenset[tuple[str, str]]:
        return frozenset()

    def is_self(self, node_id: str) -> bool:
        return node_id == self.own_id

    async def profile_layer(self, node_id: str, request: ProfileLayerRequest) -> LayerProfile:
        self.layers.append((node_id, request.known_only, request.fresh))
        self.kv.append(request.settings.kv)
        if node_id in self.gone or (request.known_only and node_id in self.unknown):
            raise BackendUnavailable("no")
        return LAYER

    async def profile_links(
        self, node_id: str, others: Iterable[str], *, known_only: bool = False, fresh: bool = False
    ) -> ProfileLinksReply:
        self.links.append((node_id, tuple(others), known_only))
        if node_id in self.gone:
            raise NodeUnreachable(f"node {node_id} is not in the cluster now")
        if node_id in self.silent:
            raise ConnectTimeout(f"{node_id} cannot be reached", fact="no answer")
        open_ways = [other for other in others if (node_id, other) not in self.shut]
        return ProfileLinksReply(
            links=tuple(LinkProfile(sender=node_id, receiver=other, one_way_s=0.001) for other in open_ways),
            unreached=tuple(other for other in others if other not in open_ways),
        )


def surveyor(peers: FakePeers) -> Surveyor:
    return Surveyor(cast("Any", peers))


async def test_every_device_and_every_directed_link_is_asked_for() -> None:
    peers = FakePeers()
    reply = await surveyor(peers).survey(MODEL, DEFAULT_SETTINGS)
    assert [machine.node_id for machine in reply.machines] == ["a", "b", "c"]
    assert all(machine.layer is not None for machine in reply.machines)
    assert {(link.sender, link.receiver) for link in reply.links} == {(x, y) for x in "abc" for y in "abc" if x != y}
    assert not any(known_only for _, known_only, _ in peers.layers)


async def test_a_node_that_cannot_keep_8_bit_kv_is_left_out_with_the_reason() -> None:
    peers = FakePeers()
    peers.forms["b"] = ("8bit",)
    reply = await surveyor(peers).survey(MODEL, KV_IN_8_BITS)
    assert [machine.node_id for machine in reply.machines] == ["b"]
    assert reply.unusable == ("a: it cannot keep KV as 8bit", "c: it cannot keep KV as 8bit")
    known = await surveyor(peers).known(MODEL, KV_IN_8_BITS)
    assert [machine.node_id for machine in known.machines] == ["b"]
    assert peers.kv == ["8bit", "8bit"], "steps are measured with that KV"


async def test_what_is_known_is_measured_again_when_asked() -> None:
    peers = FakePeers()
    await surveyor(peers).survey(MODEL, DEFAULT_SETTINGS, fresh=True)
    assert all(fresh for _, _, fresh in peers.layers)


async def test_a_node_that_goes_while_links_are_measured_gets_no_layers() -> None:
    peers = FakePeers()
    peers.gone.add("b")
    reply = await surveyor(peers).survey(MODEL, DEFAULT_SETTINGS)
    obstacles = {machine.node_id: machine.obstacle.what if machine.obstacle else "" for machine in reply.machines}
    assert obstacles == {"a": "", "b": "node b is not in the cluster now", "c": ""}


@pytest.mark.parametrize("asked_before", [True, False])
async def test_a_node_that_takes_no_new_connections_gets_no_layers_and_its_ports_are_named(asked_before: bool) -> None:
    """It answers on a connection that is open since before, or not at all."""
    peers = FakePeers()
    peers.shut = {("a", "b"), ("c", "b")}
    peers.silent = set() if asked_before else {"b"}
    reply = await surveyor(peers).survey(MODEL, DEFAULT_SETTINGS)
    (error,) = (machine.obstacle for machine in reply.machines if machine.obstacle is not None)
    assert (error.node, error.what) == ("b", "a does not reach b")
    assert "let TCP ports 7117-7133 through the firewall of b" in error.next_step
    assert not any("b" in (link.sender, link.receiver) and link.receiver == "b" for link in reply.links)


async def test_what_is_known_is_told_without_measuring_and_the_rest_is_left_out() -> None:
    peers = FakePeers()
    peers.unknown, peers.gone = {"b"}, {"c"}
    reply = await surveyor(peers).known(MODEL, DEFAULT_SETTINGS)
    assert {machine.node_id: machine.layer is not None for machine in reply.machines} == {
        "a": True,
        "b": False,
        "c": False,
    }
    assert {link.sender for link in reply.links} == {"a", "b"}
    assert all(known_only for *_, known_only in peers.links)


async def test_only_what_touches_a_new_node_is_measured() -> None:
    peers = FakePeers()
    await surveyor(peers).known(MODEL, DEFAULT_SETTINGS, measure=["c"])
    assert {(name, known_only) for name, known_only, _ in peers.layers} == {("a", True), ("b", True), ("c", False)}
    measured = {(name, other) for name, others, known_only in peers.links if not known_only for other in others}
    assert measured == {("a", "c"), ("b", "c"), ("c", "a"), ("c", "b")}


class CountingProbes(LinkProbes):
    """Wires are imagined; this node's own calls are counted by the peers."""

    measured = 0
    dropped: frozenset[str] = frozenset()

    async def _measure(self, node: NodeState) -> LinkProfile:
        self.measured += 1
        if node.node_id in self.dropped:
            raise ConnectTimeout(f"node {node.name} cannot be reached")
        return LinkProfile(sender="a", receiver=node.node_id, one_way_s=0.002, bytes_per_s=1e8)


async def test_the_link_of_a_node_is_not_taken_for_that_of_another_at_its_former_address() -> None:
    peers = FakePeers()
    probes = CountingProbes(peers=cast("Any", peers), clock=FakeClock(), timeouts=cast("Any", None), network=None)
    await probes.measure(["b", "c"])
    peers.swapped = {"b": "c", "c": "b"}
    assert [link.receiver for link in (await probes.measure(["b", "c"])).links] == ["a", "b", "c"]
    assert probes.measured == 4, "after its address changed, a node may be behind another link"


async def test_links_are_kept_a_while_and_told_with_what_the_host_takes() -> None:
    peers, clock = FakePeers(), FakeClock()
    probes = CountingProbes(peers=cast("Any", peers), clock=clock, timeouts=cast("Any", None), network=None)
    assert probes.known(["b"]) == []
    found = await probes.measure(["b"])
    assert [link.receiver for link in found.links] == ["a", "b"]
    await probes.measure(["b"])
    assert probes.measured == 1
    await probes.measure(["b"], fresh=True)
    assert probes.measured == 1, "it was measured a moment ago"
    clock.advance(11)
    await probes.measure(["b"], fresh=True)
    clock.advance(3600)
    assert [link.receiver for link in probes.known(["b"])] == ["a", "b"], "old figures are better than none"
    await probes.measure(["b"])
    assert probes.measured == 3


async def test_a_known_model_is_planned_before_any_machine_has_it() -> None:
    class NoModels:
        async def resolve(self, name: str) -> NoReturn:
            raise ModelUnknown(f"no model '{name}' is in the cluster")

    peers = FakePeers()
    fields = dict.fromkeys(("ids", "local", "follower", "replicas", "heartbeats", "book", "tasks", "clock"))
    serving = Serving(**cast("Any", fields | {"peers": peers, "models": NoModels(), "surveyor": surveyor(peers)}))
    reply = await serving.survey("Qwen3 4B", DEFAULT_SETTINGS)
    assert (reply.model, len(reply.machines)) == ("qwen3-4b:q4_k_m", 3)
    assert all(machine.layer is not None for machine in reply.machines)
    assert all(known_only for _, known_only, _ in peers.layers), "nobody waits for measurements to choose a model"
    peers.layers.clear()
    await serving.survey("Qwen3 4B", DEFAULT_SETTINGS, fresh=True)
    assert not any(known_only for _, known_only, _ in peers.layers), "--measure measures"
    assert cluster_of(reply).config == named_model("qwen3-4b")[0]
    for name in ("gpt-9", "org/unheard-of"):
        with pytest.raises(ModelUnknown, match="is in the cluster"):
            await serving.survey(name, DEFAULT_SETTINGS)


async def test_a_link_that_takes_no_connection_is_told_beside_the_others() -> None:
    peers = FakePeers()
    probes = CountingProbes(peers=cast("Any", peers), clock=FakeClock(), timeouts=cast("Any", None), network=None)
    probes.dropped = frozenset("b")
    found = await probes.measure(["b", "c"])
    assert found.unreached == ("b",)
    assert [link.receiver for link in found.links] == ["a", "c"]


async def test_a_lone_machine_is_not_measured_before_it_serves() -> None:
    """The model is placed there whatever its speed; a plan that people read is measured."""
    peers = FakePeers()
    peers.forms["b"] = ("8bit",)
    await surveyor(peers).survey(MODEL, KV_IN_8_BITS, to_serve=True)
    assert [(name, known_only) for name, known_only, _ in peers.layers] == [("b", True)]
    await surveyor(peers).survey(MODEL, KV_IN_8_BITS)
    await surveyor(peers).survey(MODEL, DEFAULT_SETTINGS, to_serve=True)
    assert not any(known_only for _, known_only, _ in peers.layers[1:])


@pytest.mark.parametrize(
    ("taken_s", "trip_s", "expected_s"),
    [(1.0, 0.1, 0.9), (1.0, 0.75, 0.5), (1.0, 1.0, 0.5), (1.0, 14.0, 0.5)],
)
def test_a_link_is_not_taken_for_faster_than_twice_what_went_over_it(
    taken_s: float, trip_s: float, expected_s: float
) -> None:
    assert sending_s(taken_s, trip_s) == pytest.approx(expected_s)
