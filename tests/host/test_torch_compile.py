"""torch.compile on the CPU: every public function in the default mode, under other modes of torch, and exported. On a
fake machine: where memory that is kept between calls comes from. With CUDA graphs, on a GPU: test_gpu_compile.py."""

import gc
import inspect
import shutil
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import cycle
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tests.conftest import run_python
from tests.support import compiled, graphs
from tests.support.fake_machine import FakeMachine
from wrappers import (
    KVCacheTarget,
    append_qkv,
    concat_mla_k,
    concat_mla_q,
    dsa_indexer_topk,
    get_batch_indices_positions,
    trtllm_batch_decode_with_kv_cache_mla,
)
from wrappers.attention import call
from wrappers.flashinfer import values
from wrappers.host import machine, scratch
from wrappers.own import registry

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
compiles = [  # 5 to 20 s each: not for `make quick`
    pytest.mark.kernels,
    pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler"),
]
AROUND = {
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


def compiles_test(test):
    for mark in compiles:
        test = mark(test)
    return test


# ---- the compiler


def test_every_public_function_has_a_step():
    names = {name for group in compiled.EVERY for name in compiled.GROUPS[group]}
    others = {"paged", "sinks", "ragged", "decode", *compiled.CACHES}  # and those of test_traced.py
    others |= {"single_prefill_with_kv_cache_return_lse"}  # single_prefill_with_kv_cache
    others |= {"get_paged_mqa_logits_metadata"}  # returns an empty tensor
    families = registry.ATTENTION, registry.TOP_K, registry.INDEXER
    served = {row.name for row in registry.FUNCTIONS if row.family in families}
    assert names | others == served | others


# Full: the first call of a process, below, covers each group in part, and graphs of dynamic sizes trace all of them.
@pytest.mark.full
@compiles_test
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("group", compiled.EVERY)
def test_compiled(group, dynamic, fresh_compiler):
    compiled.matches_eager(group, "cpu", dynamic=dynamic)


# Groups that have graphs of dynamic sizes with --all alone, and run in a mode of torch instead, in graphs of one size:
# they call operators that the other groups have in graphs of dynamic sizes.
IN_MODES = ("sparse", "others", "classes")


@pytest.mark.parametrize(
    "group,around",
    [
        pytest.param(group, around, marks=() if group in IN_MODES else [pytest.mark.kernels, pytest.mark.full])
        for group, around in zip(compiled.EVERY, cycle(AROUND))
    ],
)
def test_in_a_mode_of_torch(group, around, fresh_compiler):
    compiled.matches_eager(group, "cpu", AROUND[around], runs=((0, 0), (0, 1)), backend="aot_eager")


GRAPHS = {"classes": 2}  # of both sizes; the number of requests of a plan is a constant


ALL_CALLS = pytest.param((), id="all calls", marks=[pytest.mark.kernels, pytest.mark.full])


@pytest.mark.parametrize("without", [pytest.param(compiled.SAME_CALL, id="each call once"), ALL_CALLS])
@pytest.mark.parametrize(
    "group",
    [
        pytest.param(group, marks=[pytest.mark.kernels, pytest.mark.full] if group in IN_MODES else ())
        for group in compiled.EVERY
    ],
)
def test_graphs_of_dynamic_sizes(group, without, fresh_compiler):
    """One graph serves both sizes. It writes to no input, so that it can be a CUDA graph, and searches no view."""
    found = []
    runs = (0, 0), (1, 1)
    compiled.matches_eager(group, "cpu", runs=runs, without=without, dynamic=True, backend=graphs.keeping(found))
    assert len(found) == GRAPHS.get(group, 1)
    for graph in found:
        assert graphs.written_inputs(graph) == []
        assert not [node for node in graphs.searched(graph) if graphs.is_view(node)]


def offsets(*values):
    """Return int64 offsets behind a number that is none of them, of which a step takes a view."""
    return torch.tensor([99, *values])


SEARCHES = {  # steps that search in offsets, of which each gets a view
    "get_batch_indices_positions": (
        lambda starts, lens: get_batch_indices_positions(starts[1:], lens, 6),
        lambda: (offsets(0, 2, 2, 5), torch.tensor([4, 0, 3])),
    ),
    "trtllm_batch_decode_with_kv_cache_mla, sparse_mla_top_k_lens": (
        lambda q, cache, slots, lens, starts: trtllm_batch_decode_with_kv_cache_mla(
            q, cache, None, 128, 512, 64, slots, None, 8, sparse_mla_top_k=4, cum_seq_lens_q=starts[1:], max_q_len=2,
            sparse_mla_top_k_lens=lens,
        ),
        lambda: (torch.randn(3, 4, 576).half(), torch.randn(2, 16, 576).half(), torch.randint(32, (3, 4)).int(),
                 torch.tensor([1, 3]).int(), offsets(0, 2, 3).int()),
    ),
    "dsa_indexer_topk": (
        lambda q, k, w, ends: dsa_indexer_topk(q, k, w, ends[1:], ends[1:], top_k=2),
        lambda: (torch.randn(5, 4, 32).bfloat16(), torch.randn(5, 32).bfloat16(), torch.rand(5, 4),
                 offsets(0, 2, 5).int()),
    ),
}  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", SEARCHES)
def test_no_view_is_searched(name, dynamic, fresh_compiler):
    step, make = SEARCHES[name]
    given, found = make(), []
    run = torch.compile(step, fullgraph=True, dynamic=dynamic, backend=graphs.keeping(found))
    assert compiled.bits_of(run(*given)) == compiled.bits_of(step(*given))
    nodes = [node for graph in found for node in graphs.searched(graph)]
    assert nodes and not [node for node in nodes if graphs.is_view(node)]


@pytest.mark.parametrize("join", [concat_mla_q, concat_mla_k])
def test_rows_that_are_joined_are_not_written(join, fresh_compiler):
    """The operator that joins rows also writes a cache, which these calls lack."""

    def step(latent, rotated):
        out = latent.new_empty(*latent.shape[:2], latent.shape[2] + rotated.shape[2])
        join(latent, rotated, out) if join is concat_mla_q else join(out, latent, rotated[:, :1])
        return out

    latent, rotated, found = torch.randn(3, 4, 32).half(), torch.randn(3, 4, 8).half(), []
    run = torch.compile(step, fullgraph=True, backend=graphs.keeping(found))
    assert compiled.bits_of(run(latent, rotated)) == compiled.bits_of(step(latent, rotated))
    assert graphs.written_inputs(found[0]) == []


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[*compiles, pytest.mark.full])])
def test_the_first_call_of_a_process(backend):
    """In one size. Other sizes, which compile anew, are those of `test_compiled`."""
    call = f"compiled.first_call('cpu', 'default', sizes=(0, 0), backend={backend!r})"
    done = run_python("-c", f"from tests.support import compiled; {call}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["equal"]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[*compiles, pytest.mark.full])])
def test_functional_call(backend, fresh_compiler):
    compiled.functional_call_matches(CPU, backend=backend)


@pytest.mark.parametrize("operator,group,name", compiled.OPERATORS)
def test_opcheck(operator, group, name):
    compiled.opcheck(operator, group, name, "cpu")


@pytest.mark.parametrize("dynamic", [True, False])
def test_caches_that_are_indexed_inside(dynamic):
    """With dynamic sizes torch.compile loses the offset of a view that an operator writes: such a call is refused."""

    def step(k, caches, slots):
        append_qkv(None, k, k, KVCacheTarget((caches[0][1], caches[1][1])), slots)
        return k + 1

    k, slots = torch.randn(5, 3, 16).bfloat16(), torch.tensor([3, 5, 6, -1, 30])
    got, want = ([torch.zeros(3, 4, 8, 3, 16).bfloat16() for _ in range(2)] for _ in range(2))
    run = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    if dynamic:
        with pytest.raises(Exception, match="k_cache: a view at offset"):
            run(k, got, slots)
        return
    run(k, got, slots)
    step(k, want, slots)
    assert all(map(torch.equal, got, want)) and want[0].any()


def test_opcheck_covers_every_operator():
    assert compiled.operators() == {operator for operator, _, _ in compiled.OPERATORS}


def test_an_exported_decode_step():
    compiled.exported_matches("cpu")


@pytest.mark.full
@compiles_test
def test_a_decode_step_compiled_ahead_of_time(tmp_path):
    compiled.exported_matches("cpu", tmp_path / "layer.pt2")


# ---- memory that is kept between calls


def nothing(op, spec):
    """Return a kernel that writes nothing: results are not looked at."""
    return lambda *flat: None


def alive():
    """Return the tensors with memory that were made in inference mode, a mode of one thread, like a memory pool."""
    gc.collect()
    return [
        t for t in gc.get_objects()
        if type(t) is torch.Tensor and t.is_inference() and not t.is_meta and t.untyped_storage().nbytes()
    ]  # fmt: skip


@contextmanager
def first_calls(monkeypatch, **state):
    """Yield a machine for which nothing is kept yet, anywhere."""
    fake = FakeMachine(nothing)
    vars(fake).update(state)
    monkeypatch.setattr(call, "_kept", ())
    monkeypatch.setattr(values, "_slopes", {})
    with machine.override(fake):
        yield fake


def run_all():
    """Call every function and run every class in inference mode, with inputs that were made outside it."""
    for group in compiled.EVERY:
        given = compiled.inputs_of(group, "cpu", 0, 0)
        with torch.inference_mode():
            compiled.group_step(group)(given)


def test_what_is_kept_is_allocated_by_another_thread(monkeypatch):
    before = {id(t) for t in alive()}
    with first_calls(monkeypatch) as fake:
        run_all()
        held = fake.counter_pools, fake.split_scratch, fake.offsets, fake.constants, fake.plans, values._slopes
        assert all(held), "each kind is in use"
        assert [t for t in alive() if id(t) not in before] == []


@pytest.mark.parametrize("state", ["capturing", "warming"])
def test_nothing_of_a_captured_call_is_kept(monkeypatch, state):
    """In a capture nothing is allocated to be kept. In torch.compile's run before it, memory of another thread is."""
    before, kept = {id(t) for t in alive()}, []
    allocate = scratch.kept
    for where in (scratch, values):
        monkeypatch.setattr(where, "kept", lambda *args, **given: kept.append(1) or allocate(*args, **given))
    with first_calls(monkeypatch, **{state: True}) as fake:
        run_all()
        assert call._kept == ()
        assert [t for t in alive() if id(t) not in before] == []
        held = fake.counter_pools, fake.split_scratch, fake.offsets, fake.constants, values._slopes
        if state == "capturing":
            assert not any(held) and not kept
        else:
            assert all(held) and kept


@pytest.mark.parametrize("state,keeps", [("", True), ("capturing", False), ("warming", False)])
def test_tables_of_a_captured_call_are_released(monkeypatch, state, keeps):
    step, make = compiled.TABLES["trtllm_batch_decode_with_kv_cache"]
    given = make("cpu", 0, 0)
    refs = [weakref.ref(given[name]) for name in ("block_tables", "seq_lens")]
    with first_calls(monkeypatch, **({state: True} if state else {})):
        step(given)
        del given
        gc.collect()
        assert [ref() is not None for ref in refs] == [keeps, keeps]
        call._kept = ()


def test_the_thread_has_the_callers_stream(monkeypatch):
    log = []
    main, device, stream = (
        threading.get_ident(),
        torch.device("cuda", 1),
        SimpleNamespace(device=torch.device("cuda", 1)),
    )

    def note(what, *more):
        log.append((threading.get_ident() == main, what, *more))

    @contextmanager
    def entered(what, value):
        note(what, value)
        yield
        note(f"end of {what}")

    def current_stream(of):
        note("current stream of", of)
        return stream

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(torch.cuda, "device", lambda value: entered("device", value))
    monkeypatch.setattr(torch.cuda, "stream", lambda value: entered("stream", value))
    here = machine.HostMachine()
    here.synchronize = lambda of: note("wait for", of)
    with machine.override(here):
        assert scratch.kept(lambda: note("make") or 5, device, wait=True) == 5
    assert log == [
        (True, "current stream of", device), (False, "device", device), (False, "stream", stream), (False, "make"),
        (False, "wait for", device), (False, "end of stream"), (False, "end of device"),
    ]  # fmt: skip


def test_the_thread_has_no_mode_of_the_caller():
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        made, autocast = scratch.kept(lambda: (torch.empty(3), torch.is_autocast_enabled("cpu")), CPU)
    assert not made.is_inference() and not autocast and made.device == CPU


@pytest.mark.parametrize("mode", [FakeTensorMode, lambda: torch.device("meta"), compiled.Seen])
def test_slopes_made_under_a_mode_are_not_kept(monkeypatch, mode):
    monkeypatch.setattr(values, "_slopes", {})
    with mode():
        values.alibi_slopes(6, CPU)
    assert not values._slopes
    made = values.alibi_slopes(6, CPU)
    assert type(made) is torch.Tensor and values._slopes == {(CPU, 6): made}


def test_an_error_reaches_the_caller():
    with pytest.raises(ZeroDivisionError):
        scratch.kept(lambda: 1 / 0, CPU)


def test_torch_compile_is_known_by_its_stream(monkeypatch):
    """Its run before a capture is on the stream that `torch._inductor.cudagraph_trees` has made for a device."""
    device, name = torch.device("cuda", 1), "torch._inductor.cudagraph_trees"
    here = machine.HostMachine()
    here.uncaptured_stream = lambda device: 7

    def trees(index, stream):
        container = SimpleNamespace(tree_manager=stream and SimpleNamespace(stream=SimpleNamespace(cuda_stream=stream)))
        return SimpleNamespace(local=None, get_obj=lambda local, name: {index: container})

    known = [
        (None, True),
        (trees(1, 7), False),
        (trees(1, 8), True),
        (trees(0, 7), True),
        (trees(1, None), True),
        (SimpleNamespace(), True),
    ]
    for module, keeps in known:
        monkeypatch.setitem(sys.modules, name, module)
        assert here.may_keep(device) is keeps
    here.uncaptured_stream = lambda device: None
    assert not here.may_keep(device)


def test_torch_has_the_names_that_are_asked_for():
    """`machine._warms_up` reads private attributes of torch, which another version may rename."""
    from torch._inductor import cudagraph_trees as trees

    containers = trees.get_obj(trees.local, "tree_manager_containers")
    assert isinstance(containers, dict)
    assert "tree_manager" in vars(trees.TreeManagerContainer(0))
    assert "self.stream = torch.cuda.Stream()" in inspect.getsource(trees.CUDAGraphTreeManager.__init__)
    assert machine._warms_up(0, 7) is False
    with ThreadPoolExecutor(1) as thread:  # no graph of torch.compile has run in it
        assert thread.submit(machine._warms_up, 0, 7).result() is False
