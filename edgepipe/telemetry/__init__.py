"""Metric names and units, logging."""

HOP_LATENCY_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
"""Upper bounds of the engines' histogram of one-way hop latencies: from a switch to poor Wi-Fi."""
