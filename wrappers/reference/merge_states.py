"""States of attention merged in plain torch, computed in fp32."""

import torch


def merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge states (N, S, H, D), (N, S, H) into (N, H, D) of v's dtype and fp32 (N, H)."""
    if not v.shape[1]:
        return v.sum(1), s.sum(1) - torch.inf
    most = s.amax(1, keepdim=True)
    weights = torch.exp2(s - torch.where(most == -torch.inf, 0.0, most))
    total = weights.sum(1)
    wide = torch.where((s == -torch.inf).unsqueeze(-1), 0.0, v.float())
    merged = (wide * weights.unsqueeze(-1)).sum(1) / torch.where(total == 0, 1.0, total).unsqueeze(-1)
    return merged.to(v.dtype), most.squeeze(1) + total.log2()


def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two states (N, H, D), (N, H). Autocast changes `torch.stack`, and refuses one of fp16 under bf16."""
    first = (torch.arange(2, device=v_a.device) == 0)[:, None]
    s = torch.where(first, s_a[:, None], s_b[:, None])
    return merge_states(torch.where(first[..., None], v_a[:, None], v_b[:, None]), s)
