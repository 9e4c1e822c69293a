"""Attention and top-k kernels in CuTe DSL: everything here is traced, or feeds a trace. No torch."""
