"""The MLX backend: Apple silicon through Metal, and MLX's CPU device wherever MLX runs."""

from edgepipe_mlx.backend import MlxBackend

__all__ = ["MlxBackend"]
