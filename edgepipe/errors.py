"""Every error that edgepipe raises on purpose.

::

    EdgepipeError                      exit 1, HTTP 500
    ├─ UserError                       exit 2, HTTP 400
    │  ├─ ConfigInvalid                exit 2, HTTP 400
    │  ├─ PlanInvalid                  exit 2, HTTP 400
    │  ├─ RequestInvalid               exit 2, HTTP 400
    │  │  └─ PromptTooLong             exit 2, HTTP 400
    │  ├─ PortInUse                    exit 1, HTTP 400
    │  ├─ FeatureMissing               exit 2, HTTP 501
    │  ├─ ModelUnknown                 exit 7, HTTP 404
    │  ├─ ModelDownloadFailed          exit 7, HTTP 502
    │  ├─ ModelInvalid                 exit 7, HTTP 400
    │  │  └─ ArchitectureUnsupported   exit 7, HTTP 400
    │  └─ TemplateFailed               exit 2, HTTP 400
    ├─ CapacityError                   exit 1, HTTP 503
    │  ├─ QueueFull                    exit 1, HTTP 429
    │  ├─ KVCacheFull                  exit 1, HTTP 503
    │  ├─ DiskFull                     exit 1, HTTP 507
    │  └─ NoFeasiblePlacement          exit 6, HTTP 503
    ├─ LinkError                       exit 3, HTTP 503
    │  ├─ ConnectTimeout               exit 3, HTTP 503
    │  ├─ SendTimeout                  exit 3, HTTP 503
    │  ├─ PeerClosed                   exit 3, HTTP 503
    │  ├─ LocalProtocolError           exit 3, HTTP 503
    │  └─ RemoteProtocolError          exit 3, HTTP 503
    ├─ ClusterError                    exit 3, HTTP 503
    │  ├─ NodeUnreachable              exit 3, HTTP 503
    │  ├─ LinkNotMeasured              exit 3, HTTP 503
    │  ├─ NoPeersFound                 exit 4, HTTP 503
    │  ├─ StaleEpoch                   exit 3, HTTP 503
    │  ├─ StagesMove                   exit 3, HTTP 503
    │  ├─ PairingRejected              exit 5, HTTP 503
    │  ├─ CertificateInvalid           exit 5, HTTP 503
    │  ├─ AccessDenied                 exit 5, HTTP 503
    │  ├─ TrustInvalid                 exit 5, HTTP 503
    │  └─ VersionMismatch              exit 9, HTTP 503
    └─ StageError                      exit 1, HTTP 503
       ├─ BackendUnavailable           exit 1, HTTP 503
       ├─ ShardMismatch                exit 1, HTTP 503
       ├─ DeviceOutOfMemory            exit 6, HTTP 503
       ├─ StageLost                    exit 1, HTTP 503
       ├─ StepFailed                   exit 1, HTTP 503
       ├─ GrammarNotReady              exit 1, HTTP 503
       └─ PipelineBroken               exit 1, HTTP 503

A bug is an ``AssertionError`` or ``RuntimeError``, never in this tree. A
class's docstring is the sentence that a person reads first; ``fact`` is the measured fact, ``next_step`` the command to
type. The command line prints these three lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from enum import Enum
from typing import ClassVar, Self

from edgepipe.safe_text import one_line


class Retry(Enum):
    """Whether a caller may retry after the error."""

    SAFE = "safe"
    AFTER_REPLAN = "after_replan"
    NEVER = "never"


class EdgepipeError(Exception):
    """Something went wrong in edgepipe."""

    code: ClassVar[str] = "edgepipe_error"
    retry: ClassVar[Retry] = Retry.NEVER
    exit_code: ClassVar[int] = 1
    http_status: ClassVar[int] = 500
    usual_step: ClassVar[str] = ""  # default ``next_step`` of the class
    # Time until another attempt can succeed; 0: not known. For HTTP; not sent to other processes.
    retry_after_s: float = 0.0

    def __init__(
        self,
        what: str = "",
        *,
        fact: str = "",
        next_step: str = "",
        node: str = "",
        stage: str = "",
        request_id: str = "",
    ) -> None:
        # Spelled as in other messages.
        self.what = what or self.sentence()[:1].lower() + self.sentence()[1:].removesuffix(".")
        self.fact = fact
        self.next_step = next_step or self.usual_step
        self.node = node
        self.stage = stage
        self.request_id = request_id
        super().__init__(self.what)

    @classmethod
    def sentence(cls) -> str:
        """Return the first line of the class's docstring, the default text of the error."""
        return (cls.__doc__ or cls.__name__).strip().splitlines()[0]

    def changed(self, **parts: str) -> Self:
        """Return a copy with other texts: ``what``, ``fact``, ``next_step``, ``node``, ``stage``, ``request_id``."""
        assert parts.keys() <= vars(self).keys(), "these are texts of errors"
        made = copy(self)
        for name, text in parts.items():
            setattr(made, name, text)
        made.args, made.__cause__ = (made.what,), self.__cause__
        return made

    def on_node(self, name: str, *, stage: str = "") -> Self:
        """Return the error with this node and stage, unless it names others."""
        return self.changed(node=self.node or name, stage=self.stage or stage)

    def lines(self) -> list[str]:
        """Return what failed, the measured fact and the next step, without empty parts, each safe to show on a line."""
        named = self.what.replace(",", " ").replace("'", " ").split()
        node = f"node {self.node}" if self.node and self.node not in named else ""
        stage = self.stage if self.stage not in self.what else ""
        where = ", ".join(part for part in (node, stage) if part)
        first = f"{self.what} ({where})" if where else self.what
        return [one_line(line) for line in (first, self.fact, self.next_step) if line]

    def __str__(self) -> str:
        return " · ".join(self.lines())

    def __eq__(self, other: object) -> bool:
        """Errors of one class with the same texts are equal, so that values that hold them can be compared."""
        return isinstance(other, EdgepipeError) and self._parts() == other._parts()

    def __hash__(self) -> int:
        return hash(self._parts())

    def _parts(self) -> tuple[object, ...]:
        return (type(self), self.what, self.fact, self.next_step, self.node, self.stage, self.request_id)


