"""vLLM's own update of MLA's caches, of 0.33.0, on the plugin's operators, and what is left to vLLM's."""

import inspect

import pytest
import torch

import wrappers
from tests.engines.test_integration_vllm import Case, config_of, engine, server

__all__ = ["engine", "server"]  # fixtures
PAGES, PAGE = 5, 16


@pytest.fixture
def operators(server, monkeypatch):
    """vLLM's operators, with the plugin named, and those that were there before, which record their calls."""
    from vllm import _custom_ops as ops

    from wrappers.integrations import plugins, vllm_mla

    calls, names = [], [function.__name__ for function in vllm_mla.FUNCTIONS]
    for name in names:
        own = inspect.signature(getattr(ops, name))
        assert list(own.parameters) == list(inspect.signature(getattr(wrappers, name)).parameters), name
        monkeypatch.setattr(ops, name, lambda *args, _name=name, **named: calls.append((_name, args, named)))
    before = [getattr(ops, name) for name in names]
    plugins.vllm_mla()
    assert [getattr(ops, name) for name in names] == before  # VLLM_PLUGINS does not name it
    monkeypatch.setenv("VLLM_PLUGINS", "cute_kernels, cute_kernels_mla")
    for _ in range(2):  # vLLM may load plugins again
        plugins.vllm_mla()
    server.config = config_of(Case())
    return ops, calls


@pytest.mark.parametrize("stored", ["auto", "fp8", "fp8_ds_mla", "nvfp4_ds_mla"])
def test_the_caches_of_a_layer(stored, operators, device):
    """vLLM's update writes them, and its gather reads them for a chunk of a prompt."""
    from vllm.v1.attention.backend import MLAAttentionImpl

    ops, calls = operators
    gen = torch.Generator().manual_seed(0)
    rows = torch.randn(7, 576, generator=gen, dtype=torch.bfloat16).to(device)
    width, dtype = {"auto": (576, torch.bfloat16), "fp8": (576, torch.uint8)}.get(
        stored, (656 if stored == "fp8_ds_mla" else 352, torch.uint8)
    )
    cache, scale = torch.zeros(PAGES, PAGE, width, dtype=dtype, device=device), torch.full((1,), 0.25, device=device)
    slots = torch.tensor([3 * PAGE + i for i in range(5)] + [-1, PAGE], device=device)
    arguments = rows[:, :512], rows[:, None, 512:], cache, slots, stored, scale
    MLAAttentionImpl.do_kv_cache_update(None, *arguments)
    out = torch.full((6, 576), float("nan"), dtype=torch.bfloat16, device=device)
    table, starts = torch.tensor([[3], [1]], device=device).int(), torch.tensor([0, 5, 6], device=device).int()
    requests = torch.tensor([0] * 5 + [1], device=device).int()
    ops.gather_and_maybe_dequant_cache(cache, out, table, starts, requests, 6, stored, scale)
    assert not calls
    error = (out.float() - rows[[0, 1, 2, 3, 4, 6]].float()).abs()
    assert error.max() <= {"auto": 0.0, "nvfp4_ds_mla": 0.8}.get(stored, 0.15)
    assert error.mean() <= {"auto": 0.0, "nvfp4_ds_mla": 0.1}.get(stored, 0.025)


def test_a_call_that_is_refused_goes_to_vllm(operators, device):
    from vllm.v1.attention.backend import MLAAttentionImpl

    ops, calls = operators
    rows, cache = torch.ones(1, 576, device=device).half(), torch.zeros(1, PAGE, 576, device=device).half()
    one = torch.ones(1, device=device)
    arguments = rows[:, :512], rows[:, 512:], cache, torch.zeros(1, device=device).long(), "auto", one
    MLAAttentionImpl.do_kv_cache_update(None, *arguments, skip_scale=True)
    ops.concat_and_cache_mla(*arguments[:4], "fp8_e5m2", arguments[5])
    ops.concat_and_cache_mla(arguments[0].float(), arguments[1].float(), cache.float(), *arguments[3:])
    assert [name for name, _, _ in calls] == ["concat_and_cache_mla"] * 3 and not cache.any()
    with pytest.raises(ValueError, match="^k_pe: shape"):
        ops.concat_and_cache_mla(arguments[0], rows[:, 448:].view(1, 2, 64), *arguments[2:])
    assert len(calls) == 3
