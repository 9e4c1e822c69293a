"""Rows gathered from caches of latent attention: values, rows without a page, and refusals."""

import pytest
import torch

import wrappers
from bench.cases import latent_read as reads
from bench.cases.latent_read import ReadCase
from tests.support.emulated import emulation
from tests.support.good_calls import GATHERS, inputs_of
from wrappers import LatentCache, gather_latent
from wrappers.host.machine import HostMachine, override

BF16, BYTE = torch.bfloat16, torch.uint8


def ints(*values):
    return torch.tensor(values)


def code(value):
    """Return the e4m3 code of a value."""
    return int(torch.tensor(float(value)).to(torch.float8_e4m3fn).view(BYTE))


def test_values_of_a_row_of_656_bytes():
    """Written byte by byte: value, scale of 128 values, and rotated values in bf16."""
    cache = torch.zeros(2, 3, 656, dtype=BYTE)
    row = cache[1, 2]
    row[0], row[130], row[511] = code(1.5), code(-2), code(448)
    row[512:528].view(torch.float32).copy_(torch.tensor([2.0, 0.5, 1.0, 0.25]))
    row[528:].view(BF16)[63] = 7.0
    out = torch.full((1, 576), 3.0).to(BF16)
    gather_latent(LatentCache(cache, "656"), ints(0, 1).view(1, 2), ints(0, 1), out, ints(5))
    found = {int(i): float(out[0, i]) for i in out[0].nonzero()}
    assert found == {0: 3.0, 130: -1.0, 511: 112.0, 575: 7.0}


def test_values_of_a_row_of_352_bytes():
    """The factor of block s lies at 8 * (s % 4) + s // 4."""
    cache = torch.zeros(1, 1, 352, dtype=BYTE)
    row = cache[0, 0]
    row[0], row[40] = 0x2F, 0x0B  # codes 15 and 2 of values 0 and 1; 11 of value 80, in block 5
    row[256] = code(3)
    row[320], row[320 + 8 * 1 + 1] = code(0.5), code(4)
    out = torch.zeros(1, 576).to(BF16)
    gather_latent(LatentCache(cache, "352"), ints(0).view(1, 1), ints(0, 1), out)
    found = {int(i): float(out[0, i]) for i in out[0].nonzero()}
    assert found == {0: -3.0, 1: 0.5, 80: -6.0, 512: 3.0}


@pytest.mark.parametrize("on", ["cpu", "kernels"])
@pytest.mark.parametrize("function", list(reads.RECORDS_OF))
def test_every_function_gathers_rows_one_by_one(function, on):
    """As a loop over rows does, from the values of `gather_latent` for one row or the bytes of the cache."""
    for record in reads.RECORDS_OF[function]:
        case = ReadCase(function, record, starts="nvfp4" not in function and function != reads.INDEXER, hostile=True)
        given, want = reads.make_inputs(case), reads.make_inputs(case)
        with emulation() if on == "kernels" else override(HostMachine()):
            reads.run(case, given)
        one_by_one(case, want)
        assert not reads.difference(given, want), record


def one_by_one(case, given):
    held = given.get("cache", given.get("src_cache", given.get("kv_cache")))
    cache = held.cache if isinstance(held, LatentCache) else held
    table, firsts = given["block_table"], given.get("seq_starts")
    out, row = next(iter(reads.outputs(given).values())), 0
    for request, count in enumerate(case.lens):
        for i in range(count):
            position = i + (int(firsts[request]) if firsts is not None else 0)
            column, at = divmod(position, case.page_size)
            page = int(table[request, column]) if 0 <= column < table.shape[1] and position >= 0 else -1
            if 0 <= page < len(cache):
                copied(case, given, cache, (page, at), out[row], row)
            row += 1


def copied(case, given, cache, where, target, row):
    page, at = where
    if case.function == reads.INDEXER:
        flat = cache[page].reshape(-1)
        target.copy_(flat[128 * at : 128 * (at + 1)])
        scale = flat[128 * case.page_size + 4 * at :][:4]
        given["dst_scale"][row].copy_(scale)
    elif case.function == reads.COPY:
        target.copy_(cache[page, at])
    else:
        scale = given.get("scale", given["cache"].scale if "cache" in given else 1.0)
        values = wrappers.reference.latent_values(case.record, cache[page : page + 1].view(BYTE), BF16, scale)
        target.copy_(values[0, at])


def test_rows_of_another_tensor_are_not_read():
    """Offsets that overlap, go back or lie past the output."""
    for starts in ((0, 9, 4), (-3, 2, 3), (2, 2, 2), (5, 1, 7), (0, 1 << 40, 3)):
        out = torch.full((6, 576), 3.0).to(BF16)
        gather_latent(LatentCache(torch.zeros(2, 4, 656).byte(), "656"), ints(0, 1).view(2, 1), ints(*starts), out)
        assert set(out.unique().tolist()) <= {0.0, 3.0}


