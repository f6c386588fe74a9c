"""The torch backend: CPUs in float32, CUDA in bf16. It imports torch, so only stage processes import it."""

from edgepipe_torch.backend import TorchBackend

__all__ = ["TorchBackend"]
