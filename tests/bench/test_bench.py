"""The benchmarks on the CPU: each runs once with the reference as `ours` and a clock of the test. Wrong results get no
row, and shipped kernels serve the cases that are held against bars."""

import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import wrappers
from bench import __main__ as command
from bench import (
    accuracy,
    append,
    decode,
    family,
    harness,
    indexer,
    layer,
    merging,
    precision,
    prefill,
    providers,
    serving,
    skipping,
    sparsity,
    timing,
    topk,
    trace,
    workload,
)
from bench.cases import attention as cases
from bench.cases import precision as types
from bench.cases import serving as shapes
from bench.results import Environment
from cute_kernels.attention import dispatch
from tests.support.fake_machine import FakeMachine
from wrappers import fp4
from wrappers.host import machine
from wrappers.own.registry import call_of

ENV = Environment("2026-01-02T03:04:05+00:00", "abc123", "some-gpu", "580.1", "2.13.0")
TOP = harness.Ceilings(700.0, 4000.0, 1300.0)


class Clock:
    """Runs every call and says that it took 2 ms."""

    def measure(self, call, sets):
        for i in sets:
            call(i)
        return 2000.0


def setup_of(*names):
    return harness.Setup(names, 2, "cpu", Clock(), Clock())


@pytest.fixture(autouse=True)
def one_input_set(monkeypatch):
    """A tiny case would otherwise have hundreds of input sets."""
    monkeypatch.setattr(harness, "L2_BYTES", 0)


# ---- one run of each benchmark

PROMPTS = prefill.case_of("prefill-tiny", (40, 40), True)
DECODE = cases.decoding(3, 70, (4, 2), 64, 16)
MIXED = replace(
    shapes.SERVE["serve-bf16-mixed-h32x8-d128-p16"],
    name="serve-tiny",
    q_lens=(70, 30, 1, 1, 1),
    kv_lens=(90, 130, 40, 300, 17),
    heads_q=4,
    heads_kv=2,
    head_dim_qk=64,
    head_dim_vo=64,
)
FAMILY = replace(family.PREFILL, name="family-tiny", q_lens=(70, 70), kv_lens=(70, 70), heads_q=4, heads_kv=2)
PLAIN = [name for name in family.FORMS if name.startswith("ours") and name not in family.OWN_CASE]


def typed(kind, length=70, batch=2):
    case = next(case for name, case in types.PRECISION.items() if types.kind_of(name) == kind)
    return replace(case, q_lens=(length,) * batch, kv_lens=(length,) * batch, heads_q=4, heads_kv=2)


