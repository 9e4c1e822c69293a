"""The tile schedulers: which tile a CTA works on, computed on the device from the lengths. No host-side plan.

policy      consequences of a schedule for the rest of a kernel: other files ask it and test no names of schedules
work        the pipeline through which one warp of a CTA tells the others the next tile
tiles       dynamic persistent scheduler: whole tiles from an atomic counter, in LPT order, swizzled by L2 sections
stream_k    stream-K: every CTA gets the same number of KV blocks, so that tiles are split
"""
