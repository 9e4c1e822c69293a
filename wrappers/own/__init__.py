"""Functions that no other library has.

- registry: a row per public function, from which the modules below and the tests know them
- explanation: `explain`, which kernel serves a call, or why none does
- binding: `bind`, a call that is repeated
- append_qkv: norm, rotary embedding, quantisation and append in one launch
- append_latent: the same for a layer with latent attention, and for the rows of its indexer
- gather_latent: rows of latent attention, of several requests in one tensor
"""
