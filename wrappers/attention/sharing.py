"""Tokens that share the keys which they have chosen: the calls that may ask for it, and what a launch needs.

With `AttentionCall.share_keys`, consecutive tokens are a sequence of the kernel, which reads the union of their keys
(`cute_kernels.attention.key_union`). The reference computes each token by itself.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from cute_kernels.attention.request import KernelRequest
from cute_kernels.attention.spec import UNION_HEADS, tokens_of_union

from ..host.checks import listed
from .call import AttentionCall

_empty = torch.empty  # a module global saves a look-up, 20 ns


class SharedKeys(NamedTuple):
    """The groups of tokens that share their keys. size: tokens of a group, of which the last one has what is left.
    groups: their number. width: slots of a token."""

    size: int
    groups: int
    width: int

    @staticmethod
    def of(call: AttentionCall) -> "SharedKeys | None":
        """Return those of a valid call, None if its tokens do not share keys."""
        if not call.share_keys:
            return None
        size = tokens_of_union(call.q.shape[1])
        return SharedKeys(size, -(-call.q.shape[0] // size), call.requests.page_table.shape[2])

    def request(self, of_tokens: KernelRequest) -> KernelRequest:
        """Return the request of a call, given that of tokens which do not share keys."""
        return replace(of_tokens, share_keys=True, rows=self.size, kv_heads=self.groups)

    def scratch(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Return the memory of the unions of a launch, by argument of the kernel, uninitialised."""
        shape = self.groups, max(self.size * self.width, 1)
        return {
            "union_slots": _empty(shape, dtype=torch.int32, device=device),
            "union_tokens": _empty(shape, dtype=torch.uint8, device=device),
            "union_lens": _empty(self.groups, dtype=torch.int32, device=device),
        }


def tokens(call: AttentionCall) -> int:
    """Return how many tokens share keys, 1 if they do not."""
    return max(tokens_of_union(call.q.shape[1]), 1) if call.share_keys else 1


def check(call: AttentionCall, name: Callable[[str], str]) -> None:
    """Raise if the tokens of a call cannot share keys but are to. name: from a field to the caller's name."""
    if not call.share_keys:
        return
    if call.requests.form != "slots" or call.max_q_len != 1 or not call.shares_v:
        need = "must be False unless each token has chosen its keys, of which V is a part"
        raise ValueError(f"{name('share_keys')}: True, {need}")
    if call.extra_k is not None:
        given = f"{name('share_keys')}: True with {name('extra_k')} {tuple(call.extra_k.shape)}"
        raise NotImplementedError(f"{given}, not supported, must be False: tokens share keys of one cache")
    if not tokens_of_union(call.q.shape[1]):
        given = f"{name('share_keys')}: True with {call.q.shape[1]} heads in {name('q')}"
        raise NotImplementedError(f"{given}, not supported, must be False unless there are {listed(UNION_HEADS)}")
