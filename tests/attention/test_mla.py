"""Attention to latent caches (MLA) on the CPU and with a kernel in torch: FlashMLA's function, and FlashInfer's with
TensorRT-LLM's signature, against float64; what they return, take and refuse."""

import math
from dataclasses import replace

import pytest
import torch

import wrappers
from bench.cases import mla
from bench.cases.mla import MlaCase, call, error, expected, make
from tests.support import good_calls
from tests.support.bad_values import one_thread  # noqa: F401
from tests.support.emulated import emulation
from wrappers import flash_mla_with_kvcache, get_mla_metadata
from wrappers import trtllm_batch_decode_with_kv_cache_mla as trtllm_mla

FLASH, TRTLLM = good_calls.MLA
FUNCTIONS = {"flash_mla": FLASH, "trtllm": TRTLLM}
CASES = {
    "plain": MlaCase(lens=(70,)),
    "page of one row": MlaCase(lens=(5, 0, 33), page_size=1),
    "pages of three rows": MlaCase(lens=(1, 50, 0), rows=2, page_size=3, heads=8),
    "eight rows": MlaCase(lens=(9, 130, 3), rows=8, heads=4),
    "sinks": MlaCase(lens=(0, 64, 65), rows=2, sink=True),
    "strided, gaps": MlaCase(lens=(63, 17), rows=2, strided=True, gap=3, page_size=16),
    "512": MlaCase(lens=(100, 0, 7), rows=2, dim=512, sink=True),
    "fp16": MlaCase(lens=(90, 4), dtype="fp16", sink=True, data="peaks"),
    "chosen": MlaCase(lens=(40, 3), rows=3, heads=4, page_size=7, chosen=70, gap=2),
    "chosen, counted": MlaCase(lens=(40, 0, 30, 9), rows=2, dim=512, sink=True, chosen=128, counted=True),
    "chosen, strided": MlaCase(lens=(30,), strided=True, page_size=1, chosen=65, dtype="fp16"),
    "chosen, no rows": MlaCase(lens=(0, 0), chosen=5),
    "fp16, 512": MlaCase(lens=(31, 32, 33), rows=8, dtype="fp16", dim=512, page_size=3, heads=2),
}


SECOND = {
    "small": MlaCase(lens=(40, 3), rows=3, heads=4, page_size=7, chosen=70, second=33),
    "counted": MlaCase(lens=(40, 0, 30, 9), dim=512, sink=True, chosen=128, counted=True, second=5, dtype="fp16"),
    "one cache has nothing": MlaCase(lens=(0, 30), chosen=5, second=70),
}


def given(function, **changes):
    return good_calls.mla(function) | changes


# ---- values


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", CASES)
def test_results(name, function):
    """On the CPU, and by the kernel that Hopper would run."""
    case = replace(CASES[name], function=function)
    inputs = make(case)
    want = expected(case, inputs)
    assert error(case, call(case, inputs), want) <= 1
    with emulation() as fake:
        for _ in range(2):  # a new plan, then the same one
            assert error(case, call(case, inputs), want) <= 1
    assert len(fake.launches) == 2 and all(spec.kv.shares_v for spec in fake.specs)


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_without_a_mask(rows):
    case = MlaCase(lens=(20, 0, 2), rows=rows, causal=False, page_size=16)
    inputs = make(case)
    want = expected(case, inputs)
    assert error(case, call(case, inputs), want) <= 1
    with emulation():
        assert error(case, call(case, inputs), want) <= 1


@pytest.mark.parametrize("sink", [False, True])
def test_the_lse_of_rows_with_and_without_keys(sink):
    """Zeros of logits: FlashMLA's LSE is ln of the number of keys, without the sink, and +inf without any; the other
    function's has base 2, and the sink counts."""
    q, cache = torch.zeros(2, 2, 4, 576).half(), torch.ones(2, 64, 576).half()
    table, lens = torch.tensor([[1], [0]]).int(), torch.tensor([1, 12]).int()
    sinks = torch.full((4,), math.log(5.0)) if sink else None
    more = 5 if sink else 0
    for machine in (None, emulation()):
        with machine or torch.no_grad():
            out, lse = flash_mla_with_kvcache(
                q, cache.unsqueeze(2), table, lens, 512, softmax_scale=1.0, causal=True, attn_sink=sinks
            )
            o, other = trtllm_mla(q, cache, None, 128, 512, 64, table, lens, 64, sinks=sinks, return_lse=True)
        counts = torch.tensor([[0.0, 1.0], [11.0, 12.0]])
        natural = torch.where(counts == 0, math.inf, counts.log())
        assert lse.shape == (2, 4, 2) and lse.dtype == torch.float32
        assert torch.allclose(lse, natural[:, None].expand(2, 4, 2))
        assert other.shape == (4, 4)
        assert torch.allclose(other, (counts + more).log2().flatten()[:, None].expand(4, 4))
        share = counts / (counts + more).clamp(min=1)
        for result in (out, o):
            assert result.shape == (2, 2, 4, 512)
            assert torch.allclose(result.float(), share[..., None, None].expand(2, 2, 4, 512), atol=1e-3)


