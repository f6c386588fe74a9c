"""Backends driven by hand, and what stands in for a GPU on a machine without one: CUDA kernels compiled for the CPU,
pages and graphs on a CPU, one model run twice in two ways. ``steps`` makes a step out of a few words, ``maker`` the
backends that the contract tests run against. Use these in tests of a backend or of its kernels.
"""
