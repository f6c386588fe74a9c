"""Cluster of emulated devices on this machine: real nodes, stages and links; a backend without weights."""

from __future__ import annotations

import secrets
import shutil
import string
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgepipe.cli.admin import connect
from edgepipe.cli.local_cluster import LocalCluster, NodeToStart, local_cluster, wait_until_joined
from edgepipe.errors import NoPeersFound
from edgepipe.link.admin_client import Admin

if TYPE_CHECKING:
    from edgepipe.spec.facts import ModelConfig

_JOIN_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedCluster:
    """Description of the cluster to start."""

    devices: Sequence[str]  # keys of the device table; node i is called a, b, c, ...
    model: str  # model to imitate: qwen2.5-32b:q4_k_m
    config: ModelConfig  # the model's shape
    link: str = ""  # emulated link of every node, such as 1gbit,0.3ms; empty: this machine's loopback
    # Settings that all devices share: {"jitter": "0.05"}.
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    mix: str = ""  # types of the weights (edgepipe.weights.mixes); empty: bf16
    vocab_size: int | None = None  # None: the smallest, because logits of 150,000 tokens cost host time

    @property
    def served_name(self) -> str:
        """Name of the model in the store, which takes it from a folder."""
        return self.model.replace(":", "-")


@asynccontextmanager
async def emulated_cluster(cluster: EmulatedCluster) -> AsyncGenerator[Admin]:
    """Start the nodes and wait until they find each other. Yield the first node's. Stop and remove all at the end.

    Raises NoPeersFound, and the error of a node that did not start.
    """
    folder = Path(tempfile.mkdtemp(prefix="edgepipe-bench-"))
    try:
        _store_model(folder / "models", folder / cluster.served_name, cluster)  # activations have the real size
        async with local_cluster(_plan(cluster, folder / "models")) as nodes, connect(nodes[0].data_dir) as admin:
            if await wait_until_joined(admin, num_nodes=len(nodes), timeout_s=_JOIN_S) is None:
                raise NoPeersFound(
                    "the nodes did not find each other",
                    fact=f"not within {_JOIN_S:.0f} s; mDNS on 127.0.0.1 may be blocked",
                    next_step="edgepipe doctor",
                )
            yield admin
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _store_model(models_dir: Path, source: Path, cluster: EmulatedCluster) -> None:
    from edgepipe.store.store import ModelStore
    from edgepipe.weights.emulated_folder import SMALLEST_VOCAB, write_model_folder

    # Emulated devices draft with the imagined draft model of their settings, never with a layer of the model's own.
    config = replace(cluster.config, vocab_size=cluster.vocab_size or SMALLEST_VOCAB, mtp=None)
    write_model_folder(source, config, mix=cluster.mix)
    ModelStore(models_dir).pull(str(source))


def _plan(cluster: EmulatedCluster, models_dir: Path) -> LocalCluster:
    return LocalCluster(
        cluster=f"bench-{secrets.token_hex(4)}",
        nodes=[
            NodeToStart(name=name, backend="emulated", device=device)
            for name, device in zip(node_names(len(cluster.devices)), cluster.devices, strict=True)
        ],
        models_dir=models_dir,
        threads=1,
        backend_options=[f"{key}={value}" for key, value in {**cluster.settings, "as_model": cluster.model}.items()],
        link=cluster.link,
    )


def node_names(count: int) -> list[str]:
    """Name a node: a, b, ..., z, aa, ab, ..."""
    letters = string.ascii_lowercase
    return [letters[i] if i < 26 else letters[i // 26 - 1] + letters[i % 26] for i in range(count)]
