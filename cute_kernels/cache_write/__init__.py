"""Writing rows of Q, K and V: norm, rotary embedding, quantisation and placement in a KV cache, in one pass."""
