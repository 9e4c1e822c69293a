"""Merging partial results of attention: outputs weighted by their log-sum-exp, in one pass."""
