"""Plans of all public functions: what two calls may share, and on which device, stream and graph a launch is made.

Kernels are torch functions, on a machine that `FakeMachine` describes; a launch is its arguments by name.
"""

from dataclasses import replace

import pytest
import torch

import wrappers
from bench.cases import attention as cases
from bench.cases import topk as topk_cases
from cute_kernels.attention import args
from cute_kernels.cache_write import args as cache_write
from cute_kernels.merge_states import args as merge_states
from cute_kernels.topk.args import SortArgs, TopKArgs
from tests.support.fake_machine import FakeMachine
from wrappers.attention import checks, op, rope
from wrappers.attention import plan as attention_plan
from wrappers.attention.call import Rope, ragged_sequences
from wrappers.flashinfer import values
from wrappers.host import machine, scratch

CONTEXT, DECODE = wrappers.trtllm_batch_context_with_kv_cache, wrappers.trtllm_batch_decode_with_kv_cache
E4M3 = torch.float8_e4m3fn


class Recorder(FakeMachine):
    """`launches`: (op, spec, arguments by name) of each launch. Nothing is computed."""

    def __init__(self, **how):
        super().__init__(self.recorded, **how)
        self.launches = []

    def recorded(self, op, spec):
        kinds = {"topk.radix": TopKArgs, "topk.sort": SortArgs}
        seam = {"cache_write": cache_write, "merge_states": merge_states}.get(op.partition(".")[0], args)
        names = kinds[op]._fields if op in kinds else seam.fields(spec)
        return lambda *flat: self.launches.append((op, spec, dict(zip(names, flat, strict=True))))


@pytest.fixture
def here():
    with machine.override(Recorder()) as found:
        yield found


NOT_COMPARED = ("counter_base", "counters", "o_partial")  # of the machine's past
WRITTEN = ("out", "raw")


def looks(name, value):
    """What tells two arguments apart: the form of tensors, of small integer ones what they hold."""
    if not isinstance(value, torch.Tensor):
        return value
    form = value.dtype, tuple(value.shape), value.stride()
    small = value.dtype == torch.int32 and value.numel() < 100 and name not in WRITTEN
    return (*form, value.tolist()) if small else form


def launch_of(function, inputs):
    """(op, spec, looks of the arguments by name) of one call."""
    machine.current.launches.clear()
    function(**inputs)
    ((op, spec, by_name),) = machine.current.launches
    return op, spec, {n: looks(n, v) for n, v in by_name.items() if n not in NOT_COMPARED}


def same_on_every_machine(function, first, second):
    """A call's launch is that of a machine which saw no other call."""
    want = []
    for inputs in (first, second):
        with machine.override(Recorder()):
            want.append(launch_of(function, inputs))
    with machine.override(Recorder()):
        for _ in range(2):
            assert launch_of(function, first) == want[0]
            assert launch_of(function, second) == want[1]


