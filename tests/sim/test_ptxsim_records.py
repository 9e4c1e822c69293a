"""Packed records of latent attention in the simulator: a row that sees one key returns its values, so codes show."""

import math
from dataclasses import replace

import pytest
import torch

from bench.cases import mla as cases
from bench.cases.mla import MlaCase
from cute_kernels.attention.latent.tile_table import MOST_ROWS
from cute_kernels.attention.latent.tile_table import ROWS as ROWS_OF_AN_MMA
from cute_kernels.records import RECORDS
from tests.conftest import ARCH, ROOT
from tests.sim.workloads import simulated
from tests.sim.workloads.mla import more_heads
from tests.support.kernels import LATER, SHIPPED
from wrappers import flash_mla_with_kvcache

pytestmark = pytest.mark.kernels
MEMORY = ROOT / "build" / "simulated"
PACKED = {  # kernels of shared keys read rows as the others do
    label: spec for label, (_, spec) in SHIPPED.items()
    if getattr(getattr(spec, "kv", None), "record", "") and not spec.kv.union
}  # fmt: skip
FEW = [label for label in PACKED if label.startswith("attention.latent/bf16_kv656v_d576x512_full")]
NAN, SIGN = 0x7F, 0x80
LARGE = {3: 1, 12: 9, 20: 30}  # row -> exponent of its factors
ROWS = 24
BY_SLOTS = next(s for _, s in SHIPPED.values() if s.name == "bf16_kvbf16v_d576x512_full_slots_m64n64s2o2t")


def put_all_codes(record, cache):
    """Overwrite the codes of the rows of a cache of one page, so that all of e4m3 but NaN, or of e2m1, are there."""
    form, rows = RECORDS[record], cache[0]
    width = form.latent // (2 if form.codes == "e2m1" else 1) if form.vec else rows.shape[1]
    flat = rows.view(torch.uint8)
    if form.planar:
        flat = cache.as_strided((len(rows), form.row), (form.row, 1))
    codes = (37 * torch.arange(len(rows))[:, None] + torch.arange(width)) % 256
    codes = torch.where((codes & NAN == NAN) & (form.codes == "e4m3"), codes - 1, codes)
    flat[:, :width] = codes.byte()
    if form.rotated_as == "e4m3" and form.vec:
        rest = (torch.arange(len(rows))[:, None] * 64 + torch.arange(form.rotated)) % 256
        flat[:, form.rotated_at : form.rotated_at + form.rotated] = torch.where(rest & NAN == NAN, 0, rest).byte()


