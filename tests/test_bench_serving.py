"""The benchmark of mixed batches, chunks, small and ragged batches, on the CPU: cases, peers, parts, floors, plots, and
which kernel serves each case."""

import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import wrappers
from bench import __main__ as command
from bench import compare, decode, harness, plots, prefill, readme, results, serving, timing, workload
from bench.cases import attention as cases
from bench.cases import serving as shapes
from cute_kernels.attention import dispatch
from tests.fake_machine import FakeMachine
from tools import profile
from wrappers import machine

TARGETS = """
    prefill-bf16-d192x128-b1-s8192-h16x16-p64 prefill-bf16-d256-b1-s8192-h16x8-p64
    prefill-bf16-one-s512-h32x8-d128-p16 prefill-bf16-one-s1024-h32x8-d128-p16
    serve-bf16-chunks-h32x8-d128-p16 serve-bf16-mixed-h32x8-d128-p16
    decode-bf16-b1-s1024-h32x8-d128-p16 decode-bf16-b1-s8192-h32x8-d128-p16
    decode-bf16-b4-s4096-h32x8-d128-p16 decode-bf16-b8-s1024-h32x8-d128-p16
    decode-bf16-ragged-b256-h64x8-d128-p16 decode-fp8-ragged-b256-h64x8-d128-p16 decode-nvfp4-ragged-b256-h64x8-d128-p16
""".split()
CASES = {c.name: c for group in (shapes.PREFILL, shapes.DECODE, serving.CASES) for c in group.values()}
TINY = replace(
    shapes.SERVE["serve-bf16-mixed-h32x8-d128-p16"],
    name="serve-tiny",
    q_lens=(70, 30, 1, 1, 1),
    kv_lens=(90, 130, 40, 300, 17),
    heads_q=4,
    heads_kv=2,
    head_dim_qk=64,
    head_dim_vo=64,
)
TINY_CHUNKS = replace(TINY, name="serve-tiny-chunks", q_lens=(70, 30), kv_lens=(90, 130))


class WallClock:
    """What each call says that it takes, else `us`."""

    def __init__(self, us=2000.0):
        self.us = us

    def measure(self, call, sets):
        took = [call(i) for i in sets]
        return took[0] if isinstance(took[0], float) else self.us


TOP = harness.Ceilings(700.0, 4000.0)
ENV = results.Environment("2026-01-02T03:04:05+00:00", "abc123", "nvidia-h200", "580.1", "2.13.0")


def setup(*providers, us=2000.0):
    return harness.Setup(providers, 2, "cpu", WallClock(us), WallClock(us))


def family():
    return command.attention()


@pytest.fixture(autouse=True)
def one_input_set(monkeypatch):
    """Tiny caches would take turns by the thousand."""
    monkeypatch.setattr(harness, "L2_BYTES", 0)


# ---- cases


def test_names_are_those_of_the_targets():
    assert {*TARGETS} <= {*command.chosen_of(family(), "", False)} and {*TARGETS} <= CASES.keys()
    for name, case in CASES.items():
        assert name == case.name and f"-h{case.heads_q}x{case.heads_kv}-" in name
        assert name.endswith(f"-p{case.page_size}")
        dims = case.head_dim_qk, case.head_dim_vo
        assert f"-d{dims[0]}x{dims[1]}-" in name or (f"-d{dims[0]}-" in name and dims[0] == dims[1])


def test_lengths_of_the_batches():
    mixed, chunks = shapes.SERVE.values()
    assert mixed.q_lens == (1024,) * 4 + (1,) * 60 and mixed.kv_lens[:4] == (2048, 6144, 10240, 14336)
    assert mixed.kv_lens[4:] == tuple(sorted(mixed.kv_lens[4:])) and (mixed.kv_lens[4], mixed.kv_lens[-1]) == (
        1024,
        7168,
    )
    assert chunks.q_lens == (512,) * 4 and chunks.kv_lens == (4096, 8192, 16384, 32768)
    assert shapes.PREFILL["prefill-bf16-one-s512-h32x8-d128-p16"].kv_lens == (512,)


