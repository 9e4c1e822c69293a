"""Rows of latent attention (MLA) and of its indexer: calls, checks, plans and the torch operator."""
