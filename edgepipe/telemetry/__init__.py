"""Metric names and units, logging."""
