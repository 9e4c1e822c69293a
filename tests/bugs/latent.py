"""Bugs of kernels of latent and sparse attention, their caches and the indexer."""

from cute_kernels.attention.latent import tile_table as few_rows

from .plant import Bug, exactly, shipped, union

ATTENTION, LATENT_CACHES, LOGITS = "cute_kernels/attention", "cute_kernels/latent", "cute_kernels/indexer/logits"
PACKED = shipped("attention.sm90/bf16_kv656v_d576x512_full_slots_m64n64s2o2a")
EXACTLY = exactly("attention.sm90/bf16_kv656v_d576x512_full_slots_m64n64s2o2a")
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
FEW_NVFP4 = f"attention.latent/bf16_kv352v_d576x512_full_slots_{few_rows.tile_of(8, '352').name}"  # type: ignore
FEW_E4M3 = f"attention.latent/bf16_kve4m3v_d576x512_causal_gather_{few_rows.tile_of(8, 'e4m3').name}"  # type: ignore
CHOSEN, SHARED, TWO_CACHES = (
    shipped(f"attention.sm90/bf16_kvbf16v{more}_d576x512_full_slots_m64n64s2o2t") for more in ("", "u", "x")
)
FOUR_TOKENS = shipped("indexer.logits/e4m3_h64_d128_r4_fp32")

