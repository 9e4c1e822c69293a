"""The order of a launch's tiles (`schedule/tiles.py`): a kernel lists them in the simulator, against plain Python."""

import math
import random
from typing import NamedTuple

import numpy as np
import pytest
from ptxsim import host
from ptxsim.runner import run

from cute_kernels import build
from cute_kernels.attention import args, sm90
from cute_kernels.attention.spec import PACK_GQA_MAX_Q
from tests.conftest import ARCH

pytestmark = pytest.mark.kernels
SPEC = sm90.headline("bf16", "bf16", (64, 64), True)
M, N, DIM, PAGE = SPEC.tile.m, SPEC.tile.n, 64, 64


class Tile(NamedTuple):
    request: int
    head: int
    m_block: int
    pack_factor: int
    lo: int
    hi: int


@pytest.fixture(scope="module")
def listed(tmp_path_factory):
    """A function: the tiles of a launch, in their order, and two more."""
    build.use_arch(ARCH)
    import cutlass.cute as cute
    from cutlass import Int32

    from cute_kernels import abi
    from cute_kernels.attention import fakes
    from tests.support import listed as kernel

    options = f"{build.OPTIONS} --dump-dir {tmp_path_factory.mktemp('dump')}"
    given = [abi.stream(), abi.tensor(Int32, (None, 7), align=4), *fakes.fake_args(SPEC).values()]
    with build.host_functions() as hosts:
        compiled = cute.compile(kernel.forward, SPEC, *given, options=options)
    shared = build._dynamic_shared(str(compiled.ir_module))

    def launch(count, heads, q_lens, kv_lens):
        half, ints = np.dtype(np.uint16), np.dtype(np.int32)
        tokens, width = sum(q_lens), max(1, math.ceil(max(kv_lens) / PAGE))
        values = {
            "q": np.zeros((tokens, heads[0], DIM), half), "k": np.zeros((1, heads[1], PAGE, DIM), half),
            "v": np.zeros((1, heads[1], PAGE, DIM), half), "o": np.zeros((tokens, heads[0], DIM), half),
            "cu_seqlens_q": np.cumsum([0, *q_lens], dtype=ints), "kv_lens": np.array(kv_lens, ints),
            "page_table": np.zeros((len(q_lens), 2, width), ints), "lse": np.zeros((0, heads[0]), np.float32),
            "counters": np.zeros(1, ints),
        }  # fmt: skip
        numbers = {"softmax_scale_log2": 1.0, "out_scale": 1.0, "grid": 1, "counter_base": 0, "enable_pdl": 0}
        empty = {"kv_starts": np.zeros(0, ints)}
        rest = {name: np.zeros(0, np.float32) for name in ("softmax_scale_ptr", "sink", "out_scale_ptr")}
        found = np.full((count, 7), -1, ints)
        known = values | numbers | empty | rest
        arguments = [found, *(known[name] for name in args.fields(SPEC))]
        (call,) = host.evaluate(*hosts, compiled.__ptx__, arguments, shared)
        run(call)
        return found

    return launch


def expected(heads, q_lens, kv_lens):
    """All tiles of a launch, in no order."""
    found = []
    for request, (m, n) in enumerate(zip(q_lens, kv_lens)):
        each = heads[0] // heads[1] if m <= PACK_GQA_MAX_Q else 1
        for block in range(math.ceil(m * each / M)):
            last = (min((block + 1) * M, m * each) - 1) // each
            hi = max(0, math.ceil((last + 1 + n - m) / N))
            found += [Tile(request, head, block, each, 0, hi) for head in range(heads[0] // each)]
    return found


def level(n):
    """One for each power of two, from 2048 on."""
    return math.floor(math.log2(max(n, 2048)))


def batch_of(seed):
    """Requests of both kinds, some without queries, some without keys; more than a warp looks at in one step."""
    r = random.Random(seed)
    q_lens = [r.choice((0, 1, 5, PACK_GQA_MAX_Q, PACK_GQA_MAX_Q + 1, 300)) for _ in range(r.choice((1, 4, 31, 33, 70)))]
    return q_lens, [m + r.choice((0, 1, 60, 2000, 6000, 20000, 90000)) if r.random() < 0.9 else 0 for m in q_lens]


CASES = {
    "mixed": ((4, 2), [300, 1, 200, 1, 0, 7], [900, 40, 50000, 9000, 9, 7]),
    "packed": ((6, 2), [1, 3, 64], [100, 4096, 64]),
    "not packed": ((2, 2), [1, 65, 200], [100, 40000, 200]),
    "one": ((4, 2), [300], [900]),  # without a search
    "one packed": ((6, 2), [40], [40]),
    "one over several sections": ((4, 2), [700], [120000]),
    "one without keys": ((4, 2), [70], [0]),
    "nothing": ((4, 2), [0, 0], [0, 90]),
    **{f"random {seed}": ((4, 2), *batch_of(seed)) for seed in range(8)},
}


@pytest.mark.parametrize("case", CASES)
def test_order(listed, case):
    """Every tile comes once, and nothing behind the last. Of either kind, levels fall. Any stretch has its share of
    packed tiles, to one."""
    heads, q_lens, kv_lens = CASES[case]
    want = expected(heads, q_lens, kv_lens)
    rows = listed(len(want) + 2, heads, q_lens, kv_lens).tolist()
    assert [row[0] for row in rows] == [1] * len(want) + [0, 0]
    found = [Tile(*row[1:]) for row in rows[: len(want)]]
    assert sorted(found) == sorted(want)
    packed = [tile for tile in found if tile.pack_factor > 1]
    for kind in (packed, [tile for tile in found if tile.pack_factor == 1]):
        levels = [level(kv_lens[tile.request]) for tile in kind]
        assert levels == sorted(levels, reverse=True)
    before = 0
    for i, tile in enumerate(found):
        assert before == i * len(packed) // len(found)
        before += tile.pack_factor > 1
