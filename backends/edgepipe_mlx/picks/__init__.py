"""Candidates for sampling, picked on the device."""