PLAIN = replace(cases.EDGE["plain"], q_lens=(5, 37), kv_lens=(19, 37), heads_q=4, heads_kv=2)
EQUAL = replace(PLAIN, q_lens=(2, 2), kv_lens=(19, 37))
PREFILL_CASES = {  # static facts of a case: what differs
    "dtype": {"dtype": "fp16"}, "query heads": {"heads_q": 8}, "KV heads": {"heads_kv": 1}, "pages": {"spare_pages": 9},
    "head_dim": {"head_dim_qk": 128, "head_dim_vo": 128}, "V's head_dim": {"head_dim_qk": 192, "head_dim_vo": 128},
    "page size": {"page_size": 32}, "layout": {"layout": "NHD"}, "cache": {"cache": "stacked"},
    "shared cache": {"cache": "shared"}, "tables": {"separate_tables": True},
    "batch": {"q_lens": (5, 37, 3), "kv_lens": (19, 37, 8)}, "table width": {"kv_lens": (19, 370)},
    "tokens": {"q_lens": (5, 36)}, "long": {"q_lens": (5, 137), "kv_lens": (19, 137)},
    "window": {"window_left": 3}, "soft cap": {"soft_cap": 4.0}, "causal": {"causal": False}, "sink": {"sink": False},
}  # fmt: skip
CALLS = {  # of any function: arguments that differ
    "window of 0": {"window_left": 0}, "other window": {"window_left": 9}, "far window": {"window_left": 1 << 40},
    "no window": {"window_left": -7}, "cap": {"logits_soft_cap": 4.0}, "other cap": {"logits_soft_cap": 5},
    "no cap": {"logits_soft_cap": 0.0}, "no sinks": {"sinks": None}, "no out": {"out": None},
    "no lse": {"lse": None, "return_lse": False}, "new lse": {"lse": None, "return_lse": True},
    "pdl": {"enable_pdl": False}, "scale": {"bmm1_scale": 0.3}, "integer scales": {"bmm1_scale": 1, "bmm2_scale": 2},
    "scale tensor": {"bmm1_scale": torch.tensor([0.3])}, "output scale": {"bmm2_scale": 0.3},
    "output scale tensor": {"bmm2_scale": torch.tensor(0.3)}, "same dtype": {"out": None, "out_dtype": torch.bfloat16},
    "unsigned lengths": {"seq_lens": torch.tensor(PLAIN.kv_lens, dtype=torch.uint32)},
    "bound": {"max_q_len": 1 << 20}, "small bound": {"max_q_len": 1},
}  # fmt: skip


@pytest.mark.parametrize("fact", PREFILL_CASES)
def test_prefill_by_case(fact):
    a, b = (cases.make_inputs(case) for case in (PLAIN, replace(PLAIN, **PREFILL_CASES[fact])))
    same_on_every_machine(CONTEXT, a, b)


@pytest.mark.parametrize("fact", [*CALLS, "not causal"])
def test_prefill_by_argument(fact):
    inputs = cases.make_inputs(replace(PLAIN, q_lens=(5, 137), kv_lens=(19, 137)))
    same_on_every_machine(CONTEXT, inputs, inputs | (CALLS | {"not causal": {"causal": False}})[fact])


def decode_inputs(case, **changes):
    return cases.as_decode(cases.make_inputs(case)) | changes


def tokens_apart(case, q_len):
    return decode_inputs(case, cum_seq_lens_q=None, max_q_len=None, q_len_per_req=q_len)


DECODE_CASES = {k: v for k, v in PREFILL_CASES.items() if k not in ("causal", "V's head_dim")} | {
    "e4m3": {"kv_dtype": "fp8"},
    "nvfp4": {"kv_dtype": "nvfp4"},
}
DRAFTS = torch.full((42, 4), 7).to(torch.uint16)
DECODE_CALLS = CALLS | {
    "e4m3 output": {"out": None, "out_dtype": E4M3}, "given e4m3": {"out": torch.zeros(42, 4, 64).to(E4M3)},
    "skip": {"skip_softmax_threshold_scale_factor": 0.1}, "other skip": {"skip_softmax_threshold_scale_factor": 0.2},
    "invariant": {"batch_invariant": True}, "mask": {"mask": DRAFTS}, "o_scale": {"o_scale": 2.0},
    "log2": {"bmm1_scale_log2": torch.tensor([0.3])},
}  # fmt: skip


@pytest.mark.parametrize("fact", DECODE_CASES)
def test_decode_by_case(fact):
    a, b = (decode_inputs(case) for case in (PLAIN, replace(PLAIN, **DECODE_CASES[fact])))
    same_on_every_machine(DECODE, a, b)


@pytest.mark.parametrize("fact", DECODE_CALLS)
def test_decode_by_argument(fact):
    same_on_every_machine(DECODE, decode_inputs(PLAIN), decode_inputs(PLAIN) | DECODE_CALLS[fact])


