"""Reference counts, the prefix cache and the order of eviction."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import octavo.engine.block_pool
from octavo.engine.block_pool import BlockPool

SIZE = 4


def take(pool: BlockPool, num_blocks: int) -> list[int]:
    block_ids = pool.allocate(num_blocks)
    assert block_ids is not None
    return block_ids


def fill(pool: BlockPool, token_ids: list[int]) -> list[int]:
    """Blocks of a sequence that has been computed; the caller holds them."""
    matched = pool.match_prefix(token_ids)
    block_ids = matched + take(pool, pool.blocks_for(len(token_ids)) - len(matched))
    whole = len(token_ids) // pool.block_size * pool.block_size
    pool.commit(block_ids, len(matched), token_ids[len(matched) * pool.block_size : whole])
    return block_ids


def tokens(num_blocks: int, first: int = 0) -> list[int]:
    return list(range(first, first + num_blocks * SIZE))


# --- allocation and references ------------------------------------------------------------------


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (-1, 4), (4, 0)])
def test_a_pool_without_room_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="must be >= 1"):
        BlockPool(num_blocks, block_size)


def test_allocate_gives_different_blocks_all_or_nothing() -> None:
    pool = BlockPool(5, SIZE)
    first = take(pool, 3)
    assert len(set(first)) == 3
    assert pool.allocate(3) is None
    assert pool.num_free == 2
    second = take(pool, 2)
    assert sorted(first + second) == list(range(5))
    assert pool.num_free == 0
    assert take(pool, 0) == []
    with pytest.raises(ValueError, match="-1"):
        pool.allocate(-1)


def test_blocks_for_rounds_up() -> None:
    pool = BlockPool(5, SIZE)
    assert [pool.blocks_for(n) for n in (0, 1, 3, 4, 5, 8, 9)] == [0, 1, 1, 1, 2, 2, 3]
    assert pool.capacity == 20


def test_a_double_release_raises_and_changes_nothing() -> None:
    pool = BlockPool(4, SIZE)
    block_ids = take(pool, 2)
    pool.release(block_ids[:1])
    with pytest.raises(ValueError, match=f"block {block_ids[0]} is released 1 .* held 0"):
        pool.release([block_ids[1], block_ids[0]])
    assert pool.ref_count(block_ids[1]) == 1, "the good half of a bad call must not go through"
    with pytest.raises(ValueError, match=r"released 2 .* held 1"):
        pool.release([block_ids[1], block_ids[1]])
    assert pool.num_free == 3
    pool.release(block_ids[1:])
    assert pool.num_free == 4


@pytest.mark.parametrize("block_id", [-1, 4])
def test_a_block_outside_the_pool_cannot_be_released(block_id: int) -> None:
    pool = BlockPool(4, SIZE)
    take(pool, 4)
    with pytest.raises(ValueError, match=str(block_id)):
        pool.release([block_id])


def test_a_shared_block_is_free_only_after_its_last_holder() -> None:
    pool = BlockPool(4, SIZE)
    holder = fill(pool, tokens(1))
    sharers = [pool.match_prefix(tokens(2)) for _ in range(2)]
    assert sharers == [holder, holder]
    assert pool.ref_count(holder[0]) == 3
    for left in (2, 1, 0):
        assert pool.num_free == 3
        pool.release(holder)
        assert pool.ref_count(holder[0]) == left
    assert pool.num_free == 4


# --- what a look-up finds -----------------------------------------------------------------------


@pytest.mark.parametrize(("length", "expected"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (99, 3)])
def test_the_last_token_is_never_matched(length: int, expected: int) -> None:
    pool = BlockPool(8, SIZE)
    cached = fill(pool, tokens(3))
    assert pool.match_prefix(list(range(length))) == cached[:expected]


def test_only_whole_blocks_are_found() -> None:
    pool = BlockPool(8, SIZE)
    block_ids = fill(pool, [*tokens(2), 50, 51])
    assert [pool.is_cached(b) for b in block_ids] == [True, True, False]
    assert pool.match_prefix([*tokens(2), 50, 51, 52, 53, 54]) == block_ids[:2]


def test_the_same_block_after_another_prefix_is_another_block() -> None:
    pool = BlockPool(8, SIZE)
    fill(pool, tokens(1, first=0) + tokens(1, first=100))
    other = fill(pool, tokens(1, first=50) + tokens(1, first=100))
    assert pool.match_prefix([*tokens(1, first=100), 1]) == [], "a second block is not a first block"
    assert pool.match_prefix([*tokens(1, first=50), *tokens(1, first=100), 1]) == other
    assert other[1] not in pool.match_prefix([*tokens(1, first=0), *tokens(1, first=100), 1])


def test_moving_a_token_over_a_block_border_is_seen() -> None:
    pool = BlockPool(8, 2)
    fill(pool, [1, 2, 3, 4])
    assert pool.match_prefix([1, 2, 34, 4, 9]) == pool.match_prefix([1, 2, 3])
    assert pool.match_prefix([12, 3, 4, 9, 9]) == []
    # Ids beyond one or two bytes must not run into each other.
    fill(pool, [256, 1])
    assert pool.match_prefix([1, 256, 9]) == []
    assert pool.match_prefix([0, 257, 9]) == []


def test_a_gap_ends_the_match() -> None:
    pool = BlockPool(3, SIZE)
    block_ids = fill(pool, tokens(3))
    for block_id in (block_ids[1], block_ids[0], block_ids[2]):
        pool.release([block_id])
    assert take(pool, 1) == block_ids[1:2]
    assert pool.is_cached(block_ids[2])
    assert pool.match_prefix(tokens(4)) == block_ids[:1]


def test_of_two_equal_blocks_the_first_is_found() -> None:
    pool = BlockPool(4, SIZE)
    first = take(pool, 1)
    second = take(pool, 1)
    pool.commit(first, 0, tokens(1))
    pool.commit(second, 0, tokens(1))
    assert (pool.is_cached(first[0]), pool.is_cached(second[0])) == (True, False)
    assert pool.match_prefix(tokens(2)) == first
    # What follows the second one is still found behind the first.
    second += take(pool, 1)
    pool.commit(second, 1, tokens(1, first=4))
    assert pool.match_prefix(tokens(3)) == [first[0], second[1]]


def test_the_duplicate_does_not_take_the_first_ones_entry_along() -> None:
    pool = BlockPool(2, SIZE)
    first, second = take(pool, 1), take(pool, 1)
    pool.commit(first, 0, tokens(1))
    pool.commit(second, 0, tokens(1))
    pool.release(second)
    assert take(pool, 1) == second
    assert pool.match_prefix(tokens(2)) == first


def test_digests_do_not_depend_on_the_process() -> None:
    """Python's own hash of strings and bytes does; two ranks must agree.

    The module is run by itself: it needs nothing but the standard library.
    """
    code = (
        "import runpy, sys\n"
        "pool = runpy.run_path(sys.argv[1])['BlockPool'](2, 2)\n"
        "pool.commit(pool.allocate(2), 0, [1, 2, 3, 4])\n"
        "print(*[digest.hex() for digest in pool._cached])\n"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-S", "-c", code, octavo.engine.block_pool.__file__],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1
    assert len(seen.pop().split()) == 2


def test_without_prefix_caching_nothing_is_found() -> None:
    pool = BlockPool(4, SIZE, enable_prefix_caching=False)
    block_ids = fill(pool, tokens(2))
    assert pool.match_prefix(tokens(3)) == []
    pool.release(block_ids)
    assert pool.num_free == 4
    assert not any(pool.is_cached(b) for b in range(4))


# --- commit refuses nonsense --------------------------------------------------------------------


@pytest.mark.parametrize(("first", "count"), [(0, 3), (0, 12), (1, 8), (0, 5)])
def test_commit_takes_whole_blocks_that_the_sequence_has(first: int, count: int) -> None:
    pool = BlockPool(4, SIZE)
    with pytest.raises(ValueError, match="whole blocks"):
        pool.commit(take(pool, 2), first, list(range(count)))
    assert not any(pool.is_cached(b) for b in range(4))


def test_commit_needs_the_block_before() -> None:
    pool = BlockPool(4, SIZE)
    block_ids = take(pool, 2)
    with pytest.raises(ValueError, match=f"block {block_ids[0]} comes before"):
        pool.commit(block_ids, 1, tokens(1))


def test_commit_takes_held_blocks_once() -> None:
    pool = BlockPool(4, SIZE)
    block_ids = take(pool, 2)
    pool.commit(block_ids, 0, tokens(1))
    with pytest.raises(ValueError, match="once"):
        pool.commit(block_ids, 0, tokens(2, first=9))
    assert pool.match_prefix([*tokens(1), 99]) == block_ids[:1]
    pool.release([block_ids[0], *block_ids])
    with pytest.raises(ValueError, match=f"block {block_ids[1]} is free"):
        pool.commit(block_ids, 1, tokens(1, first=4))


# --- eviction -----------------------------------------------------------------------------------


def test_the_tail_is_evicted_before_the_head() -> None:
    pool = BlockPool(4, SIZE)
    block_ids = fill(pool, tokens(4))
    pool.release(block_ids)
    assert [take(pool, 1)[0] for _ in range(4)] == block_ids[::-1]


def test_the_least_recently_used_sequence_is_evicted_first() -> None:
    pool = BlockPool(6, SIZE)
    first = fill(pool, tokens(2, first=0))
    second = fill(pool, tokens(2, first=100))
    third = fill(pool, tokens(2, first=200))
    for block_ids in (second, third, first):  # released in this order, whatever the order of allocation
        pool.release(block_ids)
    used_again = pool.match_prefix([*tokens(2, first=100), 1])
    assert used_again == second
    pool.release(used_again)
    assert take(pool, 6) == third[::-1] + first[::-1] + second[::-1]


def test_blocks_that_cannot_be_found_are_used_up_before_cached_ones() -> None:
    pool = BlockPool(5, SIZE)
    cached = fill(pool, tokens(2))
    pool.release(cached)
    partial = take(pool, 1)  # of the three that were never used
    pool.release(partial)
    fresh = take(pool, 3)
    assert partial[0] in fresh
    assert not set(fresh) & set(cached)
    assert pool.match_prefix([*tokens(2), 1]) == cached


def test_an_evicted_block_is_not_found_again() -> None:
    pool = BlockPool(1, SIZE)
    pool.release(fill(pool, tokens(1)))
    assert pool.is_cached(0)
    take(pool, 1)
    assert not pool.is_cached(0)
    assert pool.match_prefix(tokens(2)) == []


# --- K02: a cached block must not be taken between look-up and use --------------------------------


def test_a_look_up_takes_the_block_out_of_reach() -> None:
    pool = BlockPool(1, SIZE)
    pool.release(fill(pool, tokens(1)))
    assert pool.num_free == 1
    mine = pool.match_prefix(tokens(2))
    assert mine == [0]
    assert pool.num_free == 0
    assert pool.allocate(1) is None, "a second request got the block that the first one found"
    pool.release(mine)
    assert pool.num_free == 1


def test_look_ups_are_counted_when_they_are_used() -> None:
    pool = BlockPool(4, SIZE)
    fill(pool, tokens(2))
    assert (pool.num_queried_tokens, pool.num_hit_tokens) == (0, 0)
    pool.record_lookup(10, 8)
    pool.record_lookup(3, 0)
    assert (pool.num_queried_tokens, pool.num_hit_tokens) == (13, 8)
