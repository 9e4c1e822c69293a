"""The torch operator that writes rows of latent attention, for torch.compile and for tensors that are not plain.

It takes a `LatentCall` field by field, and behind it those fields of its indexer's call that can differ (`INDEX`).
"""

from typing import Any

from cute_kernels.records import INDEX as INDEX_RECORD

from ..host import schema
from ..host.launch import run
from ..host.plain import traced
from ..host.scalars import split_scale
from . import checks, plan
from .call import LatentCall
from .checks import INDEXER, OUTPUTS, first_of

INDEX = ("kv", "cache", "places", "slots", "weight", "norm_eps", "rope_table", "interleaved", "rope_positions", "q",
         "q_out", "power_of_two", "bias", "weights", "weights_out", "weight_scale")  # fmt: skip
SHARED = ("batch_indices", "positions", "page_table", "kv_indices", "kv_indptr", "cu_seqlens", "kv_lens")


def serve(call: LatentCall) -> None:
    """Run a call that writes rows. It is the last step of all functions.

    The operator gets no cache that is not written: torch.compile captures no CUDA graph of a call that seems to write
    to an input of the compiled function.
    """
    if not traced(first_of(call)):
        run(plan.FAMILY, call)
        return
    checks.validate(call)
    call = call if call.kv is not None else call._replace(cache=None)
    index = NO_INDEX if call.index is None else call.index
    given = call._asdict() | {f"i_{name}": getattr(index, name) for name in INDEX}
    OPERATOR.record(given | {"index": call.index is not None})


def _run(*flat: Any) -> None:
    count = len(_FIELDS)
    call = LatentCall(*flat[:count])
    for field in ("scale", "q_scale"):  # the host's scale tensors had no value in a trace
        tensor = getattr(call, f"{field}_ptr")
        if tensor is not None:
            number, tensor = split_scale(checks.name_of(call, field), tensor)
            call = call._replace(**{field: getattr(call, field) * number, f"{field}_ptr": tensor})
    if flat[count]:
        own = dict(zip(INDEX, flat[count + 1 :], strict=True)) | {name: getattr(call, name) for name in SHARED}
        q_pe = None if own["q"] is None else own["q"][..., :0]
        call = call._replace(index=LatentCall(INDEXER, INDEX_RECORD, pe=None, q_pe=q_pe, **own))
    run(plan.FAMILY, call)


NO_INDEX = LatentCall("", "", None, None, None)
_FIELDS = schema.arguments(LatentCall, OUTPUTS, index="")
_NAMED = {field.split()[-1]: field for field in _FIELDS}
_INDEX = [_NAMED[name].replace(" ", " i_").replace("(", "(i_") for name in INDEX]
OPERATOR = schema.define("write_latent", [*_FIELDS, "bool index", *_INDEX], _run)
