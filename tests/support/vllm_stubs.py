"""Stubs for the parts of vLLM 0.33.0 that do not concern attention, and what its operator that writes caches does."""

import pkgutil
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

E4M3 = torch.float8_e4m3fn


class DeviceCapability(NamedTuple):
    major: int
    minor: int


class Platform:
    """`vllm.platforms.current_platform` of a GPU; its tensors may be on the CPU."""

    capability = DeviceCapability(9, 0)
    dispatch_key = "CompositeExplicitAutograd"  # for operators on the CPU and on CUDA
    device = torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        return lambda *_: False

    @property
    def device_name(self) -> str:
        return self.device.type

    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def import_kernels(self) -> None:
        pass

    def opaque_attention_op(self) -> bool:
        """Return True, as on CUDA: layers call vLLM's operators, which torch.compile does not trace into."""
        return True

    def get_device_capability(self) -> DeviceCapability:
        return self.capability

    def fp8_dtype(self) -> torch.dtype:
        return E4M3

    def get_attn_backend_cls(self, selected: Any, attn_selector_config: Any, num_heads: int | None = None) -> str:
        """Validate a backend that the user chose, as vLLM's CUDA platform does."""
        found = selected.get_class()
        reasons = found.validate_configuration(device_capability=self.capability, **attn_selector_config._asdict())
        if reasons:
            raise ValueError(f"Selected backend {selected} is not valid for this configuration. Reason: {reasons}")
        return ".".join(found.full_cls_name())


class QuantFP8:
    """vLLM's quantisation: returns e4m3 and the scale."""

    def __init__(self, static: bool, group_shape: Any) -> None:
        assert static and group_shape == "tensor"

    def __call__(self, x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x / scale).to(E4M3), scale


def identity(function: Any) -> Any:
    return function


def stubs(server: Any) -> dict[str, dict[str, Any]]:
    quantised = {f"kFp8{kind}Sym": kind for kind in ("Dynamic64", "Dynamic128", "StaticTensor")}
    return {
        "vllm.platforms": {"current_platform": server.platform},
        "vllm.platforms.interface": {"DeviceCapability": DeviceCapability},
        "vllm.config": {
            "get_current_vllm_config": lambda: server.config, "get_current_vllm_config_or_none": lambda: server.config,
        },
        "vllm.config.cache": {
            "get_kv_cache_dtype_handler": lambda name: None, "is_known_kv_cache_dtype": lambda name: True,
            "KV_CACHE_DTYPES": (), "CacheDType": str,
        },
        "vllm.forward_context": {"get_forward_context": lambda: server.context},
        "vllm.compilation.breakable_cudagraph": {"eager_break_during_capture": identity},
        "vllm.model_executor.layers.attention.kv_transfer_utils": {"maybe_transfer_kv_layer": identity},
        "vllm.model_executor.layers.quantization.utils.quant_utils": quantised
        | {"kNvfp4Dynamic": "nvfp4", "GroupShape": SimpleNamespace(PER_TENSOR="tensor")},
        "vllm.model_executor.layers.quantization.input_quant_fp8": {"QuantFP8": QuantFP8},
        "vllm.distributed.parallel_state": {
            "get_dcp_world_size_and_rank": lambda sharded: (1, 0),
            "get_pcp_group": lambda: SimpleNamespace(world_size=1, rank_in_group=0),
        },
        "vllm.utils.platform_utils": {"is_pin_memory_available": lambda: False},
        "vllm.utils.import_utils": {"resolve_obj_by_qualname": pkgutil.resolve_name},
        "vllm.utils.flashinfer": {"has_flashinfer": lambda: False},
        "vllm.utils.torch_version": {name: lambda version: False for name in ("is_torch_equal_or_newer",)},
    }  # fmt: skip


def reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale):
    """Emulate vLLM's operator: write rows with a non-negative slot to caches (blocks, tokens, heads, head_size).

    For fp8 caches it divides in fp32 and saturates.
    """
    stored, size = slot_mapping >= 0, key_cache.shape[1]
    slots = slot_mapping[stored]
    for rows, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        rows = rows[: len(slot_mapping)][stored]
        if kv_cache_dtype.startswith("fp8"):
            most = torch.finfo(cache.dtype).max
            rows = (rows.float() / scale).clamp(-most, most).to(cache.dtype).view(torch.uint8)
            cache = cache.view(torch.uint8)
        cache[slots // size, slots % size] = rows
