"""Functions that no other library has.

- explanation: `explain`, which kernel serves a call, or why none does
- binding: `bind`, a call that is repeated
- append_qkv: norm, rotary embedding, quantisation and append in one launch
"""
