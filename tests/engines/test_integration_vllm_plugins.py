"""Which backend vLLM 0.33.0 has after its plugins are loaded, and what ours refuses."""

import pytest
import torch

from tests.engines.test_integration_vllm import HEADS, KV_HEADS, Case, config_of, engine, server
from tests.support.vllm_stubs import DeviceCapability

__all__ = ["engine", "server"]  # fixtures
OTHER = "other.package.Backend"


@pytest.fixture
def slot(engine, monkeypatch):
    """The registry of attention backends, and a function that loads plugins as a new process with VLLM_PLUGINS does."""
    from vllm import plugins
    from vllm.v1.attention.backends import registry

    def load(named: str | None) -> None:
        monkeypatch.setattr(plugins, "plugins_loaded", False)
        if named is None:
            monkeypatch.delenv("VLLM_PLUGINS", raising=False)
        else:
            monkeypatch.setenv("VLLM_PLUGINS", named)
        plugins.load_general_plugins()

    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", {})
    return registry, load


@pytest.mark.parametrize("named", [None, "", "other", "cute_kernels_topk,other"])
def test_custom_is_left_to_other_packages_unless_the_plugin_is_named(slot, named, monkeypatch):
    registry, load = slot
    monkeypatch.setattr("wrappers.integrations.vllm_topk.replace", lambda: None)
    custom = registry.AttentionBackendEnum.CUSTOM
    load(named)
    assert not custom.is_overridden()
    registry.register_backend(custom, OTHER)
    load(named)
    assert custom.get_path() == OTHER


@pytest.mark.parametrize("named", ["cute_kernels", "other,cute_kernels"])
def test_custom_is_the_backend_if_the_plugin_is_named(slot, named):
    registry, load = slot
    for _ in range(2):  # vLLM may load plugins again
        load(named)
        assert registry.AttentionBackendEnum.CUSTOM.get_path() == "wrappers.integrations.vllm_select.VllmSelector"


def test_a_slot_that_is_taken_is_not_taken_from_its_owner(slot):
    registry, load = slot
    custom = registry.AttentionBackendEnum.CUSTOM
    registry.register_backend(custom, OTHER)
    with pytest.raises(RuntimeError, match=f"^VLLM_PLUGINS: 'other,cute_kernels', must not name .* CUSTOM as {OTHER}"):
        load("other,cute_kernels")
    assert custom.get_path() == OTHER


@pytest.mark.parametrize("asked", ["use_sparse", "use_mm_prefix", "use_per_head_quant_scales",
    "use_non_causal", "use_batch_invariant", "use_pcp", "use_dcp", "use_rswa"])  # fmt: skip
def test_modes_that_are_refused(asked, server):
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    backend = AttentionBackendEnum.CUSTOM.get_class()
    server.config = config_of(Case())
    config = AttentionSelectorConfig(64, torch.bfloat16, "auto", 16, has_sink=True, has_sliding_window=True)
    valid = backend.validate_configuration(device_capability=DeviceCapability(9, 0), **config._asdict())
    reasons = backend.validate_configuration(
        device_capability=DeviceCapability(9, 0), **config._replace(**{asked: True})._asdict()
    )
    assert not valid and len(reasons) == 1


@pytest.mark.parametrize("options, message", [
    ({"attn_type": "encoder_only"}, "attn_type: encoder_only, must be "),
    ({"kv_cache_dtype": "nvfp4_4over6"}, "kv_cache_dtype: 'nvfp4_4over6', must be one of auto, float16"),
])  # fmt: skip
def test_refused_by_the_layer(options, message, server):
    from wrappers.integrations.vllm import VllmImpl

    with pytest.raises(NotImplementedError, match=message):
        VllmImpl(HEADS, 64, 0.125, KV_HEADS, **options)
