"""Parts of a decode step, from kernel times of two runs."""

from types import SimpleNamespace

import pytest

from bench import engine_profile
from bench.cases.engine import CASES
from bench.engine_worker import EngineAnswer

KERNELS = {
    "cache_write_rows__bf16_bf16_append_0": "cache write",
    "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>": "cache write",
    "attention_decode__bf16_d128_causal_0": "attention",
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90>>": "attention",
    "kernel_unified_attention_3d": "attention",
    "nvjet_sm90_tst_128x64_64x9_2x1_v_bz_TNT": "GEMM",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>": "GEMM",
    "_fused_moe_gemm_kernel": "experts",
    "void vllm::fused_add_rms_norm_kernel": "norm",
    "void vllm::rotary_embedding_kernel": "rotary embedding",
    "void vllm::act_and_mul_kernel<silu>": "activation",
    "triton_red_fused_argmax": "other",
}


@pytest.mark.parametrize("kernel, part", KERNELS.items(), ids=KERNELS.values())
def test_parts(kernel, part):
    assert engine_profile.part_of(kernel) == part


def test_a_step_is_the_difference_of_two_runs():
    short = {"nvjet_a": 50.0, "attention_prefill": 500.0}
    long = {"nvjet_a": 114.0, "attention_prefill": 500.0, "attention_decode": 320.0}
    assert engine_profile.step_of(short, long, 32) == {"attention": 10.0, "GEMM": 2.0}


def test_gaps_are_what_no_kernel_fills(monkeypatch):
    """A request waits 1 ms for each of its tokens, of which kernels fill half; a pass before all others is not
    counted."""
    asked = []

    def generate(prompts, outputs, logprobs):
        asked.append(outputs)
        return [EngineAnswer([0] * outputs, [], 0.0, 1e-3 * (outputs - 1), 0) for _ in prompts]

    events = iter([{"nvjet": 500.0}, {"nvjet": 32500.0}])
    made = [SimpleNamespace(key=k, self_device_time_total=us) for e in events for k, us in e.items()]
    traced = iter(made)

    class Profiler:
        def __init__(self, activities): ...
        def __enter__(self):
            return SimpleNamespace(key_averages=lambda: [next(traced)])

        def __exit__(self, *error): ...

    monkeypatch.setattr("torch.profiler.profile", Profiler)
    case = CASES["engine-vllm-tiny-llama-bf16"]
    found = engine_profile.profile(SimpleNamespace(generate=generate), case)
    assert asked == [2, 2, 2, 66, 66, 66, 66] and found == pytest.approx({"GEMM": 500.0, "gaps": 500.0})


def test_other_engines_are_refused(monkeypatch):
    monkeypatch.setattr("sys.argv", ["engine_profile", "engine-sglang-tiny-llama-bf16", "ours"])
    with pytest.raises(SystemExit, match="its engine is sglang, must be vllm"):
        engine_profile.main()