def test_the_scale_is_that_of_the_query_by_default():
    inputs = given(FLASH)
    del inputs["softmax_scale"]
    (out, lse), (same, its) = (flash_mla_with_kvcache(**inputs | s) for s in ({}, {"softmax_scale": 576**-0.5}))
    assert torch.equal(out, same) and torch.equal(lse, its)


def test_offsets_of_queries():
    """Requests of one row, of three and of none, as if each were alone; the outputs are those that were given."""
    case = MlaCase(function="trtllm", lens=(20, 33, 8), rows=3, heads=4, page_size=16)
    inputs = make(case)
    out, lse = torch.full((4, 4, 512), math.nan).bfloat16(), torch.full((4, 4), math.nan)
    ragged = torch.cat([inputs.q[0, 2:], inputs.q[1]])
    starts = torch.tensor([0, 1, 4, 4]).int()
    rest = (inputs.cache[:, None], None, 128, 512, 64, inputs.table, inputs.lens, 64)
    for machine in (None, emulation()):
        with machine or torch.no_grad():
            got = trtllm_mla(
                ragged, *rest, out=out, lse=lse, return_lse=True, bmm1_scale=mla.SCALE, cum_seq_lens_q=starts,
                max_q_len=3,
            )  # fmt: skip
            assert got[0] is out and got[1] is lse
            all_rows, all_lse = call(case, inputs)
        assert torch.allclose(out, torch.cat([all_rows[0, 2:], all_rows[1]]), atol=1e-2)
        assert torch.allclose(lse, torch.cat([all_lse[0, :, 2:].T, all_lse[1].T]), atol=1e-5)


@pytest.mark.parametrize("function", good_calls.MLA)
def test_outputs_that_are_given_are_filled(function):
    inputs, out = given(function), torch.full((2, 2, 4, 512), math.nan).bfloat16()
    public = getattr(wrappers, function)
    want = public(**inputs)
    got = public(**inputs | {"out": out})
    want, got = (t[0] if isinstance(t, tuple) else t for t in (want, got))
    assert got is out and torch.equal(out, want)


@pytest.mark.parametrize("kernels", [False, True])
def test_a_table_with_the_pages_of_v(kernels):
    """Entries behind the last page of a request may be anything."""
    inputs = given(TRTLLM)
    table, lens = inputs["block_tables"], inputs["seq_lens"]
    behind = torch.arange(table.shape[1] + 2) >= -(-lens // inputs["kv_cache"].shape[-2])[:, None]
    both = torch.nn.functional.pad(table, (0, 2))[:, None].repeat(1, 2, 1)
    both[:, 0][behind], both[:, 1][behind] = 3, 1 << 20
    with emulation() if kernels else torch.no_grad():
        got = trtllm_mla(**inputs | {"block_tables": both, "uses_shared_paged_kv_idx": False})
    assert behind.any() and torch.equal(got, trtllm_mla(**inputs))


def test_scales_of_a_device():
    """On the output, and on the logits; as tensors they are read by the kernel."""
    inputs = given(TRTLLM, bmm1_scale=0.2, bmm2_scale=3.0)
    want = trtllm_mla(**inputs)
    with emulation():
        got = trtllm_mla(**inputs | {"bmm1_scale": torch.tensor([0.2]), "bmm2_scale": torch.tensor([3.0])})
    assert torch.equal(got, want) and not torch.equal(want, trtllm_mla(**given(TRTLLM)))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_entries_behind_the_keys_of_a_request_name_any_page(function):
    case = MlaCase(function=function, lens=(20, 0, 33), page_size=16, heads=4)
    inputs = make(case)
    assert (inputs.table == mla.NO_PAGE).sum() == 4
    found = []
    for entry in (mla.NO_PAGE, -1, -(1 << 31), 0):
        table = torch.where(inputs.table == mla.NO_PAGE, entry, inputs.table)
        with emulation():
            found.append(call(case, inputs._replace(table=table)))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other))


