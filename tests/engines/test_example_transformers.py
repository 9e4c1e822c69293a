"""transformers on the paged cache: four tiny models against eager attention, requests that come and go, refusals."""

import contextlib
import io
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from examples import hugging_face as example
from tests.support.engine_files import attention
from tests.support.fake_machine import FakeMachine
from tests.support.host_work import WAITS, Seen
from tests.support.untouched import WAYS, moved, prepared, watch_transformers
from wrappers import fp4
from wrappers.attention.bound import LayerLaunch
from wrappers.host import machine
from wrappers.integrations import transformers as integration
from wrappers.integrations.transformers import PagedCache, StorageFormat, register

E4M3, E5M2, U8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8  # the last: NVFP4
LENGTHS = (3, 40, 1, 27)  # some with more keys than the window has


def prompts_of(lengths, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, example.VOCABULARY, (n,), generator=generator).to(device) for n in lengths]


def tiny(name, device="cpu"):
    return example.model_of(example.config_of(name, hidden=64, layers=2), device)


@pytest.fixture(autouse=True)
def watching(monkeypatch):
    watch_transformers(monkeypatch)


@pytest.fixture(scope="module")
def llama():
    return tiny("llama")


@pytest.mark.parametrize("name", example.MODELS)
def test_as_exact_as_eager_attention(name, device):
    model = tiny(name, device)
    found = example.generate(model, prompts_of(LENGTHS, device=device), 5)
    assert [len(t) for t in found.tokens] == [len(x) for x in found.logits] == [n + 4 for n in LENGTHS]
    for length, tokens, logits in zip(LENGTHS, found.tokens, found.logits):
        assert torch.equal(logits[length - 1 : -1].argmax(-1), tokens[length:])  # each the likeliest after the last
    e = example.errors(model, found)
    assert 0 < e.ours <= 2 * e.eager < 0.1 * e.largest


@pytest.mark.parametrize(
    "name, change",
    [
        ("gemma2", {"logits_soft_cap": None}),
        ("gemma2", {"window_left": -1}),
        ("gpt_oss", {"window_left": example.WINDOW}),
        ("gpt_oss", {"sinks": None}),
    ],
)
@pytest.mark.parametrize("phase", ["context", "decode"])
def test_an_option_that_is_lost_shows(name, change, phase, monkeypatch):
    function = f"{phase}_call"
    real = getattr(integration, function)
    monkeypatch.setattr(integration, function, lambda *args, **options: real(*args, **options | change))
    model = tiny(name)
    e = example.errors(model, example.generate(model, prompts_of(LENGTHS), 3))
    assert e.ours > 2 * e.eager


def test_the_program_prints_as_it_goes(monkeypatch):
    """Before each stage of each model it has printed, and flushed, which one it is: a pipe shows it at once."""
    shown = io.StringIO()

    class Pipe(io.StringIO):
        def flush(self):
            shown.write(self.getvalue()[len(shown.getvalue()) :])

    seen = []

    def watched(function):
        def call(*args, **options):
            seen.append(shown.getvalue().splitlines()[-1])
            return function(*args, **options)

        return call

    monkeypatch.setattr(sys, "argv", "x --models llama qwen3 --tokens 9 --hidden 64 --layers 1".split())
    monkeypatch.setattr(example.PagedCache, "extend", watched(example.PagedCache.extend))
    monkeypatch.setattr(example, "eager", watched(example.eager))
    with contextlib.redirect_stdout(Pipe()) as pipe:
        example.main()
    stages = ["173 tokens of prompts", "8 of 9 tokens", "eager attention in fp32 and bf16"]
    assert list(dict.fromkeys(seen)) == [f"{name:<8} {stage}" for name in ("llama", "qwen3") for stage in stages]
    assert pipe.getvalue() == shown.getvalue() and "tokens/s" in shown.getvalue().splitlines()[-1]


def test_register_is_one_line():
    """A model made with the name that it gives calls our function, also under a name of the user's."""
    from transformers import AttentionInterface

    config = example.config_of("llama", hidden=64, layers=1)
    for name in (register(), register("mine"), register()):
        assert AttentionInterface()[name] is integration.paged_attention
        model = example.transformers.AutoModelForCausalLM.from_config(config, attn_implementation=name)
        with pytest.raises(ValueError, match="paged_cache: None, required"):
            model(torch.tensor([[5]]))


def test_requests_do_not_disturb_each_other(llama):
    a, b = prompts_of((5, 33))
    other = b.flip(0)
    first, second = (example.generate(llama, [a, x], 4) for x in (b, other))
    assert torch.equal(first.logits[0], second.logits[0]) and torch.equal(first.tokens[0], second.tokens[0])
    assert not torch.equal(first.logits[1], second.logits[1])


