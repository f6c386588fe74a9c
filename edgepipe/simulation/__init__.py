"""Predicts throughput and latency of modelled clusters, with the real scheduler and without tensors.

Only ``cli`` imports it.
"""