@pytest.mark.parametrize("heads", [(4, 2), (4, 4), (16, 1)])
def test_decode_by_tokens_of_a_request(heads):
    """Rows of a token decide the kernel; equal lengths have offsets of their own."""
    one, *others = (replace(EQUAL, heads_q=heads[0], heads_kv=heads[1], q_lens=(n, n)) for n in (1, 2, 3, 4, 8, 9, 17))
    for case in others:
        n = case.q_lens[0]
        same_on_every_machine(DECODE, tokens_apart(one, 1), tokens_apart(case, n))
        same_on_every_machine(DECODE, decode_inputs(one), decode_inputs(case))
        same_on_every_machine(DECODE, decode_inputs(case), tokens_apart(case, n))
        invariant = {"batch_invariant": True}
        same_on_every_machine(DECODE, tokens_apart(case, n), tokens_apart(case, n) | invariant)
    wide = replace(EQUAL, q_lens=(2,) * 4, kv_lens=(19, 37) * 2)  # as many tokens: 4 requests of 2, or 2 of 4
    same_on_every_machine(DECODE, tokens_apart(wide, 2), tokens_apart(replace(EQUAL, q_lens=(4, 4)), 4))


def test_interleaved_scales_have_a_plan():
    inputs = decode_inputs(replace(PLAIN, kv_dtype="nvfp4"))
    same_on_every_machine(DECODE, inputs, inputs | {"v_scales_interleaved": True})


@pytest.mark.parametrize("q_lens", [(1,), (1, 2)])
@pytest.mark.parametrize("bound", [-1, -9])
def test_a_known_plan_accepts_no_negative_bound(here, q_lens, bound):
    inputs = cases.make_inputs(replace(PLAIN, q_lens=q_lens, kv_lens=(20, 31)[: len(q_lens)]))
    for most in (0, 1, 2, 50):
        CONTEXT(**inputs | {"max_q_len": most})
    with pytest.raises(ValueError, match=f"^max_q_len: {bound}, must be at least 0"):
        CONTEXT(**inputs | {"max_q_len": bound})


@pytest.mark.by_shape
@pytest.mark.parametrize("tokens, keys, schedule", [(1, 4096, "stream_k"), (1, 40, "stream_k"), (9, 40, "tiles")])
def test_shapes_choose_the_kernel_of_every_function(here, tokens, keys, schedule):
    inputs = cases.make_inputs(replace(PLAIN, q_lens=(tokens, tokens), kv_lens=(keys, keys)))
    CONTEXT(**inputs)
    DECODE(**cases.as_decode(inputs))
    (op, spec, _), (of_decode, same, _) = here.launches
    assert (op, spec) == (of_decode, same) and spec.schedule == schedule


def test_functions_share_no_plan(here):
    inputs = cases.make_inputs(replace(PLAIN, q_lens=(1, 2)))
    for _ in range(2):
        CONTEXT(**inputs)
        DECODE(**cases.as_decode(inputs))
    assert [op for op, _, _ in here.launches] == ["attention.sm90", "attention.decode"] * 2


TOPK_CASES = {
    "dtype": {"dtype": "bf16"}, "rows": {"rows": 6}, "width": {"width": 51}, "long": {"width": 30_000}, "k": {"k": 8},
}  # fmt: skip
TOPK_TRANSFORM = {"ties": {"tie_break": 2}, "starts": {"starts": True}}
TOPK_OWN = {
    topk_cases.PAGE_TABLE: TOPK_TRANSFORM | {
        "pages": {"page_size": 4}, "map": {"batch_map": True}, "outputs": {"given": False},
        "table": {"width_table": 90},
    },
    topk_cases.RAGGED: TOPK_TRANSFORM,
    topk_cases.TOP_K: {"ties": {"tie_break": 2}},
    topk_cases.PREFILL: {},
    topk_cases.DECODE: {"next_n": {"next_n": 1}, "ends": {"each_row": True}},
}  # fmt: skip


