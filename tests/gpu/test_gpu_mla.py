"""Decode over latent caches on a GPU: kernels beside float64, equal bits in every run, graphs for other lengths."""

from dataclasses import replace

import pytest
import torch

import wrappers
from bench.cases import mla as cases
from bench.cases.mla import MlaCase, MlaInputs
from tests.support.gpu import CUDA, feature
from tools import matrix

CASES = {
    "one request": MlaCase(lens=(1, 64, 65)),
    "page of a row": MlaCase(lens=(300, 0, 1000), page_size=1, heads=8),
    "page of three": MlaCase(lens=(301,), page_size=3, heads=8, rows=2),
    "pages of 8": MlaCase(lens=(129, 500), page_size=8, rows=4, heads=16),
    "many heads": MlaCase(lens=(700, 3000), heads=128, rows=2, sink=True),
    "prompt": MlaCase(lens=(900, 200, 1500), heads=16, rows=70),
    "odd heads, strided": MlaCase(lens=(400,) * 9, heads=5, rows=3, strided=True, gap=3),
    "no mask": MlaCase(lens=(4000, 10, 100), heads=16, rows=2, causal=False),
    "512": MlaCase(lens=(777, 5000), heads=64, dim=512, sink=True),
    "fp16": MlaCase(dtype="fp16", lens=(2000, 1), heads=16),
    "splits": MlaCase(lens=(60_000,), heads=16, sink=True),
    "splits of many heads": MlaCase(lens=(33_000, 100), heads=128),
    "peaks": MlaCase(lens=(5000, 900), heads=20, data="peaks"),
    "many requests": MlaCase(lens=tuple(range(0, 3000, 7)), heads=16),
    "window and cap": MlaCase(function="qv", lens=(2500, 90), heads=16, rows=5, window=700, cap=6.0, sink=True),
    "qv": MlaCase(function="qv", lens=(2500, 90), heads=128, page_size=1),
    "trtllm": MlaCase(function="trtllm", lens=(1000, 50), heads=16, rows=3, sink=True),
    "wrapper": MlaCase(function="wrapper", lens=(1000, 0, 50, 700), heads=16, rows=3),
    "wrapper, pages of a row": MlaCase(function="wrapper", lens=(300, 50), heads=128, page_size=1),
    "wrapper, 512": MlaCase(function="wrapper", lens=(3000, 50), heads=64, dim=512, dtype="fp16", page_size=32),
}
CHOSEN = {
    "chosen": MlaCase(lens=(3000, 9), heads=16, chosen=2048),
    "chosen, counted": MlaCase(
        lens=(900, 0, 50) * 20, rows=2, heads=128, page_size=53, chosen=512, counted=True, gap=2
    ),
    "chosen, one request": MlaCase(lens=(5000,), heads=8, page_size=1, chosen=2049, sink=True, strided=True),
    "chosen, 512": MlaCase(function="trtllm", lens=(700, 700), rows=3, heads=64, dim=512, chosen=129, counted=True),
    "chosen, fp16": MlaCase(dtype="fp16", lens=(80,), rows=40, heads=5, page_size=2, chosen=65, data="peaks"),
}
CHOSEN |= {
    "sparse_fwd": MlaCase(function="sparse_fwd", lens=(3000, 9), rows=70, heads=64, chosen=512),
    "sparse_fwd, 512": MlaCase(
        function="sparse_fwd", lens=(900, 50), rows=9, heads=128, dim=512, chosen=2048, counted=True, sink=True
    ),
    "dsa": MlaCase(function="dsa", lens=(700, 3), rows=21, heads=64, chosen=300, counted=True),
    "gather_kv_indices": MlaCase(function="gather", lens=(700, 3), rows=21, heads=64, chosen=300, sink=True),
    "sparse_fwd, few": MlaCase(function="sparse_fwd", dtype="fp16", lens=(5000,), rows=3, heads=8, chosen=8191),
    "sparse_fwd, peaks": MlaCase(function="sparse_fwd", lens=(700, 3), rows=21, heads=5, chosen=300, data="peaks"),
}
SHARED = {  # tokens share the keys that they have chosen, many of them twice
    "shared": MlaCase(function="sparse_fwd", lens=(3000, 9), rows=70, heads=16, chosen=512, share=True),
    "shared, counted": MlaCase(
        function="sparse_fwd", lens=(300, 50, 0), rows=9, heads=8, chosen=2048, counted=True, sink=True, share=True
    ),
    "shared, 32 heads": MlaCase(function="sparse_fwd", lens=(5000,), rows=1001, heads=32, chosen=100, share=True),
    "shared, far apart": MlaCase(
        function="sparse_fwd", lens=(200_000,), rows=5, heads=24, chosen=3000, strided=True, share=True
    ),
    "shared, fp16": MlaCase(
        function="sparse_fwd", dtype="fp16", lens=(900,), rows=19, heads=16, dim=512, chosen=300, data="peaks",
        share=True,
    ),
    "shared, 656": MlaCase(
        function="sparse_fwd", record="656", lens=(900, 30), rows=40, heads=16, chosen=300, counted=True, share=True
    ),
    "shared, 656, split": MlaCase(
        function="sparse_fwd", record="656", lens=(9000, 30), rows=30, heads=16, chosen=2048, share=True, split=True
    ),
    "shared, e4m3": MlaCase(
        function="sparse_fwd", record="e4m3", lens=(900,), rows=41, heads=32, chosen=300, sink=True, share=True
    ),
    "shared, split": MlaCase(
        function="sparse_fwd", lens=(9000, 3), rows=21, heads=8, chosen=2048, counted=True, share=True, split=True
    ),
}  # fmt: skip
SECOND = {
    "two caches": MlaCase(lens=(3000, 9), heads=16, chosen=2048, second=640),
    "two caches, counted": MlaCase(lens=(900, 50, 70), rows=2, heads=128, chosen=129, counted=True, second=500, gap=2),
    "two caches, 512": MlaCase(lens=(700,), heads=64, dim=512, page_size=1, chosen=128, second=8192, sink=True),
}
RECORDS = {
    "e4m3": MlaCase(record="e4m3", lens=(1000, 0, 65), heads=16, rows=2, sink=True),
    "e4m3, splits": MlaCase(record="e4m3", lens=(60_000,), heads=16, page_size=1),
    "e4m3, trtllm": MlaCase(function="trtllm", record="e4m3", lens=(1000, 50), heads=128, rows=3),
    "e4m3 queries": MlaCase(record="e4m3", lens=(1000, 0, 65), heads=16, rows=2, q8=True, sink=True),
    "e4m3 queries, chosen": MlaCase(record="e4m3", lens=(3000, 9), heads=128, chosen=700, q8=True, strided=True),
    "e4m3, chosen": MlaCase(record="e4m3", lens=(3000, 9), heads=64, chosen=700),
    "656": MlaCase(record="656", lens=(3000, 9), heads=20, chosen=2048),
    "656, counted": MlaCase(
        record="656", lens=(900, 0, 50) * 20, rows=2, heads=128, page_size=53, chosen=512, counted=True, gap=2
    ),
    "656, one request": MlaCase(record="656", lens=(5000,), heads=8, page_size=1, chosen=2049, sink=True, strided=True),
    "656, trtllm": MlaCase(function="trtllm", record="656", lens=(700, 700), rows=3, heads=64, chosen=129),
    "656, all keys": MlaCase(record="656", lens=(1300, 64, 0, 1), heads=16, rows=3, page_size=2, causal=False),
    "656, many heads": MlaCase(record="656", lens=(1300, 0, 1), heads=24, page_size=3, sink=True),
    "352": MlaCase(record="352", lens=(3000, 9), heads=128, chosen=600, counted=True),
    "528_fp32": MlaCase(function="trtllm", record="528_fp32", dim=512, lens=(900,), rows=2, heads=64, chosen=333),
    "528": MlaCase(record="528", dim=512, lens=(900, 30), heads=64, chosen=333, page_size=61),
    "584": MlaCase(record="584", dim=512, lens=(900, 30), heads=64, chosen=333, page_size=2, gap=1),
    "584, window": MlaCase(
        record="584", second_record="584", dim=512, lens=(900,) * 5, chosen=128, second=640, heads=64
    ),
    "584, counted": MlaCase(
        record="584", second_record="584", dim=512, lens=(900, 50, 70), rows=2, heads=128, chosen=129, counted=True,
        second=500, sink=True, page_size=256,
    ),
    "528 and 528": MlaCase(record="528", second_record="528", dim=512, lens=(900,), chosen=128, second=65, heads=64),
    "sparse_fwd, 656": MlaCase(function="sparse_fwd", record="656", lens=(3000, 9), rows=70, heads=16, chosen=512),
    "sparse_fwd, 656, many heads": MlaCase(
        function="sparse_fwd", record="656", lens=(900,), rows=9, heads=128, chosen=300, counted=True,
    ),
    "sparse_fwd, e4m3": MlaCase(
        function="sparse_fwd", record="e4m3", lens=(3000, 9), rows=35, heads=16, chosen=700, counted=True, sink=True,
    ),
    "sparse_fwd, e4m3 queries": MlaCase(
        function="sparse_fwd", record="e4m3", lens=(900,), rows=9, heads=64, chosen=300, q8=True,
    ),
    "sparse_fwd, 584": MlaCase(
        function="sparse_fwd", record="584", second_record="584", dim=512, lens=(900,), rows=40, heads=64, chosen=128,
        second=640, sink=True, counted=True,
    ),
    "528 and 288": MlaCase(record="528", second_record="288", dim=512, lens=(900,), chosen=128, second=650, heads=64),
}  # fmt: skip
FEW_HEADS, MANY_RUNS = (1, 5, 8, 9, 16), 20
FEW = {  # heads x tokens up to 16, over the records that have kernels for them; pages of 1, 3 and 64 rows
    f"{name}, {heads} heads": replace(
        case, heads=heads, page_size=(1, 3, 64)[(number + turn) % 3], sink=heads > 4, strided=heads == 5,
        data="peaks" if heads == 8 else "normal", gap=turn % 2,
    )
    for number, (name, case) in enumerate(
        {
            "few e4m3": MlaCase(record="e4m3", lens=(9000, 0, 65, 1)),
            "few e4m3 queries": MlaCase(record="e4m3", lens=(65, 9000, 300), q8=True),
            "few 656": MlaCase(record="656", lens=(1, 64, 9000, 0)),
            "few e4m3, chosen": MlaCase(record="e4m3", lens=(9000, 9), chosen=2048),
            "few e4m3 queries, chosen": MlaCase(record="e4m3", lens=(900, 50, 0), rows=2, chosen=700, counted=True,
                                                q8=True),
            "few 656, chosen": MlaCase(record="656", lens=(9000, 70), rows=3, chosen=2049, counted=True),
            "few 528_fp32, chosen": MlaCase(function="trtllm", record="528_fp32", dim=512, lens=(9000, 70, 9),
                                            chosen=1100),
            "few 352, chosen": MlaCase(record="352", lens=(9000, 70), rows=2, chosen=2048, counted=True),
            "few 528, chosen": MlaCase(record="528", dim=512, lens=(9000, 70), chosen=700),
            "few 584": MlaCase(record="584", dim=512, lens=(900, 0, 65, 1)),
            "few 584 and 584": MlaCase(record="584", second_record="584", dim=512, lens=(900,) * 5, chosen=128,
                                       second=640, counted=True),
            "few 528 and 528": MlaCase(record="528", second_record="528", dim=512, lens=(900, 7), chosen=65, second=9),
            "few 528 and 288": MlaCase(record="528", second_record="288", dim=512, lens=(5000, 9), rows=2, chosen=300,
                                       second=1500),
        }.items()
    )
    for turn, heads in enumerate(FEW_HEADS)
}  # fmt: skip
FEW |= {
    "few 656, tokens": MlaCase(record="656", lens=(9000, 2, 0, 300), heads=4, rows=4, page_size=3, sink=True),
    "few e4m3, two tensors": MlaCase(function="wrapper", record="e4m3", lens=(9000, 0, 65), heads=13, page_size=3),
    "few 656, no mask": MlaCase(record="656", lens=(9000, 2, 64), heads=1, rows=8, page_size=1, causal=False),
    "few e4m3, tokens": MlaCase(record="e4m3", lens=(3, 9000, 500), heads=2, rows=8, strided=True, gap=3),
    "few e4m3 queries, tokens": MlaCase(record="e4m3", lens=(3, 900), heads=1, rows=5, q8=True, page_size=1),
    "few e4m3, many requests": MlaCase(record="e4m3", lens=tuple(range(0, 3000, 7)), heads=8, page_size=3),
    "few 656, many requests": MlaCase(record="656", lens=(900, 0, 5) * 130, heads=16, chosen=300, counted=True),
    "few 584, window": MlaCase(
        record="584",
        second_record="584",
        dim=512,
        lens=(900,) * 130,
        chosen=128,
        second=512,
        heads=16,
        page_size=256,
        sink=True,
    ),
    "few 584 and 528": MlaCase(record="584", second_record="528", dim=512, lens=(900, 50), chosen=300, second=300),
    "few 656 and 352": MlaCase(record="656", second_record="352", lens=(900, 50), heads=8, chosen=300, second=300),
    "few 352 and 656": MlaCase(record="352", second_record="656", lens=(900, 50), heads=9, chosen=65, second=300),
    "few e4m3 and e4m3": MlaCase(record="e4m3", second_record="e4m3", lens=(900, 50), heads=8, chosen=129, second=65),
}
RECORDS |= FEW
CASES |= CHOSEN | SHARED | SECOND | RECORDS


