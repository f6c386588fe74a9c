"""Attention of a few new tokens of all sequences over pages of keys and values: own Metal kernels."""
