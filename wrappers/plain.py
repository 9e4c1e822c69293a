"""Which calls may go straight to a kernel."""

import torch

_is_dynamo_compiling = torch.compiler.is_dynamo_compiling  # module globals: an attribute look-up saved is 20 ns
_modes = torch._C._len_torch_dispatch_stack
_transform = torch._C._functorch.peek_interpreter_stack
_Tensor = torch.Tensor


def traced(tensor: object) -> bool:
    """Whether a call on `tensor` must be a torch operator: something records or rewrites it (torch.compile, a mode,
    vmap and its like), or the tensor has no memory of its own (fake, functional, proxy). 0.1 us."""
    if _is_dynamo_compiling():  # first, and apart: torch.compile sees no further
        return True
    if tensor.__class__ is _Tensor and not _modes() and _transform() is None:
        return False
    special = isinstance(tensor, _Tensor) and not isinstance(tensor, (torch.nn.Parameter, torch.nn.Buffer))
    return special or bool(_modes()) or _transform() is not None
