"""A change to vLLM's own layers of DeepSeek, without which VLLM_BATCH_INVARIANT does not keep the bits of a token."""

from vllm.model_executor.models import deepseek_v2


def keep_one_kernel() -> None:
    """Let the first projection of a layer (to q_a, the latent and its rotated part) have one kernel for any number of
    tokens. With the dimensions of DeepSeek V3, vLLM computes up to 16 tokens with another kernel in every mode, and so
    with other bits."""
    always, ignored = (lambda layer: False), (lambda layer, chosen: None)
    deepseek_v2.DeepSeekV2FusedQkvAProjLinear._use_min_latency_gemm = property(always, ignored)
