"""Rows of Q, K and V written in one launch: what all functions that write to a cache share, and `append_qkv`."""
