"""The MLX backend: Apple silicon through Metal, and MLX's CPU device on all its platforms."""

from edgepipe_mlx.backend import MlxBackend

__all__ = ["MlxBackend"]
