"""Served models: their records, engines, placements and copies. The top wing of ``daemon``."""
