"""How the plugin writes K and V to SGLang's pools: the bytes, the launches, and the host's work."""

from typing import Any

import pytest
import torch

from tests.engines import test_integration_sglang as sglang

engine, server = sglang.engine, sglang.server


@pytest.mark.parametrize("name", sglang.CASES)
def test_what_is_written(name, server, monkeypatch):
    """In 8 bits, K and V are divided in fp32 and saturate."""
    model = sglang.Model(server, sglang.CASES[name], monkeypatch)
    dtype, heads = model.case.kv_dtype, (sglang.KV_HEADS, model.case.head_dim)
    batch = model.batch("EXTEND", {0: 20})
    model.backend.init_forward_metadata(batch)
    for number, layer in enumerate(model.layers):
        if model.case.scales[0]:
            layer.k_scale_float, layer.v_scale_float = 0.37, 3.1
        q, k, v = (300 * t for t in model.placed(model.inputs(20))[0][:3])
        with torch.inference_mode():
            layer(q, k, v, batch)
        slots = batch.out_cache_loc
        if model.backend._windows and model.case.windows[number] >= 0:
            slots = model.to_window[slots]
        scales = layer.k_scale_float or 1.0, layer.v_scale_float or 1.0
        for rows, pool, scale in zip((k, v), model.pool.get_kv_buffer(number), scales, strict=True):
            pool = pool.transpose(1, 2).reshape(-1, *heads) if model.case.hnd else pool.view(-1, *heads)
            wanted = rows.view(-1, *heads)
            if dtype.itemsize == 1:
                most = torch.finfo(dtype).max
                wanted = (wanted.float() / scale).clamp(-most, most).to(dtype)
            assert torch.equal(pool.view(torch.uint8)[slots], wanted.view(torch.uint8))


def test_a_pool_that_writes_its_rows_itself(server, monkeypatch):
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from wrappers.integrations.sglang import _is_plain

    class Own(MHATokenToKVPool):
        written = 0

        def set_kv_buffer(self, *given: Any, **options: Any) -> None:
            Own.written += 1
            super().set_kv_buffer(*given, **options)

    model = sglang.Model(server, sglang.CASES["bf16"], monkeypatch)
    assert model.backend._plain
    model.pool.__class__ = Own
    model.backend._plain = _is_plain(model.pool)
    model.step("EXTEND", {0: 20})
    assert Own.written == 2 and not model.backend._plain
