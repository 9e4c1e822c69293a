"""Logits of an indexer: a `LogitsCall` -> a plan and its launch (`logits`). And keys that they choose (`selection`).

The signatures are in `deep_gemm` and `flashinfer.attn_scores`, those with selection in `own.select` and
`flashinfer.dsa_indexer`.
"""
