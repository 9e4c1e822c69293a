"""Attention over a paged KV cache: signature -> `AttentionCall` -> plan -> launch. Imports go down this list.

- trtllm, xqa, engines: public signatures: the names that one upstream function gives its arguments, and nothing else
- op: the torch operator, for torch.compile and tensors that are not plain; `serve`, the last step of every signature
- plan: the launch plan of a call; a call with a known plan is one dictionary lookup and its launch
- values: refuses invalid values, on the CPU or if the caller asks for it
- checks: refuses arguments that do not fit, in the caller's words
- call: the tensors of a call in one form, which the reference takes too
"""
