"""Kernels that write rows, in torch: they check what their callers promise, then run the reference."""

from cute_kernels.cache_write.args import ANGLES, FROM_FIRST, PAGES, ROWS, SLOTS, fields
from tests.support.fake_machine import promised, promised_apart
from wrappers import fp4, reference

WRITTEN = ("k_cache", "v_cache", "k_sf", "v_sf", "q_out", "q_fp8", "kv_lens_out", "values")
GATHERED = ("k", "q_out", "tables_out")


def emulate(spec, launches):
    """Return a kernel of `spec` for any device; the arguments of each launch, by name, are appended to `launches`."""

    def kernel(*flat):
        a = dict(zip(fields(spec), flat, strict=True))
        promised_apart(a, *(GATHERED if spec.gather else WRITTEN))
        check = check_dequantise if spec.dequantises else check_gather if spec.gather else check_promises
        check(spec, a)
        launches.append(a)
        if spec.dequantises:
            scale = a["k_scale_ptr"] if len(a["k_scale_ptr"]) else a["k_scale"]
            a["values"].copy_(fp4.nvfp4_dequantize(a["codes"], a["sf"][:, None], scale))
        else:
            (reference.gather_rows if spec.gather else reference.write_rows)(spec, *flat)

    return kernel


def check_promises(spec, a):
    """Check what callers promise, which compiled code does not notice."""
    k, v, k_cache, v_cache = a["k"], a["v"], a["k_cache"], a["v_cache"]
    packed = 2 if spec.cache == "nvfp4" else 1
    if a["nhd"]:
        k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    promised(len(k) and a["nhd"] in (0, 1) and a["places"] in (SLOTS, PAGES, ROWS))
    table = a.get("rope_table")
    promised(table is None or (len(table) == 1 or table.stride(0) % 4 == 0) and table.stride(1) == 1)
    promised(
        1 <= a["lanes_log2"] <= 5 and a["k_groups"] >= 1 and a["v_groups"] >= (v.shape[1] > 0 and not spec.transform)
    )
    for rows, cache in ((k, k_cache), (v, v_cache)):
        if rows.shape[1]:
            promised(cache.shape[1] == rows.shape[1] and cache.shape[3] * packed == rows.shape[2])
    if spec.cache == "nvfp4":
        for cache, sf in ((k_cache, a["k_sf"]), (v_cache, a["v_sf"])):
            sf = sf.transpose(1, 2) if a["nhd"] else sf
            promised(sf.shape == (*cache.shape[:3], cache.shape[3] * 2 // 16))
    tokens = len(a["slots"]) // (1 + (a["wide"] & 1)) if a["places"] == SLOTS else len(k)
    promised(a.get("scales_multiply", 0) in (0, 1))
    promised(min(len(k), len(v) if v.shape[1] else len(k)) >= min(tokens, len(k)))
    if len(a.get("kv_lens_out", ())):
        promised(a["rope"] & FROM_FIRST and not a["wide"] and len(a["kv_lens_out"]) == len(a["kv_lens"]))
    if len(a.get("rope_cos", ())):
        promised(not len(a["rope_table"]) and not a["rope"] & ANGLES and a["rope_cos"].shape == a["rope_sin"].shape)
        promised(a["rope_table"].shape[1] == 2 * a["rope_cos"].shape[1])
        promised(all(a[f"rope_{x}"].stride(0) % 4 == a[f"rope_{x}"].data_ptr() % 8 == 0 for x in ("cos", "sin")))


def check_gather(spec, a):
    """Check what callers of a kernel that rotates Q and K of an attention call promise."""
    q, k, pages, tables = a["q"], a["k"], a["k_cache"], a["tables"]
    size, heads = pages.shape[1:3] if a["nhd"] else pages.shape[1:3][::-1]
    promised(q.shape == a["q_out"].shape and q.shape[2] == k.shape[2] == pages.shape[3] == a["rope_table"].shape[1])
    promised(k.shape[1] == heads and tables.shape == a["tables_out"].shape and a["rope"] == ANGLES and not a["wide"])
    promised(1 <= a["lanes_log2"] <= 5 and a["k_groups"] >= 1 and a["v_groups"] == 0)
    batch = len(a["cu_seqlens"]) - 1
    promised(batch >= 1 and len(a["kv_lens"]) in (0, batch) and len(a["kv_indptr"]) in (0, batch + 1))
    if not len(a["kv_indptr"]):
        promised(len(tables) == len(a["kv_lens"]) == batch)
    else:
        promised(len(tables) == 1 and (tables.shape[2] or size == 1 and len(pages) == len(k)))
    promised(len(k) == size * tables.shape[0] * tables.shape[2] or not tables.shape[2])


def check_dequantise(spec, a):
    """Check what callers of the kernel that dequantises promise."""
    blocks = len(a["sf"])
    promised(blocks and a["codes"].shape == (blocks, 8) and a["values"].shape == (blocks, 16))
    promised(a["codes"].is_contiguous() and a["sf"].is_contiguous() and a["values"].is_contiguous())
    promised(a["values"].data_ptr() % 16 == 0 and len(a["k_scale_ptr"]) in (0, 1))
