"""Which tile a CTA works on, computed on the device from the lengths: nothing is planned.

work        the pipe by which one warp tells the others of a CTA
tiles       whole tiles, drawn from a counter
stream_k    equal shares of KV blocks, so parts of tiles
"""