@torch.no_grad()
def test_requests_come_and_go(llama):
    """B runs on while A ends, and C comes to another slot, in two chunks, and gets A's pages."""
    llama.set_attn_implementation(register())
    a, b, c = prompts_of((20, 37, 30))
    cache = PagedCache(3, pages=6, max_tokens=48, page_size=16, device="cpu")
    none = a[:0]

    def feed(*parts):
        """Tokens of prompts; returns logits of each."""
        lens = [*map(len, parts)]
        positions = cache.extend(lens)
        out = llama(torch.cat(parts)[None], position_ids=positions, paged_cache=cache, use_cache=False)
        return out.logits[0].split(lens)

    def step(*tokens):
        out = llama(torch.tensor(tokens)[:, None], position_ids=cache.extend(), paged_cache=cache, use_cache=False)
        return out.logits[:, 0]

    cache.admit(0, 22)
    cache.admit(1, 41)
    addresses = cache.seq_lens.data_ptr(), cache.block_tables.data_ptr()
    feed(a, b, none)
    outs = [step(7, 11, 0)]
    pages = cache.block_tables[0, :2].tolist()
    cache.release(0)
    for pool in (pool for target in cache._pools.values() for pool in target.kv):
        pool[pages] = float("nan")
    outs.append(step(0, 12, 0))
    assert cache.seq_lens.tolist() == [0, 39, 0]
    cache.admit(2, 32)
    assert sorted(pages) == sorted(cache.block_tables[2, :2].tolist())
    chunks = [feed(none, none, c[:13])[2], feed(none, none, c[13:])[2]]
    outs.append(step(0, 13, 8))
    assert cache.seq_lens.tolist() == [0, 40, 31]
    assert addresses == (cache.seq_lens.data_ptr(), cache.block_tables.data_ptr())

    run_b, run_c = torch.cat([b, torch.tensor([11, 12, 13])]), torch.cat([c, torch.tensor([8])])
    eager_b, eager_c = example.eager(llama, [run_b, run_c])
    torch.testing.assert_close(torch.stack([out[1] for out in outs]).float(), eager_b[-3:], rtol=0, atol=0.1)
    torch.testing.assert_close(torch.cat([*chunks, outs[-1][2:]]).float(), eager_c, rtol=0, atol=0.1)


CACHES = {"16 bits": (None, 1.0, 1.0), "e4m3": (E4M3, 0.1, 0.2), "e5m2": (E5M2, 1.0, 0.5), "nvfp4": (U8, 0.04, 0.03)}


def attend(cache, lens, dim=64, dtype=torch.bfloat16, device="cpu"):
    """Write rows of the next tokens and attend, as a layer of a model; return [q, k, v] and the output, (T, heads, dim)
    each."""
    layer = SimpleNamespace(layer_idx=0, is_causal=True)
    rows = cache.extend(lens).numel()
    b, s = (1, rows) if lens else (rows, 1)
    q, k, v = (torch.randn(b, s, heads, dim, device=device, dtype=dtype).transpose(1, 2) for heads in (4, 2, 2))
    out, _ = integration.paged_attention(layer, q, k, v, None, paged_cache=cache)
    return [t.transpose(1, 2).reshape(rows, -1, dim) for t in (q, k, v)], out.reshape(rows, 4, dim)


@torch.inference_mode()
@pytest.mark.parametrize("name", CACHES)
def test_pools_of_every_dtype(name, device):
    """A prompt and three decode steps against attention in float64 over what the pools hold, and its bytes."""
    torch.manual_seed(0)
    dtype, k_scale, v_scale = CACHES[name]
    cache = PagedCache(2, pages=7, max_tokens=48, device=device, stored=StorageFormat(dtype, k_scale, v_scale))
    cache.admit(1, 40)
    keys, values = [], []
    for lens in ([0, 33], None, None, None):
        (q, k, v), out = attend(cache, lens, device=device)
        mine = slice(0, 33) if lens else slice(1, 2)
        keys.append(k[mine])
        values.append(v[mine])
        target = cache._pools[0]
        rows = cache.block_tables[1].long().repeat_interleave(16) * 16 + torch.arange(48, device=device) % 16
        known = rows[: sum(map(len, keys))]
        held = []
        for side, (new, scale) in enumerate(((keys, k_scale), (values, v_scale))):
            new, pool = torch.cat(new), target.kv[side].flatten(0, 1)
            if dtype is U8:
                data, factors = fp4.nvfp4_quantize(new, 1 / scale)
                assert torch.equal(pool[known], data)
                assert torch.equal(target.sf[side].flatten(0, 1).view(U8)[known], factors.view(U8))
                held.append(fp4.nvfp4_dequantize(data, factors, 1 / scale).double())
                continue
            wanted = (new.float() / scale).to(dtype) if dtype else new
            assert torch.equal(pool.view(U8)[known], wanted.view(U8))
            held.append(wanted.double() * scale)
        want = attention(q[mine].cpu(), *(t.cpu() for t in held), 64**-0.5)
        torch.testing.assert_close(out[mine].cpu().double(), want, rtol=0.02, atol=0.01)