def put_large_factors(record, cache):
    """Let some rows have factors past 2, with which codes are not multiplied at once."""
    form, rows = RECORDS[record], cache[0].view(torch.uint8)
    if form.factor not in ("fp32", "ue8m0"):
        return
    if form.planar:
        start = len(rows) * form.row
        rows = cache.as_strided((len(rows), form.factor_row), (form.factor_row, 1), cache.storage_offset() + start)
    factors = rows[:, form.factors_at * (not form.planar) :][
        :, : form.latent // form.vec * (4 if form.factor == "fp32" else 1)
    ]
    for row, power in LARGE.items():
        factors[row] = (
            torch.tensor([2.0**power]).repeat(factors.shape[1] // 4).view(torch.uint8)
            if form.factor == "fp32"
            else torch.tensor(127 + power, dtype=torch.uint8)
        )


@pytest.mark.parametrize(
    "label", [pytest.param(label, marks=pytest.mark.full if label in LATER else ()) for label in PACKED]
)
def test_every_code_is_converted_exactly(label):
    spec = PACKED[label]
    case = MlaCase(
        record=spec.kv.record, second_record=spec.kv.extra_record, dim=spec.head_dim_qk, lens=(ROWS,), page_size=ROWS,
        q8=spec.q == "e4m3",
    )  # fmt: skip
    i = cases.make(case)
    page = i.cache[int(i.table[0, 0])]
    cache = i.cache.as_strided((1, *page.shape), i.cache.stride(), page.storage_offset())
    put_all_codes(case.record, cache)
    put_large_factors(case.record, cache)
    few = replace(case, lens=(1,) * ROWS, function="trtllm" if case.record == "528_fp32" else "flash_mla")
    key = torch.arange(ROWS, dtype=torch.int32)[:, None, None]
    heads = {ROWS_OF_AN_MMA: 1, MOST_ROWS: 1 + ROWS_OF_AN_MMA}.get(spec.tile.m, 1 + more_heads(spec))
    q = torch.randn(ROWS, 1, heads, case.dim).to(torch.float8_e4m3fn if case.q8 else torch.bfloat16)
    q[list(LARGE)] = 0.0  # logits of that size would round to several, and P to other values than 1
    want = cases.values(case.record, cache)[0, :, : cases.VALUES].bfloat16()
    slots, second = key, None
    if spec.kv.extra:  # every second row is of the second cache
        other = cases.make(replace(case, record=case.second_record))
        page = other.cache[int(other.table[0, 0])]
        extra = other.cache.as_strided((1, *page.shape), other.cache.stride(), page.storage_offset())
        put_all_codes(case.second_record, extra)
        of_first = key % 2 == 0
        slots = torch.where(of_first, key, -1)
        second = cases.MlaInputs(q, extra, key, key[:, 0, 0], None, torch.where(of_first, -1, key))
        more = cases.values(case.second_record, extra)[0, :, : cases.VALUES].bfloat16()
        want = torch.where(of_first[:, 0], want, more)
        few = replace(few, second=1)
    inputs = cases.MlaInputs(q, cache, key[:, 0], torch.ones(ROWS, dtype=torch.int32), None)
    if spec.kv.source == "slots":
        inputs, few = inputs._replace(slots=slots, second=second), replace(few, chosen=1)
    else:  # pages of a row
        inputs = inputs._replace(cache=cache.view(ROWS, 1, -1) if cache.is_contiguous() else cache.transpose(0, 1))
        few = replace(few, page_size=1)
    with simulated(ARCH, [], 2, spec, memory=MEMORY):
        out, _ = cases.call(few, inputs)
    assert torch.equal(out[:, 0, 0], want)


@pytest.mark.parametrize("label", FEW)
def test_queries_past_the_range_of_fp16(label):
    """Queries over codes of e4m3 are fp16. Heads differ by powers of two, and in some, one column of a warp is larger
    than fp16 can be. Keys are 0 there."""
    spec = PACKED[label]
    case = MlaCase(record=spec.kv.record, heads=spec.tile.m, lens=(70,), chosen=64)
    i = cases.make(case)
    columns = torch.tensor([0, 20, 250, 511])
    i.cache.view(torch.uint8)[..., columns] = 0
    q = i.q * 2.0 ** (torch.arange(case.heads)[:, None] % 5 - 3)
    for head, column in enumerate(columns.tolist()):
        q[..., head, column] = 2.0 ** (17 + 2 * head)
    q[..., 4, :] *= 2.0**-120  # all scores are 0
    i = i._replace(q=q.bfloat16())
    with simulated(ARCH, [], 2, spec, memory=MEMORY):
        got = cases.call(case, i)
    assert cases.error(case, got, cases.expected(case, i)) < 1


def test_slots_past_the_integers_of_fp32():
    """Numbers of pages, from 2^24 on, must not pass through fp32."""
    step, last = 16, (1 << 24) + 8  # elements between pages, which overlap; pages
    memory = torch.zeros(last * step + 576, dtype=torch.bfloat16)
    memory[-4000:] = torch.randn(4000).bfloat16()
    cache = memory.as_strided((last, 1, 1, 576), (step, 576, 576, 1))
    slots = torch.tensor([last - 1, last - 2, last - 5], dtype=torch.int32).view(3, 1, 1)
    with simulated(ARCH, [], 2, BY_SLOTS, memory=MEMORY):
        out, _ = flash_mla_with_kvcache(
            torch.randn(3, 1, 2, 576).bfloat16(), cache, None, None, cases.VALUES, indices=slots
        )
    assert torch.equal(out[:, 0, 0], cache[slots.flatten().long(), 0, 0, : cases.VALUES])


@pytest.mark.parametrize(("first", "largest"), [(200, 70), (150, 3)])
def test_a_key_that_has_most_of_a_row_is_not_rounded(first, largest):
    """A block has one key that counts, and the next block of the same warpgroup one that counts more, by up to 2^8. If
    the row's maximum lagged behind, P of that key would be rounded, and a third of the outputs with it."""
    keys, heads = 256, 15
    cache = torch.randn(1, keys, 1, 576).bfloat16()
    cache[..., cases.VALUES :], cache[0, :, 0, -1] = 0.0, -64.0
    cache[0, largest, 0, -1], cache[0, first, 0, -1] = 1.0, 0.0
    q = torch.zeros(1, 1, heads, 576).bfloat16()
    q[..., -1] = (torch.arange(1, heads + 1) / 2 / cases.SCALE * math.log(2.0)).bfloat16()
    slots = torch.arange(keys, dtype=torch.int32).view(1, 1, keys)
    with simulated(ARCH, [], 1, BY_SLOTS, memory=MEMORY):
        out, _ = flash_mla_with_kvcache(q, cache, None, None, cases.VALUES, softmax_scale=cases.SCALE, indices=slots)
    k = cache[0, :, 0].double()
    want = torch.softmax(q[0, 0].double() @ k.T * cases.SCALE, -1) @ k[:, : cases.VALUES]
    assert (out[0, 0] == want.bfloat16()).double().mean() > 0.99
