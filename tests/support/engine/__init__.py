"""Pipelines within one process. ``lab`` runs an engine with real stages of the emulated backend, ``pipeline`` the
stages alone, driven by hand-made plans; ``simulation`` and ``virtual_ring`` run the real scheduler or pump over
stages in virtual time. Use these when a test needs tokens out of a pipeline, but no process or network.
"""
