"""The shipped kernels, and the ways to name one. No torch, no DSL."""

import json
from fnmatch import fnmatchcase
from functools import cache
from importlib import import_module
from typing import Any

from . import archs, manifest
from .attention import dispatch as attention
from .cache_write import dispatch as cache_write
from .indexer import dispatch as indexer
from .latent import dispatch as latent
from .manifest import Kernel
from .merge_states import dispatch as merge_states
from .topk import dispatch as topk

FAMILIES = {  # operator family -> dispatch
    "attention": attention,
    "topk": topk,
    "cache_write": cache_write,
    "latent": latent,
    "merge_states": merge_states,
    "indexer": indexer,
}
ARCHS = archs.NAMES


@cache
def shipped(arch: str) -> tuple[Kernel, ...]:
    """Return all kernels that a bundle of `arch` holds. It takes 7 ms, once."""
    return tuple(kernel for dispatch in FAMILIES.values() for kernel in dispatch.shipped(arch))


def spec_type(op: str) -> Any:
    """Return the type of the specs of `op`, for `manifest.from_json`."""
    return import_module(f"cute_kernels.{op}").Spec


def matches(kernel: Kernel, pattern: str) -> bool:
    """Return whether a kernel matches a pattern: a part of `op/name`, or a glob over all of it or over the name."""
    label = manifest.label(*kernel)
    return pattern in label or fnmatchcase(label, pattern) or fnmatchcase(kernel[1].name, pattern)


def parse(text: str) -> Kernel:
    """Return the kernel that a text names: `attention.sm90={"q": "bf16", ...}`. Fields that are left out take their
    defaults.

    Raise ValueError for other texts, and for specs that the op does not support."""
    op, _, spec = text.partition("=")
    try:
        kernel = op, manifest.from_json(spec_type(op), json.loads(spec))
        reason = import_module(f"cute_kernels.{op}").supports(kernel[1])
    except (AttributeError, ImportError, TypeError, ValueError) as error:
        raise ValueError(f"spec: {text!r}, must be OP=JSON, such as topk.sort={{}}: {error!r}") from None
    if reason:
        raise ValueError(f"spec: {op} does not support {spec}: {reason}")
    return kernel
