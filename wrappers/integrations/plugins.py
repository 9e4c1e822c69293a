"""Entry points by which serving engines find the integrations.

Each gives the engine the name of a class or a function, which the engine imports when it needs it: loading a plugin
imports little, and changes nothing unless the user enables it.

    VLLM_PLUGINS=cute_kernels vllm serve MODEL --attention-backend CUSTOM  # K and V per head, MLA, and sparse MLA
    VLLM_PLUGINS=cute_kernels_topk vllm serve MODEL  # the sparse indexer's top-k
    VLLM_PLUGINS=cute_kernels_mla vllm serve MODEL  # the operators of MLA's caches
    python -m sglang.launch_server --model-path MODEL --attention-backend cute_kernels --page-size 16
    SGLANG_PLUGINS=cute_kernels,cute_kernels_topk python -m sglang.launch_server --model-path MODEL  # DSA's top-k
    SGLANG_PLUGINS=cute_kernels_dsa python -m sglang.launch_server --model-path MODEL  # all of DSA

A plugin that takes a place which is not this package's own does nothing unless the engine's plugin variable names it:
`*_topk`, `*_mla`, `*_dsa` and `*_trtllm_mha` replace a part of the engine, and vLLM has one place, CUSTOM, for the
backends of all packages. vLLM loads its plugins before it parses `--attention-backend`, and its Python functions take
the backend as an argument, so a plugin cannot see which backend the user chose.
"""

import os
from typing import Any

NAME = "cute_kernels"  # of the attention backend in SGLang, and of the plugins


def _named(plugin: str, variable: str) -> bool:
    """Return whether the engine was told to load this plugin, by name."""
    return plugin in map(str.strip, os.environ.get(variable, "").split(","))


def vllm() -> None:
    """Register `--attention-backend CUSTOM` if VLLM_PLUGINS names this plugin (`vllm.general_plugins`).

    Raises RuntimeError if another package has registered its backend there: `register_backend` would replace it.
    """
    if not _named(NAME, "VLLM_PLUGINS"):
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom, backend = AttentionBackendEnum.CUSTOM, "wrappers.integrations.vllm_select.VllmSelector"
    if custom.is_overridden() and custom.get_path() != backend:
        raise RuntimeError(
            f"VLLM_PLUGINS: {os.environ['VLLM_PLUGINS']!r}, must not name {NAME} beside the plugin that registered the "
            f"attention backend CUSTOM as {custom.get_path()}"
        )
    register_backend(custom, backend)
    from vllm.utils.deep_gemm import has_deep_gemm

    if not has_deep_gemm():
        from .vllm_indexer import without_deep_gemm

        without_deep_gemm()


def vllm_topk() -> None:
    """Replace the sparse indexer's top-k if VLLM_PLUGINS names this plugin (`vllm.general_plugins`)."""
    if _named(f"{NAME}_topk", "VLLM_PLUGINS"):
        from .vllm_topk import replace

        replace()


def vllm_mla() -> None:
    """Replace the operators of MLA's caches if VLLM_PLUGINS names this plugin (`vllm.general_plugins`)."""
    if _named(f"{NAME}_mla", "VLLM_PLUGINS"):
        from .vllm_mla import replace

        replace()


def sglang() -> None:
    """Register `--attention-backend cute_kernels` (`sglang.srt.plugins`)."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    if NAME not in choices.ATTENTION_BACKEND_CHOICES:
        choices.add_attention_backend_choices([NAME])
        choices.add_chunked_prefix_cache_attention_backend(NAME)  # latent attention fetches prefixes of prompts
    register_attention_backend(NAME)(_sglang_backend)


def _sglang_backend(runner: Any) -> Any:
    if runner.use_mla_backend:
        from .sglang_mla import SglangMlaBackend

        return SglangMlaBackend(runner)
    from .sglang import SglangBackend

    return SglangBackend(runner)


def sglang_trtllm_mha() -> None:
    """Register the same backend as `--attention-backend trtllm_mha` if SGLANG_PLUGINS names this plugin.

    Entry point of `sglang.srt.plugins`.

    For models for which SGLang allows only backends that it knows (GPT-OSS, Llama 4, Gemma 4).
    """
    if _named(f"{NAME}_trtllm_mha", "SGLANG_PLUGINS"):
        from sglang.srt.layers.attention.attention_registry import register_attention_backend

        register_attention_backend("trtllm_mha")(_sglang_backend)


def sglang_topk() -> None:
    """Replace the top-k of DSA if SGLANG_PLUGINS names this plugin (`sglang.srt.plugins`)."""
    if _named(f"{NAME}_topk", "SGLANG_PLUGINS"):
        from .sglang_topk import replace

        replace()


def sglang_dsa() -> None:
    """Replace the kernels of DSA, its indexer's and its top-k if SGLANG_PLUGINS names this plugin.

    Entry point of `sglang.srt.plugins`.
    """
    if _named(f"{NAME}_dsa", "SGLANG_PLUGINS"):
        from .sglang_dsa import replace

        replace()
