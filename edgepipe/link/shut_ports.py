"""PURE: the error when a node can be reached and one of its ports cannot."""

from __future__ import annotations

from edgepipe.config import CHILD_PORTS, PAIRING_OFFSET
from edgepipe.errors import ConnectTimeout


def shut_port(source: str, target: str, *, address: str, node_address: str, beside: str = "") -> ConnectTimeout:
    """Return the error of a connection from the node named ``source`` to ``address`` of ``target`` or its children.

    ``node_address`` is the address of that node's daemon; ``beside`` names a node that reaches both, if it is another.
    """
    alone = source == target
    return ConnectTimeout(
        f"{source} does not reach {'its own ports' if alone else target}",
        fact=f"no connection to {address} could be made from {'the machine itself' if alone else 'there'}"
        + (f", though {beside} reaches both" if beside not in ("", source) else ""),
        next_step=f"let TCP {_ports(address, node_address)} through the firewall of {target}, "
        f"{'also' if alone else 'at least'} from {'itself' if alone else source}: see 'edgepipe doctor' on {source}",
        node=target,
    )


def _ports(address: str, node_address: str) -> str:
    """Return the port that was tried, or the range to open: the children's, or all ports of a node."""
    port, of_node = (int(text.rpartition(":")[2]) for text in (address, node_address))
    if port == of_node:
        return f"ports {of_node}-{of_node + PAIRING_OFFSET}"
    first, last = of_node + 1, of_node + CHILD_PORTS
    return f"ports {first}-{last}" if first <= port <= last else f"port {port}"