def test_ragged_lengths_are_log_normal_in_a_fixed_order():
    lens = shapes.RAGGED
    assert (
        len(lens) == 256 and (min(lens), max(lens)) == (64, 31805) and sum(lens) / 256 == pytest.approx(2048, rel=0.02)
    )
    assert lens[:4] == shapes.log_normal(256, 2048, 1.2, 64, 32768)[:4] == (64, 619, 1051, 5061)
    logs = torch.tensor(lens).log()
    assert float(logs.std()) == pytest.approx(1.2, abs=0.03) and float(logs.median()) == pytest.approx(
        math.log(2048) - 0.72, abs=0.02
    )
    found = [c.kv_lens for c in shapes.DECODE.values() if "-ragged-" in c.name]
    assert found == [lens] * 3 and lens != tuple(sorted(lens))


def test_sweeps_are_chosen_by_name_or_asked_for():
    def kinds(prefix, sweep=False):
        return {name.rpartition("-bf16-")[0] for name in command.chosen_of(family(), prefix, sweep)}

    assert kinds("sweep-decode") == {"sweep-decode"} and kinds("sweep-serve") == {"sweep-serve"}
    assert kinds("prefill-bf16", True) == {"prefill", "sweep"} and kinds("serve") == {"serve"}
    assert kinds("decode-bf16") == {"decode"} and kinds("decode-bf16,serve") == {"decode", "serve"}
    with pytest.raises(SystemExit, match="no case begins with 'decode-sweep'; there are: prefill-bf16-causal"):
        kinds("decode-bf16,decode-sweep")
    for case in shapes.SWEEP_DECODE.values():
        assert plots.DECODE_SWEEP.match(case.name) and sum(case.kv_lens) <= shapes.SWEEP_TOKENS
    assert all(map(plots.SERVE_SWEEP.match, shapes.SWEEP_SERVE))


def test_each_case_goes_to_the_benchmark_of_its_kind(monkeypatch):
    for module in (prefill, decode, serving):
        monkeypatch.setattr(module, "measure", lambda case, top, setup, module=module: (module, case.name))
    measure = family().measure
    wanted = {"prefill": prefill, "decode": decode, "serve": serving}
    for name in CASES:
        kind = name.removeprefix("sweep-").partition("-")[0]
        assert measure(name, TOP, None) == (wanted[kind], name)


@pytest.mark.parametrize("name", TARGETS)
def test_a_shipped_kernel_serves_each_case(name):
    """Of fewer keys, on which no plan depends: through the public function, on a machine of 132 SMs."""
    case, launched = CASES[name], []
    inputs = cases.make_inputs(replace(case, kv_lens=tuple(min(n, 40) for n in case.kv_lens)))
    fake = FakeMachine(lambda op, spec: lambda *flat: launched.append((op, spec)))
    with machine.override(fake):
        if name.startswith("decode"):
            decode.ours(inputs)()
        else:
            wrappers.trtllm_batch_context_with_kv_cache(**inputs)
        if name.startswith("serve"):
            for provider, own in serving.parts(inputs).items():
                serving.PARTS[provider](own)()
    assert {*launched} <= {*dispatch.shipped("sm_90a")}
    ops = [op for op, _ in launched]
    assert ops == {
        "decode": ["attention.decode"], "prefill": ["attention.sm90"],
        "serve": ["attention.sm90", *(["attention.sm90", "attention.decode"] if "mixed" in name else [])],
    }[name.partition("-")[0]]  # fmt: skip


# ---- shapes and floors


