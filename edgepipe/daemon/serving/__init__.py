"""Served models: their records, engines, placements and copies. No other subpackage of ``daemon`` imports it."""
