"""Plain torch: gather the pages of a group, then one masked attention over the padded batch.

Shape letters: B sequences of a group, S queries of one, L gathered tokens, H query heads, K KV heads, G = H / K, D head dim.
"""

import torch
from torch.nn import functional

from model_optimizer.memory.kv_storage import KvStorage
from model_optimizer.runtimes.torch.attention import ATTENTIONS
from model_optimizer.runtimes.torch.batch import FlatBatch, Group


def attend_plain(
    query_THD: torch.Tensor, batch: FlatBatch, storage: KvStorage, *, layer: int, window: int | None
) -> torch.Tensor:
    """Return the attention of every token of the step, [T, H, D]."""
    output_THD = torch.empty_like(query_THD)
    for group in batch.groups:
        output_BSHD = _attend_group(query_THD[group.rows_BS], group, storage, layer, window)
        output_THD[group.target_T] = output_BSHD.flatten(0, 1)[group.kept_T]
    return output_THD


def _attend_group(query_BSHD: torch.Tensor, group: Group, storage: KvStorage, layer: int, window: int | None) -> torch.Tensor:
    num_sequences, num_queries, num_heads, head_dim = query_BSHD.shape
    keys_BLKD, values_BLKD = storage.read(layer, group.pages_BP)
    if group.unwritten_BL is not None:
        unwritten_BL11 = group.unwritten_BL[..., None, None]
        keys_BLKD, values_BLKD = keys_BLKD.masked_fill(unwritten_BL11, 0), values_BLKD.masked_fill(unwritten_BL11, 0)
    keys_BKLD, values_BKLD = keys_BLKD.transpose(1, 2), values_BLKD.transpose(1, 2)
    mask_B1SL = group.masks_BSL[window][:, None]
    if num_queries == 1:  # heads that share keys stand in for queries, so that keys are read once
        query_BKGD = query_BSHD.view(num_sequences, keys_BKLD.shape[1], -1, head_dim)
        output_BKGD = functional.scaled_dot_product_attention(query_BKGD, keys_BKLD, values_BKLD, attn_mask=mask_B1SL)
        return output_BKGD.reshape(num_sequences, 1, num_heads, head_dim)
    output_BHSD = functional.scaled_dot_product_attention(
        query_BSHD.transpose(1, 2), keys_BKLD, values_BKLD, attn_mask=mask_B1SL, enable_gqa=num_heads != keys_BKLD.shape[1]
    )
    return output_BHSD.transpose(1, 2)


ATTENTIONS.register("plain")(attend_plain)
