"""Continuous batching over a shared page pool: decodes and prompt chunks in one pass of a small random decoder.

    python -m examples.serve        # seconds on the CPU, a larger model on a GPU; draws build/timeline.png

The loop is in `schedule` and `serve`. The host knows only lengths: tokens are sampled, stored and read on the device,
so that no step waits for a copy.
"""

import argparse
import random
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from .decoder import DIM, VOCABULARY, Batch, Decoder
from .timeline import Span, draw, mark, seconds

# model: layers, width, query heads, KV heads. prompts, outputs: least and largest number of tokens.
CPU = dict(model=(2, 128, 4, 2), prompts=(8, 96), outputs=(4, 32), requests=12, budget=64, pages=24, page_size=16)
CUDA = dict(model=(8, 2048, 32, 8), prompts=(64, 4096), outputs=(16, 512), requests=128, budget=4096, pages=1500)
SIZES: dict[str, dict[str, Any]] = {"cpu": CPU, "cuda": CUDA | {"page_size": 64}}


@dataclass(eq=False)
class Request:
    """A request. Tokens [0, known) of row `index` are its prompt or were sampled; K and V of [0, cached) are in its
    pages."""

    index: int
    arrival: int  # the step at which it arrives
    prompt: int
    total: int  # tokens of the prompt and the output
    known: int = 0
    cached: int = 0
    pages: list[int] = field(default_factory=list)
    first: int = -1  # the step that sampled its first token