@torch.inference_mode()
def test_queries_of_blackwell():
    """Are e4m3 over an e4m3 pool, as MMAs there take it; the output has the model's dtype."""
    with machine.override(FakeMachine(lambda op, spec: None, arch="sm_100a")):
        assert not PagedCache(1, 4, 48, device="cpu").e4m3_queries
        cache = PagedCache(1, 4, 48, device="cpu", stored=StorageFormat(E4M3, 0.1, 0.2))
    cache.admit(0, 40)
    (q, k, v), out = attend(cache, [33])
    held = [(t.float() / scale).to(E4M3).double() * scale for t, scale in ((k, 0.1), (v, 0.2))]
    want = attention(q.to(E4M3).double(), *held, 64**-0.5)
    assert cache.e4m3_queries and out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), want, rtol=0.02, atol=0.01)


@torch.no_grad()
@pytest.mark.parametrize("name", example.MODELS)
def test_a_decode_step_may_be_captured(name, monkeypatch):
    """It reads no value, makes no tensor from the host, and its operators and shapes are those of the step before."""
    monkeypatch.setattr(LayerLaunch, "serve", lambda self, step, *_: torch.zeros_like(step.q))  # the reference reads
    model = tiny(name)
    model.set_attn_implementation(register())
    cache = PagedCache(2, pages=5, max_tokens=32, device="cpu")
    for request in (0, 1):
        cache.admit(request, 20)
    model(torch.ones(1, 8).long(), position_ids=cache.extend([3, 5]), paged_cache=cache, use_cache=False)
    tokens, steps = torch.ones(2, 1).long(), []
    for _ in range(12):
        with Seen() as seen:
            model(tokens, position_ids=cache.extend(), paged_cache=cache, use_cache=False)
        steps.append([(op.name(), *(x.shape for x in args if torch.is_tensor(x))) for op, args, _ in seen.calls])
    assert all(step == steps[0] for step in steps) and len(steps[0]) > 100
    assert WAITS.isdisjoint(seen.names())


def test_cache_refuses(llama):
    with pytest.raises(
        TypeError, match="^stored.dtype: torch.float32, must be None, torch.float8_e4m3fn, torch.float8_e5m2 or"
    ):
        PagedCache(2, pages=4, max_tokens=40, device="cpu", stored=StorageFormat(torch.float32))
    cache = PagedCache(2, pages=4, max_tokens=40, page_size=16, device="cpu")
    cache.admit(0, 20)
    for request, tokens, error, text in (
        (0, 5, ValueError, "request: 0, already admitted"), (1, 41, ValueError, r"tokens: 41, must be in \[1, 40\]"),
        (1, 0, ValueError, r"tokens: 0, must be in \[1, 40\]"), (1, 30, MemoryError, "request: 1, needs 2 pages, 1"),
        (2, 5, ValueError, r"request: 2, must be in \[0, 1\]"), (-1, 5, ValueError, "request: -1, must be in"),
        (1.0, 5, TypeError, "request: 1.0, must be an int"), (1, 5.0, TypeError, "tokens: 5.0, must be an int"),
    ):  # fmt: skip
        free = list(cache._free)
        with pytest.raises(error, match=f"^{text}"):
            cache.admit(request, tokens)
        assert cache._free == free and cache._live.tolist() == [1, 0], "a refusal takes no pages"
    for request, text in ((1, "not admitted"), (2, "must be in"), (-1, "must be in")):
        with pytest.raises(ValueError, match=f"^request: {request}, {text}"):
            cache.release(request)
    for lens in ([33, 0], [0, 1], [1]):
        with pytest.raises(ValueError, match="has pages for|entries"):
            cache.extend(lens)
    assert cache.seq_lens.tolist() == [0, 0]
    cache.extend([30, 0])
    for lens in ([3, 0], [-1, 0]):  # 33 in two chunks
        with pytest.raises(ValueError, match="has pages for 32 tokens and has 30 tokens"):
            cache.extend(lens)
    assert cache.extend([2, 0]).tolist() == [[30, 31]]
    cache.release(0)
    cache.admit(1, 40)


