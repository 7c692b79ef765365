"""One rule of the scheduler at a time; test_simulator.py has them all at once."""

from __future__ import annotations

import pytest

from octavo.engine.block_pool import BlockPool
from octavo.engine.request import Request, SamplingParams
from octavo.engine.scheduler import Scheduler, Step


def make(
    num_blocks: int = 100, block_size: int = 4, *, seqs: int = 8, budget: int = 64, model_len: int = 1000
) -> Scheduler:
    return Scheduler(
        BlockPool(num_blocks, block_size),
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        max_model_len=model_len,
    )


def add(scheduler: Scheduler, name: str, length: int, *, first: int = 0, max_tokens: int = 100) -> Request:
    request = Request(name, range(first, first + length), SamplingParams(max_tokens=max_tokens))
    scheduler.add(request)
    return request


def turn(scheduler: Scheduler) -> Step:
    """One whole turn; every sampled token is 7."""
    step = scheduler.schedule()
    assert step is not None
    scheduler.complete(step)
    for chunk in step.scheduled:
        if chunk.samples:
            chunk.request.output_token_ids.append(7)
            if chunk.request.is_at_limit:
                scheduler.finish(chunk.request, "length")
    return step


def shape(step: Step) -> list[tuple[str, int, int, bool]]:
    return [(c.request.request_id, c.start, c.num_tokens, c.samples) for c in step.scheduled]


# --- construction and admission of requests -------------------------------------------------------


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "max_model_len"])
def test_limits_that_admit_nothing_are_refused(name: str) -> None:
    limits = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 2}
    Scheduler(BlockPool(1, 1), **limits)
    limits[name] -= 1
    with pytest.raises(ValueError, match=f"{name} is {limits[name]}"):
        Scheduler(BlockPool(1, 1), **limits)


def test_an_empty_prompt_is_refused() -> None:
    scheduler = make()
    with pytest.raises(ValueError, match="the prompt is empty"):
        add(scheduler, "a", 0)
    assert not scheduler.has_unfinished
    assert scheduler.schedule() is None


def test_the_prompt_leaves_room_for_one_token_of_the_model_length() -> None:
    scheduler = make(model_len=10)
    with pytest.raises(ValueError, match="has 10 tokens; at most 9 fit a model length of 10"):
        add(scheduler, "long", 10)
    request = add(scheduler, "fits", 9, max_tokens=50)
    assert request.token_limit == 10
    turn(scheduler)
    assert request.finish_reason == "length"
    assert request.output_token_ids == [7]


def test_the_prompt_must_fit_the_whole_pool() -> None:
    scheduler = make(num_blocks=3, block_size=4)
    with pytest.raises(ValueError, match=r"has 13 tokens; the cache holds 12 \(3 blocks of 4\)"):
        add(scheduler, "large", 13)
    # The last token is sampled, never computed: it needs no slot.
    request = add(scheduler, "fits", 12)
    assert request.token_limit == 13
    turn(scheduler)
    assert request.finish_reason == "length"
    assert not scheduler.has_unfinished


def test_growth_beyond_the_whole_pool_ends_with_length() -> None:
    scheduler = make(num_blocks=3, block_size=4)
    request = add(scheduler, "a", 5)
    while scheduler.has_unfinished:
        turn(scheduler)
    assert request.finish_reason == "length"
    assert request.num_tokens == 13
    assert request.num_preemptions == 0


def test_max_tokens_is_the_limit_where_it_is_the_smallest() -> None:
    assert add(make(), "a", 5, max_tokens=3).token_limit == 8


def test_a_request_is_added_once() -> None:
    scheduler = make()
    request = add(scheduler, "a", 3)
    with pytest.raises(ValueError, match="'a' was added before"):
        scheduler.add(request)
    with pytest.raises(ValueError, match="'a' was added before"):
        add(scheduler, "a", 3)
    scheduler.abort("a")
    with pytest.raises(ValueError, match="'a' was added before"):
        scheduler.add(request)
    add(scheduler, "a", 3)  # the name is free again
    assert len(scheduler.waiting) == 1


# --- the order and size of chunks -----------------------------------------------------------------


def test_a_long_prompt_is_computed_in_chunks_and_samples_after_the_last() -> None:
    scheduler = make(budget=6)
    add(scheduler, "a", 14)
    assert shape(turn(scheduler)) == [("a", 0, 6, False)]
    assert shape(turn(scheduler)) == [("a", 6, 6, False)]
    assert shape(turn(scheduler)) == [("a", 12, 2, True)]
    assert shape(turn(scheduler)) == [("a", 14, 1, True)]


