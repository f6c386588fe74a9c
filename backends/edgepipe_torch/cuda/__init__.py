"""CUDA devices: own kernels, attention over pages, graphs."""
