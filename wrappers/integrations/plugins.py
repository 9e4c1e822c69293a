"""Entry points by which serving engines find the integrations. Each names a class or a function to the engine, which
imports it where it is used: loading a plugin imports little, and changes nothing for who does not ask.

    vllm serve MODEL --attention-backend CUSTOM
    VLLM_PLUGINS=cute_kernels,cute_kernels_topk vllm serve MODEL  # the sparse indexer's top-k
    python -m sglang.launch_server --model-path MODEL --attention-backend cute_kernels --page-size 64
    SGLANG_PLUGINS=cute_kernels,cute_kernels_topk python -m sglang.launch_server --model-path MODEL  # DSA's top-k

Those that replace something of the engine, `*_topk` and `*_trtllm_mha`, do nothing unless the engine's variable of
plugins names them.
"""

import os
from typing import Any

NAME = "cute_kernels"  # of the attention backend in SGLang, and of the plugins


def _named(what: str, variable: str) -> bool:
    """Whether the engine was told to load this plugin, by name."""
    return f"{NAME}_{what}" in map(str.strip, os.environ.get(variable, "").split(","))


def vllm() -> None:
    """`vllm.general_plugins`: `--attention-backend CUSTOM` is `wrappers.integrations.vllm.Backend`."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "wrappers.integrations.vllm.Backend")


def vllm_topk() -> None:
    """`vllm.general_plugins`: the sparse indexer's top-k, where VLLM_PLUGINS names this plugin."""
    if _named("topk", "VLLM_PLUGINS"):
        from .vllm_topk import replace

        replace()


def sglang() -> None:
    """`sglang.srt.plugins`: `--attention-backend cute_kernels`."""
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(_sglang_backend)


def _sglang_backend(runner: Any) -> Any:
    from .sglang import SglangBackend

    return SglangBackend(runner)


def sglang_trtllm_mha() -> None:
    """`sglang.srt.plugins`: the same backend as `--attention-backend trtllm_mha`, for models of which SGLang allows
    only backends that it knows (GPT-OSS, Llama 4, Gemma 4), where SGLANG_PLUGINS names this plugin."""
    if _named("trtllm_mha", "SGLANG_PLUGINS"):
        from sglang.srt.layers.attention.attention_registry import register_attention_backend

        register_attention_backend("trtllm_mha")(_sglang_backend)


def sglang_topk() -> None:
    """`sglang.srt.plugins`: the top-k of DSA, where SGLANG_PLUGINS names this plugin."""
    if _named("topk", "SGLANG_PLUGINS"):
        from .sglang_topk import replace

        replace()
