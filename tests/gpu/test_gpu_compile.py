"""torch.compile on a Hopper GPU, with CUDA graphs: every public function and class in every mode, as first calls too;
and memory that is kept lies in no pool of somebody else; operators, modes of torch, a step compiled ahead of time."""

import gc
import weakref

import pytest
import torch
from torch.utils.cpp_extension import CUDA_HOME

import wrappers
from tests.conftest import run_python
from tests.support import compiled
from tests.support.gpu import captured
from wrappers.attention import call
from wrappers.host import machine

GRAPHS = ("reduce-overhead", "max-autotune")
MODES = ("default", *GRAPHS)
AROUND = {
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cuda", torch.bfloat16),
}


@pytest.fixture(autouse=True)
def one_compiler(fresh_compiler, monkeypatch):
    """Compile in this process: the tests run in many processes at a time, and their kernels are few."""
    from torch._inductor import config

    with config.patch(compile_threads=1):
        yield
    torch.compiler.reset()


def graphs():
    """Return the number of CUDA graphs that begin a sequence of them, of all that torch.compile has captured here."""
    from torch._inductor import cudagraph_trees as trees

    manager = trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    return 0 if manager is None else len(list(manager.get_roots()))


# ---- every function in every mode


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("group", compiled.EVERY)
def test_compiled(group, mode, dynamic):
    """Nothing is kept before: the compiled call makes the counters, scratch and constants, within torch's own pool."""
    with compiled.nothing_kept():
        run = compiled.matches_eager(group, "cuda", mode=mode, dynamic=dynamic)
        assert (graphs() > 0) == (mode in GRAPHS), "CUDA graphs were captured"
        del run  # graphs live as long as it


@pytest.mark.parametrize("mode", MODES)
def test_the_first_call_of_a_process(mode):
    code = f"from tests.support import compiled; compiled.first_call('cuda', {mode!r})"
    done = run_python("-c", code, TORCHINDUCTOR_COMPILE_THREADS="1")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split()[-1:] == ["equal"]


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_in_a_mode_of_torch(mode, around):
    with compiled.nothing_kept():
        compiled.matches_eager("first", "cuda", AROUND[around], runs=((0, 0), (0, 1), (0, 2)), mode=mode)


@pytest.mark.parametrize("mode", MODES)
def test_functional_call(mode):
    with compiled.nothing_kept():
        compiled.functional_call_matches("cuda", mode=mode)


@pytest.mark.parametrize("operator,group,name", compiled.OPERATORS)
def test_opcheck(operator, group, name):
    compiled.opcheck(operator, group, name, "cuda")


@pytest.mark.skipif(CUDA_HOME is None, reason="torch needs the CUDA toolkit to compile ahead of time")
def test_a_decode_step_compiled_ahead_of_time(tmp_path):
    compiled.exported_matches("cuda", tmp_path / "layer.pt2")


# ---- memory of pools that belong to others


def test_a_scale_that_changes_between_calls():
    """A number is part of the graph, so that another one is another graph."""
    q, k, v, table, lens = compiled.layer_inputs("cuda")

    def step(q, scale):
        call = wrappers.trtllm_batch_decode_with_kv_cache
        return call(q * 2, (k, v), None, table, lens, None, scale, kv_layout="HND") * 0.5

    run = torch.compile(step, fullgraph=True, dynamic=True, mode="reduce-overhead")
    for scale in (0.125, 0.125, 0.125, 0.25, 0.25, 0.25, 0.125):
        torch.compiler.cudagraph_mark_step_begin()
        assert compiled.bits_of(run(q, scale)) == compiled.bits_of(step(q, scale)), scale


def test_eager_calls_between_compiled_ones():
    """Compiled and eager calls share what is kept. Tables of eager calls are results of a graph, which owns them."""
    step, make = compiled.TABLES["trtllm_batch_decode_with_kv_cache"]

    def tables(given):
        return given["block_tables"] + 0, given["seq_lens"] + 0

    with compiled.nothing_kept():
        run = torch.compile(step, fullgraph=True, mode="reduce-overhead")
        describe = torch.compile(tables, fullgraph=True, mode="reduce-overhead")
        for seed in range(5):
            given = make("cuda", 0, seed)
            want = compiled.bits_of(step(given))
            torch.compiler.cudagraph_mark_step_begin()
            table, lens = describe(given)
            again = given | {"block_tables": table, "seq_lens": lens}
            assert compiled.bits_of(step(again)) == want
            assert compiled.bits_of(run(again)) == want
            del again, table, lens


