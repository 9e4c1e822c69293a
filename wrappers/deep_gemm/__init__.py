"""DeepGEMM's functions for the indexer of sparse attention."""
