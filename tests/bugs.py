"""Bugs to plant in the sources: each is one replacement, and the check that must notice it.

    python -m tests.bugs [--tree FOLDER] [--jobs N] [NAME ...]    plant each bug in a copy of the tree and run its check

A check is a test that CI runs, or a kernel of Blackwell, which the simulator runs as `test_kernel_of_blackwell` does.
Parts of a name select bugs. The exit status is the number of bugs that no check noticed.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from cute_kernels.attention.latent import tile_table as few_rows

ROOT = Path(__file__).resolve().parents[1]


class Bug(NamedTuple):
    """A replacement in a file. check: a test's id below tests/, or an architecture and the name of a kernel."""

    name: str
    file: str
    old: str
    new: str
    check: str

    @property
    def command(self) -> list[str]:
        """Return the command that fails when the bug is planted."""
        arch, _, kernel = self.check.partition(" ")
        if arch.startswith("sm_"):
            return [sys.executable, "-m", "tests.sim", kernel, "--arch", arch, "--mode", "eager"]
        options = ("-q", "-x", "--no-header", "-p", "no:cacheprovider")
        return [sys.executable, "-m", "pytest", *options, f"tests/{self.check}"]


def shipped(kernel: str) -> str:
    return f"sim/test_ptxsim_kernels.py::test_shipped_kernel[{kernel}]"


def feature(name: str) -> str:
    return f"sim/test_ptxsim_kernels.py::test_feature[{name}]"


def union(case: str) -> str:
    return f"sim/test_ptxsim_key_union.py::test_every_entry[{case}]"


def index_math(test: str) -> str:
    return f"attention/test_index_math.py::{test}"


def layout(call: str) -> str:
    return f"host/test_layouts.py::test_one_tensor_differs[{call}]"


DECODES = "trtllm_batch_decode_with_kv_cache"
ATTENTION, MASK = "cute_kernels/attention", "cute_kernels/attention/mask.py"
DECODE = shipped("attention.decode/bf16_d64_causalwb_cap_skip_tma_m64n128s6g2r8")
SM90 = shipped("attention.sm90/bf16_d64_causal_tma_m192n128s4")
WINDOW = shipped("attention.sm90/bf16_d64_anyw_cap_tma_m128n128s4")
FP8 = shipped("attention.sm90/e4m3_d128_causal_tma_m192n96s3")
HALVES, PING_PONG = "sm_100a bf16_d64_causal_tma_m256n128s4e4", "sm_103a bf16_d128_causal_tma_m128n96s3"
RADIX = shipped("topk.radix/fp32_c3t512_n46080")
ROTATED = shipped("cache_write.rows/bf16_bf16_transform")
SHARED_SCORES = "sim/test_ptxsim_shared_scores.py::test_shared_scores[causal]"
PACKED = shipped("attention.sm90/bf16_kv656v_d576x512_full_slots_m64n64s2o2a")
EXACTLY = (
    "sim/test_ptxsim_records.py::test_every_code_is_converted_exactly"
    "[attention.sm90/bf16_kv656v_d576x512_full_slots_m64n64s2o2a]"
)
FEW_PAGES = shipped(  # few query rows over packed latents
    f"attention.latent/bf16_kv656v_d576x512_causal_gather_{few_rows.tile_of(16, '656').name}"  # type: ignore
)
FEW_PLANAR, FEW_RECORDS = (  # of two caches
    shipped(f"attention.latent/bf16_kv{caches}_d512_full_slots_{few_rows.tile_of(rows, '584').name}")  # type: ignore
    for caches, rows in (("584vx584", 8), ("528vx288", 16))
)
PLANAR, TWO_RECORDS = (
    shipped(f"attention.sm90/bf16_kv{caches}_d512_full_slots_m64n64s2o2a") for caches in ("584vx584", "528vx288")
)
STATES = shipped("merge_states.rows/bf16_states")

