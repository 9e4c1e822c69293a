"""Problems in other forms: the same keys in CSR, as ragged rows or by slot, and with the masks and biases of the
prefill family."""

import torch

from wrappers.attention.call import AttentionCall, csr_sequences, ragged_sequences, slot_sequences
from wrappers.reference import gather

FORMS = ("csr", "ragged", "slots", "mask", "ranges", "prefix", "alibi")
BLOCK = 128  # keys of a block that is hidden or seen whole
HOLE_EVERY, HOLES = 3, 150  # slots from one that names no key to the next; those that follow each other
SPARE = 3  # unused rows, or entries, before the first request's and after the last one's


def apply(p: AttentionCall, forms: tuple[str, ...], seed: int = 0) -> AttentionCall:
    """Convert a 16-bit problem with a page table to other `forms`. Reads lengths on the host."""
    lens = p.requests.kv_lens.tolist()
    if "csr" in forms:
        p = as_csr(p, lens)
    if "ragged" in forms:
        p = as_ragged(p, lens)
    if "slots" in forms:
        p = as_slots(p, lens, seed)
    if "mask" in forms:
        p = with_mask(p, lens, seed)
    for form in ("ranges", "prefix"):
        if form in forms:
            p = with_lengths(p, form, lens, seed)
    if "alibi" in forms:
        heads = torch.arange(p.q.shape[1], device=p.q.device)
        p = p._replace(alibi_slopes=torch.exp2(-(heads + 1.0) / 2))
    return p


def _starts(counts: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *counts], device=device).cumsum(0).to(torch.int32)


