"""Logits of an indexer: a `LogitsCall` -> a plan and its launch (`logits`).

The signatures are in `deep_gemm` and `flashinfer.attn_scores`, those with selection in `own.select`.
"""