@pytest.mark.parametrize("function,fact", [(f, n) for f in topk_cases.FUNCTIONS for n in TOPK_CASES | TOPK_OWN[f]])
def test_top_k(function, fact):
    plain = topk_cases.PLAIN[function]
    other = replace(plain, **(TOPK_CASES | TOPK_OWN[function])[fact])
    same_on_every_machine(getattr(wrappers, function), *map(topk_cases.make_inputs, (plain, other)))


def everything():
    """A call of every kind."""
    yield CONTEXT, cases.make_inputs(PLAIN)
    yield DECODE, decode_inputs(PLAIN)
    yield DECODE, tokens_apart(EQUAL, 2)
    for function in topk_cases.FUNCTIONS:
        yield getattr(wrappers, function), topk_cases.make_inputs(topk_cases.PLAIN[function])


def test_devices_have_plans_of_their_own(here, monkeypatch):
    for device in (0, 1, 0):
        monkeypatch.setattr(torch.Tensor, "get_device", lambda self, device=device: device)
        for function, inputs in everything():
            function(**inputs)
    assert len(here.plans) == 2 * len(list(everything()))


def test_launches_are_made_on_the_tensors_device(here):
    """`FakeMachine` says no where one is made, or a stream asked for, while another device is current."""
    here.devices, here.device = 2, 1
    for _ in range(2):
        for function, inputs in everything():
            function(**inputs)
            assert here.device == 1, "the caller's device is current again"
    assert len(here.launches) == 2 * len(list(everything()))


