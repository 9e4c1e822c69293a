"""FlashInfer's class for latent attention (MLA) on the CPU and with a kernel in torch, against float64: both forms of
plan and of run, graphs' buffers, and what is refused."""

import math
import re
from dataclasses import replace

import pytest
import torch

import wrappers
from bench.cases import mla
from bench.cases.mla import MlaCase, error, expected, make
from tests.support.emulated import emulation
from wrappers import BatchMLAPagedAttentionWrapper, MLAPlanMetadata

CASES = {
    "one row": MlaCase(lens=(70, 1, 0)),
    "causal rows": MlaCase(lens=(70, 0, 5, 16), rows=3, heads=4, page_size=16),
    "no mask, 512": MlaCase(lens=(70, 33), dim=512, page_size=1, causal=False, heads=3, rows=2),
    "fp16, gaps": MlaCase(lens=(40, 64), dtype="fp16", page_size=8, gap=3, data="peaks"),
}


E4M3 = torch.float8_e4m3fn


def lists(case, i):
    """The batch as lists of pages, with an entry that no request has behind them."""
    pages = [-(-n // case.page_size) for n in case.lens]
    entries = torch.cat([*(i.table[b, :n] for b, n in enumerate(pages)), torch.tensor([7], dtype=torch.int32)])
    starts = torch.tensor([0, *pages]).cumsum(0).int()
    return torch.arange(len(pages) + 1).int() * case.rows, starts, entries, i.lens


def shape(case):
    dtype = mla.DTYPES[case.dtype]
    return {"num_heads": case.heads, "head_dim_ckv": 512, "head_dim_kpe": case.dim - 512, "page_size": case.page_size,
            "causal": case.causal, "sm_scale": mla.SCALE, "q_data_type": dtype,
            "kv_data_type": E4M3 if case.record else dtype}  # fmt: skip


def planned(case, i, form="lists", **options):
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(0), **options)
    csr, table = lists(case, i), (torch.arange(len(case.lens) + 1).int() * case.rows, i.table, i.lens)
    names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
    metadata = {
        "lists": dict(zip(names, csr, strict=True)),
        "csr": {"metadata": MLAPlanMetadata.csr(*csr)},
        "table": dict(zip(("cum_seq_lens_q", "block_tables", "seq_lens"), table, strict=True)),
        "dense": {"metadata": MLAPlanMetadata.dense(*table, max_q_len=case.rows)},
        "dual": {
            "metadata": MLAPlanMetadata.dual(*csr, cum_seq_lens_q=table[0], block_tables=i.table, seq_lens=i.lens)
        },
    }
    wrapper.plan(**metadata[form], **shape(case))
    return wrapper


def tensors(case, i, form="two"):
    q, rope = i.q.flatten(0, 1), case.dim > 512
    if form == "one":
        return {"query": q, "kv_cache": i.cache}
    apart = [t[..., part].clone() for t in (q, i.cache) for part in (slice(0, 512), slice(512, None))]
    if form == "pairs":
        return {"query": tuple(apart[:2]), "kv_cache": tuple(apart[2:])}
    names = ("q_nope", "q_pe", "ckv_cache", "kpe_cache")
    return {name: t for name, t in zip(names, apart, strict=True) if rope or "p" not in name.replace("nope", "")}


def judged(case, i, out, lse):
    """The error of a result with an LSE of base 2."""
    heads = case.heads
    got = out.view(len(case.lens), case.rows, heads, 512), lse.view(-1, case.rows, heads).transpose(1, 2)
    return error(case, got, expected(replace(case, function="trtllm"), i))


@pytest.mark.parametrize("form", ["two", "one", "pairs"])
@pytest.mark.parametrize("name", CASES)
def test_results(name, form):
    case = CASES[name]
    i = make(case)
    wrapper, given = planned(case, i), tensors(case, i, form)
    with emulation() as fake:
        for _ in range(3):  # a new plan, a launch that is kept, and its repetition
            assert judged(case, i, *wrapper.run(**given, return_lse=True)) <= 1
    assert len(fake.launches) == 3 and all(spec.kv.shares_v for spec in fake.specs)
    assert judged(case, i, *planned(case, i).run(**given, return_lse=True)) <= 1  # on the CPU


@pytest.mark.parametrize("form", ["csr", "table", "dense", "dual"])
def test_metadata_of_every_form(form):
    case = CASES["causal rows"]
    i = make(case)
    want = planned(case, i).run(**tensors(case, i), return_lse=True)
    for machine in (None, emulation()):
        with machine or torch.no_grad():
            got = planned(case, i, form).run(**tensors(case, i), return_lse=True)
            assert all(map(torch.equal, want, got))


def test_outputs_and_natural_logarithms():
    case = CASES["one row"]
    i = make(case)
    wrapper, given = planned(case, i), tensors(case, i)
    out, lse = torch.full((3, 16, 512), math.nan).bfloat16(), torch.full((3, 16), math.nan)
    for machine in (None, emulation()):
        with machine or torch.no_grad():
            want, base2 = wrapper.run(**given, return_lse=True)
            assert torch.equal(wrapper.run(**given), want)
            got = wrapper.run(**given, out=out, lse=lse, return_lse=True, return_lse_base_on_e=True)
        assert got[0] is out and got[1] is lse and torch.equal(out, want)
        assert torch.allclose(lse[:2], base2[:2] * math.log(2.0)) and (lse[2] == -math.inf).all()
        assert not out[2].any() and (base2[2] == -math.inf).all()


def test_a_run_that_is_repeated_in_another_base():
    case = CASES["one row"]
    i = make(case)
    with emulation():
        wrapper, given = planned(case, i), tensors(case, i)
        bases = [wrapper.run(**given, return_lse=True, return_lse_base_on_e=e)[1] for e in (False, True, True, False)]
    assert torch.equal(bases[0], bases[3]) and torch.equal(bases[1], bases[2])
    torch.testing.assert_close(bases[1], bases[0] * math.log(2.0))


def test_lengths_are_those_of_keys():
    """Not of the last page: fewer keys than the pages before the last have, and more than all pages have."""
    case = MlaCase(lens=(40,), page_size=8)
    i = make(case)
    for n, seen in ((3, 3), (17, 17), (0, 0)):
        wrapper = planned(case, i._replace(lens=torch.tensor([n]).int()))
        with emulation():
            out, lse = wrapper.run(**tensors(case, i), return_lse=True)
        assert judged(replace(case, lens=(seen,)), i, out, lse) <= 1
    with emulation():
        wrapper = planned(case, i._replace(lens=torch.tensor([900]).int()))
        assert judged(case, i, *wrapper.run(**tensors(case, i), return_lse=True)) <= 1
    wrapper = planned(case, i._replace(lens=torch.tensor([41]).int()))
    with pytest.raises(ValueError, match=r"^kv_len_arr: 41 of request 0, must be in \[0, 40\]: rows of its pages"):
        wrapper.run(**tensors(case, i))


def test_other_tensors_of_the_same_shapes_repeat_the_launch():
    case = CASES["causal rows"]
    first, second = (make(case, seed=seed) for seed in range(2))
    wrapper = planned(case, first)
    with emulation() as fake:
        for i in (first, first, second, first):
            same = i._replace(table=first.table, lens=first.lens)
            if i is second:
                same = same._replace(cache=second.cache.nan_to_num(0.5))
                want = planned(case, same).run(**tensors(case, same))
            else:
                want = planned(case, first).run(**tensors(case, first))
            assert torch.equal(wrapper.run(**tensors(case, same)), want)
    assert len(fake.launches) == 8


def test_buffers_of_graphs():
    """Plans are copied to them, and a batch of another size is refused; tables need no buffers."""
    case = MlaCase(lens=(40, 20), page_size=8)
    i = make(case)
    csr = lists(case, i)
    buffers = [torch.zeros_like(t) for t in csr]
    names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
    wrapper = planned(case, i, use_cuda_graph=True, **dict(zip(names, buffers, strict=True)))
    assert wrapper.is_cuda_graph_enabled and all(map(torch.equal, buffers, csr))
    assert judged(case, i, *wrapper.run(**tensors(case, i), return_lse=True)) <= 1
    shorter = replace(case, lens=(9, 17))
    wrapper.plan(*csr[:3], torch.tensor([9, 17]).int(), **shape(case))
    assert judged(shorter, i, *wrapper.run(**tensors(case, i), return_lse=True)) <= 1
    with pytest.raises(ValueError, match="^qo_indptr: a batch of 1, must be that of the buffers, 2"):
        wrapper.plan(*(t[: len(t) - 1] for t in csr), **shape(case))
    assert (
        judged(case, i, *planned(case, i, "table", use_cuda_graph=True).run(**tensors(case, i), return_lse=True)) <= 1
    )
    with pytest.raises(ValueError, match="^qo_indptr: None in the constructor, must be a tensor if use_cuda_graph"):
        planned(case, i, use_cuda_graph=True)


# ---- what is refused

GOOD = MlaCase(lens=(9, 20), rows=2, heads=4, page_size=8, dtype="fp16")
PLANS = [
    ({"q_data_type": torch.float32}, TypeError, "q_data_type: torch.float32, must be one of torch.float16"),
    (
        {"kv_data_type": torch.float8_e4m3fn},
        TypeError,
        "kv_data_type: torch.float8_e4m3fn, must be torch.float16 unless q_data_type=torch.bfloat16",
    ),
    ({"kv_data_type": torch.float8_e4m3fn}, ValueError, "kv_data_type: torch.float8_e4m3fn, must be torch.float16"),
    ({"output_dtype": torch.bfloat16}, TypeError, "output_dtype: torch.bfloat16, must be torch.float16"),
    ({"num_heads": None}, TypeError, "num_heads: None, must be an int"),
    ({"head_dim_ckv": 0}, ValueError, "head_dim_ckv: 0, must be at least 1"),
    ({"head_dim_kpe": -1}, ValueError, "head_dim_kpe: -1, must be at least 0"),
    ({"page_size": 0}, ValueError, "page_size: 0, must be at least 1"),
    ({"causal": None}, TypeError, "causal: None, must be True or False"),
    ({"causal": None, "head_dim_kpe": 0, "num_heads": 9}, TypeError, "causal: None, must be True or False"),
    ({"sm_scale": None}, TypeError, "sm_scale: None, must be a float"),
    ({"lse_mode": "base10"}, ValueError, "lse_mode: 'base10', must be one of none, base2, basee"),
    ({"query_layout": "both"}, ValueError, "query_layout: 'both', must be one of None, packed, split"),
    ({"output_scale": "per-tensor"}, NotImplementedError, "output_scale: 'per-tensor', must be 'none'"),
    ({"scale_mode": "kv-per-tensor"}, NotImplementedError, "scale_mode: 'kv-per-tensor', must be 'default'"),
    ({"skip_softmax": True}, NotImplementedError, "skip_softmax: True, must be False"),
    ({"use_profiler": 1}, TypeError, "use_profiler: 1, must be True or False"),
    ({"metadata": 3}, TypeError, "metadata: int, must be an MLAPlanMetadata"),
    ({"metadata": MLAPlanMetadata()}, ValueError, "qo_indptr: given, must be None with metadata"),
    (
        {"seq_lens": torch.zeros(2).int()},
        ValueError,
        "qo_indptr: given, must be None with cum_seq_lens_q, block_tables",
    ),
    ({"kv_len_arr": None}, TypeError, "kv_len_arr: NoneType, must be a torch.Tensor"),
    ({"kv_len_arr": torch.zeros(3).int()}, ValueError, "kv_len_arr: 3 elements, must be 2"),
    ({"kv_indices": torch.zeros(9).long()}, TypeError, "kv_indices: dtype torch.int64, must be torch.int32"),
]
RUNS = [
    ({"q_pe": None}, TypeError, "q_pe: NoneType, must be a torch.Tensor"),
    ({"q_pe": torch.zeros(4, 4, 32).half()}, ValueError, "q_pe: shape (4, 4, 32), must end with 64, head_dim_kpe"),
    ({"q_pe": torch.zeros(4, 3, 64).half()}, ValueError, "q_pe: shape (4, 3, 64), must be (4, 4, 64)"),
    ({"q_pe": torch.zeros(4, 4, 64)}, ValueError, "q_pe.dtype: torch.float32, must be plan's q_data_type, t"),
    ({"q_nope": torch.zeros(4, 4, 512)}, ValueError, "q_nope.dtype: torch.float32, must be plan's q_data_type, t"),
    ({"kpe_cache": torch.zeros(7, 8, 64)}, ValueError, "kpe_cache.dtype: torch.float32, must be plan's kv_data_t"),
    ({"kpe_cache": torch.zeros(6, 9, 64).half()}, ValueError, "kpe_cache: shape (6, 1, 9, 64), must be (7, 1, 8, 64)"),
    ({"q_nope": torch.zeros(4, 4, 9).half()}, ValueError, "q_nope: 9 (elements per head), must be plan's head_dim_ckv"),
    ({"q_nope": torch.zeros(4, 5, 512).half()}, ValueError, "q_nope: 5 (heads), must be plan's num_heads, 4"),
    ({"q_nope": torch.zeros(3, 4, 512).half()}, ValueError, "q_nope: 3 (rows), must be plan's last of qo_indptr, 4"),
    ({"ckv_cache": torch.zeros(6, 9, 512).half()}, ValueError, "ckv_cache: 9 (rows per page), must be plan's page"),
    ({"ckv_cache": torch.zeros(6, 8, 512)}, ValueError, "ckv_cache.dtype: torch.float32, must be plan's kv_data_t"),
    ({"query": torch.zeros(4, 4, 576).half()}, ValueError, "q_nope: given, must be None with query"),
    ({"out": torch.zeros(4, 4, 576).half()}, ValueError, "out: shape (4, 4, 576), "),
    ({"lse": torch.zeros(4, 3)}, ValueError, "lse: shape (4, 3), "),
    ({"return_lse_base_on_e": 1}, TypeError, "return_lse_base_on_e: 1, must be True or False"),
    *(({name: torch.zeros(2)}, NotImplementedError, f"{name}: Tensor, must be None: not supported")
      for name in ("profiler_buffer", "kv_len", "page_table", "o_scale")),
    ({"ckv_scale_arr": torch.ones(7, 8, 4)}, ValueError, "ckv_scale_arr: given, must be None unless kv_data_type is"),
    *(({name: 0.5}, ValueError, f"{name}: 0.5, must be None unless kv_data_type is torch.float8_e4m3fn")
      for name in ("ckv_scale", "kpe_scale")),
]  # fmt: skip


@pytest.mark.parametrize("form", ["two", "one"])
@pytest.mark.parametrize("kernels", [False, True])
def test_e4m3_caches_have_one_scale(kernels, form):
    case = MlaCase(record="e4m3", lens=(40, 64, 0), heads=4, rows=2, page_size=8)
    i, factor = make(case), mla.E4M3_SCALE
    with emulation() if kernels else torch.no_grad():
        wrapper = planned(case, i)
        for scale in (factor, torch.tensor([factor])):
            given = tensors(case, i, form) | {"ckv_scale": scale, "kpe_scale": scale, "return_lse": True}
            for _ in range(2):
                assert judged(case, i, *wrapper.run(**given)) <= 1
        one = "^Exactly one of ckv_scale or ckv_scale_arr must be given over torch.float8_e4m3fn; both are "
        factors, shape = torch.ones(*i.cache.shape[:2], 4), tuple(i.cache.shape[:2])
        for scales, error, message in (
            ({}, ValueError, one + "None"),
            ({"kpe_scale": scale}, ValueError, one + "None"),
            ({"ckv_scale": 0.5, "ckv_scale_arr": factors}, ValueError, one + "given"),
            ({"ckv_scale": 0.5}, ValueError, "^kpe_scale: None, must be given, since kv_data_type"),
            ({"ckv_scale_arr": factors[1:]}, ValueError,
             re.escape(f"Invalid shape of ckv_scale_arr: {(shape[0] - 1, shape[1], 4)}, must be {(*shape, 4)}")),
            ({"ckv_scale_arr": factors, "kpe_scale": 1.0}, NotImplementedError, "^ckv_scale_arr: Tensor, must be None"),
        ):  # fmt: skip
            with pytest.raises(error, match=message):
                wrapper.run(**tensors(case, i, form) | scales)
        with pytest.raises(ValueError, match="^ckv_scale: inf"):
            wrapper.run(**tensors(case, i, form) | dict.fromkeys(("ckv_scale", "kpe_scale"), float("inf")))


@pytest.mark.parametrize("kernels", [False, True])
def test_e4m3_caches_have_a_scale_for_each_part(kernels):
    """The quotient of both is a power of two: no rounding."""
    case = MlaCase(record="e4m3", lens=(40, 64, 0), heads=4, rows=2, page_size=8)
    i, factor = make(case), mla.E4M3_SCALE
    halved = i._replace(q=torch.cat([i.q[..., :512], 0.5 * i.q[..., 512:]], -1))
    with emulation() if kernels else torch.no_grad():
        wrapper = planned(case, i)
        for as_given in (float, torch.tensor):
            scales = {"ckv_scale": as_given(factor), "kpe_scale": as_given(factor / 2)}
            for _ in range(2):
                found = wrapper.run(**tensors(case, i) | scales, return_lse=True)
                assert judged(case, halved, *found) <= 1


def test_kv_indptr_may_have_more_entries():
    case = MlaCase(lens=(40, 64), heads=4, page_size=8)
    i = make(case)
    names, given = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"), list(lists(case, i))
    want = planned(case, i).run(**tensors(case, i))
    given[1] = torch.cat([given[1], torch.tensor([-5, 1 << 30], dtype=torch.int32)])
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(0))
    wrapper.plan(**dict(zip(names, given, strict=True)), **shape(case))
    assert torch.equal(wrapper.run(**tensors(case, i)), want)


