"""The error tree: every class can be read, told apart and sent to another process."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest

from edgepipe import PROTOCOL_VERSION, errors
from edgepipe.link import channels
from edgepipe.security.mutual_tls import Credentials, Plaintext
from edgepipe.wire.common import Hello, check_hello
from edgepipe.wire.errors import error_from_wire, error_to_wire
from edgepipe.wire.v1 import node_pb2, node_pb2_grpc
from tests.support.network.ports import free_port

CLASSES = list(dict.fromkeys(errors.all_errors()))


def test_every_error_has_its_own_code_and_a_sentence() -> None:
    codes = [cls.code for cls in CLASSES]
    assert len(set(codes)) == len(codes)
    for cls in CLASSES:
        assert cls.__doc__
        assert cls.sentence().endswith(".")


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_errors_survive_the_wire(cls: type[errors.EdgepipeError]) -> None:
    sent = cls("it broke", fact="3 of 4", next_step="try again", node="a", stage="stage 1", request_id="r")
    received = error_from_wire(error_to_wire(sent))
    assert type(received) is cls
    assert received.lines() == sent.lines()
    assert received.request_id == "r"


def test_lines_name_the_place_once_and_leave_out_what_is_empty() -> None:
    assert errors.StageLost("the stage died", node="studio").lines() == ["the stage died (node studio)"]
    assert errors.StageLost("stage 0 on studio was lost", node="studio", stage="stage 0").lines() == [
        "stage 0 on studio was lost"
    ]
    assert errors.StageLost("stage 0 was lost", node="a", stage="stage 0").lines() == ["stage 0 was lost (node a)"]
    assert errors.StageLost().lines() == ["a stage's process ended while requests were running"]


def test_codes_of_newer_peers_become_the_root_class() -> None:
    assert errors.error_class("not_yet_invented") is errors.EdgepipeError


def test_another_protocol_version_names_the_side_to_upgrade() -> None:
    hello = Hello(role="node", node_name="studio")
    check_hello(hello)
    with pytest.raises(errors.VersionMismatch) as caught:
        check_hello(replace(hello, protocol_version=PROTOCOL_VERSION - 1))
    assert "on studio" in caught.value.next_step
    with pytest.raises(errors.VersionMismatch) as caught:
        check_hello(replace(hello, protocol_version=PROTOCOL_VERSION + 1))
    assert "on this node" in caught.value.next_step


class _Failing:
    """Two handlers of the Admin service; the others are not called."""

    def __getattr__(self, name: str) -> Any:
        return None

    async def Status(self, request: Any, context: Any) -> Any:
        raise errors.NoFeasiblePlacement("too large", fact="short by 3.0 GB", next_step="add a machine")

    async def Serve(self, request: Any, context: Any) -> AsyncIterator[node_pb2.ServeEvent]:
        yield node_pb2.ServeEvent(message="first")
        raise errors.PlanInvalid("a gap")


async def test_handlers_errors_reach_the_caller_as_the_same_class() -> None:
    server = channels.make_server(Plaintext())
    failing: Any = _Failing()
    node_pb2_grpc.add_AdminServicer_to_server(failing, server)
    port = channels.bind(server, Plaintext(), host="127.0.0.1", port=0)
    await server.start()
    try:
        async with channels.make_channel(f"127.0.0.1:{port}", Credentials()) as channel:
            stub: Any = node_pb2_grpc.AdminStub(channel)
            with pytest.raises(errors.NoFeasiblePlacement) as caught, channels.translated("a"):
                await stub.Status(node_pb2.StatusRequest(), timeout=5)
            assert caught.value.fact == "short by 3.0 GB"
            events: list[str] = []

            async def read() -> None:
                async for event in stub.Serve(node_pb2.ServeRequest(), timeout=5):
                    events.append(event.message)

            with pytest.raises(errors.PlanInvalid), channels.translated("a"):
                await read()
            assert events == ["first"]
    finally:
        await server.stop(None)


async def test_nobody_there_is_a_link_error_that_names_the_peer() -> None:
    port = free_port("127.0.0.1")
    async with channels.make_channel(f"127.0.0.1:{port}", Credentials()) as channel:
        stub: Any = node_pb2_grpc.AdminStub(channel)
        with pytest.raises(errors.LinkError, match="studio"), channels.translated("studio"):
            await stub.Status(node_pb2.StatusRequest(), timeout=5)


async def test_a_taken_port_says_so() -> None:
    first, second = channels.make_server(Plaintext()), channels.make_server(Plaintext())
    port = channels.bind(first, Plaintext(), host="127.0.0.1", port=0)
    await first.start()
    try:
        with pytest.raises(errors.PortInUse, match=str(port)):
            channels.bind(second, Plaintext(), host="127.0.0.1", port=port)
    finally:
        await first.stop(None)
        await second.stop(None)


def test_the_tree_at_the_top_of_the_module_is_the_classes() -> None:
    assert "\n".join(_tree(errors.EdgepipeError)) in (errors.__doc__ or "")


def _tree(cls: type[errors.EdgepipeError], lead: str = "", branch: str = "") -> Iterator[str]:
    """The class and those below it, a line each, as the module's docstring shows them."""
    yield f"    {lead}{branch}{cls.__name__}".ljust(39) + f"exit {cls.exit_code}, HTTP {cls.http_status}"
    below = cls.__subclasses__()
    lead += {"": "", "├─ ": "│  ", "└─ ": "   "}[branch]
    for child in below:
        yield from _tree(child, lead, "└─ " if child is below[-1] else "├─ ")


def test_an_error_with_other_texts_is_a_copy() -> None:
    cause = ConnectionRefusedError()
    error = errors.ConnectTimeout("it does not answer", fact="3 s", stage="stage 1")
    error.__cause__, error.retry_after_s = cause, 2.0
    other = error.on_node("a", stage="stage 2").changed(what="a does not answer", fact="4 s")
    assert other == errors.ConnectTimeout("a does not answer", fact="4 s", node="a", stage="stage 1")
    assert (other.__cause__, other.retry_after_s, other.args) == (cause, 2.0, ("a does not answer",))
    assert error == errors.ConnectTimeout("it does not answer", fact="3 s", stage="stage 1"), "it stays as it was"
    assert other.on_node("b").node == "a"
