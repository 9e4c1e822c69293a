"""Operators of vLLM that are not FlashInfer's or FlashAttention's. Its plugins are in `integrations`."""
