"""Functions in plain torch or with one small kernel: NVFP4 codes, packed bits, lengths and positions of requests."""

from random import Random
from typing import Any

import torch

import wrappers

from .. import plain
from ..call import Call, Options, Results, Work
from . import rows

FUNCTIONS = (
    "nvfp4_quantize", "nvfp4_quantize", "nvfp4_dequantize", "nvfp4_dequantize", "packbits", "segment_packbits",
    "get_batch_indices_positions", "get_seq_lens",
)  # fmt: skip
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
WAITS = ("segment_packbits",)  # it cannot be captured


def draw(family: str, rng: Random, options: Options) -> Call:
    function = rng.choice(FUNCTIONS)
    case: dict[str, Any] = {"n": rng.choice((1, 2, 9, 100, 700)), "m": rng.choice((1, 2, 8, 33))}
    if function.startswith("nvfp4"):
        case |= {
            "dtype": rng.choice(tuple(DTYPES)),
            "scale": rng.choice((1.0, 0.37, 100.0)),
            "dim": rng.choice((1, 4, 8)),
        }
        case |= {"device": rng.random() < 0.4, "strided": rng.random() < 0.3, "special": rng.random() < 0.2}
    elif "pack" in function:
        case["order"] = rng.choice(("big", "little"))
    mode = "eager" if function in WAITS else rng.choices(("eager", "graph", "threads"), (80, 12, 8))[0]
    return Call(family, function, rng.randrange(1 << 30), mode, "shape", case)


def _offsets(gen: torch.Generator, count: int, most: int) -> torch.Tensor:
    return torch.cat([torch.zeros(1), torch.randint(most, (count,), generator=gen).cumsum(0)]).int()


def _arguments(call: Call, seed: int) -> dict[str, Any]:
    c, gen = call.case, torch.Generator().manual_seed(seed)
    n, m = c["n"], c["m"]
    if call.function.startswith("nvfp4"):
        dim = 16 * c["dim"]
        scale: Any = torch.tensor([c["scale"]]) if c["device"] else c["scale"]
        if call.function == "nvfp4_dequantize":
            data = torch.randint(256, (n, m, dim // 2), generator=gen).to(torch.uint8)
            factors = torch.randint(127, (n, m, dim // 16), generator=gen).to(torch.uint8).view(torch.float8_e4m3fn)
            return {"data": data, "scales": factors, "global_scale": scale}
        x = torch.randn(n, m, dim * (2 if c["strided"] else 1), generator=gen)[..., :dim]
        if c["special"]:
            values = torch.tensor([0.0, -0.0, 1e-8, 3e4, 450.0, torch.inf, torch.nan])
            x = torch.where(
                torch.rand(x.shape, generator=gen) < 0.1, values[torch.randint(7, x.shape, generator=gen)], x
            )
        return {"x": x.to(DTYPES[c["dtype"]]), "global_scale": scale}
    if call.function == "packbits":
        return {"x": torch.randint(3, (n * m,), generator=gen), "bitorder": c["order"]}
    starts = _offsets(gen, m, n)
    if call.function == "segment_packbits":
        x = torch.rand(int(starts[-1]), generator=gen) < 0.5
        return {"x": x, "indptr": starts, "bitorder": c["order"]}
    lens = torch.randint(1, 50, (m,), generator=gen).int()
    if call.function == "get_seq_lens":
        return {"kv_indptr": starts, "kv_last_page_len": lens.clamp(max=16), "page_size": 16}
    return {"append_indptr": starts, "seq_lens": lens + starts.diff(), "nnz": n * m}


def _packed(bits: list[int], order: str) -> list[int]:
    found = []
    for first in range(0, len(bits), 8):
        part = [int(bool(x)) for x in [*bits[first : first + 8], *([0] * 8)][:8]]
        found.append(sum(bit << (i if order == "little" else 7 - i) for i, bit in enumerate(part)))
    return found


def right(function: str, a: dict[str, Any]) -> list[torch.Tensor]:
    """Return the results of a function, on the CPU."""
    if function == "nvfp4_quantize":
        scale = a["global_scale"]
        codes, sf = rows.nvfp4(a["x"], scale.reshape(()) if isinstance(scale, torch.Tensor) else scale)
        return [codes, sf]
    if function == "nvfp4_dequantize":
        return [plain.values_of(a["data"], a["scales"]) / a["global_scale"]]
    if function == "packbits":
        return [torch.tensor(_packed(a["x"].tolist(), a["bitorder"]), dtype=torch.uint8)]
    if function == "segment_packbits":
        starts, found, places = a["indptr"].tolist(), [], [0]
        for first, last in zip(starts, starts[1:]):
            found += _packed(a["x"][first:last].tolist(), a["bitorder"])
            places.append(len(found))
        return [torch.tensor(found, dtype=torch.uint8), torch.tensor(places, dtype=torch.int32)]
    if function == "get_seq_lens":
        lens = [max(end - first - 1, 0) * a["page_size"] + (last if end > first else 0) for first, end, last in
                zip(a["kv_indptr"].tolist(), a["kv_indptr"].tolist()[1:], a["kv_last_page_len"].tolist())]  # fmt: skip
        return [torch.tensor(lens)]
    requests, positions, starts = [-1] * a["nnz"], [0] * a["nnz"], a["append_indptr"].tolist()
    for b, (first, last) in enumerate(zip(starts, starts[1:])):
        for row in range(first, min(last, a["nnz"])):
            requests[row], positions[row] = b, int(a["seq_lens"][b]) - (last - row)
    return [torch.tensor(requests), torch.tensor(positions)]


def build(call: Call, device: torch.device) -> Work:
    function = getattr(wrappers, call.function)
    variants = [_arguments(call, call.seed + i) for i in range(2 if call.mode == "graph" else 1)]

    def run(tree: Any) -> Results:
        found = function(**tree)
        return {str(i): t for i, t in enumerate(found if isinstance(found, tuple) else (found,))}

    def judge(variant: int, tree: Any, results: Results) -> str:
        want = right(call.function, variants[variant])
        for number, t in enumerate(want):
            got = results[str(number)].cpu()
            got, t = (x.view(torch.uint8) if x.element_size() == 1 else x for x in (got, t))
            exact = not got.is_floating_point()
            off = got.long() != t.long() if exact else ~((got - t).abs() <= 1e-6 * t.abs())
            if got.shape != t.shape or off.any():
                return f"result {number}: {int(off.sum())} of {off.numel()} values are wrong"
        return ""

    return Work(variants, run, lambda tree: [], judge)


def smaller(call: Call) -> list[dict[str, Any]]:
    return [call.case | {name: call.case[name] // 2} for name in ("n", "m", "dim") if call.case.get(name, 0) > 1]