DIMS = {576: "576 (Q, K) and 512 (V)", 512: "512"}


def marked(name):
    shown = f"decode head_dim of a latent cache {DIMS[CASES[name].dim]}"
    if name in CHOSEN or name in SECOND:
        shown = f"decode with keys that each token chooses, of {'two' if name in SECOND else 'a'} latent cache"
        shown += "s" * (name in SECOND)
    if name in SHARED:
        record = CASES[name].record
        of_cache = f"record {record}" if record else "a latent cache"
        shown = f"decode with keys that neighbouring tokens share, of {of_cache}"
    if name in RECORDS:
        of = CASES[name]
        one = "e4m3 under e4m3 queries" if of.q8 else "record " * (of.record != "e4m3") + of.record
        of_both = f"records {of.record} and {of.second_record}"
        both, shown = (f"decode KV of a latent cache {what}" for what in (of_both, one))
        shown = both if both in matrix.NAMES else shown  # other pairs of records compile at their first call
    return pytest.param(name, marks=feature(shown))


@pytest.mark.parametrize("name", list(map(marked, CASES)))
def test_right_and_equal_when_run_again(name):
    case = CASES[name]
    given = cases.make(case, CUDA, seed=len(name))
    first = cases.call(case, given)
    assert cases.error(case, first, cases.expected(case, given)) <= 1.0
    for _ in range(MANY_RUNS if name in FEW else 3):
        assert all(map(torch.equal, cases.call(case, given), first))