def test_work_of_requests_that_differ():
    """Against counting: a query token and the keys it sees, the diagonal by half."""
    shape = workload.shape_of(cases.make_inputs(TINY))
    assert (shape.q_lens, shape.kv_lens, shape.batch, shape.equal) == (TINY.q_lens, TINY.kv_lens, 5, False)
    pairs = sum(n - m + i + 0.5 for m, n in zip(TINY.q_lens, TINY.kv_lens) for i in range(m))
    assert shape.flops == 2 * 4 * (64 + 64) * pairs
    assert replace(shape, causal=False).flops == 2 * 4 * 128 * sum(m * n for m, n in zip(TINY.q_lens, TINY.kv_lens))
    assert shape.bytes == 2 * (4 * 103 * 128 + 2 * 577 * 128)
    wide = replace(shape, dim_qk=192, dim_vo=128)
    assert wide.flops == shape.flops * 320 / 128 and wide.bytes == shape.bytes * 320 // 128
    with pytest.raises(ValueError, match="requests: 1 to 70 query tokens of 17 to 300 tokens, must be the same"):
        _ = shape.length


def test_head_dims_of_a_case_come_from_its_caches():
    case = replace(TINY, q_lens=(5,), kv_lens=(5,), head_dim_qk=192, head_dim_vo=128)
    assert [(s.dim_qk, s.dim_vo) for s in [workload.shape_of(cases.make_inputs(case))]] == [(192, 128)]
    shape = workload.shape_of(cases.make_inputs(replace(TINY, kv_dtype="nvfp4")))
    assert (shape.dim_qk, shape.dim_vo) == (64, 64)


def test_page_lists_of_requests_that_differ():
    inputs = cases.make_inputs(TINY)
    q_starts, starts, indices, last = workload.csr(inputs)
    assert q_starts.tolist() == [0, 70, 100, 101, 102, 103] and last.tolist() == [10, 2, 8, 12, 1]
    assert starts.tolist() == [0, 6, 15, 18, 37, 39] and {t.dtype for t in (starts, indices, last)} == {torch.int32}
    rows = [row[:count] for row, count in zip(inputs["block_tables"], starts.diff().tolist())]
    assert torch.equal(indices, torch.cat(rows))


@pytest.mark.parametrize("length", ["first", "shortest", "longest", "last"])
def test_check_looks_at_requests_that_stand_out(length):
    """An error in one of them is seen, whatever the random choice."""
    inputs = cases.make_inputs(TINY)
    right, _ = cases.reference_of(inputs)
    assert workload.check(inputs, right) is None
    lens = [*TINY.kv_lens]
    request = {"first": 0, "shortest": lens.index(17), "longest": lens.index(300), "last": 4}[length]
    wrong = right.clone()
    wrong[sum(TINY.q_lens[:request])] += 0.2
    for seed in range(3):
        assert workload.check(inputs, wrong, seed).startswith("off by")


# ---- rows of a run


def test_a_mixed_batch_is_measured_beside_its_parts(monkeypatch):
    times = {"own-prefill": 700.0, "own-decode": 150.0, "ours": 800.0}
    plain = serving.interleave

    def timed(calls, clock, sets, rounds):
        return plain({name: lambda i, name=name: times[name] for name in calls}, clock, sets, rounds)

    monkeypatch.setattr(serving, "interleave", timed)
    found = serving.measure(TINY, TOP, setup("ours"))
    by = {r.provider: r for r in found}
    assert [*by] == ["ours", "own-parts", "floor", "own-prefill", "own-decode"]
    assert by["own-parts"].timing == timing.exactly(850.0)
    shape = workload.shape_of(cases.make_inputs(TINY))
    assert by["ours"].tflops == pytest.approx(shape.flops / 800e6) and by["own-decode"].tflops is None
    rows = harness.rows_of(found, ENV)
    assert next(r for r in rows if r.provider == "own-parts").ratio_to_ours == pytest.approx(850 / 800)
    text = readme.measured_serving({"nvidia-h200": rows})
    assert "| `serve-tiny` | 800 | 0 | 0% | 1.06 |  |  |" in text and "commit abc123" in text
    assert readme.measured_serving({}) == "Not measured yet."