TOPK, APPEND = "topk-fp32-3x100-k7", "append-normrope-nvfp4-n5-h4x2-d32-p16"
RUNS = {  # name -> (function that measures, case, providers with a row)
    "prefill": (prefill.measure, PROMPTS, ["ours", "floor"]),
    "decode": (decode.measure, DECODE, ["ours", "batch-invariant", "floor"]),
    "serving": (serving.measure, MIXED, ["ours", "own-parts", "floor", "own-prefill", "own-decode"]),
    "family": (family.measure, FAMILY, [*PLAIN, "floor"]),
    **{kind: (precision.measure, typed(kind), ["ours", *types.WIDER[kind], "floor"]) for kind in ("fp8", "kvnvfp4")},
    "topk": (topk.measure, TOPK, ["ours", "floor"]),
    "append": (append.measure, APPEND, ["ours", "floor"]),
    "merge": (append.measure, "merge-states-n60-s3-h2-d40", ["ours", "floor"]),
    "logits": (indexer.measure, "indexer-decode-b2-s128-h8-q2", ["ours", "floor"]),
    "logits of a prompt": (indexer.measure, "indexer-prefill-t5-s70-h8", ["ours", "floor"]),
    "selection": (indexer.measure, "dsa-select-b2-s128-h8-k16", ["ours", "floor"]),
    "selection in bf16": (indexer.measure, "dsa-select-bf16-t5-s70-h8-k16", ["ours", "floor"]),
    "layer": (layer.measure, "dsa-layer-kv656-b2-s128-h16-k16", ["ours", "floor"]),
    "dequantise": (append.measure, "nvfp4-dequantize-n5-h2-d32", ["ours", "floor"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_benchmark_gives_rows(name):
    measure, case, wanted = RUNS[name]
    found = measure(case, TOP, setup_of("ours"))
    rows = harness.rows_of(found, ENV)
    assert [r.provider for r in rows] == wanted and len({r.case for r in rows}) == 1
    assert rows[0].case in harness.table(found, rows, TOP) and rows[0].ratio_to_ours == 1


@pytest.mark.parametrize(("tokens", "major", "slots"), [("", 9, 12), ("-q4", 9, 6), ("-q4", 10, 12)])
def test_deep_gemm_is_called_as_vllm_has_it(monkeypatch, tokens, major, slots):
    """By a module with the signatures of vLLM 0.33, of which `wrappers` computes the results."""
    found = []

    def ragged(q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, max_seqlen_k, schedule_meta=None):
        return wrappers.fp8_fp4_mqa_logits(q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, max_seqlen_k)

    def paged(q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, indices=None):
        found.append(len(schedule_meta) - 1)
        given = q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, indices
        return wrappers.fp8_fp4_paged_mqa_logits(*given)

    peer = SimpleNamespace(
        get_num_sms=lambda: 12, get_paged_mqa_logits_metadata=wrappers.get_paged_mqa_logits_metadata,
        fp8_fp4_mqa_logits=ragged, fp8_fp4_paged_mqa_logits=paged,
    )  # fmt: skip
    for name, module in (("vllm", peer), ("vllm.third_party", peer), ("vllm.third_party.deep_gemm", peer)):
        monkeypatch.setitem(sys.modules, name, module)
    peer.third_party = peer.deep_gemm = peer
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, 0))
    for case in (f"indexer-decode-b2-s128-h8{tokens}", "indexer-prefill-t5-s70-h8"):
        inputs = indexer.make(case, "cpu", 0)
        got = indexer.deep_gemm(inputs)
        assert indexer.check(inputs, got) is None and got.shape == indexer.ours(inputs).shape
    assert found == [slots]


def test_a_layer_is_called_as_vllm_has_it(monkeypatch):
    """By modules with the signatures of vLLM 0.33, of which `wrappers` computes the results."""

    def to_slots(req_id, block_table, token_indices, BLOCK_SIZE=64, NUM_TOPK_TOKENS=2048, return_valid_counts=False):
        assert token_indices.shape == (len(req_id), NUM_TOPK_TOKENS)
        place = token_indices.clamp(min=0).long()
        slots = block_table[req_id.long()].gather(1, place // BLOCK_SIZE) * BLOCK_SIZE + place % BLOCK_SIZE
        return torch.where(token_indices < 0, -1, slots.int()), (token_indices >= 0).sum(1)

    def logits(q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len):
        return wrappers.fp8_fp4_paged_mqa_logits(
            q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len
        )

    mla = "vllm.v1.attention.backends.mla"
    packages = "vllm", "vllm.third_party", *(mla.rsplit(".", n)[0] for n in range(4))
    peers = {name: SimpleNamespace() for name in packages}
    peers["vllm._custom_ops"] = peers["vllm"]._custom_ops = wrappers
    peers["vllm.third_party.deep_gemm"] = peers["vllm"].third_party = SimpleNamespace(
        get_num_sms=lambda: 12, get_paged_mqa_logits_metadata=wrappers.get_paged_mqa_logits_metadata,
        fp8_fp4_paged_mqa_logits=logits,
    )  # fmt: skip
    peers["vllm"].third_party.deep_gemm = peers["vllm.third_party.deep_gemm"]
    peers["vllm.third_party.flashmla"] = SimpleNamespace(flash_mla_interface=wrappers)
    peers[f"{mla}.sparse_utils"] = SimpleNamespace(triton_convert_req_index_to_global_index=to_slots)
    for name, module in peers.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    inputs = layer.make("dsa-layer-kv656-b2-s128-h16-k48", "cpu", 0)
    got = layer.vllm(inputs)
    assert layer.check(inputs, got) is None and len(inputs.metadata) == 1
    slots, out, lse = got
    assert layer.check(inputs, (slots.roll(1, 0), out, lse)).startswith("token 0 differs")
    assert layer.check(inputs, (slots, out * 1.02, lse)).startswith("attention: ")
    inputs.rows.cache[:, :, 0] ^= 1
    assert layer.check(inputs, got) == "kv656: other rows than the reference"


def test_a_provider_that_is_wrong_or_missing_has_no_row(monkeypatch, capsys):
    def contiguous(factor, inputs):
        args = [t.transpose(1, 2) for t in workload.contiguous(inputs)]
        out = torch.nn.functional.scaled_dot_product_attention(*args, is_causal=True, enable_gqa=True)
        return {"slow": (lambda: factor * out.transpose(1, 2).flatten(0, 1), lambda o: o)}

    def missing(inputs):
        raise ImportError("not here")

    peers = {"right": partial(contiguous, 1), "wrong": partial(contiguous, 2), "missing": missing}
    monkeypatch.setattr(prefill, "PROVIDERS", {"ours": providers.ours, **peers})
    found = prefill.measure(PROMPTS, TOP, setup_of("ours", *peers))
    assert [(r.provider, r.note) for r in found] == [("ours", ""), ("right", "slow"), ("floor", "")]
    said = capsys.readouterr().out
    assert "no row: wrong/slow: off by" in said and "no row: missing: ImportError: not here" in said
    flops = 4 * 2 * 40 * 40 * PROMPTS.heads_q * PROMPTS.head_dim_qk / 2
    assert found[2].tflops == 700 and found[2].timing.median == pytest.approx(flops / 700e6)


# ---- checks of results


@pytest.mark.parametrize("kind", ["bf16", "windows", "mixed", "e4m3 cache", "NVFP4 cache", "fp8", "kvfp8outnvfp4"])
def test_wrong_attention_is_refused(kind):
    case = {
        "bf16": PROMPTS, "windows": replace(DECODE, window_left=9), "mixed": MIXED,
        "e4m3 cache": cases.decoding(3, 2000, (2, 1), 64, 64, "fp8", tokens=2),
        "NVFP4 cache": cases.decoding(3, 2000, (2, 1), 64, 64, "nvfp4", tokens=2),
    }.get(kind)  # fmt: skip
    inputs = types.make_inputs(typed(kind)) if case is None else cases.make_inputs(case)
    right, _ = cases.reference_of({k: v for k, v in inputs.items() if k not in ("out", "o_sf_scale")})

    def stored(o):
        if kind == "kvfp8outnvfp4":
            out = fp4.empty(tuple(o.shape), o.device)
            fp4.store(o, out, types.O_SF_SCALE)
            return out
        return o.to(inputs["out"].dtype)

    assert workload.check(inputs, stored(right)) is None
    late, hole = right.clone(), right.clone()
    late[-1, -1] += 0.3  # the last head of the last token
    hole[1, 1, 5] = float("nan")
    masks = {"bf16": {"causal": False}, "windows": {"window_left": -1}}.get(kind)
    others = [cases.reference_of(inputs | masks)[0]] if masks else []
    for wrong in (right.roll(1, 0), right * 0.7, late, *others):
        assert workload.check(inputs, stored(wrong)).startswith("off by")
    if kind != "kvfp8outnvfp4":
        assert workload.check(inputs, stored(hole)) == "not finite"


@pytest.mark.parametrize(
    ("indices", "said"),
    [
        ([0, 3], None),
        ([2, 0], None),  # two scores are equal at the boundary: either is right
        ([2, 2], "twice"),
        ([0, -1], "outside"),
        ([0, 4], "outside"),
        ([0, 1], "not the largest"),
    ],
)
def test_wrong_selections_are_refused(indices, said):
    i = replace(topk.make(TOPK, "cpu", 0), scores=torch.tensor([[3.0, 1.0, 2.0, 2.0]] * 2), k=2)
    found = topk.check(i, torch.tensor([[0, 2], indices]))
    assert found is None if said is None else said in found
    if said is None:
        in_order = topk.check(replace(i, sorted=True), torch.tensor([[0, 2], indices]))
        assert in_order == (None if indices[0] == 0 else "not in descending order")


def test_wrong_rows_of_caches_and_merged_states_are_refused():
    rows = append.make("append-fp8-n5-h4x2-d32-p16", "cpu", 0)
    out = append.ours(rows)
    assert append.check(rows, out) is None
    rows.caches[1].view(torch.uint8)[rows.slots[0] // 16, rows.slots[0] % 16] ^= 0x55
    assert append.check(rows, out) == "other rows than the reference"
    states = merging.make("merge-state-n5-h2-d32", "cpu", 0)
    o, lse = merging.ours(states)
    assert merging.check(states, (o, lse + 0.01)) == "far from the reference"
    codes = append.make_dequantize("nvfp4-dequantize-n5-h2-d32", "cpu", 0)
    assert append.check_dequantize(codes, append.DEQUANTIZERS["ours"](codes) * 2) == "other values than the reference"


@pytest.mark.slow
def test_the_share_of_skipped_blocks_is_that_of_attention_that_skips():
    case = replace(typed("fp8"), q_lens=(520,), kv_lens=(520,), heads_q=2, heads_kv=1, dtype="bf16", kv_dtype="")
    inputs = types.concentrated(case, "cpu", "heavy-tailed")
    for factor in (1.0, 30.0, 1000.0):
        p = call_of(wrappers.trtllm_batch_context_with_kv_cache, **inputs, **{precision.FACTOR: factor})
        want = skipping.attend(p, sparsity.KEYS, 0).sparsity
        assert sparsity.share(sparsity.maxima_of(inputs), factor / 520) == pytest.approx(want)
    assert 0.2 < want < 0.3


@pytest.mark.parametrize("form", ["prefill", "decode"])
def test_errors_against_fp64_and_counts_of_equal_bits(monkeypatch, form):
    monkeypatch.setattr(accuracy, "FORMS", {"prefill": (5,), "decode": (1, 1)})
    monkeypatch.setattr(accuracy, "REPEATS", 3)
    case, setup = accuracy.AccuracyCase(form, "kve4m3", "normal", 300), setup_of("ours")
    rows, runs = accuracy.measure(case, setup, ENV)
    assert [r.provider for r in rows] == ["rounded", "ours"] and set(runs) == {"ours"}
    assert 0 < rows[0].rms_error <= rows[1].rms_error < 3e-3 < rows[1].format_error < 0.1
    assert all(r.equal == r.count > 0 for r in accuracy.determinism(case, runs, setup, ENV))


# ---- time


def test_input_sets_leave_the_l2_and_providers_take_turns():
    for size in (1, 30 << 20, 100 << 20):
        count = timing.input_sets(size, 50 << 20)
        assert count == 1 or (count - 1) * size >= 100 << 20 > (count - 2) * size
    log = []

    class Heating(Clock):
        """A GPU that each call slows down by 1 %."""

        def measure(self, call, sets):
            super().measure(call, sets)
            return 1000 * (1 + 0.01 * len(log))

    calls = {name: lambda i, name=name: log.append((name, i)) for name in "abc"}
    times = timing.interleave(calls, Heating(), sets=2, rounds=60, warmup=1, target_us=1)
    assert "".join(name for name, _ in log[3:12]) == "abcbcacab" and {i for _, i in log} == {0, 1}
    assert times["a"].p90 / times["a"].p10 > 1.3
    assert times["a"].median / times["b"].median == pytest.approx(1, abs=0.02)


def test_steps_of_a_trace():
    """The first prompt is cut at the budget; its rest and the second prompt share a step."""
    made = [trace.TraceRequest(0, 50, 53), trace.TraceRequest(1, 3, 5)]
    tiny = trace.Trace("tiny", 6, 2.0, (40.0, 0.8), (4.0, 0.5), 32, 400, (4, 2), 64, 16)
    found = trace.steps_of(tiny, made)
    assert [step.q_lens for step in found] == [(32,), (18, 3), (1, 1), (1, 1), (1,)]
    assert [step.kv_lens for step in found] == [(32,), (50, 3), (51, 4), (52, 5), (53,)]
    said = trace.report(made, found, [10.0, 20.0, 1.0, 2.0, 3.0])
    assert (said.waits["p50"], said.steps["p90"], said.total) == (20.0, 20.0, 36.0)


# ---- the cases that are held against bars

BARS = """
    prefill-bf16-d192x128-b1-s8192-h16x16-p64 prefill-bf16-d256-b1-s8192-h16x8-p64
    prefill-bf16-one-s512-h32x8-d128-p16 prefill-bf16-one-s1024-h32x8-d128-p16
    serve-bf16-chunks-h32x8-d128-p16 serve-bf16-mixed-h32x8-d128-p16
    decode-bf16-b1-s1024-h32x8-d128-p16 decode-bf16-b1-s8192-h32x8-d128-p16
    decode-bf16-b4-s4096-h32x8-d128-p16 decode-bf16-b8-s1024-h32x8-d128-p16
    decode-bf16-ragged-b256-h64x8-d128-p16 decode-fp8-ragged-b256-h64x8-d128-p16 decode-nvfp4-ragged-b256-h64x8-d128-p16
""".split()
LOW_PRECISION = """
    prefill-fp8-causal-b2-s8192-h32x8-d128-p64 prefill-fp8-full-b2-s8192-h32x8-d128-p64
    prefill-kvfp8-causal-b2-s8192-h32x8-d128-p64 prefill-kvnvfp4-causal-b2-s8192-h32x8-d128-p64
    prefill-skip0-causal-b1-s32768-h32x8-d128-p64 prefill-skip75-causal-b1-s32768-h32x8-d128-p64
""".split()


def test_names_of_cases_that_are_held_against_bars():
    assert {*BARS, *LOW_PRECISION} <= {*command.attention().cases}


@pytest.mark.parametrize("name", BARS)
def test_shipped_kernels_serve_them(name):
    """Their keys are fewer here, on which no plan depends. The machine has 132 SMs."""
    every = [*shapes.PREFILL.values(), *shapes.DECODE.values(), *serving.CASES.values()]
    case, launched = next(case for case in every if case.name == name), []
    inputs = cases.make_inputs(replace(case, kv_lens=tuple(min(n, 40) for n in case.kv_lens)))
    with machine.override(FakeMachine(lambda op, spec: lambda *flat: launched.append((op, spec)))):
        call = decode.ours if name.startswith("decode") else serving.context
        call(inputs)()
        for provider, own in (serving.parts(inputs) if name.startswith("serve") else {}).items():
            serving.PARTS[provider](own)()
    assert {*launched} <= {*dispatch.shipped("sm_90a")}
    alone = "attention.decode" if name.startswith("decode") else "attention.sm90"
    parts = ["attention.sm90", "attention.decode"] if "mixed" in name else []
    assert [op for op, _ in launched] == [alone, *parts]