def test_decodes_stand_first_and_prefills_share_what_is_left() -> None:
    scheduler = make(budget=8)
    add(scheduler, "long", 20)
    turn(scheduler)
    assert shape(turn(scheduler)) == [("long", 8, 8, False)]
    add(scheduler, "b", 3, first=100)
    add(scheduler, "c", 9, first=200)
    # A piece of one token is a row like that of a decode.
    assert shape(turn(scheduler)) == [("c", 0, 1, False), ("long", 16, 4, True), ("b", 0, 3, True)]
    step = turn(scheduler)
    assert shape(step) == [("long", 20, 1, True), ("b", 3, 1, True), ("c", 1, 6, False)]
    assert step.num_tokens == 8
    assert [chunk.stop for chunk in step.scheduled] == [21, 4, 7]


def test_a_decode_is_never_held_up_by_an_older_prefill() -> None:
    scheduler = make(budget=5)
    add(scheduler, "a", 12)
    turn(scheduler)
    turn(scheduler)
    add(scheduler, "b", 3, first=100)
    turn(scheduler)  # a: its last 2, b: its 3
    add(scheduler, "c", 30, first=200)
    add(scheduler, "d", 3, first=300)
    for _ in range(3):
        step = turn(scheduler)
        assert [row[0] for row in shape(step)] == ["a", "b", "c"]
        assert step.num_tokens == 5


def test_first_come_first_served_even_if_a_later_one_would_fit() -> None:
    scheduler = make(num_blocks=10, block_size=4)
    first = add(scheduler, "first", 24, max_tokens=2)
    add(scheduler, "large", 20, first=100)
    add(scheduler, "small", 2, first=200)
    turn(scheduler)
    assert [r.request_id for r in scheduler.running] == ["first"]
    turn(scheduler)
    assert first.finish_reason == "length"
    assert [row[0] for row in shape(turn(scheduler))] == ["large", "small"]


def test_max_num_seqs_bounds_the_running_requests() -> None:
    scheduler = make(seqs=2)
    for name in "abc":
        add(scheduler, name, 2, max_tokens=2)
    assert [row[0] for row in shape(turn(scheduler))] == ["a", "b"]
    assert [row[0] for row in shape(turn(scheduler))] == ["a", "b"]
    assert [row[0] for row in shape(turn(scheduler))] == ["c"]


def test_no_budget_left_admits_nobody() -> None:
    scheduler = make(budget=2)
    for name in "abc":
        add(scheduler, name, 1, max_tokens=3)
    for _ in range(3):
        assert [row[0] for row in shape(turn(scheduler))] == ["a", "b"]
    assert [row[0] for row in shape(turn(scheduler))] == ["c"]


# --- the prefix cache -----------------------------------------------------------------------------


def test_a_shared_prefix_is_computed_once() -> None:
    scheduler = make(block_size=4)
    first = add(scheduler, "a", 10, max_tokens=1)
    turn(scheduler)
    assert scheduler.pool.num_free == 100, "finished: all blocks back"
    second = add(scheduler, "b", 10, max_tokens=1)
    step = scheduler.schedule()
    assert step is not None
    assert shape(step) == [("b", 8, 2, True)]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 8)
    assert (scheduler.pool.num_queried_tokens, scheduler.pool.num_hit_tokens) == (20, 8)


def test_a_prompt_of_whole_blocks_still_computes_its_last_block() -> None:
    scheduler = make(block_size=4)
    add(scheduler, "a", 8, max_tokens=1)
    turn(scheduler)
    add(scheduler, "b", 8)
    assert shape(turn(scheduler)) == [("b", 4, 4, True)]


def test_a_block_is_not_found_before_the_step_that_fills_it_is_complete() -> None:
    scheduler = make(block_size=4, budget=12)
    add(scheduler, "a", 8)
    add(scheduler, "b", 9)
    assert shape(turn(scheduler)) == [("a", 0, 8, True), ("b", 0, 4, False)]
    add(scheduler, "c", 9)
    assert shape(turn(scheduler)) == [("a", 8, 1, True), ("c", 8, 1, True), ("b", 4, 5, True)]


