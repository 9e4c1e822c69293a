"""How the plugin writes K and V to SGLang's pools: the bytes, the launches, and the host's work."""

from typing import Any

import pytest
import torch

from tests import test_integration_sglang as sglang
from tests.fake_machine import FakeMachine
from tests.host_work import Work, host_work
from wrappers import append_qkv, machine

engine, server = sglang.engine, sglang.server


@pytest.mark.parametrize("name", sglang.CASES)
def test_what_is_written(name, server, monkeypatch):
    """K and V stay as they are; in 8 bits they are divided in fp32 and saturate."""
    model = sglang.Model(server, sglang.CASES[name], monkeypatch)
    dtype, heads = model.case.kv_dtype, (sglang.KV_HEADS, model.case.head_dim)
    batch = model.batch("EXTEND", {0: 20})
    model.backend.init_forward_metadata(batch)
    for number, layer in enumerate(model.layers):
        if model.case.scales[0]:
            layer.k_scale_float, layer.v_scale_float = 0.37, 3.1
        q, k, v = (300 * t for t in model.placed(model.inputs(20))[0][:3])
        given = k.clone(), v.clone()
        with torch.inference_mode():
            layer(q, k, v, batch)
        slots = batch.out_cache_loc
        if model.backend._windows and model.case.windows[number] >= 0:
            slots = model.to_window[slots]
        scales = layer.k_scale_float or 1.0, layer.v_scale_float or 1.0
        for rows, old, pool, scale in zip((k, v), given, model.pool.get_kv_buffer(number), scales, strict=True):
            assert torch.equal(rows, old)
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


OPERATORS = dict(zip(sglang.CASES, (14, 12, 15, 14, 19, 18), strict=True))  # of a decode layer, its views included


@pytest.mark.parametrize("name", sglang.CASES)
def test_host_work_of_a_decode_layer(name, engine, monkeypatch):
    """Two launches: rows are written, then attention is computed. A copy exceeds the bound."""
    engine.device, launches = torch.device("cpu"), []
    model = sglang.Model(engine, sglang.CASES[name], monkeypatch)
    model.step("EXTEND", {0: 20, 1: 3})
    batch = model.batch("DECODE", {0: 1, 1: 1})
    model.backend.init_forward_metadata(batch)
    given = model.inputs(2)[0]
    with machine.override(FakeMachine(lambda op, spec: lambda *flat: launches.append(op))), torch.inference_mode():
        run = lambda: model.layers[0](*given[:3], batch, **dict(zip(["sinks"], given[3:])))  # noqa: E731
        work, bound = host_work(run), Work(49, OPERATORS[name])
        assert work.within(bound), work
        assert [op.partition(".")[0] for op in launches] == ["cache_write", "attention"] * 3  # of three calls
        copies = lambda q, k, *more: append_qkv(q, k.clone(), *more)  # noqa: E731
        monkeypatch.setattr("wrappers.integrations.sglang.append_qkv", copies)
        assert not host_work(run).within(bound)