LATENT = (
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
        "RowSource(op.extra, RECORDS[spec.kv.extra_record or", "RowSource(op.extra, RECORDS[spec.kv.record or",
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
        'serves = p.source == "slots" or p.split_kv in ("auto", "always")', "serves = True",
        "attention/test_dispatch.py::test_few_rows_over_records"),
    Bug("columns: the last group of a stage is never freed", f"{ATTENTION}/sm90/scoring.py",
        "release_keys(spec, s, groups - 1, at.kv)\n    return", "pass\n    return",
        shipped("attention.sm90/bf16_kvbf16v_d576x512_causal_tma_m64n64s2o2a")),
    Bug("columns: Q K^T reads the second half without waiting for it", f"{ATTENTION}/sm90/scoring.py",
        "pipeline.consumer_wait(s.k.pipes[i], at.kv)", "pipeline.consumer_wait(s.k.pipes[min(i, 1)], at.kv)",
        shipped("attention.sm90/bf16_kvbf16v_d576x512_causal_tma_m64n64s2o2a")),
    Bug("stripes: a CTA that gives up waiting leaves no count", f"{ATTENTION}/stripes.py",
        '            left = counters.add(a, LEFT, 1, "release")',
        '            if smem.last[i] >= 0:\n                left = counters.add(a, LEFT, 1, "release")',
        shipped("attention.sm90/bf16_kvbf16v_d576x512_causal_tma_m64n64s2o2a")),
    Bug("stripes: nobody merges the stripe of a CTA that gave up", f"{ATTENTION}/stripes.py",
        "if before >= GAVE_UP:", "if before < 0:",
        shipped("attention.sm90/bf16_kvbf16v_d576x512_causal_tma_m64n64s2o2a")),
    Bug("stripes: the sum of many splits is not rescaled", f"{ATTENTION}/stripes.py",
        "acc[None, i].store(acc[None, i].load() * old)", "acc[None, i].store(acc[None, i].load() * 1.0)",
        shipped("attention.sm90/bf16_kvbf16v_d576x512_causal_tma_m64n64s2o2a")),
    Bug("scores: maxima lag behind a key that has most of a row", f"{ATTENTION}/sm90/turns.py",
        "cute.math.log2(total, fastmath=True) - QUARTER", "cute.math.log2(total, fastmath=True) + 8.0",
        "sim/test_ptxsim_records.py::test_a_key_that_has_most_of_a_row_is_not_rounded"),
    Bug("records: factors of the first quarter are those of all", "cute_kernels/attention/kv/packed.py",
        "byte = byte >> (8 * (quarter * more // 4)).to(Uint32)", "byte = byte >> (0 * quarter).to(Uint32)",
        TWO_RECORDS),
    Bug("slots: numbers of pages pass through fp32", "cute_kernels/attention/kv/gather.py",
        "return warp.select(page < 0, page, in_cache)",
        "return warp.select(page < 0, page.to(cutlass.Float32), in_cache)",
        "sim/test_ptxsim_records.py::test_slots_past_the_integers_of_fp32"),
    # ---- unions of keys
    Bug("union: a range has the first row of the next one", f"{ATTENTION}/key_union.py",
        "if slot >= rows.first and row < rows.count:", "if slot >= rows.first and row <= rows.count:",
        union("ranges-eager")),
    Bug("union: marks are read before all warps have set theirs", f"{ATTENTION}/key_union.py",
        "        mark(a, s, group, part)\n        cute.arch.barrier()\n", "        mark(a, s, group, part)\n",
        union("neighbours-eager")),
    Bug("union: the last group has as many tokens as the others", f"{ATTENTION}/key_union.py",
        "count = cutlass.min(a.kv.union_size, a.kv.page_table.shape[0] - first)", "count = a.kv.union_size",
        union("neighbours-eager")),
    Bug("union: the row behind the cache is in it", f"{ATTENTION}/key_union.py",
        "if slots[i] >= 0 and Int64(slots[i]) < group.rows:", "if slots[i] >= 0 and Int64(slots[i]) <= group.rows:",
        union("repeated-eager")),
    Bug("union: slots that do not count repeat earlier ones", f"{ATTENTION}/key_union.py",
        "keys, slots = geometry.slots_that_count(a, group.first + t), cute",
        "keys, slots = a.kv.page_table.shape[2], cute",
        SHARED),
    # ---- keys that a token has chosen
    Bug("chosen: the row behind a cache is a key", f"{ATTENTION}/kv/gather.py",
        "vote_ballot_sync(slot >= 0 and Int64(slot) < rows)", "vote_ballot_sync(slot >= 0 and Int64(slot) <= rows)",
        shipped(FEW_NVFP4)),
    Bug("chosen: heads past the first 64 have the queries of others", f"{ATTENTION}/sm90/scoring.py",
        "row, starts = w.m_block * spec.tile.m + first + lane, [", "row, starts = first + lane, [", CHOSEN),
    Bug("chosen: the largest logit is the one from which sums were last rescaled", f"{ATTENTION}/sm90/scoring.py",
        "rescale_threshold=warp.select(exact, Float32(0.0), params.rescale_threshold)",
        "rescale_threshold=params.rescale_threshold", PACKED),
    Bug("chosen: slots behind those that count are keys of decode", f"{ATTENTION}/decode/chosen.py",
        "w.sequence.kv_len, key)", "a.kv.page_table.shape[2], key)",
        shipped("attention.decode/bf16_d64_full_cap_skip_slots_m64n128s6g2r8")),
    Bug("second cache: all tokens have the count of the first one", f"{ATTENTION}/geometry.py",
        "a.kv.extra_lens[b // Quotient(Int32(1), *a.launch.per_length)]", "a.kv.extra_lens[0]", FEW_PLANAR),
    Bug("second cache: 16-bit rows lie in pages of the first one", f"{ATTENTION}/kv/gather.py",
        "others = page_ids._replace(page_size=page_ids.extra_page_size)", "others = page_ids", TWO_CACHES),
    Bug("second cache: a slot behind those that count is a key of the first one", f"{ATTENTION}/kv/gather.py",
        "if row >= 0 and row < of.first_keys:", "if row >= 0 and row <= of.first_keys:", FEW_PLANAR),
    # ---- few query rows
    Bug("few rows: each split counts the sink", f"{ATTENTION}/latent/mainloop.py",
        "-Float32.inf if split else sink", "sink", FEW_PAGES),
    Bug("few rows: the first block with masked keys counts as full", f"{ATTENTION}/latent/score.py",
        "if n_block >= w.n_block_full_max or", "if n_block > w.n_block_full_max or", FEW_PAGES),
    Bug("few rows: a tile without keys takes a place of sums", f"{ATTENTION}/latent/mainloop.py",
        "    if w.n_block_max > w.n_block_min:\n        at = at._replace(tile=at.tile + 1)\n    if w.split",
        "    at = at._replace(tile=at.tile + 1)\n    if w.split", FEW_PAGES),
    Bug("few rows: maxima of other warps are read before they are there", f"{ATTENTION}/latent/score.py",
        ', buffer] = top\n    meet()\n', ', buffer] = top\n', FEW_PAGES),
    Bug("few rows: bulk copies are not fenced from zeros in their stage", "cute_kernels/attention/kv/bulk.py",
        '    cute.arch.fence_proxy("async.shared", space="cta")  # behind zeros', "    # behind zeros", FEW_PLANAR),
    Bug("few rows: factors of e2m1 codes are those of other columns", "cute_kernels/records.py",
        "return 8 * quarter + box if self.permuted", "return 4 * quarter + box if self.permuted", exactly(FEW_NVFP4)),
    Bug("few rows: each split is multiplied by the factor on the output", f"{ATTENTION}/latent/mainloop.py",
        "    if not split:\n        scale *= epilogue.output_scale(a)\n", "    scale *= epilogue.output_scale(a)\n",
        shipped(FEW_E4M3)),
    # ---- caches
    Bug("cache: a slot right behind the cache is written", "cute_kernels/cache_write/places.py",
        "if page >= pool.pages:", "if page > pool.pages:", shipped("latent.write/bf16_656")),
    Bug("cache: factors lie behind as many rows as there are pages", f"{LATENT_CACHES}/write/whole.py",
        "* form.row\n        behind = page + Int64(a.cache.shape[1])",
        "* form.row\n        behind = page + Int64(a.cache.shape[0])",
        shipped("latent.write/bf16_584")),
    Bug("cache: keys of an indexer have the least scale of a latent", f"{LATENT_CACHES}/write/factors.py",
        "FP32_LEAST if spec.index else LEAST_POWER", "LEAST_POWER", shipped("latent.write/bf16_132")),
    Bug("gather: rows behind the last request are written", f"{LATENT_CACHES}/read/forward.py",
        'is_wide(a, "starts")) > requests:', 'is_wide(a, "starts")) > requests + 1:',
        shipped("latent.read/read_bf16_656")),
    # ---- the indexer's logits
    Bug("indexer: each token of a request sees one key less", f"{LOGITS}/schedule.py",
        "cutlass.max(end, 0) - (a.next_n - 1) +", "cutlass.max(end, 0) - a.next_n +", FOUR_TOKENS),
    Bug("indexer: a page right behind the cache is read", f"{LOGITS}/load.py",
        "if page >= a.k.shape[0]:", "if page > a.k.shape[0]:", FOUR_TOKENS),
    Bug("indexer: a NaN among the scores counts as 0", f"{LOGITS}/scores.py",
        'return spec.keys == "e4m3"\n', "return False\n", shipped("indexer.logits/e4m3_h64_d128_r1_fp32")),
    Bug("indexer: pages that do not exist are fetched", f"{LOGITS}/hints.py",
        "if page >= 0 and page < a.k.shape[0]:", "if page >= 0:", FOUR_TOKENS),
)  # fmt: skip
