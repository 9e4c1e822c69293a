"""Kernels that merge states, in torch: they check what their callers promise, then run the reference."""

from cute_kernels.merge_states.args import fields
from tests.support.fake_machine import promised, promised_apart
from wrappers import reference


def emulate(spec, launches):
    """Return a kernel of `spec` for any device; the arguments of each launch, by name, are appended to `launches`."""

    def kernel(*flat):
        a = dict(zip(fields(spec), flat, strict=True))
        check_promises(a)
        launches.append(a)
        if spec.pair:
            v, s = reference.merge_state(a["v"], a["s"], a["v_other"], a["s_other"])
        else:
            v, s = reference.merge_states(a["v"], a["s"])
        rows = a["mask"] != 0 if len(a.get("mask", ())) else slice(None)
        a["v_out"][rows], a["s_out"][rows] = v[rows], s[rows]

    return kernel


def check_promises(a):
    """Check what callers promise, which compiled code does not notice."""
    promised_apart(a, "v_out", "s_out")
    shape = a["v_out"].shape
    promised(a["v_out"].numel() and a["v"].numel() and 0 <= a["lanes_log2"] <= 5)
    promised(a["s_out"].shape == shape[:-1] and a["s"].shape == a["v"].shape[:-1])
    promised(a["v"].shape == shape or (a["v"].shape[0], *a["v"].shape[2:]) == shape)
    if "v_other" in a:
        promised(a["v_other"].shape == shape and a["s_other"].shape == shape[:-1] and len(a["mask"]) in (0, shape[0]))
