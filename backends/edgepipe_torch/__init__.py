"""The torch backend: CPUs in float32, CUDA in bf16. Importing it imports torch, so only stage processes do."""

from edgepipe_torch.backend import TorchBackend

__all__ = ["TorchBackend"]
