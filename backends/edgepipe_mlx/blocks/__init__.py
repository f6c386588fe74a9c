"""Weights of GGUF's K types at their own size: own Metal kernels for few rows, MLX's products for many."""