def test_bits_of_a_request_that_do_not_depend_on_the_others():
    """Splits of fixed numbers of keys; without, CTAs share the keys of the whole batch."""
    kinds = []
    for invariant in (False, True):
        with emulation() as fake:
            flash_mla_with_kvcache(**given(FLASH, enable_batch_invariant=invariant))
        kinds.append((fake.specs[0].schedule, getattr(fake.launches[0], "blocks_per_split", None)))
    assert kinds[0][0] == "stream_k" and kinds[0] != kinds[1]
    inputs = given(FLASH, enable_batch_invariant=True)
    out, lse = flash_mla_with_kvcache(**inputs)
    alone = {name: inputs[name][1:] for name in ("q", "block_table", "cache_seqlens")}
    one, its = flash_mla_with_kvcache(**inputs | alone)
    assert torch.equal(out[1:], one) and torch.equal(lse[1:], its)


@pytest.mark.parametrize("function", good_calls.MLA)
@pytest.mark.parametrize("bound", [False, True])
def test_a_bound_call_takes_other_queries(function, bound):
    inputs = given(function)
    public, first = getattr(wrappers, function), "q" if function == FLASH else "query"
    with emulation() if bound else torch.no_grad():
        layer = wrappers.bind(public, **inputs)
        for seed in range(2):
            q = torch.randn(inputs[first].shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
            want, got = public(**inputs | {first: q}), layer.run(q)
            want, got = (t if isinstance(t, tuple) else (t,) for t in (want, got))
            assert len(want) == len(got) and all(map(torch.equal, want, got))
        with pytest.raises(ValueError, match=rf"^{first}: shape \(1, 2, 4, 576\), must begin with \(2, 2\), "):
            layer.run(q[:1])


# ---- keys that a row has chosen


CHOSEN = MlaCase(lens=(9, 40), rows=2, heads=4, page_size=16, chosen=37)


def chosen(function, **changes):
    """Arguments of a call of two requests of two rows, each of which has chosen its keys."""
    made, inputs = make(CHOSEN), given(function)
    if function == FLASH:
        return inputs | {"indices": made.slots, "causal": False} | changes
    return inputs | {"block_tables": made.slots, "seq_lens": None, "sparse_mla_top_k": 37} | changes


def results(function, **changes):
    found = getattr(wrappers, function)(**chosen(function, **changes))
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("function", good_calls.MLA)
def test_any_order_and_any_number_that_is_no_row(function):
    """The same keys in another order, between other numbers, and as many behind those that count."""
    name, counts = ("indices", "topk_length") if function == FLASH else ("block_tables", "seq_lens")
    slots, rows = chosen(function)[name].long(), 6 * 16
    want = results(function)
    outside = (slots < 0) | (slots >= rows)
    assert outside.any() and not outside.all()
    for number in (-1, -(1 << 31), rows, (1 << 31) - 1):
        got = results(function, **{name: torch.where(outside, number, slots).int()})
        assert all(map(torch.equal, want, got))
    order = torch.randperm(37)
    more = torch.cat((slots[..., order], torch.zeros(2, 2, 5).long()), -1).int()
    top_k = {} if function == FLASH else {"sparse_mla_top_k": 42}
    for lens in (torch.tensor([37, 37]), torch.full((2, 2), 37)):
        if (lens.ndim == 2) == (function == TRTLLM):
            got = results(function, **{name: more, counts: lens.int()}, **top_k)
            assert all(torch.allclose(a, b, atol=1e-2) for a, b in zip(want, got))


@pytest.mark.parametrize("name", SECOND)
def test_keys_of_two_caches(name):
    case = SECOND[name]
    inputs = make(case)
    want = expected(case, inputs)
    assert error(case, call(case, inputs), want) <= 1
    with emulation() as fake:
        assert error(case, call(case, inputs), want) <= 1
    assert all(spec.kv.extra for spec in fake.specs)


def test_two_caches_are_one():
    """The same keys, half of them in another cache of other pages; counts of one of both are enough."""
    inputs, rows = chosen(FLASH), torch.arange(96).view(1, 1, 96).expand(2, 2, 96).int()
    cache = inputs["k_cache"].flatten(0, 1)
    first, second = cache[:32].view(2, 16, 1, 576), cache[32:].view(8, 8, 1, 576)
    want = results(FLASH, indices=rows.contiguous())
    more = {"k_cache": first, "extra_k_cache": second, "indices": rows[..., :32].contiguous(),
            "extra_indices_in_kvcache": rows[..., :64].contiguous()}  # fmt: skip
    counts = {"topk_length": torch.tensor([32, 32]).int(), "extra_topk_length": torch.tensor([64, 64]).int()}
    for given_counts in ({}, *({name: counts[name]} for name in counts), counts):
        got = results(FLASH, **more | given_counts)
        assert all(torch.allclose(a, b, atol=1e-2) for a, b in zip(want, got))


def test_counts_of_rows_come_before_lengths():
    want = results(TRTLLM, seq_lens=torch.tensor([5, 5, 20, 20]).int())
    own = {"sparse_mla_top_k_lens": torch.tensor([5, 20]).int(), "seq_lens": torch.tensor([900, 900]).int()}
    assert torch.equal(results(TRTLLM, **own)[0], want[0])
    ragged = chosen(TRTLLM, cum_seq_lens_q=torch.tensor([0, 1, 4]).int(), max_q_len=3)
    ragged |= {"query": ragged["query"].flatten(0, 1), "block_tables": ragged["block_tables"].flatten(0, 1)}
    got = trtllm_mla(**ragged | {"seq_lens": torch.tensor([5, 5, 20, 20]).int()})
    assert torch.equal(got.view(2, 2, 4, 512), want[0])


def test_lengths_of_requests_are_causal():
    """The last row of a request has all of its keys, and each row before it one less, as in FlashInfer's tests."""
    want = results(TRTLLM, seq_lens=torch.tensor([8, 9, 29, 30]).int())[0]
    lens = {"seq_lens": torch.tensor([9, 30]).int()}
    assert torch.equal(results(TRTLLM, **lens)[0], want)
    ragged = chosen(TRTLLM, cum_seq_lens_q=torch.tensor([0, 2, 4]).int(), max_q_len=2)
    ragged |= {"query": ragged["query"].flatten(0, 1), "block_tables": ragged["block_tables"].flatten(0, 1)}
    assert torch.equal(trtllm_mla(**ragged | lens).view(2, 2, 4, 512), want)
    assert torch.equal(results(TRTLLM, seq_lens=torch.tensor([1, 900]).int())[0][0, 0], torch.zeros(4, 512).half())


def test_as_many_lengths_as_rows_are_those_of_rows():
    """Whatever the offsets of requests are."""
    want = results(TRTLLM, seq_lens=torch.tensor([8, 20, 29, 30]).int())[0]
    ragged = chosen(TRTLLM, max_q_len=4, seq_lens=torch.tensor([8, 20, 29, 30]).int())
    ragged |= {"query": ragged["query"].flatten(0, 1), "block_tables": ragged["block_tables"].flatten(0, 1)}
    for offsets in ((0, 1, 2, 3, 4), (0, 0, 4, 4, 4)):
        got = trtllm_mla(**ragged | {"cum_seq_lens_q": torch.tensor(offsets).int()})
        assert torch.equal(got.view(2, 2, 4, 512), want)


def test_a_key_that_comes_twice_counts_twice():
    """And keys that do not count, or that nobody has chosen, may be NaN."""
    q, cache = torch.zeros(1, 1, 4, 576).half(), torch.full((2, 3, 1, 576), math.nan).half()
    cache[1, 0], cache[0, 2] = 1.0, 4.0
    slots, count = torch.tensor([[[2, 3, -1, 2, 1, 0]]]).int(), torch.tensor([4]).int()
    for machine in (None, emulation()):
        with machine or torch.no_grad():
            out, lse = flash_mla_with_kvcache(q, cache, None, None, 512, indices=slots, topk_length=count)
        assert torch.allclose(out, torch.tensor(3.0).half()) and torch.allclose(lse, torch.tensor(3.0).log())


@pytest.mark.parametrize("function", good_calls.MLA)
def test_a_bound_call_of_chosen_keys(function):
    first = "q" if function == FLASH else "query"
    q = torch.randn(2, 2, 4, 576, generator=torch.Generator().manual_seed(1)).bfloat16()
    with emulation():
        layer = wrappers.bind(getattr(wrappers, function), **chosen(function))
        got = layer.run(q)
        got = got if isinstance(got, tuple) else (got,)
        assert all(map(torch.equal, got, results(function, **{first: q})))
        with pytest.raises(ValueError, match=rf"^{first}: shape \(1, 2, 4, 576\), must begin with"):
            layer.run(q[:1])


# ---- metadata


def test_metadata_in_both_styles():
    """The new call has no arguments; the older one gives tensors of FlashMLA's shapes. No kernel reads either."""
    metadata, splits = get_mla_metadata()
    assert splits is None and metadata is not None
    lens = torch.tensor([9, 40]).int()
    parts, offsets = get_mla_metadata(lens, 8, 1)
    assert parts.shape == (1, 8) and offsets.shape == (3,) and parts.dtype == offsets.dtype == torch.int32
    inputs = given(FLASH)
    want = flash_mla_with_kvcache(**inputs)
    for style in ((metadata, splits), (parts, offsets), (None, None)):
        got = flash_mla_with_kvcache(
            **inputs | dict(zip(("tile_scheduler_metadata", "num_splits"), style, strict=True))
        )
        assert all(map(torch.equal, got, want))
    positional = [inputs[n] for n in ("q", "k_cache", "block_table", "cache_seqlens", "head_dim_v")]
    assert all(map(torch.equal, flash_mla_with_kvcache(*positional, parts, offsets, 0.1, True), want))


def test_metadata_in_the_hands_of_engines():
    """SGLang copies both tensors into buffers of its graphs. vLLM 0.33 makes the same call, and gives the first result
    attributes."""
    call = torch.tensor([9, 40]).int(), 8, 1
    parts, offsets = get_mla_metadata(*call, is_fp8_kvcache=True)
    kept, their_offsets = torch.ones(132, 8).int(), torch.ones(5).int()
    kept[: parts.shape[0]].copy_(parts)
    their_offsets[:3].copy_(offsets)
    inputs, (metadata, _) = given(FLASH), get_mla_metadata(*call, is_fp8_kvcache=False)
    metadata.tile_scheduler_metadata, metadata.num_splits = kept, their_offsets
    want = flash_mla_with_kvcache(**inputs)
    for style in ((kept[: parts.shape[0]], their_offsets[:3]), (metadata, None)):
        names = "tile_scheduler_metadata", "num_splits"
        assert all(map(torch.equal, flash_mla_with_kvcache(**inputs | dict(zip(names, style))), want))


def test_metadata_without_content_has_flash_mla_s_attributes():
    found, splits = get_mla_metadata()
    assert (found.tile_scheduler_metadata, found.num_splits, splits) == (None, None, None)


def test_metadata_of_bad_arguments():
    for bad, kind, message in (
        ({"cache_seqlens": torch.ones(2)}, TypeError, "cache_seqlens: dtype torch.float32, must be torch.int32"),
        ({"cache_seqlens": torch.ones(2, 1).int()}, ValueError, r"cache_seqlens: shape \(2, 1\), must have 1 dim"),
        ({"num_q_tokens_per_head_k": None}, TypeError, "num_q_tokens_per_head_k: None, must be an int"),
        ({"num_heads_k": 0}, ValueError, "num_heads_k: 0, must be at least 1"),
        ({"num_heads_q": 2.0}, TypeError, "num_heads_q: 2.0, must be an int"),
        ({"topk": "2"}, TypeError, "topk: '2', must be an int"),
        ({"is_fp8_kvcache": 1}, TypeError, "is_fp8_kvcache: 1, must be True or False"),
    ):
        with pytest.raises(kind, match=f"^{message}"):
            get_mla_metadata(**good_calls.inputs_of("get_mla_metadata") | bad)


# ---- what is refused: before a launch, with these beginnings

E4M3 = torch.float8_e4m3fn
INT = torch.zeros(1).int()
SLOTS = torch.zeros(2, 2, 7).int()
PARALLEL = "context parallelism is not supported"
SPARSE = {"indices": SLOTS, "causal": False}
OTHER = torch.zeros(3, 5, 1, 576).bfloat16()
FLASH_REFUSALS = [
    ({"descale_q": INT.float()}, ValueError, "descale_q: "),
    ({"descale_k": INT}, TypeError, "descale_k: dtype torch.int32, must be torch.float32"),
    ({"descale_k": INT.float()}, ValueError, "descale_k: "),
    *(({name: INT}, ValueError, f"{name}: shape (1,), must be None without indices")
      for name in ("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length")),
    *((SPARSE | {name: INT}, ValueError, f"{name}: shape (1,), must be None without extra_k_cache")
      for name in ("extra_indices_in_kvcache", "extra_topk_length")),
    (SPARSE | {"extra_k_cache": OTHER}, TypeError, "extra_indices_in_kvcache: NoneType, must be a torch.Tensor"),
    (SPARSE | {"extra_k_cache": OTHER[..., :512], "extra_indices_in_kvcache": SLOTS}, ValueError,
     "extra_k_cache: shape (3, 5, 1, 512), must end with 576, the last dimension of q"),
    (SPARSE | {"extra_k_cache": OTHER.half(), "extra_indices_in_kvcache": SLOTS}, TypeError,
     "extra_k_cache: dtype torch.float16, must be torch.bfloat16"),
    (SPARSE | {"extra_k_cache": OTHER, "extra_indices_in_kvcache": SLOTS[:1]}, ValueError,
     "extra_indices_in_kvcache: shape (1, 2, 7), must be (2, 2, 7)"),
    (SPARSE | {"extra_k_cache": OTHER, "extra_indices_in_kvcache": SLOTS, "extra_topk_length": INT}, ValueError,
     "extra_topk_length: shape (1,), must be (2,)"),
    ({"topk_length": INT}, ValueError, "topk_length: shape (1,), must be None without indices"),
    ({"indices": SLOTS}, ValueError, "causal: True, must be False with indices (2, 2, 7), which say what a row sees"),
    *(({"indices": slots, "causal": False}, kind, message) for slots, kind, message in (
        (SLOTS[:1], ValueError, "indices: shape (1, 2, 7), must be (2, 2, 7) (requests and rows of q, keys)"),
        (SLOTS[0], ValueError, "indices: shape (2, 7), must have 3 dimensions"),
        (SLOTS.long(), TypeError, "indices: dtype torch.int64, must be torch.int32"),
        (SLOTS[..., ::2], ValueError, "indices: strides"),
    )),
    ({"indices": SLOTS, "causal": False, "topk_length": INT}, ValueError, "topk_length: shape (1,), must be (2,)"),
    ({"indices": SLOTS, "causal": False, "topk_length": torch.zeros(2)}, TypeError,
     "topk_length: dtype torch.float32, must be torch.int32"),
    ({"is_fp8_kvcache": True}, TypeError,
     "k_cache: with is_fp8_kvcache, dtype torch.bfloat16, must be one of torch.uint8, torch.int8, torch.float8_e4m3fn"),
    ({"head_dim_v": 577}, ValueError, "head_dim_v: 577, must be at most 576, the last dimension of q and k_cache"),
    ({"head_dim_v": 0}, ValueError, "head_dim_v: 0, must be at least 1"),
    ({"head_dim_v": None}, TypeError, "head_dim_v: None, must be an int"),
    ({"causal": 1}, TypeError, "causal: 1, must be True or False"),
    ({"k_cache": torch.zeros(6, 16, 1, 512).bfloat16()}, ValueError,
     "k_cache: shape (6, 16, 1, 512), must end with 576, the last dimension of q"),
    ({"k_cache": torch.zeros(6, 16, 1, 576).half()}, TypeError,
     "k_cache: with query torch.bfloat16, dtype torch.float16, must be torch.bfloat16"),
    ({"k_cache": torch.zeros(6, 16, 1, 576).to(E4M3)}, TypeError,
     "k_cache: with query torch.bfloat16, dtype torch.float8_e4m3fn, must be torch.bfloat16"),
    ({"k_cache": torch.zeros(6, 16, 3, 576).bfloat16()}, ValueError,
     "q: 4 heads, must be a multiple of k_cache's 3"),
    ({"q": torch.zeros(2, 2, 4, 576).to(E4M3)}, TypeError,
     "q: dtype torch.float8_e4m3fn, must be one of torch.float16, torch.bfloat16"),
    ({"q": torch.zeros(3, 2, 4, 576).bfloat16()}, ValueError,
     "q: shape (3, 2, 4, 576), must begin with 2, the rows of block_table"),
    ({"block_table": torch.zeros(2, 3)}, TypeError, "block_table: dtype torch.float32, must be torch.int32"),
    ({"block_table": None}, TypeError, "block_table: NoneType, must be a torch.Tensor"),
    ({"cache_seqlens": None}, TypeError, "cache_seqlens: NoneType, must be a torch.Tensor"),
    ({"attn_sink": torch.zeros(3)}, ValueError, "attn_sink: shape (3,), must be (4,)"),
    ({"attn_sink": torch.zeros(4).half()}, TypeError, "attn_sink: dtype torch.float16, must be torch.float32"),
    ({"out": torch.zeros(2, 2, 4, 576).bfloat16()}, ValueError,
     "out: shape (2, 2, 4, 576), must be (2, 2, 4, 512) (that of q, with head_dim_v)"),
    ({"out": torch.zeros(2, 2, 4, 512).half()}, TypeError, "out: dtype torch.float16, must be torch.bfloat16"),
    ({"out": torch.zeros(2, 3, 4, 512).bfloat16()[:, ::2]}, ValueError,
     "out: strides (6144, 4096, 512, 1), the first must be 2 times the second"),
    ({"softmax_scale": "1"}, TypeError, "softmax_scale: '1', must be a float"),
]  # fmt: skip
TRTLLM_REFUSALS = [
    ({"sparse_mla_top_k": 64}, ValueError, "sparse_mla_top_k: 64, must be 3, the last dimension of block_tables"),
    ({"sparse_mla_top_k": -1}, ValueError, "sparse_mla_top_k: -1, must be at least 0"),
    ({"sparse_mla_top_k": 7, "block_tables": SLOTS[:1]}, ValueError,
     "block_tables: shape (1, 2, 7), must be (2, 2, 7)"),
    ({"sparse_mla_top_k": 7, "block_tables": SLOTS, "seq_lens": torch.zeros(3).int()}, ValueError,
     "seq_lens: 3 elements, must have 4 or 2"),
    ({"sparse_mla_top_k_lens": INT}, ValueError, "sparse_mla_top_k_lens: shape (1,), must be None without"),
    ({"cp_world": 2}, NotImplementedError, f"cp_world: 2, must be 1: {PARALLEL}"),
    ({"cp_rank": 1}, NotImplementedError, f"cp_rank: 1, must be 0: {PARALLEL}"),
    ({"enable_dcp": True}, NotImplementedError, f"enable_dcp: True, must be False: {PARALLEL}"),
    ({"causal_seqlens_kv_global": INT}, NotImplementedError,
     f"causal_seqlens_kv_global: Tensor, must be None: {PARALLEL}"),
    ({"skip_softmax_threshold_scale_factor": 2.0}, NotImplementedError,
     "skip_softmax_threshold_scale_factor: float, must be None: skip-softmax is not supported"),
    ({"uses_shared_paged_kv_idx": False}, ValueError, "block_tables: shape (2, 3), must have 3 dimensions"),
    ({"uses_shared_paged_kv_idx": False, "block_tables": torch.zeros(2, 3, 3).int()}, ValueError,
     "block_tables: shape (2, 3, 3), must be (B, 2, M) unless uses_shared_paged_kv_idx"),
    ({"uses_shared_paged_kv_idx": False, "block_tables": torch.arange(12).int().view(2, 2, 3)}, ValueError,
     "block_tables: pages of V that are not those of K, must be the same"),
    ({"uses_shared_paged_kv_idx": False, "sparse_mla_top_k": 7, "block_tables": SLOTS}, NotImplementedError,
     "uses_shared_paged_kv_idx: False, must be True with sparse_mla_top_k"),
    ({"backend": "fa9"}, ValueError, "backend: 'fa9', must be one of auto, xqa"),
    ({"kv_lora_rank": 513}, ValueError,
     "query: shape (2, 2, 4, 576), must end with 577, kv_lora_rank 513 + qk_rope_head_dim 64"),
    ({"qk_rope_head_dim": 65}, ValueError,
     "query: shape (2, 2, 4, 576), must end with 577, kv_lora_rank 512 + qk_rope_head_dim 65"),
    ({"kv_cache": torch.zeros(6, 16, 512).bfloat16()}, ValueError,
     "kv_cache: shape (6, 16, 512), must end with 576, kv_lora_rank 512 + qk_rope_head_dim 64"),
    ({"kv_cache": torch.zeros(6, 2, 16, 576).bfloat16()}, ValueError,
     "kv_cache: shape (6, 2, 16, 576), must be (pages, P, D) or (pages, 1, P, D)"),
    ({"kv_cache": torch.zeros(6, 16, 576).to(torch.float8_e5m2)}, TypeError,
     "kv_cache: with query torch.bfloat16, dtype torch.float8_e5m2, must be torch.bfloat16"),
    ({"query": torch.zeros(4, 4, 576).bfloat16()}, ValueError,
     "query: shape (4, 4, 576), must have 4 dimensions without cum_seq_lens_q"),
    ({"cum_seq_lens_q": torch.tensor([0, 1, 4]).int(), "max_q_len": 3}, ValueError,
     "query: shape (2, 2, 4, 576), must have 3 dimensions with cum_seq_lens_q"),
    ({"query": torch.zeros(3, 2, 4, 576).bfloat16()}, ValueError,
     "query: shape (3, 2, 4, 576), must begin with 2, rows of block_tables"),
    ({"lse": torch.zeros(2, 4, 2)}, ValueError, "lse: shape (2, 4, 2), must have 2 dimensions"),
    ({"sinks": [torch.zeros(4), torch.zeros(4)]}, ValueError, "sinks: a list of 2, must hold one tensor"),
    ({"bmm1_scale": torch.ones(4)}, ValueError, "bmm1_scale: shape (4,), must"),
    ({"is_var_seq": 1}, TypeError, "is_var_seq: 1, must be True or False"),
]  # fmt: skip


@pytest.mark.parametrize("where", ["cpu", "kernels"])
@pytest.mark.parametrize("function, refusals", [(FLASH, FLASH_REFUSALS), (TRTLLM, TRTLLM_REFUSALS)])
def test_refusals(function, refusals, where):
    with torch.no_grad() if where == "cpu" else emulation() as fake:
        for changes, kind, message in refusals:
            with pytest.raises(kind) as found:
                getattr(wrappers, function)(**given(function, **changes))
            assert str(found.value).strip('"').startswith(message), f"{found.value}\n{message}"
    assert fake is None or not fake.launches


@pytest.mark.parametrize("function, cache", [(FLASH, "k_cache"), (TRTLLM, "kv_cache")])
def test_what_no_kernel_serves_is_refused_by_the_name_of_the_cache(function, cache):
    """Blackwell and other head dims; the CPU computes all of them."""
    with emulation("sm_100a"), pytest.raises(NotImplementedError, match=rf"^{cache}: no attention kernel: .*arch"):
        getattr(wrappers, function)(**given(function))


def test_other_head_dims_run_on_the_cpu_alone():
    q, cache = torch.ones(1, 1, 4, 192).half(), torch.ones(2, 16, 1, 192).half()
    rest = (torch.zeros(1, 1).int(), torch.tensor([9]).int(), 128)
    assert flash_mla_with_kvcache(q, cache, *rest)[0].shape == (1, 1, 4, 128)
    with emulation(), pytest.raises(NotImplementedError, match=r"no attention kernel: .*head_dim \(192, 128\)"):
        flash_mla_with_kvcache(q, cache, *rest)


def test_sparse_lengths_of_requests_belong_to_their_rows():
    """With cum_seq_lens_q, a count per request is that of each of its rows, and a length is causal."""
    case = MlaCase("trtllm", lens=(60, 40), chosen=30, heads=4, rows=2)
    i = make(case)
    given = {
        "query": i.q.flatten(0, 1)[:3], "kv_cache": i.cache, "workspace_buffer": None, "qk_nope_head_dim": 128,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "block_tables": i.slots.flatten(0, 1)[:3], "max_seq_len": 64,
        "sparse_mla_top_k": 30, "bmm1_scale": mla.SCALE, "max_q_len": 2,
        "cum_seq_lens_q": torch.tensor([0, 1, 3]).int(),
    }  # fmt: skip
    for machine in (None, emulation()):
        with machine or torch.no_grad():
            counted = trtllm_mla(**given, seq_lens=torch.tensor([9, 20, 20]).int())
            causal = trtllm_mla(**given, seq_lens=torch.tensor([9, 19, 20]).int())
            lens = torch.tensor([9, 20]).int()
            assert torch.equal(counted, trtllm_mla(**given, seq_lens=None, sparse_mla_top_k_lens=lens))
            assert torch.equal(causal, trtllm_mla(**given, seq_lens=lens))
    with pytest.raises(ValueError, match="^seq_lens: 4 elements, must have 3 or 2"):
        trtllm_mla(**given, seq_lens=torch.ones(4).int())