def test_the_floor_is_the_longer_of_work_and_bytes():
    shape = workload.shape_of(cases.make_inputs(TINY_CHUNKS))
    for top, want in (
        (harness.Ceilings(1e-3, 4000.0), shape.flops / 1e3),
        (harness.Ceilings(700.0, 1.0), shape.bytes / 1e3),
    ):
        (_, floor) = serving.measure(TINY_CHUNKS, top, setup("ours"))
        assert floor.provider == "floor" and floor.timing.median == pytest.approx(want)
        assert floor.tflops == pytest.approx(shape.flops / want / 1e6)


def test_parts_hold_each_request_once():
    inputs = cases.make_inputs(TINY)
    own = serving.parts(inputs)
    assert [workload.shape_of(x).q_lens for x in own.values()] == [(70, 30), (1, 1, 1)]
    assert [workload.shape_of(x).kv_lens for x in own.values()] == [(90, 130), (40, 300, 17)]
    assert [(x["max_q_len"], x["max_kv_len"], x["batch_size"]) for x in own.values()] == [(70, 130, 2), (1, 300, 3)]
    want, _ = cases.reference_of(inputs)
    for name, x in own.items():
        serving.PARTS[name](x)()
    torch.testing.assert_close(inputs["out"].float(), want, rtol=1e-2, atol=1e-2)
    assert serving.parts(cases.make_inputs(TINY_CHUNKS)) == {}


@pytest.mark.parametrize("wrong", [lambda inputs: decode.ours(inputs)() * 2, lambda inputs: inputs["out"]])
def test_a_wrong_part_or_ours_that_fails_leaves_no_own_parts(monkeypatch, capsys, wrong):
    """One that is off, and one that writes nothing."""
    monkeypatch.setitem(serving.PARTS, "own-decode", lambda inputs: lambda: wrong(inputs))
    assert [r.provider for r in serving.measure(TINY, TOP, setup("ours"))] == ["ours", "floor"]
    assert "no row: own-decode: " in capsys.readouterr().out
    monkeypatch.setitem(prefill.PROVIDERS, "ours", lambda inputs: {}["gone"])
    assert serving.measure(TINY, TOP, setup("ours")) == []
    assert "no row: ours: KeyError: 'gone'" in capsys.readouterr().out


def test_a_decode_provider_that_writes_nothing_has_no_row(monkeypatch, capsys):
    """Though the one before wrote the right result where it points to."""
    monkeypatch.setitem(decode.PROVIDERS, "batch-invariant", lambda inputs: lambda: inputs["out"])
    found = decode.measure(cases.decoding(2, 20, (4, 2), 64, 16), TOP, setup("ours"))
    assert [r.provider for r in found] == ["ours", "floor"] and "no row: batch-invariant: " in capsys.readouterr().out


# ---- peers, as their packages are called


