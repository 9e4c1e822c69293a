"""Small kernels that run on an NVIDIA GPU and in the simulator, and the comparison of their results."""
