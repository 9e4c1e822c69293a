"""FlashMLA's functions of latent attention (MLA).

- api: decode over a paged cache, and the metadata that it does not need
"""
