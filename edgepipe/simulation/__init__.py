"""Predicts throughput and latency of imagined clusters, with the real scheduler and no tensors.

Only ``cli`` imports it.
"""
