"""Building blocks of kernels on the device. They know nothing of attention or top-k."""
