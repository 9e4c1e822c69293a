"""Attention: a signature's `AttentionCall` -> plan -> launch. Imports go down this list.

Signatures live by library, in `flashinfer` and `flash_attn`.

- bound: launches that are kept
- op: the torch operator, for torch.compile and tensors that are not plain; `serve`, the last step of every signature
- plan: the launch plan of a call; a call with a known plan is one dictionary lookup and its launch
- values: refuses invalid values, on the CPU or if the caller asks for it
- checks: refuses arguments that do not fit, in the caller's words
- views: K and V of a caller in the forms of a call
- call: the tensors of a call in one form, which the reference takes too
"""