@pytest.mark.parametrize("how", ["called", "replayed"])
def test_tokens_past_the_pages_are_refused_after_decode_steps(how):
    """Of a request with pages for 32 tokens. The host knows the steps that it called; the device knows all."""
    cache = PagedCache(2, pages=5, max_tokens=64, page_size=16, device="cpu")
    cache.admit(0, 32)
    cache.admit(1, 20)
    cache.extend([28, 3])
    for _ in range(2):
        if how == "called":
            cache.extend()
        else:  # as the graph of a step does
            cache.seq_lens += cache._live
    before = cache.seq_lens.tolist(), cache._rows.tolist()
    with pytest.raises(
        ValueError, match=r"^lens\[0\]: 3, must be in \[0, 2\]: request 0 has pages for 32 tokens and has 30"
    ):
        cache.extend([3, 0])
    assert (cache.seq_lens.tolist(), cache._rows.tolist()) == before, "nothing has changed"
    assert cache.extend([2, 1]).tolist() == [[30, 31, 5]]
    with pytest.raises(ValueError, match=r"request 0 has pages for 32 tokens and has 32 tokens"):
        cache.extend()
    assert cache.seq_lens.tolist() == [32, 6]
    cache.release(0)
    assert cache.extend().tolist() == [[0], [6]]
    cache.admit(0, 16)
    cache._check_room = None  # which the host calls after it has waited for lengths; those of the last request are 0
    assert cache.extend().tolist() == [[0], [7]]


def test_lengths_may_be_tensors_and_may_be_set_back():
    """A caller undoes a step that only warmed up: the lengths on the device count, not the steps that were called."""
    cache = PagedCache(1, pages=2, max_tokens=16, page_size=16, device="cpu")
    cache.admit(0, 16)
    assert cache.extend(torch.tensor([15])).tolist() == [[*range(15)]]
    before = cache.seq_lens.clone()
    for _ in range(3):
        assert cache.extend().tolist() == [[15]]
        cache.seq_lens.copy_(before)
    cache.extend()
    with pytest.raises(ValueError, match="request 0 has pages for 16 tokens and has 16 tokens"):
        cache.extend()


def test_sinks_that_change_are_cast_again():
    cache, sinks = PagedCache(1, pages=2, max_tokens=16, device="cpu"), torch.ones(4, dtype=torch.bfloat16)
    first = cache.sinks(0, sinks)
    assert cache.sinks(0, sinks) is first and first.dtype == torch.float32
    sinks.fill_(5)
    assert cache.sinks(0, sinks).tolist() == [5.0] * 4
    assert cache.sinks(0, sinks + 1).tolist() == [6.0] * 4
    for way in WAYS:
        sinks = torch.arange(4).bfloat16()
        prepared(sinks, way)
        for _ in range(2):
            assert cache.sinks(0, sinks).tolist() == [0, 1, 2, 3]
            moved(sinks, way)
            way = "set_"
    sinks = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16), requires_grad=False)
    first = cache.sinks(0, sinks)
    sinks.data.fill_(5)  # as a loader of weights writes them
    assert cache.sinks(0, sinks) is first and first.tolist() == [5.0] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_sinks_at_the_address_of_the_last_ones(dtype):
    cache, memory = PagedCache(1, pages=2, max_tokens=16, device="cpu"), torch.ones(4, dtype=dtype)
    for value in (1.0, 2.0):
        memory.fill_(value)
        sinks = torch.empty(0, dtype=dtype).set_(memory.untyped_storage(), 0, (4,), (1,))
        assert cache.sinks(0, sinks).tolist() == [value] * 4


def test_rows_of_steps_past_the_pages_go_to_page_0():
    """A graph replays steps that nobody counts: they may reach no page of another request, nor leave the table."""
    cache = PagedCache(2, pages=4, max_tokens=32, page_size=16, device="cpu")
    cache.admit(0, 16)
    cache.admit(1, 16)
    for length in (16, 31, 32, 33, 1000, 2**31 - 2):
        cache.seq_lens[0] = length
        cache._seen = [0, 0]  # the host has called none of the steps
        cache.extend()
        assert 0 <= cache._rows[0] < 16, "of page 0, which no request owns"


@torch.no_grad()
def test_attention_refuses(llama):
    llama.set_attn_implementation(register())
    with pytest.raises(ValueError, match="paged_cache: None, required"):
        llama(torch.tensor([[5]]))
    cache = PagedCache(1, pages=2, max_tokens=16, device="cpu")
    cache.admit(0, 16)
    cache.extend([3])
    with pytest.raises(ValueError, match="key: 1 tokens, must be the 3 that extend announced"):
        llama(torch.tensor([[5]]), paged_cache=cache, use_cache=False)
    layer, x = llama.model.layers[0].self_attn, torch.zeros(1, 8, 3, 128)
    for given in ({"attention_mask": x}, {"position_bias": x}, {"dropout": 0.1}, {"is_causal": False}):
        with pytest.raises(NotImplementedError, match=f"^{next(iter(given))}: not supported"):
            integration.paged_attention(layer, x, x, x, **{"attention_mask": None, "paged_cache": cache, **given})