def attended(q, k, v, scale, causal):
    """fp32 attention of (m, Hq, D) over (n, Hkv, D); causal: the last query sees all keys."""
    q, k, v = (t.float().transpose(0, 1) for t in (q, k, v))
    k, v = (t.repeat_interleave(len(q) // len(k), 0) for t in (k, v))
    m, n = q.shape[1], k.shape[1]
    hidden = torch.ones(m, n).tril(n - m).logical_not() if causal else torch.zeros(m, n).bool()
    p = (scale * q @ k.transpose(1, 2)).masked_fill(hidden, -math.inf).softmax(-1)
    return (p @ v).transpose(0, 1)


def flash_attn_varlen_func(
    q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal
):  # fmt: skip
    """What flash-attn-4 promises of these arguments."""
    assert max_seqlen_q == int(cu_seqlens_q.diff().max()) and max_seqlen_k == int(cu_seqlens_k.diff().max())
    assert {t.dtype for t in (cu_seqlens_q, cu_seqlens_k)} == {torch.int32} and k.is_contiguous()
    sides = [t.split(starts.diff().tolist()) for t, starts in ((q, cu_seqlens_q), (k, cu_seqlens_k), (v, cu_seqlens_k))]
    return torch.cat([attended(*one, softmax_scale, causal) for one in zip(*sides)]).to(q.dtype), None


def flash_attn_func(q, k, v, *, softmax_scale, causal):
    return torch.stack([attended(*one, softmax_scale, causal) for one in zip(q, k, v)]).to(q.dtype), None


class Paged:
    """flashinfer's class, whose place ours takes."""

    def __init__(self, space, kv_layout, backend):
        assert backend == "fa3"
        self.ours = wrappers.BatchPrefillWithPagedKVCacheWrapper(space, kv_layout)
        self.plan, self.run = self.ours.plan, self.ours.run


@pytest.fixture
def peers(monkeypatch):
    interface = SimpleNamespace(flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func)
    for name, module in {
        "flash_attn": SimpleNamespace(),
        "flash_attn.cute": SimpleNamespace(),
        "flash_attn.cute.interface": interface,
        "flashinfer": SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Paged),
        "flashinfer.xqa": SimpleNamespace(xqa=wrappers.xqa),
    }.items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("case", [TINY, TINY_CHUNKS], ids=lambda case: case.name)
def test_peers_of_batches_get_right_arguments(peers, case, capsys):
    found = serving.measure(case, TOP, setup("ours", "cudnn", "flash-attn-4", "flashinfer"))
    own = [] if case is TINY_CHUNKS else ["own-prefill", "own-decode"]
    assert [r.provider for r in found] == [
        "ours", "flash-attn-4", "flashinfer", *(["own-parts"] if own else []), "floor", *own
    ]  # fmt: skip
    assert "no row: cudnn: ValueError: requests: " in capsys.readouterr().out


@pytest.mark.parametrize("name", shapes.PREFILL)
def test_peers_of_prompts_get_right_arguments(peers, name):
    """Short prompts of the case's head_dims. cudnn's backend is not on this machine."""
    case = replace(CASES[name], q_lens=(40,), kv_lens=(40,), heads_q=4, heads_kv=2)
    found = prefill.measure(case, TOP, setup("ours", "flash-attn-4", "flashinfer"))
    assert [r.provider for r in found] == ["ours", "flash-attn-4", "flashinfer", "floor"]


@pytest.mark.parametrize("kv_dtype", ["", "fp8", "nvfp4"])
def test_ragged_decode_is_measured_beside_xqa_and_wider_caches(peers, kv_dtype):
    case = next(c for c in shapes.DECODE.values() if c.name.startswith(f"decode-{kv_dtype or 'bf16'}-ragged"))
    case = replace(case, q_lens=(1,) * 5, kv_lens=case.kv_lens[:5], heads_q=4, heads_kv=2)
    found = decode.measure(case, TOP, setup("ours", "flashinfer"))
    xqa, wider = ["flashinfer"] if kv_dtype != "nvfp4" else [], {"fp8": ["own-bf16"], "nvfp4": ["own-fp8"]}
    assert [r.provider for r in found] == ["ours", *xqa, "batch-invariant", *wider.get(kv_dtype, []), "floor"]
    size = {"": 2, "fp8": 1, "nvfp4": 9 / 16}[kv_dtype] * sum(case.kv_lens) * 2 * 256
    assert found[-1].timing.median == pytest.approx(size / 4e6)


def test_small_caches_take_turns(monkeypatch):
    """So many sets that none is in the L2 when it is read again; every provider runs on all of them."""
    monkeypatch.setattr(harness, "L2_BYTES", 10_000)
    seen = []
    plain = decode.PROVIDERS["ours"]

    def ours(inputs):
        run = plain(inputs)
        return lambda: (seen.append(inputs["query"].data_ptr()), run())[1]

    monkeypatch.setitem(decode.PROVIDERS, "ours", ours)
    case = replace(cases.decoding(1, 20, (2, 1), 64, 16, "fp8"), name="decode-tiny")
    sets = decode.inputs_of(case, "cpu")
    assert decode.kv_bytes(case) == 2560 and len(sets) == timing.input_sets(2560, 10_000) == 9
    assert len({float(inputs["query"].float().sum()) for inputs in sets}) == 9
    found = decode.measure(case, TOP, setup("ours", us=200.0))
    assert [r.provider for r in found] == ["ours", "batch-invariant", "own-bf16", "floor"]
    assert len({*seen}) == 18


# ---- plots, profiles, comparisons


def sweep_rows():
    rows = []
    for case in (*shapes.SWEEP_DECODE.values(), *shapes.SWEEP_SERVE.values()):
        for i, provider in enumerate(("ours", "own-parts", "flash-attn-4", "flashinfer", "floor")):
            rows.append(ENV.row(case.name, provider, 100.0 + i, tflops=500.0 - i, gbps=4000.0 - 100 * i))
    return results.with_ratios(rows)


def test_plots_of_the_sweeps(tmp_path, monkeypatch):
    axes = []
    plain = plots.figure
    monkeypatch.setattr(plots, "figure", lambda *a, **k: axes.append(plain(*a, **k)) or axes[-1])
    paths = plots.draw_all({"g": sweep_rows()}, tmp_path)
    assert [p.name for p in paths] == ["g-decode-lengths.png", "g-serve-sweep.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in paths)
    (_, (ours, peer)), (_, (mixed, chunks)) = axes
    for axis, share in ((ours, 4000 / 3600), (peer, 3700 / 3600)):
        assert [line.get_label() for line in axis.lines] == [f"batch {b}" for b in shapes.SWEEP_BATCHES]
        assert list(axis.lines[0].get_xdata()) == [*shapes.SWEEP_LENGTHS] and list(axis.lines[4].get_xdata()) == [
            1024, 2048, 4096
        ]  # fmt: skip
        assert list(axis.lines[1].get_ydata()) == pytest.approx([100 * share] * 8)
    assert (
        [line.get_label() for line in mixed.lines]
        == [*plots.SERVE_STYLE]
        == [line.get_label() for line in chunks.lines]
    )
    assert list(mixed.lines[1].get_xdata()) == [0, 15, 30, 60, 120, 240] and set(mixed.lines[1].get_ydata()) == {101.0}
    assert list(chunks.lines[2].get_xdata()) == [16 << e for e in range(8)]
    assert set(chunks.lines[2].get_ydata()) == {498.0}
    assert plots.draw_all({"g": []}, tmp_path) == []


@pytest.mark.parametrize("group", ["PREFILL", "SERVE", "DECODE"])
def test_cases_are_profiled(monkeypatch, group):
    tiny = TINY if group != "DECODE" else cases.decoding(3, 70, (4, 2), 64, 16)
    monkeypatch.setattr(shapes, group, {"tiny": tiny})
    assert len(profile.call_of("tiny", "ours", "cpu")()) == sum(tiny.q_lens)


def test_a_checkout_reads_the_cases_of_another_one():
    """As fields that differ from what cases have by default."""
    for case in compare.CASES.values():
        changed = compare.changed(case)
        assert cases.AttentionCase(**changed) == case
    assert {*TARGETS} <= compare.CASES.keys()
    headline = compare.changed(compare.CASES["prefill-bf16-causal-b2-s8192-h32x8-d128-p64"])
    assert {*headline} == {"name", "q_lens", "kv_lens", "heads_q", "heads_kv", "head_dim_qk", "head_dim_vo", "lse",
                           "page_size", "spare_pages"}  # fmt: skip
