"""Attention: one mainloop an architecture, features at seams (mask, softmax, kv, epilogue, schedule)."""
