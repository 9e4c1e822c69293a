"""FlashAttention's inference functions.

- api: the three functions
- append: new keys, and the rotation of Q and K, before a call attends
- leftpad: caches with padding before the first key of a request
"""
