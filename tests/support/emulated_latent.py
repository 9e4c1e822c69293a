"""Kernels of latent caches, in torch: they check what their callers promise, then run the reference."""

from cute_kernels.cache_write.args import PAGES, ROWS, SLOTS
from cute_kernels.latent.args import fields, read_fields
from cute_kernels.latent.spec import ReadSpec
from cute_kernels.records import INDEX
from tests.support.fake_machine import promised, promised_apart
from wrappers import reference


def emulate(spec, launches):
    """Return a kernel of `spec` for any device; the arguments of each launch, by name, are appended to `launches`."""

    reads = isinstance(spec, ReadSpec)

    def kernel(*flat):
        a = dict(zip((read_fields if reads else fields)(spec), flat, strict=True))
        (check_read if reads else check_promises)(spec, a)
        launches.append(a)
        (reference.read_latent if reads else reference.write_latent)(spec, *flat)

    return kernel


def check_promises(spec, a):
    """Check what callers promise, which compiled code does not notice."""
    promised_apart(a, "cache", "pe_cache", "q_out", "q_fp8", "pe_out", "weights_out")
    form, tokens = spec.form, max(len(a["kv"]), len(a["q_pe"]))
    promised(tokens and a["places"] in (SLOTS, PAGES, ROWS))
    latent, rotated = a["kv"].shape[1], a["pe"].shape[1] if len(a["pe"]) else 0
    if len(a["kv"]):
        promised(a["cache"].shape[2] == form.token_bytes or not form.token_bytes)
        promised(not form.latent or latent in (form.latent, form.latent - form.rotated))
        if form.planar:
            size = a["cache"].shape[1]
            promised(size == 1 or a["cache"].stride(1) == form.token_bytes)
            promised(len(a["cache"]) == 1 or a["cache"].stride(0) >= size * form.token_bytes)
    if len(a["pe_cache"]):
        promised(not form.vec and a["pe_cache"].shape[:2] == a["cache"].shape[:2])
    heads = a["q_pe"].shape[1]
    if len(a["q_pe"]) and heads:
        width = (a["q"].shape[2] if len(a["q"]) else 0) + a["q_pe"].shape[2]
        outs = [t for t in (a["q_out"], a["q_fp8"]) if len(t)]
        promised(len(outs) == 1 and outs[0].shape == (len(a["q_pe"]), heads, width))
    if len(a.get("pe_out", ())):
        promised(a["pe_out"].shape == (tokens, rotated))
    promised(len(a["weight"]) in (0, latent, latent + rotated))


def check_read(spec, a):
    """Check what callers of a kernel that reads rows promise."""
    promised_apart(a, "out", "scales")
    form, (pages, size, width) = spec.form, a["cache"].shape
    promised(a["rows"] > 0 and a["page_table"].numel() and width == (form.token_bytes or width))
    if form.planar:
        promised(size == 1 or a["cache"].stride(1) == width)
        promised(pages == 1 or a["cache"].stride(0) >= size * width)
    apart = form.rotated if form.rotated_as != "codes" else 0
    promised(a["out"].shape[1] == (form.latent + apart if form.vec else width) or spec.record == INDEX)
    if spec.record == INDEX:
        promised(a["out"].shape[1] == form.latent and a["scales"].shape == (len(a["out"]), 4))