def captured(case, given):
    """Return a graph of a call and the call's results."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    cases.call(case, given)
    with torch.cuda.stream(stream):
        cases.call(case, given)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            found = cases.call(case, given)
    return graph, found


@pytest.mark.parametrize("few", [{}, {"record": "656", "heads": 5}, {"record": "e4m3", "heads": 4}])
def test_a_graph_serves_other_lengths(few):
    case = replace(MlaCase(lens=(2000, 700, 64, 1), heads=16, rows=2), **few)
    given = cases.make(case, CUDA)
    graph, (out, lse) = captured(case, given)
    for lens in ((2000, 700, 64, 1), (3, 500, 0, 1), (1999, 1, 63, 1)):
        given.lens.copy_(torch.tensor(lens))
        graph.replay()
        torch.cuda.synchronize()
        shorter = replace(case, lens=lens)
        assert cases.error(shorter, (out, lse), cases.expected(shorter, given)) <= 1.0


SHARING = {"function": "sparse_fwd", "rows": 9, "share": True, "counted": False}


@pytest.mark.parametrize("changed", [{}, {"record": "656"}, {"record": "e4m3"}, SHARING, SHARING | {"split": True}])
def test_a_graph_serves_other_choices(changed):
    case = replace(MlaCase(lens=(900, 50), rows=2, heads=16, chosen=300, counted=True), **changed)
    given = cases.make(case, CUDA)
    graph, found = captured(case, given)
    for seed in range(3):
        for name, chosen in cases.choices(case, given, torch.Generator(CUDA).manual_seed(seed)).items():
            if chosen is not None:
                getattr(given, name).copy_(chosen)
        graph.replay()
        torch.cuda.synchronize()
        assert cases.error(case, found, cases.expected(case, given)) <= 1.0


@pytest.mark.parametrize("record", ["", "656"])
def test_a_request_does_not_depend_on_its_batch(record):
    """With the flag, bit for bit."""
    case = MlaCase(lens=(3000, 200, 64, 900), heads=16, record=record)
    given = cases.make(case, CUDA)

    def run(i):
        return wrappers.flash_mla_with_kvcache(
            given.q[i], given.cache.unsqueeze(2), given.table[i], given.lens[i], 512, softmax_scale=cases.SCALE,
            enable_batch_invariant=True, is_fp8_kvcache=bool(record),
        )  # fmt: skip

    whole = run(slice(None))
    assert cases.error(case, whole, cases.expected(case, given)) <= 1.0
    for b in range(4):
        one = run(slice(b, b + 1))
        assert torch.equal(one[0], whole[0][b : b + 1]) and torch.equal(one[1], whole[1][b : b + 1])


@pytest.mark.parametrize("record", ["", "656", "e4m3"])
def test_hostile_tables_and_lengths(record):
    """No value makes a kernel leave its tensors: the next call is right."""
    case = MlaCase(lens=(500, 70), heads=16, record=record)
    given = cases.make(case, CUDA)
    table, lens = given.table.clone(), given.lens.clone()
    for value in (-1, -(2**31), 2**31 - 1, 1 << 30):
        given.table.fill_(value)
        cases.call(case, given)
        given.table.copy_(table)
        given.lens.fill_(value)
        cases.call(case, given)
        given.lens.copy_(lens)
    torch.cuda.synchronize()
    assert cases.error(case, cases.call(case, given), cases.expected(case, given)) <= 1.0


def test_slots_past_the_integers_of_fp32():
    step, last = 16, (1 << 24) + 8  # elements between pages, which overlap; pages
    memory = torch.randn(last * step + 576, device=CUDA, dtype=torch.bfloat16)
    cache = memory.as_strided((last, 1, 1, 576), (step, 576, 576, 1))
    slots = torch.tensor([last - 1, last - 2, last - 5, 3], dtype=torch.int32, device=CUDA).view(4, 1, 1)
    q = torch.randn(4, 1, 16, 576, device=CUDA, dtype=torch.bfloat16)
    out, _ = wrappers.flash_mla_with_kvcache(q, cache, None, None, 512, indices=slots)
    want = cache[slots.flatten().long(), 0, 0, :512]
    assert torch.equal(out[:, 0], want[:, None].expand_as(out[:, 0]))


def test_a_prompt_of_70000_tokens():
    """Queries and outputs past 2^32 elements, with tokens x heads x heads past 2^30."""
    case = MlaCase("sparse_fwd", lens=(300,), heads=128, rows=70_000, page_size=300, chosen=70)
    q = torch.empty(1, case.rows, case.heads, case.dim, dtype=torch.bfloat16, device=CUDA).normal_()
    cache = torch.randn(1, 300, case.dim, device=CUDA).bfloat16()
    slots = torch.randint(-1, 300, (1, case.rows, case.chosen), dtype=torch.int32, device=CUDA)
    table, lens = torch.tensor([[0], [300]], dtype=torch.int32, device=CUDA)
    given = MlaInputs(q, cache, table[None], lens, None, slots)
    out, *stats = cases.call(case, given)
    some = torch.tensor([0, 32_767, 32_768, 58_254, 58_255, case.rows - 1], device=CUDA)
    found = out[:, some], *(x[..., some] for x in stats)
    few = replace(case, rows=len(some))
    assert cases.error(few, found, cases.expected(few, given._replace(q=q[:, some], slots=slots[:, some]))) <= 1.0
