"""Which cache block belongs to whom, and which blocks can be found again by their content."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence

_ROOT = b""  # the parent digest of a first block


class BlockPool:
    """Reference counts over `num_blocks` blocks of `block_size` tokens, and a prefix cache among them.

    A full block is known by a digest of its tokens *and of everything before them*, since K and V depend on
    both. A block whose last reference goes keeps its content and its digest, and waits in the free queue; a
    look-up may take it out again until `allocate` hands it to somebody else. Every operation is O(1) a block.

    The pool holds numbers only; the bytes lie in PagedKVCache.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be >= 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._ref_counts = [0] * num_blocks
        # In the order of use: blocks that no look-up can find, then cached ones, least recently used first.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._digests: list[bytes | None] = [None] * num_blocks  # of each committed block
        self._cached: dict[bytes, int] = {}  # digest -> the one block that a look-up finds

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, cached ones included."""
        return len(self._free)

    @property
    def capacity(self) -> int:
        """Tokens that all blocks together hold."""
        return self.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def is_cached(self, block_id: int) -> bool:
        """Whether a look-up can find this block."""
        digest = self._digests[block_id]
        return digest is not None and self._cached.get(digest) == block_id

    def allocate(self, num_blocks: int) -> list[int] | None:
        """`num_blocks` blocks with one reference each, or None and no change if fewer are free.

        What the blocks held is forgotten, the least recently used first.
        """
        if num_blocks < 0:
            raise ValueError(f"num_blocks is {num_blocks}; it must be >= 0")
        if num_blocks > len(self._free):
            return None
        block_ids = [self._free.popitem(last=False)[0] for _ in range(num_blocks)]
        for block_id in block_ids:
            self._forget(block_id)
            self._ref_counts[block_id] = 1
        return block_ids

    def match_prefix(self, token_ids: Sequence[int]) -> list[int]:
        """The longest run of cached blocks that holds the beginning of `token_ids`.

        The caller owns a reference on each block from here on, so that nothing can take a block between
        look-up and use; it gives them back through `release` if it has no use for them. The last token is
        never matched: it has to be computed for there to be logits.
        """
        block_ids: list[int] = []
        if not self.enable_prefix_caching:
            return block_ids
        digest = _ROOT
        for start in range(0, (len(token_ids) - 1) // self.block_size * self.block_size, self.block_size):
            digest = _chain(digest, token_ids[start : start + self.block_size])
            block_id = self._cached.get(digest)
            if block_id is None:
                break
            if self._ref_counts[block_id] == 0:
                del self._free[block_id]
            self._ref_counts[block_id] += 1
            block_ids.append(block_id)
        return block_ids

    def record_lookup(self, num_queried_tokens: int, num_hit_tokens: int) -> None:
        """Counts one look-up that was used; one that the caller gave back and will repeat is not counted."""
        self.num_queried_tokens += num_queried_tokens
        self.num_hit_tokens += num_hit_tokens

    def commit(self, block_ids: Sequence[int], first: int, token_ids: Sequence[int]) -> None:
        """Makes the blocks `block_ids[first:]` that `token_ids` fill findable; call once K and V are written.

        block_ids: all blocks of the sequence. token_ids: the tokens from block `first` on, whole blocks only.
        Blocks before `first` must have been committed or matched, the others not. If a block with the same
        content is cached already, that one stays the one that is found. Raises ValueError before any change.
        """
        if not self.enable_prefix_caching:
            return
        count, rest = divmod(len(token_ids), self.block_size)
        if rest or first + count > len(block_ids):
            raise ValueError(
                f"{len(token_ids)} tokens from block {first} of {len(block_ids)}: only whole blocks of "
                f"{self.block_size} tokens that the sequence has can be committed"
            )
        parent = self._digests[block_ids[first - 1]] if first else _ROOT
        if parent is None:
            raise ValueError(f"block {block_ids[first - 1]} comes before block {first}; commit it first")
        for block_id in block_ids[first : first + count]:
            if self._ref_counts[block_id] == 0 or self._digests[block_id] is not None:
                raise ValueError(f"block {block_id} is free or committed; commit each block once, while held")
        for index in range(count):
            parent = _chain(parent, token_ids[index * self.block_size : (index + 1) * self.block_size])
            self._digests[block_ids[first + index]] = parent
            self._cached.setdefault(parent, block_ids[first + index])

    def release(self, block_ids: Sequence[int]) -> None:
        """Gives back one reference on each block of a sequence, given in the sequence's order.

        The tail enters the free queue before the head, hence is evicted before it: a head without its tail is
        still a useful prefix, a tail without its head cannot be found. A block that no look-up can find goes
        to the front: nothing is lost with it. Raises ValueError, and changes nothing, if a block is given
        back more often than it is held.
        """
        for block_id, times in Counter(block_ids).items():
            held = self._ref_counts[block_id] if 0 <= block_id < self.num_blocks else 0
            if times > held:
                raise ValueError(f"block {block_id} is released {times} time(s) but held {held} time(s)")
        for block_id in reversed(block_ids):
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free[block_id] = None
                if not self.is_cached(block_id):
                    self._free.move_to_end(block_id, last=False)

    def _forget(self, block_id: int) -> None:
        digest = self._digests[block_id]
        if digest is not None and self._cached.get(digest) == block_id:
            del self._cached[digest]
        self._digests[block_id] = None


def _chain(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Digest of a block given that of the block before it.

    A cryptographic one: with a weak hash a prompt could be built that reads another request's cache.
    """
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=32).digest()