def test_generated_tokens_can_be_found_too() -> None:
    scheduler = make(block_size=2)
    add(scheduler, "a", 2, max_tokens=4)
    while scheduler.has_unfinished:
        turn(scheduler)
    request = Request("b", [0, 1, 7, 7, 7, 7])
    scheduler.add(request)
    # The last sampled token of a was never computed; 0 1 7 7 were filled.
    assert shape(turn(scheduler)) == [("b", 4, 2, True)]


def test_a_look_up_that_comes_to_nothing_gives_its_blocks_back_uncounted() -> None:
    scheduler = make(num_blocks=6, block_size=4)
    add(scheduler, "seed", 8, max_tokens=1)
    turn(scheduler)
    add(scheduler, "holder", 8, first=100)
    turn(scheduler)
    counted = scheduler.pool.num_queried_tokens
    late = add(scheduler, "late", 24, max_tokens=1)
    assert [row[0] for row in shape(turn(scheduler))] == ["holder"]
    assert late.block_ids == []
    assert scheduler.pool.num_free == 6 - 3
    assert scheduler.pool.num_queried_tokens == counted
    scheduler.abort("holder")
    assert shape(turn(scheduler)) == [("late", 8, 16, True)]
    assert scheduler.pool.num_hit_tokens == 8


# --- preemption -----------------------------------------------------------------------------------


def test_the_newest_request_goes_first_and_comes_back_in_order() -> None:
    scheduler = make(num_blocks=9, block_size=2)
    a, b, c = (add(scheduler, name, 2, first=10 * i) for i, name in enumerate("abc"))
    for _ in range(5):
        assert turn(scheduler).preempted == ()
    # Seven tokens each, three blocks each, none left.
    assert turn(scheduler).preempted == (c,)
    assert (c.num_computed_tokens, c.block_ids, c.num_tokens) == (0, [], 7)
    assert turn(scheduler).preempted == ()
    assert turn(scheduler).preempted == (b,)
    assert (scheduler.running, list(scheduler.waiting)) == ([a], [b, c])
    scheduler.finish(a, "stop")
    late = add(scheduler, "late", 2, first=90)
    turn(scheduler)
    assert [*scheduler.running, *scheduler.waiting] == [b, c, late]
    assert scheduler.running[0] is b
    assert [r.num_preemptions for r in (a, b, c, late)] == [0, 1, 1, 0]


def test_several_may_have_to_go_in_one_step() -> None:
    scheduler = make(num_blocks=9, block_size=4)
    old, b, c, d = (add(scheduler, name, 3, first=10 * i, max_tokens=50) for i, name in enumerate("abcd"))
    turn(scheduler)
    turn(scheduler)
    assert [len(r.block_ids) for r in (old, b, c, d)] == [1, 1, 1, 1]
    assert scheduler.pool.allocate(5) is not None  # somebody else takes what was left
    step = turn(scheduler)
    assert step.preempted == (d, c)
    assert shape(step) == [("a", 4, 1, True), ("b", 4, 1, True)]
    assert list(scheduler.waiting) == [c, d]


def test_the_newest_request_gives_way_if_it_is_the_one_that_grows() -> None:
    scheduler = make(num_blocks=4, block_size=2)
    old, new = add(scheduler, "old", 2), add(scheduler, "new", 3, first=50)
    turn(scheduler)
    assert turn(scheduler).preempted == ()
    assert scheduler.pool.num_free == 0
    step = turn(scheduler)  # old has room for its fourth token, new needs a third block
    assert step.preempted == (new,)
    assert shape(step) == [("old", 3, 1, True)]
    assert old.num_preemptions == 0


def test_a_newcomer_leaves_a_spare_block_for_each_running_request() -> None:
    scheduler = make(num_blocks=6, block_size=4)
    add(scheduler, "a", 4)
    add(scheduler, "b", 4, first=50)
    add(scheduler, "c", 8, first=80)
    turn(scheduler)
    assert [request.request_id for request in scheduler.running] == ["a", "b", "c"]
    scheduler = make(num_blocks=5, block_size=4)
    add(scheduler, "a", 4)
    add(scheduler, "b", 4, first=50)
    add(scheduler, "c", 8, first=80)
    turn(scheduler)
    assert [request.request_id for request in scheduler.running] == ["a", "b"]