def as_csr(p: AttentionCall, lens: list[int]) -> AttentionCall:
    size, table, device = p.k.shape[2], p.requests.page_table[:, 0], p.q.device
    counts = [-(-n // size) for n in lens]
    spare = torch.full((SPARE,), -7, dtype=torch.int32, device=device)
    indices = torch.cat([spare, *(row[:count] for row, count in zip(table, counts)), spare])
    last = torch.tensor([(n - 1) % size + 1 if n else 0 for n in lens], dtype=torch.int32, device=device)
    return p._replace(requests=csr_sequences(p.requests.cu_seqlens_q, _starts(counts, device) + SPARE, indices, last))


def as_ragged(p: AttentionCall, lens: list[int]) -> AttentionCall:
    """Convert a problem to ragged K and V. Unused rows hold NaN."""

    def rows(cache: torch.Tensor, which: int) -> torch.Tensor:
        spare = cache.new_full((SPARE, cache.shape[1], cache.shape[3]), float("nan"))
        found = [gather(cache, table[which], n) for table, n in zip(p.requests.page_table, lens)]
        return torch.cat([spare, *found, spare]).transpose(0, 1).unsqueeze(0)

    starts = _starts(lens, p.q.device) + SPARE
    return p._replace(k=rows(p.k, 0), v=rows(p.v, 1), requests=ragged_sequences(p.requests.cu_seqlens_q, starts))


def as_slots(p: AttentionCall, lens: list[int], seed: int) -> AttentionCall:
    """Convert a problem without a mask, of requests with equally many query tokens, to slots of its keys in any order.

    Between them are numbers that name no row, and behind those of every fourth request a block of them. Entries that do
    not count name any row, also those that are NaN.
    """
    gen, (pages, _, size, _), device = torch.Generator().manual_seed(seed), p.k.shape, p.q.device
    none = torch.tensor([-1, -7, -(2**31), 2**31 - 1, pages * size, pages * size + 1])
    found = []
    for b, (n, row) in enumerate(zip(lens, p.requests.page_table[:, 0].cpu())):
        key = torch.arange(n)
        kept = (row[key // size] * size + key % size)[torch.randperm(n, generator=gen)]
        holes = none[torch.randint(len(none), (-(-n // (HOLE_EVERY - 1)),), generator=gen)]
        own = torch.cat([kept, kept.new_zeros(-n % (HOLE_EVERY - 1))]).view(-1, HOLE_EVERY - 1)
        own = torch.cat([own, holes[:, None]], 1).flatten()
        own = own[: n + n // (HOLE_EVERY - 1)]  # without the padding and what follows it
        found.append(torch.cat([own, none[torch.arange(HOLES * (b % 4 == 1)) % len(none)]]))
    most = p.requests.page_table.shape[2] * size * HOLE_EVERY // (HOLE_EVERY - 1)  # by shapes alone
    slots = torch.randint(pages * size, (len(found), most + HOLES + SPARE), generator=gen)
    for into, own in zip(slots, found):
        into[: len(own)] = own
    counts = torch.tensor([len(own) for own in found], dtype=torch.int32, device=device)
    requests = slot_sequences(slots.int().to(device), counts)
    return p._replace(requests=requests, causal=False, max_q_len=len(p.q) // len(lens))


def with_mask(p: AttentionCall, lens: list[int], seed: int) -> AttentionCall:
    """Add a random bit mask: a third of the bits are 0, and also whole bytes, most of the second row, and a block of
    keys. All bits of another block are 1.

    Each request begins at a byte. The last byte of the last request is missing: kernels must hide keys past the
    tensor's end.
    """
    gen, device = torch.Generator().manual_seed(seed), p.q.device
    assert p.requests.cu_seqlens_q is not None
    counts = (p.requests.cu_seqlens_q[1:] - p.requests.cu_seqlens_q[:-1]).tolist()
    weights, found = 2 ** torch.arange(8), []
    for m, n in zip(counts, lens):
        bits = torch.zeros(-(-m * n // 8), 8, dtype=torch.bool)
        bits |= (torch.rand(bits.shape, generator=gen) > 0.33) & (torch.rand(len(bits), 1, generator=gen) >= 0.2)
        mask = bits.view(-1)[: m * n].view(m, n)
        mask[:, :BLOCK], mask[:, BLOCK : 2 * BLOCK] = True, False
        mask[1:2, BLOCK if n > 2 * BLOCK else 8 :] = False
        found.append((bits * weights).sum(1).to(torch.uint8))
    packed = torch.cat([torch.empty(0, dtype=torch.uint8), *found])
    starts = _starts([len(part) for part in found], device)
    return p._replace(custom_mask=packed[:-1].to(device), mask_starts=starts, causal=True)


def with_lengths(p: AttentionCall, form: str, lens: list[int], seed: int) -> AttentionCall:
    """Extend the causal mask by ranges or by prefixes, for requests of `lens` keys."""
    if form == "ranges":
        return with_ranges(p, lens, seed)
    half = [n // 2 + 9 * (b % 2) for b, n in enumerate(lens)]
    return p._replace(prefix_lens=torch.tensor(half, dtype=torch.int32, device=p.q.device))


def with_ranges(p: AttentionCall, lens: list[int], seed: int) -> AttentionCall:
    """Add ranges of keys to the causal mask: of spans of neighbouring tokens, which see each other, as those of an
    image; of single tokens, of any keys; and of tokens without one, some of which have values that mean the same."""
    assert p.requests.cu_seqlens_q is not None
    ranges = random_ranges(p.requests.cu_seqlens_q.diff().tolist(), lens, seed)
    return p._replace(ranges=ranges.to(p.q.device), range_left=BLOCK + 9 if seed % 2 else -1, causal=True)


def random_ranges(rows: list[int], keys: list[int], seed: int) -> torch.Tensor:
    """Return ranges of keys, int32 (T, 2), for requests with so many rows and keys; see `with_ranges`."""
    gen, found = torch.Generator().manual_seed(seed), []
    nothing = torch.tensor([[-1, -1], [5, 4], [-(1 << 31), -7], [(1 << 31) - 1, (1 << 31) - 1]])
    for m, n in zip(rows, keys):
        own = nothing[torch.randint(len(nothing), (m,), generator=gen)]
        first = 0
        while first < m:  # a span of tokens, then some others
            span = int(torch.randint(1, 90, (), generator=gen))
            keys_of_span = torch.tensor([first + n - m, min(first + span, m) + n - m - 1])
            own[first : first + span] = keys_of_span
            alone = first + span + torch.randint(0, 40, (5,), generator=gen)
            for at in alone[alone < m].tolist():
                own[at] = torch.randint(-3, max(n, 1) + 9, (2,), generator=gen).sort().values
            first += span + 40
        found.append(own)
    return torch.cat([nothing[:0], *found]).to(torch.int32)