class UserError(EdgepipeError):
    """An input or a setting is wrong."""

    code = "user_error"
    exit_code = 2
    http_status = 400


class ConfigInvalid(UserError):
    """A setting is unknown or has an invalid value."""

    code = "config_invalid"


class PlanInvalid(UserError):
    """The plan does not cover every layer exactly once."""

    code = "plan_invalid"


class RequestInvalid(UserError):
    """The request has an invalid field."""

    code = "request_invalid"


class PromptTooLong(RequestInvalid):
    """The prompt is longer than the model's context."""

    code = "context_length_exceeded"
    # For clients that read them: tokens of the prompt, and the most that it may have; 0: not known.
    num_tokens: int = 0
    most_tokens: int = 0


class PortInUse(UserError):
    """Another program uses the port."""

    code = "port_in_use"
    exit_code = 1


class FeatureMissing(UserError):
    """This installation lacks a part that the command needs."""

    code = "feature_missing"
    http_status = 501


class ModelUnknown(UserError):
    """No model of that name is known."""

    code = "model_not_found"
    exit_code = 7
    http_status = 404


class ModelDownloadFailed(UserError):
    """The model could not be fetched."""

    code = "model_download_failed"
    retry = Retry.SAFE
    exit_code = 7
    http_status = 502


class ModelInvalid(UserError):
    """The model's files are damaged or contradict each other."""

    code = "model_invalid"
    exit_code = 7
    usual_step = "fetch the model again, or choose another: edgepipe models pull MODEL"


class ArchitectureUnsupported(ModelInvalid):
    """The model's architecture is not supported."""

    code = "architecture_unsupported"


class TemplateFailed(UserError):
    """The model's chat template could not be rendered."""

    code = "template_failed"
    refused: bool = False  # the template refuses this conversation, perhaps not another form of it; not sent on


class CapacityError(EdgepipeError):
    """The cluster has no capacity for this at present."""

    code = "capacity_error"
    retry = Retry.SAFE
    http_status = 503


class QueueFull(CapacityError):
    """Too many requests are waiting."""

    code = "queue_full"
    http_status = 429


class KVCacheFull(CapacityError):
    """The KV cache has no free block."""

    code = "kv_cache_full"


