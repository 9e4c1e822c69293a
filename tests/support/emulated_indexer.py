"""Kernels of an indexer, in torch: they check what their callers promise, then run the reference."""

from cute_kernels.indexer.args import fields
from tests.support.fake_machine import promised, promised_apart
from wrappers import reference


def emulate(spec, launches):
    """Return a kernel of `spec` for any device; the arguments of each launch, by name, are appended to `launches`."""

    def kernel(*flat):
        a = dict(zip(fields(spec), flat, strict=True))
        check_promises(spec, a)
        launches.append(a)
        reference.indexer_logits(spec, *flat)

    return kernel


def check_promises(spec, a):
    """Check what callers promise, which compiled code does not notice."""
    promised_apart(a, "out")
    (tokens, heads, _), (pages, size, width), requests = a["q"].shape, a["k"].shape, len(a["table"])
    promised(tokens and a["out"].shape[1] and len(a["out"]) == tokens and 0 < heads <= spec.heads)
    promised(a["weights"].shape == (tokens, heads) and a["ctas"] > 0)
    promised(len(a["starts"]) in (0, tokens) and tokens == a["next_n"] * (requests or 1))
    promised(len(a["ends"]) in (tokens, requests or tokens))
    if requests:
        promised(width == spec.row_bytes + 4 and not len(a["k_scale"]) and size)
        promised(pages <= 1 or a["k"].stride(0) >= size * width)
        promised(size == 1 or a["k"].stride(1) == width)
    else:
        promised(width == spec.row_bytes and size == 1 and len(a["k_scale"]) == pages)
    if a["wide_rows"]:
        promised(a["k"].data_ptr() % 16 == 0 and (pages <= 1 or a["k"].stride(0) % 16 == 0))
    if a["boxes"]:
        row, scales = (size * spec.row_bytes, a["k"]) if requests else (0, a["k_scale"])
        promised(a["wide_rows"] and pages and (scales.data_ptr() + row) % 16 == 0)
        promised(size % 64 == 0 if requests else scales.stride(0) == 1 and a["k"].stride(0) >= width)
