"""Attention over a paged KV cache: signature -> `AttentionCall` -> plan -> launch. Imports go down this list.

- trtllm, xqa: public signatures: what one upstream function calls its arguments, and nothing else
- op: the torch operator, for torch.compile and tensors that are not plain; `serve`, which signatures end in
- plan: what the static facts of a problem decide; a known problem is one dictionary lookup and its launch
- values: refuses values that make no sense, where they are read anyway or a caller asks for it
- checks: refuses what does not fit, in the caller's words
- call: the tensors of a call in one form, which the reference takes too
"""