CACHE = torch.zeros(6, 4, 656, dtype=BYTE)
REFUSED = {
    "cache: Tensor, must be a LatentCache": (TypeError, {"cache": CACHE}),
    "cache.record: '132', must be one of": (ValueError, {"cache": LatentCache(CACHE, "132")}),
    "cache.record: ['656'], must be one of": (ValueError, {"cache": LatentCache(CACHE, ["656"])}),  # type: ignore
    "cache.rotated: given, not supported": (NotImplementedError, {"cache": LatentCache(CACHE, "656", CACHE)}),
    "cache.scale: 0.5, must be 1.0 with record 656": (ValueError, {"cache": LatentCache(CACHE, "656", scale=0.5)}),
    "cache.cache: shape (6, 4, 655), must be (6, 4, 656)": (ValueError, {"cache": LatentCache(CACHE[..., 1:], "656")}),
    "cache.cache: strides (2624, 656, 1), rows must begin at multiples of 4 bytes": (ValueError, {
        "cache": LatentCache(CACHE.flatten()[1:].as_strided((5, 4, 656), (2624, 656, 1)), "656")}),
    "cache.cache: strides (5280, 1320, 1), rows of a page of record 584 must be dense": (ValueError, {
        "cache": LatentCache(torch.zeros(2, 4, 1320).byte()[..., :584], "584"),
        "out": torch.zeros(7, 512).bfloat16()}),
    "out: shape (7, 512), must be (7, 576)": (ValueError, {"out": torch.zeros(7, 512).bfloat16()}),
    "out: dtype torch.float32, must be one of": (TypeError, {"out": torch.zeros(7, 576)}),
    "out: requires grad": (RuntimeError, {"out": torch.zeros(7, 576).bfloat16().requires_grad_()}),
    "out: strides (0, 1) of shape (7, 576), elements must not overlap": (ValueError, {
        "out": torch.zeros(1, 576).bfloat16().expand(7, 576)}),
    "out: dtype torch.bfloat16, must be that of cache.cache, torch.uint8": (TypeError, {
        "cache": LatentCache(CACHE)}),
    "block_table: shape (2,), must have 2 dimensions": (ValueError, {"block_table": ints(1, 2)}),
    "block_table: dtype torch.float32, must be one of": (TypeError, {"block_table": torch.zeros(2, 2)}),
    "cu_seqlens: shape (2,), must be (3,)": (ValueError, {"cu_seqlens": ints(0, 5)}),
    "cu_seqlens: device meta, must be that of cache.cache": (ValueError, {"cu_seqlens": ints(0, 5, 7).to("meta")}),
    "seq_starts: shape (1,), must be (2,)": (ValueError, {"seq_starts": ints(0)}),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(message):
    error, change = REFUSED[message]
    given = inputs_of("gather_latent") | change
    before = given["out"].detach().clone()
    for where in (override(HostMachine()), emulation()):
        with where, pytest.raises(error) as found:
            gather_latent(**given)
        assert str(found.value).startswith(message)
    assert torch.equal(given["out"].detach(), before)


def test_an_output_in_the_cache_is_refused():
    memory = torch.zeros(6 * 4 * 656, dtype=BYTE)
    out = memory[: 7 * 1152].view(BF16).view(7, 576)
    given = inputs_of("gather_latent") | {"cache": LatentCache(memory.view(6, 4, 656), "656"), "out": out}
    with pytest.raises(ValueError, match="^out: shape .*overlaps the memory of cache.cache"):
        gather_latent(**given)


@pytest.mark.parametrize("function", [name for name in GATHERS if "cp_gather" in name and "indexer" not in name])
def test_a_number_of_requests(function):
    given = inputs_of(function)
    with pytest.raises(ValueError, match="batch_size: 3, needs 3 rows of block_table"):
        getattr(wrappers, function)(**given | {"batch_size": 3})
    starts = {} if "nvfp4" in function else {"seq_starts": ints(1, 1)}  # of all requests
    getattr(wrappers, function)(**given | starts | {"batch_size": 1})


def test_a_number_of_rows_in_a_tensor():
    """As torch's operators take it: an integer without dimensions, and nothing else."""
    function, tables = wrappers.gather_and_maybe_dequant_cache, []
    for count in (3, torch.tensor(3), torch.tensor(3, dtype=torch.int32)):
        given = inputs_of("gather_and_maybe_dequant_cache") | {"num_tokens": count}
        given["dst"].fill_(7)
        function(**given)
        tables.append(given["dst"])
    assert torch.equal(tables[0], tables[1]) and torch.equal(tables[0], tables[2])
    assert not tables[0][:3].any() and (tables[0][3:] == 7).all()
    for bad in (torch.tensor(3.0), torch.tensor(True), torch.tensor([3]), torch.tensor(3, device="meta")):
        with pytest.raises(TypeError, match="^num_tokens: "):
            function(**inputs_of("gather_and_maybe_dequant_cache") | {"num_tokens": bad})