def test_a_preempted_request_gets_back_what_the_cache_kept() -> None:
    scheduler = make(num_blocks=8, block_size=2)
    old = add(scheduler, "old", 4, max_tokens=6)
    new = add(scheduler, "new", 5, first=50)
    while not new.num_preemptions:
        turn(scheduler)
    outputs = list(new.output_token_ids)
    assert outputs
    while not new.block_ids:
        turn(scheduler)
    assert old.finish_reason == "length"
    assert new.num_cached_tokens == 0, "only the first admission counts for the statistics"
    assert scheduler.pool.num_hit_tokens > 0
    assert new.output_token_ids[: len(outputs)] == outputs


def test_a_preempted_request_waits_for_the_next_step_even_if_it_fits_again() -> None:
    scheduler = make(num_blocks=10, block_size=2)
    old, new = add(scheduler, "old", 8), add(scheduler, "new", 9)
    turn(scheduler)  # in the same step: each has its own copy of the four blocks that they have in common
    turn(scheduler)
    assert scheduler.pool.num_free == 0
    step = turn(scheduler)
    assert step.preempted == (new,)
    assert shape(step) == [("old", 9, 1, True)]
    assert shape(turn(scheduler)) == [("old", 10, 1, True), ("new", 10, 1, True)]
    assert new.block_ids[:4] == old.block_ids[:4]


# --- turns that go wrong --------------------------------------------------------------------------


def test_no_second_step_while_one_is_in_flight() -> None:
    """K01: a block must not find a new owner while a step that writes it is still running."""
    scheduler = make()
    add(scheduler, "a", 4)
    step = scheduler.schedule()
    assert step is not None
    with pytest.raises(RuntimeError, match="complete"):
        scheduler.schedule()
    scheduler.complete(step)
    with pytest.raises(RuntimeError, match="not the one in flight"):
        scheduler.complete(step)


@pytest.mark.parametrize("reason", ["aborted", "error"])
def test_a_request_that_ends_while_its_step_runs_leaves_nothing_behind(reason: str) -> None:
    scheduler = make(num_blocks=8, block_size=4)
    gone, stays = add(scheduler, "gone", 8), add(scheduler, "stays", 4, first=50)
    step = scheduler.schedule()
    assert step is not None
    if reason == "aborted":
        assert scheduler.abort("gone")
    else:
        scheduler.finish(gone, "error", "no memory")
    scheduler.complete(step)
    assert gone.finish_reason == reason
    assert gone.error == (None if reason == "aborted" else "no memory")
    assert (gone.block_ids, gone.num_computed_tokens) == ([], 0)
    assert scheduler.pool.num_free == 7
    assert scheduler.pool.match_prefix(range(9)) == [], "its blocks may be half-written"
    stays.output_token_ids.append(7)
    assert shape(turn(scheduler)) == [("stays", 4, 1, True)]


def test_abort_works_in_every_state_and_once() -> None:
    scheduler = make(seqs=1)
    running, waiting = add(scheduler, "running", 4), add(scheduler, "waiting", 4)
    turn(scheduler)
    assert scheduler.abort("waiting")
    assert scheduler.abort("running")
    assert not scheduler.abort("running")
    assert not scheduler.abort("unknown")
    assert (running.finish_reason, waiting.finish_reason) == ("aborted", "aborted")
    assert scheduler.pool.num_free == 100
    assert not scheduler.has_unfinished
    with pytest.raises(ValueError, match="'running' is finished already or was never added"):
        scheduler.finish(running, "stop")
    assert scheduler.schedule() is None


def test_a_caller_that_forgets_its_part_is_told() -> None:
    scheduler = make()
    request = add(scheduler, "a", 4, max_tokens=2)
    step = scheduler.schedule()
    assert step is not None
    scheduler.complete(step)
    with pytest.raises(RuntimeError, match="append the sampled token"):
        scheduler.schedule()
    request.output_token_ids += [7, 7]
    with pytest.raises(RuntimeError, match="limit 6"):
        scheduler.schedule()
    scheduler.finish(request, "length")
    assert scheduler.schedule() is None


def test_blocks_held_by_somebody_else_are_an_error_not_an_endless_wait() -> None:
    scheduler = make(num_blocks=4, block_size=4)
    assert scheduler.pool.allocate(3) is not None
    add(scheduler, "a", 8)
    with pytest.raises(RuntimeError, match="'a' cannot start: 1 of 4 blocks"):
        scheduler.schedule()
