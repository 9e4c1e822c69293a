"""The indexer of sparse attention: how well each key suits a query token (logits)."""
