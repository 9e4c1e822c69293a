"""FlashInfer's functions and classes: the names that one upstream function gives its arguments, and nothing else.

- trtllm, xqa, engines: attention over a paged cache, with the signatures of TensorRT-LLM's kernels, of XQA, and of what
  vLLM and SGLang call on Hopper
- single_prefill, single_decode: attention of one request over K and V without pages
- wrapper_classes: batches, planned once and run often
- values: argument values that the functions and the classes share: names, types, scales, masks
- topk, page, rope, cascade, quantization, utils: upstream's modules of these names
"""
