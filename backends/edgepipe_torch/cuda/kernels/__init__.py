"""CUDA C++ kernels for packed weights, compiled on the user's machine by the NVRTC that comes with torch."""
