"""Causal masks that ranges of keys or a prefix extend, against loops over rows, and what their wrapper refuses."""

import copy

import pytest
import torch

from bench.cases.forms import random_ranges
from tests.support.prefill_batches import HKV, HQ, WORKSPACE, Case, D, check, ints
from wrappers import (
    BatchPrefillWithCausalBidirectionalRangesWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
)
from wrappers.attention import op
from wrappers.attention.call import AttentionCall, ragged_sequences

CASE = Case(q_lens=(70, 0, 7, 1, 2, 4), kv_lens=(90, 4, 7, 9, 0, 2), dtype=torch.bfloat16)
RANGES = random_ranges(list(CASE.q_lens), list(CASE.kv_lens), 0)
OPTIONS = {
    "causal": {}, "causal window": {"causal_window_left": 3}, "window 0": {"causal_window_left": 0},
    "range window": {"range_window_left": 5}, "both": {"causal_window_left": 9, "range_window_left": 1},
}  # fmt: skip


def seen(m, n, ranges, causal_window_left=-1, range_window_left=-1):
    """Return which keys each row sees, bool (m, n), by FlashInfer's definition."""
    found = torch.zeros(m, n, dtype=torch.bool)
    for i, (first, last) in enumerate(ranges.tolist()):
        for j in range(n):
            distance = i + n - m - j
            causal = distance >= 0 and (causal_window_left < 0 or distance <= causal_window_left)
            inside = first <= j <= last and (range_window_left <= 0 or distance < range_window_left)
            found[i, j] = causal or inside
    return found


def wanted(case, ranges, **options):
    """Return what the oracle computes."""
    masks, at = [], 0
    for m, n in zip(case.q_lens, case.kv_lens):
        masks.append(seen(m, n, ranges[at : at + m], **options))
        at += m
    masked = copy.copy(case)
    masked.masks = masks
    return masked.want(masked=True)


def planned(case, **options):
    wrapper = BatchPrefillWithCausalBidirectionalRangesWrapper(WORKSPACE, head_dim_qk=D, head_dim_vo=D)
    wrapper.plan(*case.index, HQ, HKV, D, case.page, **options)
    return wrapper


@pytest.mark.parametrize("name", OPTIONS)
def test_rows_see_the_causal_mask_or_their_range(name):
    options, want = OPTIONS[name], wanted(CASE, RANGES, **OPTIONS[name])
    got = planned(CASE).run_return_lse(CASE.q, tuple(CASE.cache), RANGES, **options)
    check(got, want, 2e-2)
    plan = {"causal": True, "window_left": options.get("causal_window_left", -1)}
    run = {"bidirectional_ranges": RANGES, "range_window_left": options.get("range_window_left", -1)}
    paged = CASE.paged(**plan).run_return_lse(CASE.q, tuple(CASE.cache), **run)
    ragged = CASE.ragged(**plan).run_return_lse(CASE.q, CASE.k, CASE.v, **run)
    assert all(map(torch.equal, got, paged)) and all(map(torch.equal, got, ragged))


def test_a_run_may_have_other_ranges_and_windows_than_the_one_before():
    wrapper, cache = planned(CASE), tuple(CASE.cache)
    for options in (*OPTIONS.values(), {}):
        got = wrapper.run_return_lse(CASE.q, cache, RANGES, **options)
        check(got, wanted(CASE, RANGES, **options), 2e-2)
    others, twin = RANGES.flip(0), copy.copy(wrapper)
    twin.run(CASE.q, cache, others, causal_window_left=2)
    check(wrapper.run_return_lse(CASE.q, cache, others), wanted(CASE, others), 2e-2)
    scaled = wrapper.run(CASE.q, cache, others, q_scale=0.5, k_scale=4.0, v_scale=2.0)
    assert torch.equal(scaled, wrapper.run(CASE.q, cache, others, -1, -1, 2.0, 1.0, 2.0))


def test_sinks_and_a_soft_cap():
    sinks = torch.linspace(-1, 1, HQ)
    got = planned(CASE, logits_soft_cap=2.0).run_return_lse(CASE.q, tuple(CASE.cache), RANGES, sinks=sinks)
    masked = copy.copy(CASE)
    masked.masks = [seen(m, n, r) for m, n, r in zip(CASE.q_lens, CASE.kv_lens, RANGES.split(CASE.q_lens))]
    check(got, masked.want(masked=True, cap=2.0, sinks=sinks), 2e-2)