def test_refused_plans_keep_the_one_before():
    i = make(GOOD)
    wrapper, names = planned(GOOD, i), ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
    want = wrapper.run(**tensors(GOOD, i))
    for changes, kind, message in PLANS:
        given = dict(zip(names, lists(GOOD, i), strict=True)) | shape(GOOD) | changes
        with pytest.raises(kind) as found:
            wrapper.plan(**given)
        assert str(found.value).strip('"').startswith(message), f"{found.value}\n{message}"
        assert torch.equal(wrapper.run(**tensors(GOOD, i)), want)


def test_refused_tables():
    i = make(GOOD)
    wrapper, names = planned(GOOD, i), ("cum_seq_lens_q", "block_tables", "seq_lens")
    want, good = wrapper.run(**tensors(GOOD, i)), (lists(GOOD, i)[0], i.table, i.lens)
    for name, message in zip(names, ("cum_seq_lens_q: shape (2,), must be (3,)", "seq_lens: shape (2,), must be (1,)",
                                     "seq_lens: shape (1,), must be (2,)"), strict=True):  # fmt: skip
        given = dict(zip(names, good, strict=True))
        with pytest.raises(ValueError) as found:
            wrapper.plan(**given | {name: given[name][:-1]}, **shape(GOOD))
        assert str(found.value).startswith(message), f"{found.value}\n{message}"
        assert torch.equal(wrapper.run(**tensors(GOOD, i)), want)


@pytest.mark.parametrize("where", ["cpu", "kernels"])
def test_refused_runs(where):
    i = make(GOOD)
    wrapper = planned(GOOD, i)
    with torch.no_grad() if where == "cpu" else emulation() as fake:
        for changes, kind, message in RUNS:
            with pytest.raises(kind) as found:
                wrapper.run(**tensors(GOOD, i) | changes)
            assert str(found.value).strip('"').startswith(message), f"{found.value}\n{message}"
    assert fake is None or not fake.launches
    with pytest.raises(RuntimeError, match="^BatchMLAPagedAttentionWrapper: call plan before run"):
        BatchMLAPagedAttentionWrapper(torch.empty(0)).run(**tensors(GOOD, i))
    with pytest.raises(ValueError, match="^'?backend: 'fa9'"):
        BatchMLAPagedAttentionWrapper(torch.empty(0), backend="fa9")
    assert wrappers.MLAPlanMetadata is MLAPlanMetadata