def test_inside_an_operator_of_the_caller():
    """The plain function runs within torch's run before its capture, on a table in the pool of the graph."""
    step, make = compiled.TABLES["trtllm_batch_decode_with_kv_cache"]
    decode = wrappers.trtllm_batch_decode_with_kv_cache

    @torch.library.custom_op("cute_kernels_tests::decode", mutates_args=())
    def operator(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, lens: torch.Tensor
    ) -> torch.Tensor:
        return decode(q, (k, v), None, table, lens, None, 0.125, kv_layout="HND")

    operator.register_fake(lambda q, *_: torch.empty_like(q))

    def layer(q, k, v, table, lens):
        return operator(q * 2, k, v, table + 0, lens + 0) * 0.5

    with compiled.nothing_kept():
        run = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
        for seed in range(4):
            inputs = compiled.layer_inputs("cuda", 0, seed)
            torch.compiler.cudagraph_mark_step_begin()
            found = compiled.bits_of(run(*inputs))
            assert found == compiled.bits_of(layer(*inputs)), seed


def test_nothing_is_kept_in_a_pool_of_the_caller():
    pool = torch.cuda.MemPool()
    given = {group: compiled.inputs_of(group, "cuda", 0, 0) for group in compiled.EVERY}
    with compiled.nothing_kept() as here:
        with torch.cuda.use_mem_pool(pool):
            for group in compiled.EVERY:
                found = compiled.group_step(group)(given[group])
                torch.cuda.synchronize()
                del found
        assert here.counter_pools and here.constants and here.plans
        gc.collect()
        blocks = [block for segment in pool.snapshot() for block in segment["blocks"]]
        assert blocks, "the results lay in the pool"
        assert not [block for block in blocks if block["state"] == "active_allocated"]


def test_tables_of_a_capture_are_released():
    step, make = compiled.TABLES["trtllm_batch_decode_with_kv_cache"]
    given = make("cuda", 0, 0)
    want = compiled.bits_of(step(given))
    refs = []

    def work():
        own = given | {"block_tables": given["block_tables"] + 0, "seq_lens": given["seq_lens"] + 0}
        refs.extend(weakref.ref(own[name]) for name in ("block_tables", "seq_lens"))
        return step(own)

    before = call._kept
    graph, result = captured(work, {})
    gc.collect()
    assert [ref() for ref in refs] == [None, None] and call._kept is before
    graph.replay()
    assert compiled.bits_of(result) == want


def test_captures_of_torch_before_any_other_call():
    """torch.compile makes the first call of all, and a capture by hand comes after it. Both find the counters."""
    with compiled.nothing_kept() as here:
        compiled.matches_eager("first", "cuda", runs=((0, 0), (0, 1)), mode="reduce-overhead")
        counters = [pool.counters for pool in here.counter_pools.values()]
        assert len(counters) == 1 and not counters[0].any(), "all are zero between launches"
        step, make = compiled.TABLES["trtllm_batch_context_with_kv_cache"]
        given = make("cuda", 0, 0)
        want = compiled.bits_of(step(given))
        graph, result = captured(lambda: step(given), {})
        graph.replay()
        assert compiled.bits_of(result) == want


def test_a_machine_is_told_in_the_first_run_and_in_the_capture():
    """`HostMachine.may_keep` inside torch's run before the capture, inside the capture, and outside both."""
    said = []

    @torch.library.custom_op("cute_kernels_tests::ask", mutates_args=())
    def ask(x: torch.Tensor) -> torch.Tensor:
        said.append((machine.current.may_keep(x.device), torch.cuda.is_current_stream_capturing()))
        return x.clone()

    ask.register_fake(torch.empty_like)
    run = torch.compile(lambda x: ask(x * 2) + 1, fullgraph=True, mode="reduce-overhead")
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        run(torch.ones(4, device="cuda"))
    assert said == [(False, False), (False, True)]
    ask(torch.ones(4, device="cuda"))
    assert said[2:] == [(True, False)]
