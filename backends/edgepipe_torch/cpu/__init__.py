"""A CPU: kernels compiled in the process, weights in their layout, recorded steps."""