BUGS = (
    # ---- roles of decode
    Bug("decode: K is released before it is read", f"{ATTENTION}/decode/mainloop.py",
        "                pipeline.consumer_wait(s.k.pipe, cur.block, k_ready)\n",
        "                pipeline.consumer_wait(s.k.pipe, cur.block, k_ready)\n"
        "                release_if_last(spec, s.k.pipe, tile, cur)\n", DECODE),
    Bug("decode: keys left of the window are not masked", f"{ATTENTION}/decode/mainloop.py",
        "Uint32(prev.key - tile.w.n_block_full_min * spec.tile.n) <", "Uint32(prev.key) <",
        feature("attention/decode: page 16, window, separate tables")),
    Bug("decode: sums of warps are added without their scale", f"{ATTENTION}/decode/reduce.py",
        "row_sum = warp.fma(scale, s.merge.stats[first + c, inside, 1], row_sum)",
        "row_sum += s.merge.stats[first + c, inside, 1]", DECODE),
    Bug("decode: a tile forgets its first row", f"{ATTENTION}/decode/reduce.py",
        "at, dequant_scale = tile.first_row + row,", "at, dequant_scale = row,",
        shipped("attention.decode/bf16_d256_causalwb_cap_skip_tma_m32n64s3g1r8")),
    # ---- roles of sm90
    Bug("sm90: V is released before P V has read it", f"{ATTENTION}/sm90/mainloop.py",
        "        warpgroup.wait_group(0)\n        pipeline.consumer_release(s.v.pipe, i)\n        # row 0 becomes",
        "        pipeline.consumer_release(s.v.pipe, i)\n        warpgroup.wait_group(0)\n        # row 0 becomes",
        SM90),
    Bug("sm90: a warpgroup without rows keeps its turn", f"{ATTENTION}/sm90/mainloop.py",
        "        warp_scheduler_barrier_sync(spec)\n        warp_scheduler_barrier_arrive(spec)\n"
        "        pipeline.consumer_release(s.k.pipe, next_kv)",
        "        warp_scheduler_barrier_sync(spec)\n        pipeline.consumer_release(s.k.pipe, next_kv)", SM90),
    Bug("sm90: zeroed rows of V lack the proxy fence", f"{ATTENTION}/sm90/mainloop.py",
        '            cute.arch.fence_proxy("async.shared", space="cta")\n', "", SM90),
    Bug("sm90: promoted sums are rescaled once only", f"{ATTENTION}/sm90/promotion.py",
        "acc.acc_scales[k] = acc.acc_scales[k] * acc_scale[k]", "acc.acc_scales[k] = acc_scale[k]", FP8),
    Bug("sm90: columns of transposed V stay permuted", f"{ATTENTION}/sm90/epilogue.py",
        "(0, 2, 1, 3)[i % 4]]", "(0, 1, 2, 3)[i % 4]]", FP8),
    Bug("sm90: a skipped V expects bytes", f"{ATTENTION}/sm90/skip.py",
        "producer_acquire_tx(s.v.pipe, i, Int32(0))", "producer_acquire_tx(s.v.pipe, i, Int32(16))",
        shipped("attention.sm90/bf16_d64_causal_skip_tma_m192n128s4")),
    # ---- roles of sm100
    Bug("sm100: alternating groups begin at the same block", f"{ATTENTION}/sm100/softmax.py",
        "position = begin - ((own - begin) & (step - 1))", "position = begin", PING_PONG),
    Bug("sm100: row sums of two groups are added unscaled", f"{ATTENTION}/sm100/correction.py",
        "warp.fma(two.row_sum, scale_1, one.row_sum * scale_0)",
        "warp.fma(two.row_sum, scale_1, one.row_sum)", PING_PONG),
    Bug("sm100: O is read before its last P V", f"{ATTENTION}/sm100/correction.py",
        "at.tiles if const_expr(groups(spec) == SLOTS)", "at.tiles - 1 if const_expr(groups(spec) == SLOTS)", HALVES),
    Bug("sm100: a tile adds to the O of the tile before", f"{ATTENTION}/sm100/mma_utils.py",
        "Int32(1) if n > 0 else 1 - is_first", "Int32(1)", HALVES),
    Bug("sm100: factors on O are overwritten before they are read", f"{ATTENTION}/sm100/softmax.py",
        "    pipeline.mbarrier_wait(s.p_full_o_rescaled + x.slot, x.use)\n    # row_sum\n", "    # row_sum\n", HALVES),
    # ---- masks, schedule and splits
    Bug("mask: a block with masked keys counts as full", MASK,
        "return (lo + t - 1) // t, cutlass.max(hi, 0) // t",
        "return (lo + t - 1) // t, (cutlass.max(hi, 0) + t - 1) // t",
        index_math("test_blocks_of_a_tile")),
    Bug("schedule: the last section of heads is as wide as the others", f"{ATTENTION}/schedule/tiles.py",
        "is_whole * section + (1 - is_whole) * (heads - whole * section)", "section",
        index_math("test_order_visits_every_tile_once_longest_first")),
    Bug("shared scores: P has one stage", f"{ATTENTION}/sm90/tile_table.py",
        "P_STAGES = 2", "P_STAGES = 1", SHARED_SCORES),
    Bug("shared scores: pieces are freed while they are read", f"{ATTENTION}/sm90/shared_scores.py",
        "warpgroup.wait_group(2 if", "warpgroup.wait_group(4 if", SHARED_SCORES),
    Bug("schedule: the counter of tiles is left behind", f"{ATTENTION}/schedule/tiles.py",
        "cute.arch.grid_dim()[0] + num_tiles - 1:", "cute.arch.grid_dim()[0] + num_tiles:", SM90),
    Bug("stream-k: the remainder goes to CTAs that have it already", f"{ATTENTION}/schedule/stream_k.py",
        "units_per_cta * c + cutlass.min(c, total - units_per_cta * ctas)", "units_per_cta * c",
        index_math("test_shares_of_a_split_and_who_merges")),
    Bug("stream-k: two splits have one slot", f"{ATTENTION}/schedule/stream_k.py",
        "return cta + ctas * cutlass.max(1 - distance, 0)", "return cta",
        index_math("test_shares_of_a_split_and_who_merges")),
    Bug("combine: sums of earlier splits keep their old unit", f"{ATTENTION}/combine.py",
        "            acc.store(acc.load() * old)\n            for j", "            for j",
        feature("attention/decode: 40 parts")),
    Bug("combine: the counter of splits is left behind", f"{ATTENTION}/combine.py",
        "        counters[own] = 0\n", "", DECODE),
    # ---- top-k
    Bug("top-k: ties before the first selected one are taken too", "cute_kernels/topk/radix/write.py",
        "if (tie >= skip) & (tie < skip + take):", "if tie < skip + take:", RADIX),
    Bug("top-k: the last ties of a row are not the last of each CTA", "cute_kernels/topk/radix/write.py",
        "skip = clamp(skipped - earlier, 0, mine)", "skip = clamp(skipped, 0, mine)", RADIX),
    Bug("top-k: a run that ends at the k-th key does not have it", "cute_kernels/topk/select.py",
        "(above < k_left) & (k_left <= above + mine)", "(above < k_left) & (k_left < above + mine)",
        feature("topk/ties fp32_c3t512_n46080")),
    # ---- cache writing and merging
    Bug("cache: a page that only K has is written in V", "cute_kernels/cache_write/places.py",
        "cutlass.min(a.k_cache.shape[0], a.v_cache.shape[0])", "a.k_cache.shape[0]",
        shipped("cache_write.rows/bf16_bf16_append")),
    Bug("cache: interleaved factors go to the row of the token", "cute_kernels/cache_write/store.py",
        "row - row % 4 + down, index - down * blocks", "row, index - down * blocks",
        shipped("cache_write.rows/bf16_nvfp4_append")),
    Bug("cache: the second half of rotated elements has angles of its own", "cute_kernels/cache_write/rotate.py",
        "                    begin -= rotated >> 1\n", "                    begin -= 0\n", ROTATED),
    Bug("cache: partly rotated rows exchange with the wrong lanes", "cute_kernels/cache_write/rotate.py",
        "upper = vector >= g.lanes", "upper = vector > g.lanes", ROTATED),
    Bug("merge: the sum of weights keeps its old unit", "cute_kernels/merge_states/rows/forward.py",
        "total = r.lse[1] * scale", "total = r.lse[1]", STATES),
    Bug("merge: V of a state without keys counts", "cute_kernels/merge_states/rows/forward.py",
        "words[w, half, i] = words[w, half, i] & mask", "words[w, half, i] = words[w, half, i]", STATES),
    # ---- host: wrappers
    Bug("host: kept offsets of one length serve another", "wrappers/attention/plan.py",
        "here.offsets.setdefault((device, batch, length), made)", "here.offsets.setdefault((device, batch), made)",
        "host/test_plans.py::test_offsets_of_equal_requests"),
    Bug("host: streams share the scratch of splits", "wrappers/host/scratch.py",
        "key = plan.device, stream, plan.dim_vo //", "key = plan.device, plan.dim_vo //",
        "host/test_plans.py::test_streams_have_scratch_of_their_own"),
    Bug("host: launches of more CTAs have the scratch of fewer", "wrappers/host/scratch.py",
        "plan.counters_per_split, ctas\n", "plan.counters_per_split\n",
        "host/test_plans.py::test_larger_launches_have_more_scratch"),
    Bug("host: streams of a capture share counters", "wrappers/host/scratch.py",
        "owner = device, stream, ", "owner = device, 0, ",
        "attention/test_decode_wrapper.py::test_scratch_is_kept_for_a_stream_and_counters_for_a_stream_of_a_capture"),
    Bug("host: graphs share counters", "wrappers/host/scratch.py",
        "    if known != capture:\n", "    if known is None:\n",
        "attention/test_prefill_wrapper.py::test_streams_and_captured_launches_never_share_a_counter"),
    Bug("host: a launch that is kept stays at a scale's old memory", "wrappers/attention/bound.py",
        "memory_of(self._tensors) == self._memory", "self._memory",
        "host/test_layer_launch.py::test_tensors_that_get_other_memory"),
    Bug("host: a layer that changes a scale repeats its launch", "wrappers/attention/bound.py",
        "asked == self._asked and ", "self._asked and ", "host/test_layer_launch.py::test_what_is_asked_counts"),
    Bug("host: factors that pad a row are not written", "wrappers/fp4.py",
        "new = torch.empty if columns * BLOCK == width else torch.zeros", "new = torch.empty",
        "cache/test_fp4.py::test_factors_that_pad_the_rows_of_a_new_output_are_0"),
    Bug("host: tokens of replayed steps do not count", "wrappers/integrations/transformers.py",
        "known = self.seq_lens.tolist()", "known = self._seen",
        "engines/test_example_transformers.py::test_tokens_past_the_pages_are_refused_after_decode_steps"),
    Bug("host: strides of dimensions of size 1 must be aligned", "wrappers/attention/checks.py",
        "zip(t.stride()[:-1], t.shape) if extent > 1", "zip(t.stride()[:-1], t.shape)",
        "host/test_layouts.py::test_strides_of_size_1"),
    Bug("host: as many tiles as SMs have one CTA on an SM", "cute_kernels/attention/decode/__init__.py",
        "request.kv_heads >= request.sms", "request.kv_heads > request.sms",
        "attention/test_dispatch.py::test_many_tiles_are_served_by_two_ctas_of_an_sm"),
    Bug("host: many tiles are not split", "wrappers/attention/launch_size.py",
        "spec.tile.ctas_per_sm > 1 and decode.is_narrow(request)", "spec.tile.ctas_per_sm > 1",
        "attention/test_decode_wrapper.py::test_as_many_tiles_as_sms_get_two_ctas_of_an_sm"),
    Bug("PDL: a number of keys that changes between two launches is not noticed", f"{ATTENTION}/geometry.py",
        "zip(sequence[1:], other[1:])", "zip(sequence[1:2], other[1:2])",
        "attention/test_early.py::test_what_is_guessed_does_not_show"),
    Bug("PDL: a number of queries that changes between two launches is not noticed", f"{ATTENTION}/geometry.py",
        "zip(sequence[1:], other[1:])", "zip(sequence[2:], other[2:])",
        "attention/test_early.py::test_what_is_guessed_does_not_show"),
    Bug("stream-K: equal tiles are split", f"{ATTENTION}/schedule/stream_k.py",
        "a.schedule.whole_tiles) * most == total:", "a.schedule.whole_tiles) * most == total + 1:",
        "sim/test_ptxsim_family.py::test_equal_tiles_are_not_split"),
    Bug("stream-K: tiles that differ are shared by fewer CTAs", f"{ATTENTION}/schedule/stream_k.py",
        "a.schedule.whole_tiles) * most == total:", "a.schedule.whole_tiles) * most >= total:",
        "sim/test_ptxsim_family.py::test_equal_tiles_are_not_split"),
    Bug("host: as many tiles as TPCs are split", "wrappers/attention/launch_size.py",
        "decode.one_cta_per_tpc(spec) and", "False and",
        "attention/test_decode_wrapper.py::test_one_cta_for_each_pair_of_sms"),
    Bug("host: too few tiles have one CTA for each TPC", "wrappers/attention/launch_size.py",
        "and _nearly_all(tiles, tpcs)", "and _nearly_all(2 * tiles, tpcs)",
        "attention/test_decode_wrapper.py::test_one_cta_for_each_pair_of_sms"),
    Bug("host: tiles of narrow windows are split", "wrappers/attention/launch_size.py",
        "return min(tiles, most)", "return most",
        "attention/test_decode_wrapper.py::test_narrow_windows_get_two_ctas_of_an_sm"),
    Bug("host: a right window of 0 is not causal", "wrappers/flash_attn/api.py",
        "    causal = causal or right == 0\n", "", "attention/test_flash_attn.py::test_options_in_every_form"),
    Bug("host: V's strides are not seen when a cache becomes pages", "wrappers/attention/views.py",
        "all(t.stride(0) == rows * t.stride(1) for t in (k, v))", "k.stride(0) == rows * k.stride(1)",
        "attention/test_flash_attn.py::test_caches_without_a_table_are_pages"),
    Bug("host: scales of KV heads are dealt to query heads in turn", "wrappers/host/scalars.py",
        "value[:, None].expand(-1, all_heads // own).reshape(-1)", "value.repeat(all_heads // own)",
        "attention/test_low_precision.py"),
    Bug("host: a known merge in place overlaps the other S", "wrappers/merge/plan.py",
        "AddressBounds.of(tensors, {0, 1})", "AddressBounds.of(tensors, {0})",
        "merge/test_merge_states.py::test_memory_that_an_output_shares_is_refused"),
    Bug("host: a known cache write does not see memory that is shared later", "wrappers/host/overlap.py",
        "if -b_bytes < apart < a_bytes and apart", "if 0 < apart < a_bytes and apart",
        "cache/test_cache_write.py::test_memory_that_is_shared_in_a_later_call"),
    Bug("host: a plan of top-k serves both orders of ties", "wrappers/topk/plan.py",
        "call.k, call.next_n, call.page_size, call.tie_break, call.tie_break.__class__,",
        "call.k, call.next_n, call.page_size,", "host/test_plans.py::test_top_k"),
    Bug("host: a known plan serves fewer ranges than tokens", "wrappers/attention/plan.py",
        "if getattr(call, field).shape[0] != call.q.shape[0]:", "if getattr(call, field).shape[0] > call.q.shape[0]:",
        "host/test_plans.py::test_a_known_plan_refuses_fewer_and_more_rows_than_tokens"),
    Bug("host: memory of a capture is kept", "wrappers/host/launch.py",
        "if device_info is not None and plan.kept:", "if device_info is not None:",
        "host/test_launch.py::test_a_graph_owns_what_its_capture_allocates"),
    # ---- host: operands that are alike in every good call
    Bug("operands: the key of a merge lacks the strides of the second V", "wrappers/merge/plan.py",
        "v_other.shape, v_other.stride(),\n            s_other.shape,\n        )",
        "v_other.shape,\n            s_other.shape,\n        )",
        layout("merge_state, plain-kernels")),
    Bug("operands: a launch has V with the strides of K", "wrappers/attention/plan.py",
        "flat[slots.k], flat[slots.v] = call.k, call.v\n        flat[slots.kv_lens]",
        "flat[slots.k], flat[slots.v] = call.k, call.v.as_strided(call.v.shape, call.k.stride())\n"
        "        flat[slots.kv_lens]", layout(f"{DECODES}, plain-kernels")),
    Bug("operands: the address of V's factors is not checked", "wrappers/attention/checks.py",
        'for field in ("k_scales", "v_scales"):\n        t = getattr(call, field)\n        if t is not None and t.ndim',
        'for field in ("k_scales",):\n        t = getattr(call, field)\n        if t is not None and t.ndim',
        layout(f"{DECODES}, nvfp4-kernels")),
    Bug("operands: a scale without dimensions is launched as it is", "wrappers/attention/optional.py",
        'OptionalTensor(_whole, "out_scale_ptr", _flat)', 'OptionalTensor(_whole, "out_scale_ptr")',
        layout(f"{DECODES}, log2-kernels")),
    Bug("operands: new keys are appended before the address of V's cache is refused", "wrappers/flash_attn/append.py",
        "for t in (q, k, v)]\n    tables", "for t in (q, k)]\n    tables",
        layout("flash_attn_with_kvcache, new rows-kernels")),
    Bug("operands: the key of a cache write lacks the strides of V's cache", "wrappers/cache_write/plan.py",
        "v_cache.dtype, v_cache.shape, v_cache.stride(),", "v_cache.dtype, v_cache.shape,",
        layout("append_qkv, copied-kernels")),
    Bug("operands: the key of a cache write lacks the strides of V", "wrappers/cache_write/plan.py",
        "v.dtype, v.shape, v.stride(), k_cache.dtype", "v.dtype, v.shape, k_cache.dtype",
        "host/test_layouts.py::test_a_row_in_the_memory_of_an_output_is_refused"),
    Bug("operands: the key of ragged attention lacks the heads of V", "wrappers/attention/plan.py",
        "caches = k.shape[1], k.shape[3], v.shape[1], v.shape[3],", "caches = k.shape[1], k.shape[3], v.shape[3],",
        "host/test_plans.py::test_a_known_plan_refuses_values_that_do_not_fit_keys"),
    Bug("operands: positions are as wide as the requests of tokens", "cute_kernels/cache_write/places.py",
        'element(a.positions, token, wide(a, "positions"))', 'element(a.positions, token, wide(a, "batch_indices"))',
        shipped("cache_write.rows/bf16_bf16_append")),
    Bug("operands: first positions are as wide as the offsets", "cute_kernels/latent/read/forward.py",
        'element(a.firsts, at.request, is_wide(a, "firsts"))', 'element(a.firsts, at.request, is_wide(a, "starts"))',
        shipped("latent.read/read_bf16_584")),
    Bug("operands: an output that is folded passes once its plan is known", "wrappers/attention/plan.py",
        "not (whole := out.is_contiguous()) and overlap.folded(out):", "not (whole := out.is_contiguous()) and False:",
        layout(f"{DECODES}, plain-kernels")),
    # ---- values that decide a branch
    Bug("values: both halves of a tile have the window of the first", f"{ATTENTION}/sm100/softmax.py",
        "tile_tokens(tile_q_stage(spec, w) * w.m_block + half, ROWS,",
        "tile_tokens(tile_q_stage(spec, w) * w.m_block, ROWS,", "sm_103a bf16_oany_d64_anyw_cap_tma_m256n128s4"),
    Bug("values: queries that fp16 lacks become zeros", f"{ATTENTION}/quant.py",
        "cutlass.max(Int32(27), cutlass.min(Int32(227)", "cutlass.max(Int32(127), cutlass.min(Int32(227)",
        shipped("attention.decode/bf16_kve4m3_d64_causalwb_cap_skip_tma_m64n256s6g2r16")),
    Bug("values: a row of zeros has a scale of zero", "cute_kernels/cache_write/store.py",
        "    return cute.arch.fmax(scale, Float32(FP32_LEAST))\n", "    return scale\n",
        shipped("cache_write.rows/bf16_e4m3t_transform")),
    Bug("values: a scale that is a power of two is doubled", "cute_kernels/latent/write/factors.py",
        "(warp.bits(x) + 0x7FFFFF)", "(warp.bits(x) + 0x800000)", shipped("latent.write/bf16_584")),
    # ---- tokens that share keys
    Bug("union: a slot that a token has chosen twice counts once", f"{ATTENTION}/key_union.py",
        "        if repeated > 0:\n", "        if repeated < 0:\n", union("repeated-eager")),
    Bug("union: all of some equal slots repeat an earlier one", f"{ATTENTION}/key_union.py",
        "(same & ~found) == 0 or (same & below) != 0", "(same & ~found) == 0 or same != 0", union("repeated-eager")),
    Bug("union: the second range has the rows of the first one", f"{ATTENTION}/key_union.py",
        "start = low + i * ROWS", "start = low + i // ROWS", union("ranges-eager")),
    Bug("union: a token sees the keys of its neighbours", f"{ATTENTION}/sm90/scoring.py",
        "r.words[row, i] = found[i] & own[i]", "r.words[row, i] = found[i]", union("neighbours-eager")),
    # ---- packed records of latent attention
    Bug("records: the factors of a planar page lie behind 64 rows", "cute_kernels/attention/kv/record_rows.py",
        "begins[0] + Int64(parts[0].shape[2]) * form.row", "begins[0] + Int64(64) * form.row", PLANAR),
    Bug("records: the second cache is read as the first one", "cute_kernels/attention/kv/record_rows.py",
        "RowSource(op.extra, RECORDS[spec.kv.extra_record]", "RowSource(op.extra, RECORDS[spec.kv.record]",
        TWO_RECORDS),
    Bug("records: converted rows are not fenced", "cute_kernels/attention/sm90/scoring.py",
        '    cute.arch.fence_proxy("async.shared", space="cta")\n    cute.arch.sync_warp()\n    pipeline.',
        "    cute.arch.sync_warp()\n    pipeline.",
        PACKED),
    Bug("records: a page that the cache lacks is read", "cute_kernels/attention/kv/record_rows.py",
        "exists = (page >= 0) & (page < parts[0].shape[0])", "exists = page >= 0", PACKED),
    Bug("records: a factor of 2 or more is multiplied at once", "cute_kernels/attention/kv/packed.py",
        "return any_top != 0", "return any_top > 0xFFFFFFFE", EXACTLY),
    Bug("few rows: rows of slots that do not exist keep what lay there", "cute_kernels/attention/kv/bulk.py",
        "    if not place.exists:\n        for byte", "    if rows < 0:\n        for byte", FEW_PLANAR),
    Bug("few rows: keys behind the last one are not masked", f"{ATTENTION}/latent/score.py",
        "if n_block >= w.n_block_full_max or n_block < w.n_block_full_min:",
        "if n_block < w.n_block_full_min:", FEW_PAGES),
    Bug("few rows: factors of planar records are not waited for", "cute_kernels/attention/kv/bulk.py",
        "cute.arch.cp_async_mbarrier_arrive_noinc(barrier)", "cute.arch.mbarrier_arrive(barrier)", FEW_PLANAR),
    Bug("few rows: slots of the second cache are those of the first one", "cute_kernels/attention/kv/bulk.py",
        "        if gather.is_extra(spec, at.n_block, sequence_pages.first_keys):",
        "        if gather.is_extra(spec, at.n_block - 1, sequence_pages.first_keys):", FEW_PLANAR),
    Bug("few rows: columns of O of e2m1 codes are out of order", f"{ATTENTION}/latent/precision.py",
        '"e2m1": (4, 8, 16)', '"e2m1": (16, 8, 4)', FEW_RECORDS),
    Bug("few rows: a block of the second cache has the record of the first one", f"{ATTENTION}/latent/score.py",
        "border = geometry.extra_start(w.sequence.extra) // spec.tile.n",
        "border = geometry.extra_start(w.sequence.extra) // spec.tile.n + 1", FEW_RECORDS),
    Bug("few rows: batch-invariant calls have their kernels", f"{ATTENTION}/latent/__init__.py",
        ' or p.split_kv in ("auto", "always"))', " or True)", "attention/test_dispatch.py::test_few_rows_over_records"),
    Bug("columns: the last group of a stage is never freed", f"{ATTENTION}/sm90/scoring.py",
        "release_keys(spec, s, groups - 1, at.kv)\n    return", "pass\n    return",
        shipped("attention.sm90/bf16_kvbf16v_d576x512_causal_tma_m64n64s2o2a")),
    Bug("columns: Q K^T reads the second half without waiting for it", f"{ATTENTION}/sm90/scoring.py",
        "pipeline.consumer_wait(s.k.pipes[i], at.kv)", "pipeline.consumer_wait(s.k.pipes[min(i, 1)], at.kv)",
        shipped("attention.sm90/bf16_kvbf16v_d576x512_causal_tma_m64n64s2o2a")),
    Bug("splits: a CTA that gives up waiting leaves no count", "cute_kernels/attention/splits.py",
        "        if tid == 0:\n            combine.leave(a, counters, splits)",
        "        if (tid == 0) & (smem.last[i] != 0):\n            combine.leave(a, counters, splits)",
        shipped("attention.sm90/bf16_kvbf16v_d576x512_causal_tma_m64n64s2o2a")),
    Bug("records: factors of the first quarter are those of all", "cute_kernels/attention/kv/packed.py",
        "byte = byte >> (8 * (quarter * more // 4)).to(Uint32)", "byte = byte >> (0 * quarter).to(Uint32)",
        TWO_RECORDS),
    Bug("slots: numbers of pages pass through fp32", "cute_kernels/attention/kv/gather.py",
        "return warp.select(page < 0, page, in_cache)",
        "return warp.select(page < 0, page.to(cutlass.Float32), in_cache)",
        "sim/test_ptxsim_records.py::test_slots_past_the_integers_of_fp32"),
    # ---- the state of a process
    Bug("state: turns of one scale of RoPE serve another", "wrappers/attention/rope.py",
        "key = turns, device, *numbers\n", "key = turns, device, *numbers[:2]\n",
        "attention/test_rope.py::test_positions_up_to_131072"),
    Bug("state: a run repeats the launch of an earlier plan", "wrappers/flashinfer/wrapper_classes/batch.py",
        "        self._bound = None\n        self._planned_options", "        self._planned_options",
        "attention/test_prefill_plans.py::test_a_second_plan_ends_the_launch_of_the_first"),
    Bug("state: numbers of shapes are given again", "wrappers/attention/call.py",
        "_numbers.setdefault(shape_id, next(_next))", "_numbers.setdefault(shape_id, len(_numbers))",
        "host/test_bounds.py::test_a_number_of_shapes_is_not_given_again"),
    Bug("state: the runtime library of a second bundle is not checked", "wrappers/host/runtime.py",
        "any(other.parent == folder for other in _MODULES)", "bool(_MODULES)",
        "bundles/test_robust.py::test_a_truncated_file_in_the_second_bundle"),
    # ---- tensors of others
    Bug("engines: drafts are added to the engine's own lengths", "wrappers/integrations/sglang.py",
        "batch.seq_lens.to(torch.int32, copy=True)", "batch.seq_lens.to(torch.int32)",
        "engines/test_integration_sglang.py::test_prompts_chunks_decodes_and_mixed_batches"),
    Bug("engines: a cache with other strides at its address is not seen", "wrappers/integrations/held.py",
        "(kv_cache.data_ptr(), kv_cache.shape, kv_cache.stride())", "(kv_cache.data_ptr(), kv_cache.shape)",
        "engines/test_integration_vllm.py::test_other_memory"),
    Bug("engines: a repeated launch keeps the rotated part of the first query", "wrappers/attention/bound.py",
        "step.out, None, step.rope)", "step.out, None)",
        "engines/test_integration_vllm_sparse.py::test_launches_of_a_layer"),
    Bug("engines: a token of a mixed batch does not see itself", "wrappers/integrations/vllm_batches.py",
        "[request] + token + 1", "[request] + token",
        "engines/test_integration_vllm_sparse.py::test_prompts_chunks_decodes_and_drafts"),
    Bug("engines: two requests count as uniform if one has the tokens of both", "wrappers/integrations/vllm_batches.py",
        "return n if requests * n == tokens == int(starts[requests]) else 0", "return n",
        "engines/test_integration_vllm_sparse.py"),
    Bug("engines: tokens that pad a batch have keys", "wrappers/integrations/vllm_batches.py",
        "torch.where(present, keys, 0)", "keys",
        "engines/test_integration_vllm_sparse.py::test_tokens_that_pad_a_mixed_batch_have_no_keys"),
    Bug("engines: tokens that pad a batch of full groups have keys", "wrappers/integrations/vllm_batches.py",
        "torch.where(owned, keys, 0)", "keys",
        "engines/test_integration_vllm_sparse.py::test_tokens_that_pad_a_mixed_batch_have_no_keys"),
    Bug("engines: batch-invariant bits, and two tokens visit the same keys",
        "wrappers/integrations/vllm_latent_sparse.py",
        "rows > 1 and not envs.VLLM_BATCH_INVARIANT", "rows > 1",
        "engines/test_integration_vllm_sparse.py::test_bits_of_a_token_in_all_batches"),
    Bug("engines: a bound launch of tokens that share keys serves others",
        "wrappers/integrations/vllm_latent_sparse.py",
        "(scale, out_scale, shares), ()", "(scale, out_scale), ()",
        "engines/test_integration_vllm_sparse.py::test_neighbouring_tokens_of_prompts_share_their_keys"),
    Bug("engines: tokens share keys where bits must not depend on neighbours", "wrappers/integrations/sglang_dsa.py",
        'shares = split == "auto" and can_share', "shares = can_share",
        "engines/test_integration_sglang_dsa.py::test_neighbouring_tokens_of_prompts_share_their_keys"),
    Bug("engines: drafts share keys", "wrappers/integrations/sglang_dsa.py",
        "len(lens), metadata.max_seq_len_q)", "len(lens), max(lens))",
        "engines/test_integration_sglang_dsa.py::test_neighbouring_tokens_of_prompts_share_their_keys"),
    Bug("engines: the selector names the backend of the first layer", "wrappers/integrations/vllm_select.py",
        "cls._selected = backend_of(use_mla, use_sparse)", "backend_of(use_mla, use_sparse)",
        "engines/test_integration_vllm_latent.py::test_each_layer_gets_its_own_backend"),
    Bug("host: decreasing offsets pass", "wrappers/flashinfer/values.py",
        "good = numbers == sorted(numbers)", "good = True", "attention/test_refusals.py"),
)  # fmt: skip


