"""Roles of the warps of a CTA that computes logits."""

from functools import cache

from ...device.roles import Role, Roles
from ..spec import IndexerSpec
from . import GROUPS, LOADERS

WARPS = 4  # warps per warpgroup


@cache
def roles(spec: IndexerSpec) -> Roles:
    """Return the table of roles."""
    return Roles.of(
        Role("keys", LOADERS, 40), Role("queries", 1, 40), Role("clean", 1, 40), Role("mma", WARPS * GROUPS, 232)
    )  # fmt: skip


def threads(spec: IndexerSpec) -> int:
    """Return the threads of a CTA."""
    return 32 * roles(spec).warps()