class Pool:
    """K and V of all pages, kv (layers, 2, pages, P, Hkv, D), and the list of free pages."""

    def __init__(self, kv: torch.Tensor) -> None:
        self.kv, self.size, self.page, self.free = kv, kv.shape[2], kv.shape[3], list(range(kv.shape[2]))

    def hold(self, request: Request) -> bool:
        """Give the request pages for its known tokens. Return False, and give none, if too few are free."""
        missing = -(-request.known // self.page) - len(request.pages)
        if missing > len(self.free):
            return False
        request.pages += [self.free.pop() for _ in range(missing)]
        return True

    def release(self, request: Request) -> None:
        self.free += request.pages
        request.pages, request.cached = [], 0


Work = list[tuple[Request, int]]  # requests of a step, with the number of tokens of each


def schedule(running: list[Request], waiting: deque[Request], pool: Pool, budget: int, step: int) -> Work:
    """Choose a step's work: decodes first, then prompt chunks, at most `budget` tokens.

    A prompt is admitted if all its pages are free. A decode that finds no page evicts the youngest request; when that
    request returns, its known tokens are its prompt. So the oldest request always advances.
    """
    work: Work = []
    for request in [r for r in running if r.known - r.cached == 1][:budget]:
        while request in running and not pool.hold(request):
            waiting.appendleft(running.pop())
            pool.release(waiting[0])
        work += [(request, 1)] if request in running else []
    left = budget - len(work)
    for request in [r for r in running if r.known - r.cached > 1]:
        work += [(request, min(left, request.known - request.cached))]
        left -= work[-1][1]
    while left and waiting and (waiting[0].arrival <= step or not running) and pool.hold(waiting[0]):
        running.append(waiting.popleft())
        work += [(running[-1], min(left, running[-1].known))]
        left -= work[-1][1]
    return sorted(((r, n) for r, n in work if n), key=lambda pair: pair[1] > 1)  # one token: a decode (see `Batch`)


class Step(NamedTuple):
    """The work of one step."""

    ended: Any  # a mark; in the result of `serve`, seconds from its start
    work: list[tuple[int, int]]  # (index of the request, tokens)
    decodes: int  # how many of `work`, the first ones, are decodes
    pages: int  # pages in use


def serve(model: Decoder, tokens: torch.Tensor, requests: list[Request], pool: Pool, budget: int) -> list[Step]:
    """Append to each prompt, in a row of `tokens`, the tokens that the model generates greedily."""
    if budget < 1:
        raise ValueError(f"budget: {budget}, must be at least 1")
    if max(-(-r.total // pool.page) for r in requests) > pool.size:
        raise ValueError(f"pool: {pool.size} pages of {pool.page} tokens, too few for the longest request")
    for request in requests:
        request.known = request.prompt
    waiting, running = deque(sorted(requests, key=lambda r: r.arrival)), list[Request]()
    steps, start = list[Step](), mark(tokens.device)
    while waiting or running:
        work = schedule(running, waiting, pool, budget, len(steps))
        batch = batch_of(work, pool, tokens.device)
        sampled = model(tokens[batch.row, batch.position], batch, pool.kv).argmax(-1)
        tokens[batch.row[batch.last], batch.position[batch.last] + 1] = sampled
        pairs, used = [(r.index, n) for r, n in work], pool.size - len(pool.free)
        steps.append(Step(mark(tokens.device), pairs, batch.decodes, used))
        for request, n in work:
            request.cached += n
            if request.cached == request.known:
                request.known += 1
                request.first = len(steps) - 1 if request.first < 0 else request.first
            if request.known == request.total:
                running.remove(request)
                pool.release(request)
    return [step._replace(ended=seconds(start, step.ended)) for step in steps]


def batch_of(work: Work, pool: Pool, device: torch.device) -> Batch:
    """Build the batch on the host from the lengths, and copy it to the device without a wait."""
    decodes, width = sum(n == 1 for _, n in work), max(len(r.pages) for r, _ in work)
    index, known, cached, counts = torch.tensor([(r.index, r.known, r.cached, n) for r, n in work]).T
    table = torch.tensor([r.pages + [0] * (width - len(r.pages)) for r, _ in work])
    ends, lens, owner = counts.cumsum(0), cached + counts, torch.arange(len(work)).repeat_interleave(counts)
    position = (lens - ends)[owner] + torch.arange(len(owner))
    slot = table[owner, position // pool.page] * pool.page + position % pool.page
    starts = pad(ends[decodes:] - decodes, (1, 0))
    tensors = [index[owner], position, slot, (ends - 1)[lens == known], table.int(), lens.int(), starts.int()]
    if device.type == "cuda":
        tensors = [t.pin_memory().to(device, non_blocking=True) for t in tensors]
    return Batch._make([*tensors, decodes, int(counts.max())])


def make(device: str, seed: int, sizes: dict[str, Any]) -> tuple[Decoder, torch.Tensor, list[Request], Pool]:
    """Make a model, `tokens` (requests, longest) with a prompt at the start of each row, the requests and an empty
    pool."""
    torch.manual_seed(seed)
    draw, requests, arrival = random.Random(seed), list[Request](), 0
    for index in range(sizes["requests"]):
        prompt, arrival = draw.randint(*sizes["prompts"]), arrival + draw.randint(0, 3)
        requests.append(Request(index, arrival, prompt, prompt + draw.randint(*sizes["outputs"])))
    layers, _, _, kv_heads = sizes["model"]
    with torch.device(device):
        model = Decoder(*sizes["model"]).to(torch.bfloat16 if device.startswith("cuda") else torch.float32)
        tokens = torch.randint(VOCABULARY, (len(requests), max(r.total for r in requests)))
        kv = torch.zeros(layers, 2, sizes["pages"], sizes["page_size"], kv_heads, DIM, dtype=torch.bfloat16)
    return model, tokens, requests, Pool(kv)


def report(requests: list[Request], steps: list[Step], pool: Pool, path: Path) -> None:
    """Print rates and waits. Draw the timeline of each request, the tokens of each step and the pages in use."""
    ends, shares = [step.ended for step in steps], [100 * step.pages / pool.size for step in steps]
    begins, end, counts = [0.0, *ends], ends[-1], [sum(n for _, n in step.work) for step in steps]
    out, again = sum(r.total - r.prompt for r in requests), sum(counts) - sum(r.total - 1 for r in requests)
    waits = [ends[r.first] - begins[min(r.arrival, r.first)] for r in requests]
    print(f"{len(requests)} requests, {out} output tokens, {len(steps)} steps, {end:.2f} s: {out / end:.0f} tokens/s")
    print(f"{sum(counts) / end:.0f} tokens/s including prompts, {again} of all tokens computed again")
    print(f"time to first token: mean {1e3 * sum(waits) / len(waits):.1f} ms, longest {1e3 * max(waits):.1f} ms")
    print(f"pool: {pool.size} pages, mean {sum(shares) / len(shares):.0f} % in use, at most {max(shares):.0f} %")
    spans = [
        Span(index, "decode" if i < step.decodes else "prompt", begin, step.ended)
        for begin, step in zip(begins, steps)
        for i, (index, _) in enumerate(step.work)
    ]
    last = {span.row: span.end for span in spans}
    waiting = [Span(r.index, "waiting", begins[min(r.arrival, r.first)], last[r.index]) for r in requests]
    tokens = {"prompt": counts, "decode": [step.decodes for step in steps]}
    draw(waiting + spans, ends, {"tokens of a step": tokens, "pages in use, %": {"": shares}}, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("requests", "budget", "pages", "page-size"):
        both = " or ".join(f"{sizes[name.replace('-', '_')]} ({device})" for device, sizes in SIZES.items())
        parser.add_argument(f"--{name}", type=int, help=f"default: {both}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("build/timeline.png"), help="default: build/timeline.png")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the host's tensors are small, and more threads take longer
    sizes = SIZES[torch.device(args.device).type] | {k: v for k, v in vars(args).items() if v is not None}
    model, tokens, requests, pool = make(args.device, args.seed, sizes)
    prompt = requests[0].prompt
    warm = [Request(0, 0, 3, 9), Request(0, 2, prompt, prompt + 3)]  # loads or compiles the kernels
    serve(model, tokens.clone(), warm, pool, sizes["budget"])
    report(requests, serve(model, tokens, requests, pool, sizes["budget"]), pool, args.out)


if __name__ == "__main__":
    main()