def places(bug: Bug, tree: Path = ROOT) -> int:
    """Return in how many places of a tree the text stands that a bug replaces."""
    return (tree / bug.file).read_text().count(bug.old)


def copy_of(tree: Path, folder: Path) -> None:
    """Copy the tracked and the new files of a tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=tree, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (tree / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(tree / name, folder / name)


def noticed(bug: Bug, tree: Path = ROOT) -> tuple[bool, str]:
    """Plant a bug in a copy of the tree; return whether its check fails, and the last lines that the check printed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_of(tree, folder)
        if (count := places(bug, folder)) != 1:
            raise ValueError(f"{bug.name}: {bug.file} has {count} places to change, must have 1")
        text = (folder / bug.file).read_text()
        (folder / bug.file).write_text(text.replace(bug.old, bug.new))
        path = os.pathsep.join([str(folder), str(folder / "tools/ptxsim/src")])
        hidden = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "CUTE_DSL_ARCH")}
        run = subprocess.run(
            bug.command, cwd=folder, env=hidden | {"PYTHONPATH": path, "XDG_CACHE_HOME": str(folder / "build")},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    return run.returncode == 1, "\n".join(run.stdout.splitlines()[-12:])  # 1: pytest ran and a test failed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bugs", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("name", nargs="*")
    parser.add_argument("--tree", type=Path, default=ROOT)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("-v", action="store_true", help="print what the checks printed")
    args = parser.parse_args()
    chosen = [bug for bug in BUGS if not args.name or any(part in bug.name for part in args.name)]
    missed = 0
    with ThreadPoolExecutor(args.jobs) as threads:
        for bug, (seen, text) in zip(chosen, threads.map(partial(noticed, tree=args.tree), chosen)):
            print(f"{'noticed' if seen else 'MISSED '} {bug.name}", flush=True)
            if args.v or not seen:
                print(text, flush=True)
            missed += not seen
    print(f"{len(chosen) - missed} of {len(chosen)} noticed")
    return missed


if __name__ == "__main__":
    sys.exit(main())
