"""Rows of prompts, staged: vLLM's backend of sparse latent attention attends to a copy in 16 bits of packed rows.

A token that attends to a packed row converts it. Thousands of tokens of a prompt choose the same rows, so it is less
work to convert the rows of a request once per layer, into a workspace. Layers with at least 64 heads do so with the
requests of a batch from the first prompt on (`vllm_batches.first_prompt`), if their rows fit in the workspace and are
not too many for their tokens. The requests before it, which are decodes, attend to the cache, in a launch of their own.
CUTE_KERNELS_STAGE_KEYS=0 turns it off.

The rows of page j of request r lie in page b(r) + j of the workspace, b(r) = the pages of the prompts before r. The
indexer reads its keys by the block table and writes slots of these pages. `staged_pages` decides from what the host
knows of a batch alone, so the metadata of the attention and of the indexer agree, and nothing waits for the device.

Written for vLLM 0.33. The workspace is vLLM's, which its kernels share: a layer fills it and reads it at once.
"""

from typing import NamedTuple

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.workspace import current_workspace_manager

from ..own.append_latent import LatentCache
from ..own.gather_latent import gather_latent
from .latent_support import COLUMNS, ROTATED, asked_for
from .vllm_batches import first_prompt

NAME = "CUTE_KERNELS_STAGE_KEYS"
WORKSPACE = 256 << 20  # bytes
ROWS = WORKSPACE // (2 * (COLUMNS + ROTATED))  # that it holds
# The most rows that prompts may have per token. On an H200, `gather_latent` converts 256 rows in 0.15 us
# (mla-gather-kv656-n65536). Over rows of 16 bits, a token with 64 heads takes 0.19 us less, one with 128 heads 0.4 us
ROWS_PER_TOKEN = 256
LEAST_HEADS = 64  # of a GPU. With fewer heads, neighbouring tokens can share keys (`latent_support.can_share_keys`)
STAGED_RECORDS = "656", "352"


class StagedPages(NamedTuple):
    """Where the rows of B requests lie, in pages of `size` rows: of the first `packed` ones in the cache, of the others
    in the workspace.

    table: int32 (B, M), the pages of each request. starts: int32 (B - packed + 1,), the first row of each request in
    the workspace, and the end of the last one. packed_tokens: the tokens of the first `packed` requests.
    """

    table: torch.Tensor
    starts: torch.Tensor
    size: int
    packed: int
    packed_tokens: int


def can_stage(heads: int, record: str) -> bool:
    """Return whether a layer stages the rows of prompts: it gains by it, and the model allows it.

    heads: of the GPU. record: of the cache's rows, "" for 16 bits. Raises NotImplementedError if the variable is 1 and
    the model does not allow it.
    """
    if not asked_for(NAME, True) or envs.VLLM_BATCH_INVARIANT or heads < LEAST_HEADS or record not in STAGED_RECORDS:
        return False
    reason = refusal()
    if reason and asked_for(NAME):
        raise NotImplementedError(f"{reason} with {NAME}=1")
    return reason is None


def refusal() -> str | None:
    """Return why a model's layers cannot stage rows, or None. Slots of the workspace must not reach a layer that reads
    the cache, nor a later step."""
    config = get_current_vllm_config()
    skipped = config.cache_config.kv_cache_dtype_skip_layers
    if skipped:
        return f"kv_cache_dtype_skip_layers: {skipped}, must be empty"
    draft = getattr(config.speculative_config, "draft_model_config", None)
    shared = "index_share_for_mtp_iteration"
    return f"{shared}: True, must be False" if getattr(getattr(draft, "hf_config", None), shared, False) else None


def staged_pages(common: CommonAttentionMetadata, size: int) -> StagedPages | None:
    """Return the pages of a batch's requests, or None if no rows are staged: the batch has no prompts, or these have
    more rows than the workspace holds, or more than it pays to convert (`ROWS_PER_TOKEN`).

    size: rows of a page of the cache. Only values that the host has are read; lengths are upper bounds there.
    """
    packed = first_prompt(common)
    if packed is None:
        return None
    packed_tokens, most = int(common.query_start_loc_cpu[packed]), common.seq_lens_cpu_upper_bound
    if most is None:
        pages = (common.num_reqs - packed) * -(-common.max_seq_len // size)
    else:
        pages = int(((most[packed : common.num_reqs] + size - 1) // size).sum())
    if pages * size > min(ROWS, ROWS_PER_TOKEN * (common.num_actual_tokens - packed_tokens)):
        return None
    lens, table = common.seq_lens[packed : common.num_reqs], common.block_table_tensor[: common.num_reqs]
    starts = torch.zeros(len(lens) + 1, dtype=torch.int32, device=lens.device)
    torch.cumsum((lens + size - 1) // size, 0, dtype=torch.int32, out=starts[1:])
    columns = torch.arange(table.shape[1], dtype=torch.int32, device=lens.device)
    table = torch.cat((table[:packed], starts[:-1, None] + columns))
    return StagedPages(table, starts * size, size, packed, packed_tokens)


def workspace(dtype: torch.dtype) -> torch.Tensor:
    """Return the rows of the workspace, (ROWS, 576). The first call takes memory, which vLLM must still measure."""
    (rows,) = current_workspace_manager().get_simultaneous(((ROWS, COLUMNS + ROTATED), dtype))
    return rows


def stage(
    kv_cache: torch.Tensor, record: str, block_table: torch.Tensor, staged: StagedPages, dtype: torch.dtype
) -> torch.Tensor:
    """Convert the rows of a batch's prompts, and return the pages of the workspace, (pages, size, 576).

    kv_cache: (blocks, size, bytes). Rows of a page behind the last key of its request hold anything.
    """
    if kv_cache.shape[1] != staged.size:
        raise NotImplementedError(f"kv_cache: blocks of {kv_cache.shape[1]} tokens, must have {staged.size}")
    rows, table = workspace(dtype), block_table[staged.packed : len(staged.table)]
    gather_latent(LatentCache(kv_cache.view(torch.uint8), record), table, staged.starts, rows)
    pages = ROWS // staged.size
    return rows[: pages * staged.size].view(pages, staged.size, rows.shape[1])