def test_more_tiles_than_prefill_counts(here, monkeypatch):
    """If every request owned all tokens: by the launch, so with a plan and without."""
    inputs = cases.make_inputs(PLAIN)
    CONTEXT(**inputs)
    (tokens, heads, _), batch = inputs["query"].shape, inputs["batch_size"]
    plan = next(iter(here.plans.values()))
    most = batch * heads * (tokens // plan.tile_m + 1)
    for limit, refused in ((most, True), (most + 1, False)):
        monkeypatch.setattr(attention_plan, "MOST_TILES", limit)
        for _ in range(2):
            launches = len(here.launches)
            if refused:
                with pytest.raises(NotImplementedError, match=f"^query: {tokens} tokens of {heads} heads, {batch} "):
                    CONTEXT(**inputs)
            else:
                CONTEXT(**inputs)
            assert len(here.launches) == launches + (not refused)
        here.plans.clear()


def test_more_heads_than_kernels_divide_exactly(here, monkeypatch):
    inputs = cases.make_inputs(PLAIN)
    heads, kv_heads = inputs["query"].shape[1], inputs["kv_cache"][0].shape[1]
    most = heads * (heads // kv_heads)
    for limit, refused in ((most, True), (most + 1, False)):
        monkeypatch.setattr(checks, "MOST_ROWS", limit)
        if refused:
            with pytest.raises(NotImplementedError, match=f"^query: {heads} heads, {heads // kv_heads} per KV head; "):
                CONTEXT(**inputs)
        else:
            CONTEXT(**inputs)
        assert len(here.launches) == (not refused)


@pytest.mark.parametrize("equal", [True, False])
def test_more_rows_of_a_request_than_kernels_divide_exactly(here, monkeypatch, equal):
    """Rows of one request, if the host knows how many tokens it has; else all rows might be those of one."""
    inputs = tokens_apart(replace(EQUAL, q_lens=(3, 3)), 3)
    if not equal:
        inputs |= {"max_q_len": 3, "cum_seq_lens_q": torch.tensor([0, 3, 6], dtype=torch.int32), "q_len_per_req": None}
    DECODE(**inputs)
    factor = next(iter(here.plans.values())).pack_factor
    most = (3 if equal else 6) * factor * factor
    for limit, refused in ((most, True), (most + 1, False)):
        here.plans.clear()
        monkeypatch.setattr(checks, "MOST_ROWS", limit)
        launches = len(here.launches)
        if refused:
            with pytest.raises(NotImplementedError, match="^query: 6 tokens of .* must be below"):
                DECODE(**inputs)
        else:
            DECODE(**inputs)
        assert len(here.launches) == launches + (not refused)


def test_offsets_of_equal_requests(here):
    """Written before another stream can read them. A graph has those that are kept, or its own, which nobody else gets,
    where none are yet."""
    inputs, found = tokens_apart(EQUAL, 2), []
    for here.capturing in (True, False, False, True):
        DECODE(**inputs)
        found.append(here.launches[-1][2]["cu_seqlens_q"])
        assert found[-1].tolist() == [0, 2, 4]
    assert found[1] is found[2] is found[3] and found[0] is not found[1]
    assert here.waits.count(torch.device("cpu")) == 2, "once for counters, once for the offsets"
    here.plans.clear()
    here.capturing = False
    DECODE(**inputs)
    assert here.launches[-1][2]["cu_seqlens_q"] is found[1], "another stream may still read what a plan had"
    DECODE(**tokens_apart(replace(EQUAL, q_lens=(3, 3)), 3))
    assert here.launches[-1][2]["cu_seqlens_q"].tolist() == [0, 3, 6], "as many requests of another length"


@pytest.mark.parametrize("change", [
    "table", "table's memory", "transposed", "lengths", "lengths' memory", "lengths' stride", "offsets",
])  # fmt: skip
def test_index_tensors_that_are_changed_in_place_are_seen(here, change):
    """What was made of the last ones is kept by identity."""
    case = replace(PLAIN, kv_lens=(19, 30))
    inputs = cases.make_inputs(case) | {"block_tables": torch.arange(4).int().view(2, 2)}
    apart = torch.tensor([19, 1, 30, 1], dtype=torch.uint32)
    inputs["seq_lens"] = apart[:2] if change == "lengths' stride" else apart[::2].contiguous()
    CONTEXT(**inputs)
    table, lens, offsets = (inputs[n] for n in ("block_tables", "seq_lens", "cum_seq_lens_q"))
    refused = None
    if change == "table":
        table.resize_(2, 1)
    elif change == "table's memory":
        table.set_(torch.ones(2, 2, dtype=torch.int32))
    elif change == "transposed":
        table.t_()
        refused = "block_tables: strides"  # by compiled code
    elif change == "lengths":
        lens.resize_(1)
        refused = "batch_size: 2"
    elif change == "lengths' memory":
        lens.set_(torch.tensor([1, 2], dtype=torch.uint32))
    elif change == "lengths' stride":
        lens.set_(apart.untyped_storage(), 0, (2,), (2,))
        refused = "seq_lens: stride"
    else:
        offsets.resize_(2)
        refused = "cum_seq_lens_q: shape"
    if refused:
        with pytest.raises(ValueError, match=refused):
            CONTEXT(**inputs)
        assert len(here.launches) == 1
        return
    CONTEXT(**inputs)
    launch = here.launches[-1][2]
    assert torch.equal(launch["page_table"], table[:, None].expand(-1, 2, -1))
    assert launch["kv_lens"].tolist() == lens.tolist()


def test_streams_have_scratch_of_their_own(here):
    """Two launches that may overlap share neither counters nor parts; those of a stream do."""
    inputs, seen = decode_inputs(PLAIN), {}
    for here.stream in (0, 7, 0, 7, scratch.PER_THREAD_STREAM, scratch.PER_THREAD_STREAM):
        DECODE(**inputs)
        launch = here.launches[-1][2]
        seen.setdefault(here.stream, []).append((launch["o_partial"], launch["counters"]))
    for stream, found in seen.items():
        kept = found[0][0].data_ptr() == found[1][0].data_ptr()
        assert kept == (stream != scratch.PER_THREAD_STREAM) and not found[1][1].any()
    assert len({t.data_ptr() for found in seen.values() for pair in found for t in pair}) == 8


KEPT = {  # what the host keeps per device -> how it is found
    "constants": lambda device: scratch.pages_in_order(device, 2, 3),
    "slopes of ALiBi": lambda device: values.alibi_slopes(5, device),
    "turns of RoPE": lambda device: rope.turns_of(device, 16, Rope()),
    "a page table of requests without pages": lambda device: ragged_sequences(
        *torch.zeros(2, 3, dtype=torch.int32, device=device)
    ).page_table,
}  # fmt: skip


@pytest.mark.parametrize("kept", KEPT)
def test_devices_have_constants_of_their_own(here, kept):
    for device in ("cpu", "meta", "cpu"):
        assert KEPT[kept](torch.device(device)).device.type == device


@pytest.mark.parametrize(
    "change, most",
    [
        ({"window_left": 99}, 100 + 4),  # the tokens of a request are at most the next power of two
        ({"window_left": 99, "causal": False}, 1 << 30),  # each token sees all later ones
        ({}, 1 << 30),
    ],
)
def test_visible_keys_are_bounded_by_a_causal_window(change, most):
    p = cases.make_call(replace(PLAIN, q_lens=(3, 1), kv_lens=(90, 40)))
    request = attention_plan.request_of(p._replace(**change))
    assert (request.visible_keys, request.causal) == (most, change.get("causal", True))


@pytest.mark.parametrize("size", ["most_ctas", "tile_m", "dim_vo", "counters_per_split"])
def test_larger_launches_have_more_scratch(here, size):
    """Though all else in their plans is equal."""
    DECODE(**decode_inputs(PLAIN))
    (plan,) = here.plans.values()
    for larger in (plan, replace(plan, **{size: 2 * getattr(plan, size)})):
        want = scratch.new_split_scratch(larger, 2 * larger.most_ctas, larger.most_ctas)
        for _ in range(2):
            assert [t.shape for t in scratch.split_scratch(larger, False)[:2]] == [t.shape for t in want]


def test_equal_calls_share_a_plan(here):
    for _ in range(3):
        for function, inputs in everything():
            function(**inputs)
    assert len(here.plans) == len(list(everything()))


def test_a_known_plan_refuses_values_that_do_not_fit_keys(here):
    """Without pages, the key of a plan has not all of their shapes."""
    q, k, v = (torch.zeros(7, heads, 64).half() for heads in (4, 2, 2))
    starts = torch.tensor([0, 7], dtype=torch.int32)
    given = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 7, "max_seqlen_k": 7}
    wrappers.flash_attn_varlen_func(q, k, v, **given)
    for other in (v[:, :1], v[:6]):
        with pytest.raises(ValueError, match="^k, v: K .* and V .* may differ in the last dimension only"):
            wrappers.flash_attn_varlen_func(q, k, other, **given)
    assert len(here.launches) == 1


PER_TOKEN = {  # a tensor with a row per token of the query -> a call with the first rows of such a tensor
    "mask": lambda rows: DECODE(**decode_inputs(PLAIN, mask=DRAFTS[[*range(42), 0]][:rows])),
    "ranges": lambda rows: op.serve(cases.make_call(PLAIN)._replace(ranges=torch.zeros(43, 2).int()[:rows])),
}


@pytest.mark.parametrize("rows", [0, 41, 43])
@pytest.mark.parametrize("name", PER_TOKEN)
def test_a_known_plan_refuses_fewer_and_more_rows_than_tokens(here, name, rows):
    """The key of a plan has no number of tokens."""
    PER_TOKEN[name](42)
    with pytest.raises(ValueError, match=f"^{name}: .*42"):
        PER_TOKEN[name](rows)
    assert len(here.launches) == 1


def test_a_plan_keeps_nothing_of_a_call(here):
    """It would hold memory, and threads would see each other's tensors."""
    for function, inputs in everything():
        for _ in range(2):
            function(**inputs)
        given = [id(value) for value in here.launches[-1][2].values() if isinstance(value, torch.Tensor) and len(value)]
        assert given and not {id(value) for plan in here.plans.values() for value in plan.flat} & {*given}
