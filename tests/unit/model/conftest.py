"""Hypothesis without deadlines: a shared machine is slow now and then, and that is no failure."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