class DiskFull(CapacityError):
    """The disk has no room."""

    code = "disk_full"
    http_status = 507


class NoFeasiblePlacement(CapacityError):
    """The model does not fit into the memory of the cluster."""

    code = "no_feasible_placement"
    retry = Retry.AFTER_REPLAN
    exit_code = 6


class LinkError(EdgepipeError):
    """The connection between two processes failed."""

    code = "link_error"
    retry = Retry.SAFE
    exit_code = 3
    http_status = 503


class ConnectTimeout(LinkError):
    """The other side did not answer in time."""

    code = "connect_timeout"


class SendTimeout(LinkError):
    """The other side did not accept the data in time."""

    code = "send_timeout"


class PeerClosed(LinkError):
    """The other side closed the connection."""

    code = "peer_closed"


class LocalProtocolError(LinkError):
    """This process was about to break the protocol."""

    code = "local_protocol_error"
    retry = Retry.NEVER


class RemoteProtocolError(LinkError):
    """The other side broke the protocol."""

    code = "remote_protocol_error"
    retry = Retry.NEVER


class ClusterError(EdgepipeError):
    """The cluster cannot do this at present."""

    code = "cluster_error"
    exit_code = 3
    http_status = 503


class NodeUnreachable(ClusterError):
    """The node does not answer."""

    code = "node_unreachable"
    retry = Retry.AFTER_REPLAN


class LinkNotMeasured(ClusterError):
    """A link between two nodes has not been measured."""

    code = "link_not_measured"
    retry = Retry.SAFE


class NoPeersFound(ClusterError):
    """No edgepipe node was found on this network."""

    code = "no_peers_found"
    exit_code = 4


class StaleEpoch(ClusterError):
    """A newer version of the pipeline has taken over."""

    code = "stale_epoch"


class StagesMove(ClusterError):
    """Stages move to other nodes."""

    code = "stages_move"
    retry = Retry.AFTER_REPLAN


class PairingRejected(ClusterError):
    """The cluster rejected the node."""

    code = "pairing_rejected"
    exit_code = 5


class CertificateInvalid(ClusterError):
    """The certificate is not of the form that edgepipe issues."""

    code = "certificate_invalid"
    exit_code = 5


class AccessDenied(ClusterError):
    """The caller lacks the permission for this."""

    code = "access_denied"
    exit_code = 5


class TrustInvalid(ClusterError):
    """The trust store, or a change to it, has no valid signature of a cluster owner."""

    code = "trust_invalid"
    exit_code = 5


class VersionMismatch(ClusterError):
    """Two nodes speak different versions of the protocol."""

    code = "version_mismatch"
    exit_code = 9


class StageError(EdgepipeError):
    """A stage of the pipeline failed."""

    code = "stage_error"
    retry = Retry.AFTER_REPLAN
    http_status = 503


class BackendUnavailable(StageError):
    """The backend cannot run on this machine."""

    code = "backend_unavailable"


class ShardMismatch(StageError):
    """The data has the wrong shape for this shard."""

    code = "shard_mismatch"


class DeviceOutOfMemory(StageError):
    """The device has no memory left."""

    code = "device_out_of_memory"
    exit_code = 6


class StageLost(StageError):
    """A stage's process ended while requests were running."""

    code = "stage_lost"


class StepFailed(StageError):
    """A step could not be computed."""

    code = "step_failed"


class GrammarNotReady(StageError):
    """The last stage is still compiling the answer's grammar."""

    code = "grammar_not_ready"
    retry = Retry.SAFE
    usual_step = "send the request again in some seconds, or with a simpler schema"


class PipelineBroken(StageError):
    """The pipeline fails repeatedly."""

    code = "pipeline_broken"
    retry = Retry.SAFE


def all_errors(root: type[EdgepipeError] = EdgepipeError) -> Iterator[type[EdgepipeError]]:
    """Yield the class and all its subclasses, parents first."""
    yield root
    for child in root.__subclasses__():
        yield from all_errors(child)


def error_class(code: str) -> type[EdgepipeError]:
    """Return the class with this wire code; ``EdgepipeError`` for an unknown code of a newer peer."""
    return next((cls for cls in all_errors() if cls.code == code), EdgepipeError)
