"""`bench.mla`: the arguments that peers get, of which our own function takes the place, and what ours runs beside."""

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

import wrappers
from bench import gather_rate, mla
from bench.cases.mla import MlaCase

SMALL = {
    "all keys": MlaCase(lens=(70, 3), heads=4, rows=2),
    "chosen": MlaCase(lens=(70, 70), heads=4, rows=2, chosen=30),
    "prompt": MlaCase("sparse_fwd", lens=(70,), heads=4, rows=5, chosen=30),
}


@pytest.mark.parametrize("name", SMALL)
def test_the_arguments_of_flash_attention(monkeypatch, name):
    case, path = SMALL[name], "vllm.vllm_flash_attn.flash_attn_interface"
    for parent in ("vllm", "vllm.vllm_flash_attn", path):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    sys.modules[path].flash_attn_varlen_func = wrappers.flash_attn_varlen_func
    case = replace(case, lens=(70,) * len(case.lens))
    inputs = mla.make(case, "cpu", 0)
    assert mla.served("flash-attn-3", case)
    assert mla.check(case, inputs, mla.PROVIDERS["flash-attn-3"](case, inputs)()) is None


@pytest.mark.parametrize("name", ["kv656-t4-s70-h4-k30", "fp8-t4-s70-h4-k30", "kv584-d512-t4-s70-h4-k30"])
def test_prompts_over_packed_rows_run_beside_bf16(name):
    case = mla.prompt_case(name)
    beside = mla.own_others(case)
    assert list(beside) == ["own-bf16"] and not mla.served("flashmla", case) and not mla.served("flash-attn-3", case)
    for one in (case, *beside.values()):
        inputs = mla.make(one, "cpu", 0)
        assert mla.check(one, inputs, mla.ours(one, inputs)()) is None


@pytest.mark.parametrize("alike", [90, 50, 0])
def test_prompts_of_tokens_that_choose_keys_of_their_neighbours(alike):
    case = mla.prompt_case(f"bf16-t5-s400-h16-k20-a{alike}")
    inputs, beside = mla.make(case, "cpu", 0), mla.own_others(case)
    (rows,) = inputs.slots.tolist()
    assert [len(set(one) & set(before)) for before, one in zip(rows, rows[1:])] == [20 * alike // 100] * 4
    assert all(len(set(one)) == 20 and one == sorted(one) and max(one) < 448 for one in rows)
    assert beside == {"own-shared": replace(case, share=True)}
    assert mla.check(case, inputs, mla.ours(beside["own-shared"], inputs)()) is None


def test_what_runs_beside_a_case():
    for record in ("352", "656any"):
        assert list(mla.own_others(mla.CASES[f"dsa-decode-kv{record}-b128-h16-k2048"])) == ["own-kv656"]
    assert list(mla.own_others(mla.CASES["mla-decode-bf16-b128-s4096-h16-p1"])) == ["own-p64"]
    assert not mla.own_others(mla.CASES["dsa-decode-kv656-b64-h128-k2048"])


@pytest.mark.kernels
@pytest.mark.parametrize("form, counted", [("bulk", "bulk load"), ("pieces", "cp.async arrival")])
def test_the_kernel_that_only_gathers(monkeypatch, form, counted):
    """A bulk copy for each row, or an arrival of each lane for each 32 rows."""
    from cuda.bindings.driver import CUstream
    from cutlass import Int32
    from cutlass.cute.runtime import from_dlpack
    from ptxsim import dsl

    monkeypatch.setattr(gather_rate, "TOKENS", 3)
    monkeypatch.setattr(gather_rate, "KEYS", 128)
    given = torch.zeros(40, 656, dtype=torch.uint8), torch.randint(40, (3, 128), dtype=torch.int32)
    shapes = [from_dlpack(x) for x in given]
    kernel = dsl.compile(gather_rate.launch, *shapes, 656, 2, form == "bulk", Int32(2), CUstream(0))
    assert kernel.run(*given, 2, mode="random").counts == {counted: 3 * 128}