@pytest.mark.parametrize("window", [-1, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_all_rows_see_a_prefix(window, causal):
    """A prefix may be longer than its request. The window bounds it, and without the causal mask it has no effect."""
    prefixes, masked = (60, 9, 5, 0, 3, -7), copy.copy(CASE)
    masked.masks = []
    for m, n, prefix in zip(CASE.q_lens, CASE.kv_lens, prefixes):
        own, key = torch.arange(n - m, n)[:, None], torch.arange(n)
        shown = (key <= own) | (key < prefix) if causal else torch.ones(m, n, dtype=torch.bool)
        masked.masks.append(shown & ((key >= own - window) | (window < 0)))
    plan, run = dict(causal=causal, window_left=window), dict(prefix_lens=ints(prefixes))
    got = CASE.paged(**plan).run_return_lse(CASE.q, tuple(CASE.cache), **run)
    check(got, masked.want(masked=True), 2e-2)
    assert all(map(torch.equal, got, CASE.ragged(**plan).run_return_lse(CASE.q, CASE.k, CASE.v, **run)))


def run(**change):
    given = dict(q=CASE.q, paged_kv_cache=tuple(CASE.cache), bidirectional_ranges=RANGES)
    return planned(CASE).run(**given | change)


def prefixed(lens, **options):
    return CASE.paged(causal=True).run(CASE.q, tuple(CASE.cache), prefix_lens=lens, **options)


BAD = {
    "no ranges": (lambda: run(bidirectional_ranges=None), TypeError, "bidirectional_ranges: None"),
    "dtype": (lambda: run(bidirectional_ranges=RANGES.long()), TypeError, "bidirectional_ranges: dtype torch.int64"),
    "rank": (lambda: run(bidirectional_ranges=RANGES.flatten()), ValueError, "bidirectional_ranges: shape .168,."),
    "rows": (lambda: run(bidirectional_ranges=RANGES[1:]), ValueError, "bidirectional_ranges: shape .83, 2., must be"),
    "columns": (lambda: run(bidirectional_ranges=RANGES[:, :1]), ValueError, "bidirectional_ranges: shape"),
    "device": (lambda: run(bidirectional_ranges=RANGES.to("meta")), ValueError, "bidirectional_ranges: device meta"),
    "causal window": (lambda: run(causal_window_left=0.5), TypeError, "causal_window_left: 0.5"),
    "range window": (lambda: run(range_window_left="1"), TypeError, "range_window_left: '1'"),
    "positions": (
        lambda: BatchPrefillWithCausalBidirectionalRangesWrapper(WORKSPACE, pos_encoding_mode="ALIBI"),
        NotImplementedError, "pos_encoding_mode: 'ALIBI'",
    ),
    "mask": (lambda: planned(CASE, custom_mask=CASE.custom_mask), ValueError, "custom_mask: given"),
    "packed mask": (lambda: planned(CASE, packed_custom_mask=CASE.packed), ValueError, "packed_custom_mask: given"),
    "causal": (lambda: planned(CASE, causal=True), ValueError, "causal: True"),
    "window": (lambda: planned(CASE, window_left=3), ValueError, "window_left: 3"),
    "query type": (lambda: planned(CASE, q_data_type="float16"), ValueError, "q_data_type: float16"),
    "output type": (lambda: planned(CASE, o_data_type="float16"), ValueError, "o_data_type: float16"),
    "V's head_dim": (lambda: planned(CASE, head_dim_vo=128), ValueError, "head_dim_vo: 128"),
    "scoring": (lambda: planned(CASE, prefix_len_ptr=ints([4])), NotImplementedError, "prefix_len_ptr"),
    "forward": (lambda: planned(CASE).forward(CASE.q, tuple(CASE.cache)), NotImplementedError, "forward"),
    "a plan without the causal mask": (
        lambda: CASE.paged().run(CASE.q, tuple(CASE.cache), bidirectional_ranges=RANGES), ValueError, "causal: False",
    ),
    "a plan with a mask": (
        lambda: CASE.paged(custom_mask=torch.ones(sum(m * n for m, n in zip(CASE.q_lens, CASE.kv_lens)))).run(
            CASE.q, tuple(CASE.cache), bidirectional_ranges=RANGES
        ), ValueError, "custom_mask: given, must be None with bidirectional_ranges",
    ),
    "prefix, type": (lambda: prefixed(torch.ones(6)), TypeError, "prefix_lens: dtype torch.float32"),
    "prefix, batch": (lambda: prefixed(ints([4] * 5)), ValueError, "prefix_lens: shape .5,., must be .6,. .one length"),
    "prefix, ranges": (
        lambda: prefixed(ints([4] * 6), bidirectional_ranges=RANGES), ValueError, "bidirectional_ranges: given",
    ),
    "a window without ranges": (
        lambda: CASE.paged(causal=True).run(CASE.q, tuple(CASE.cache), range_window_left=4), ValueError,
        "range_window_left: 3, must be off without bidirectional_ranges",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_refusals(name):
    call, error, text = BAD[name]
    with pytest.raises(error, match=f"^{text}"):
        call()


def test_calls_with_other_masks_are_refused():
    q, k = torch.zeros(4, 2, 64).half(), torch.zeros(1, 2, 4, 64).half()
    own = ints([0, 4])
    call = AttentionCall("", q, k, k, ragged_sequences(own, own), 4, 1.0, ranges=ints([0] * 8).view(4, 2))
    op.serve(call)
    with pytest.raises(ValueError, match="^drafts: given"):
        op.serve(call._replace(drafts=ints([0] * 4).view(4, 1)))
    with pytest.raises(NotImplementedError, match="^chunk: 2, must be 0 with ranges"):
        op.serve(call._replace(chunk=2))
    with pytest.raises(NotImplementedError, match="^chunk: 2, must be 0 with prefix_lens"):
        op.serve(call._replace(ranges=None, prefix_lens=ints([2]), chunk=2))
    with pytest.raises(ValueError, match="^drafts: given, must be None with prefix_lens"):
        op.serve(call._replace(ranges=None, prefix_lens=ints([2]), drafts=ints([0] * 4).view(4, 1)))


def test_the_wrapper_is_a_paged_one():
    assert issubclass(BatchPrefillWithCausalBidirectionalRangesWrapper, BatchPrefillWithPagedKVCacheWrapper)
