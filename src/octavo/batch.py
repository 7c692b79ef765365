"""This step's lengths and tables, as an engine hands them over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.checks import check_device, check_index


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """One engine step: which rows belong to which sequence, and where its keys live.

    Sequence i has `query_start_loc[i+1] - query_start_loc[i]` new tokens and `seq_lens[i]` keys in all,
    the new ones included. Sequences may stand in any order, have no new token, or no key (padding).

    Args:
        query_start_loc: [num_seqs + 1] int32, cumulative new tokens, starting at 0.
        seq_lens: [num_seqs] int32.
        block_table: [num_seqs, max_blocks] int32, logical to physical block; entries past a sequence's
            blocks are never looked at.
        num_tokens: query rows of the step; rows of q and out past it are padding.
        max_query_len: upper bound of the new tokens of a sequence, known on the host.
        max_seq_len: upper bound of seq_lens, known on the host.
        slot_mapping: [num_slots] int64, where each new token's K and V go (block * block_size + offset);
            negative: not stored here. None: this step writes nothing.

    Raises:
        TypeError, ValueError: a shape, dtype or device does not fit; the message names the argument.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    slot_mapping: Tensor | None = None

    def __post_init__(self) -> None:
        check_index("query_start_loc", self.query_start_loc, 1, torch.int32)
        check_index("seq_lens", self.seq_lens, 1, torch.int32)
        check_index("block_table", self.block_table, 2, torch.int32)
        if self.query_start_loc.numel() != self.num_seqs + 1:
            raise ValueError(
                f"query_start_loc must have num_seqs + 1 = {self.num_seqs + 1} entries (seq_lens has "
                f"{self.num_seqs}), got {self.query_start_loc.numel()}"
            )
        if self.block_table.shape[0] != self.num_seqs:
            raise ValueError(
                f"block_table must have one row per sequence ({self.num_seqs}), got {self.block_table.shape[0]}"
            )
        if self.slot_mapping is not None:
            check_index("slot_mapping", self.slot_mapping, 1, torch.int64)
        for name in ("num_tokens", "max_query_len", "max_seq_len"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        check_device(
            self.device,
            query_start_loc=self.query_start_loc,
            block_table=self.block_table,
            slot_mapping=self.slot_mapping,
        )

    @property
    def num_seqs(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def device(self) -> torch.device:
        return self.seq_lens.device

    @classmethod
    def from_lengths(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_table: Tensor | Sequence[Sequence[int]],
        *,
        slot_mapping: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> AttentionBatch:
        """Build a batch from lengths on the host.

        Args:
            query_lens: new tokens of each sequence.
            seq_lens: keys of each sequence, new ones included.
            block_table: a [num_seqs, max_blocks] tensor, or one list of blocks per sequence (padded here).
            slot_mapping: [num_slots] int64 or None.
            device: where the batch lives.
        """
        starts = [0]
        for n in query_lens:
            starts.append(starts[-1] + n)
        if not isinstance(block_table, Tensor):
            width = max((len(row) for row in block_table), default=0)
            padded = [list(row) + [0] * (width - len(row)) for row in block_table]
            block_table = torch.tensor(padded, dtype=torch.int32).reshape(len(padded), width)
        return cls(
            query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
            seq_lens=torch.tensor(list(seq_lens), dtype=torch.int32, device=device),
            block_table=block_table.to(device),
            num_tokens=starts[-1],
            max_query_len=max(query_lens, default=0),
            max_seq_len=max(seq_lens, default=0),
            slot_mapping=None if slot_mapping is None else slot_mapping.to(device),
        )

    @classmethod
    def from_raw_keys(
        cls, query_start_loc: Tensor, key_start_loc: Tensor, *, device: torch.device | str = "cpu"
    ) -> AttentionBatch:
        """A batch over raw keys (encoder attention): K and V are [num_keys, num_kv_heads, head_dim] tensors.

        Raw keys are pages of one row: pass `k.unsqueeze(1)` and `v.unsqueeze(1)` as the cache. The offsets
        must live on the host (an encoder's caller has them there).

        Args:
            query_start_loc: [num_seqs + 1] int32 CPU tensor, cumulative query rows.
            key_start_loc: [num_seqs + 1] int32 CPU tensor, cumulative keys.
            device: where the batch lives.
        """
        if query_start_loc.shape != key_start_loc.shape:
            raise ValueError(
                f"query_start_loc and key_start_loc must have the same number of entries, "
                f"got {tuple(query_start_loc.shape)} and {tuple(key_start_loc.shape)}"
            )
        seq_lens = key_start_loc.diff()
        query_lens = query_start_loc.diff()
        width = int(seq_lens.max()) if seq_lens.numel() else 0
        table = key_start_loc[:-1, None] + torch.arange(width, dtype=torch.int32)
        return cls(
            query_start_loc=query_start_loc.to(device),
            seq_lens=seq_lens.to(device),
            block_table=table.to(device),
            num_tokens=int(query_start_loc[-1]),
            max_query_len=int(query_lens.max()) if query_lens.numel() else 0,
            max_seq_len=width,
        )
