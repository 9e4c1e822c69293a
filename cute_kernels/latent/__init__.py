"""The caches of latent attention (MLA) and of its indexer: their records, and the kernels that write and read
them."""
