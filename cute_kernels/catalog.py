"""Which kernels are shipped, and how a user names one. No torch, no DSL."""

import json
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any

from . import manifest
from .attention import dispatch as attention
from .manifest import Kernel
from .topk import dispatch as topk

FAMILIES = {"attention": attention, "topk": topk}  # operator family -> dispatch
ARCHS = ("sm_90a", "sm_100a", "sm_103a")


def shipped(arch: str) -> list[Kernel]:
    return [kernel for dispatch in FAMILIES.values() for kernel in dispatch.shipped(arch)]


def spec_type(op: str) -> Any:
    """What manifest.from_json makes specs of `op` as."""
    return import_module(f"cute_kernels.{op}").Spec


def matches(kernel: Kernel, pattern: str) -> bool:
    """pattern: part of `op/name`, or a glob over all of it or over the name."""
    label = manifest.label(*kernel)
    return pattern in label or fnmatchcase(label, pattern) or fnmatchcase(kernel[1].name, pattern)


def parse(text: str) -> Kernel:
    """`attention.sm90={"q": "bf16", ...}`: fields that are left out take their defaults. ValueError for other texts,
    and for specs that the op does not support."""
    op, _, spec = text.partition("=")
    try:
        kernel = op, manifest.from_json(spec_type(op), json.loads(spec))
        reason = import_module(f"cute_kernels.{op}").supports(kernel[1])
    except (AttributeError, ImportError, TypeError, ValueError) as error:
        raise ValueError(f"a spec is OP=JSON, not {text!r}: {error!r}") from None
    if reason:
        raise ValueError(f"{op} cannot be built of {spec}: {reason}")
    return kernel
