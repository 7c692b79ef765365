"""The scheduler and the block pool against a shadow copy of the cache.

A fake cache stores in each slot, in place of K and V, the tokens that K and V depend on: all tokens up to
that position. A fake model reads back every position below the end of each chunk, as attention would, before
it names the next token. So a block that is given away too early, shared wrongly, found under a wrong prefix
or filled by nobody shows as a wrong read, at the step in which it happens; and what a request says in the end
must be what it says alone.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.engine.block_pool import BlockPool
from octavo.engine.request import FinishReason, Request, SamplingParams
from octavo.engine.scheduler import Scheduler, Step

VOCAB = 15
STOP = 0  # one of the tokens ends a request early

Content = tuple[int, ...]


def next_token(token_ids: list[int]) -> int:
    """The fake model: depends on every token."""
    return zlib.crc32(bytes(token_ids)) % VOCAB


def alone(prompt: list[int], token_limit: int) -> tuple[list[int], FinishReason]:
    """What a request says without company."""
    token_ids = list(prompt)
    while True:
        token_ids.append(next_token(token_ids))
        if token_ids[-1] == STOP:
            return token_ids[len(prompt) :], "stop"
        if len(token_ids) >= token_limit:
            return token_ids[len(prompt) :], "length"


@dataclass(frozen=True)
class Visit:
    """A request of the scenario."""

    arrives: int  # the turn
    prompt: list[int]
    max_tokens: int
    ends_at: int | None = None  # the turn in which something ends it, if it still lives
    how: FinishReason = "aborted"
    mid_step: bool = False  # while the model runs, or between two steps


@dataclass(frozen=True)
class Scenario:
    num_blocks: int
    block_size: int
    max_num_seqs: int
    budget: int
    max_model_len: int
    caching: bool
    visits: list[Visit]


@dataclass
class Simulator:
    scenario: Scenario
    preemptions: int = 0
    hits: int = 0
    shared: int = 0  # (turn, block) pairs in which two requests held one block
    chunked: int = 0
    finished: dict[int, Request] = field(default_factory=dict)

    def __post_init__(self) -> None:
        s = self.scenario
        self.pool = BlockPool(s.num_blocks, s.block_size, enable_prefix_caching=s.caching)
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=s.max_num_seqs,
            max_num_batched_tokens=s.budget,
            max_model_len=s.max_model_len,
        )
        self.cache: list[list[Content | None]] = [[None] * s.block_size for _ in range(s.num_blocks)]
        self.live: dict[int, Request] = {}

    def run(self) -> None:
        turn = 0
        last_arrival = max(visit.arrives for visit in self.scenario.visits)
        # While a request is the oldest it moves in every turn and is not preempted: at most a turn a token.
        patience = last_arrival + 2 + sum(len(v.prompt) + v.max_tokens for v in self.scenario.visits)
        while turn <= last_arrival or self.scheduler.has_unfinished:
            self.turn(turn)
            turn += 1
            assert turn <= patience, f"starved: {[r.request_id for r in self.live.values()]}"
        assert not self.live
        assert self.pool.num_free == self.pool.num_blocks
        assert self.scheduler.schedule() is None

    def turn(self, turn: int) -> None:
        self.arrivals(turn)
        self.departures(turn, mid_step=False)
        step = self.scheduler.schedule()
        if step is None:
            assert not self.live
            return
        self.check_step(step)
        self.check_pool()
        self.write(step)
        self.read(step)
        self.departures(turn, mid_step=True)
        self.scheduler.complete(step)
        self.check_pool()
        for chunk in step.scheduled:
            request = chunk.request
            if not chunk.samples or request.is_finished:
                continue
            request.output_token_ids.append(next_token(request.token_ids))
            if request.output_token_ids[-1] == STOP:
                self.end(request, "stop")
            elif request.is_at_limit:
                self.end(request, "length")
        self.check_pool()

    def arrivals(self, turn: int) -> None:
        for number, visit in enumerate(self.scenario.visits):
            if visit.arrives == turn:
                request = Request(str(number), visit.prompt, SamplingParams(max_tokens=visit.max_tokens))
                self.scheduler.add(request)
                self.live[number] = request

    def departures(self, turn: int, *, mid_step: bool) -> None:
        for number, visit in enumerate(self.scenario.visits):
            request = self.live.get(number)
            if request is not None and visit.ends_at == turn and visit.mid_step == mid_step:
                self.end(request, visit.how)

    def end(self, request: Request, how: FinishReason) -> None:
        if how == "aborted":
            assert self.scheduler.abort(request.request_id)
        else:
            self.scheduler.finish(request, how)
        assert (request.block_ids, request.finish_reason) == ([], how)
        number = int(request.request_id)
        self.finished[number] = self.live.pop(number)

    def slot(self, request: Request, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self.scenario.block_size)
        return request.block_ids[index], offset

    def write(self, step: Step) -> None:
        written: set[tuple[int, int]] = set()
        for chunk in step.scheduled:
            token_ids = chunk.request.token_ids
            for position in range(chunk.start, chunk.stop):
                block_id, offset = self.slot(chunk.request, position)
                assert self.pool.ref_count(block_id) == 1, "writes into a block that another request reads"
                assert not self.pool.is_cached(block_id), "writes into a block that can be found"
                assert (block_id, offset) not in written, "two tokens in one slot"
                written.add((block_id, offset))
                self.cache[block_id][offset] = tuple(token_ids[: position + 1])

    def read(self, step: Step) -> None:
        for chunk in step.scheduled:
            token_ids = chunk.request.token_ids
            for position in range(chunk.stop):
                block_id, offset = self.slot(chunk.request, position)
                assert self.cache[block_id][offset] == tuple(token_ids[: position + 1]), (
                    f"request {chunk.request.request_id} reads a foreign token at {position}"
                )

    def check_step(self, step: Step) -> None:
        """What holds of every step by itself."""
        scenario, scheduler = self.scenario, self.scheduler
        assert step.scheduled, "a step without work"
        assert 0 < step.num_tokens <= scenario.budget
        requests = [chunk.request for chunk in step.scheduled]
        assert len(set(map(id, requests))) == len(requests), "one request twice"
        assert len(requests) <= len(scheduler.running) <= scenario.max_num_seqs
        assert not set(map(id, step.preempted)) & set(map(id, requests)), "preempted and scheduled"
        sizes = [chunk.num_tokens for chunk in step.scheduled]
        assert sizes == sorted(sizes, key=lambda size: size > 1), "a long chunk before a single token"
        for chunk in step.scheduled:
            assert chunk.num_tokens >= 1
            assert chunk.start == chunk.request.num_computed_tokens
            assert chunk.stop <= chunk.request.num_tokens
            assert chunk.samples == (chunk.stop == chunk.request.num_tokens)
            self.chunked += not chunk.samples
        # Fairness: nobody overtakes, and the oldest moves in every step, as does all that runs.
        queue = [*scheduler.running, *scheduler.waiting]
        arrivals = [request.arrival for request in queue if request.arrival is not None]
        assert arrivals == sorted(arrivals)
        assert len(arrivals) == len(self.live)
        assert queue[0] in requests, "the oldest request stands still"
        assert all(request in requests for request in scheduler.running), "a running request stands still"
        for request in step.preempted:
            assert (request.block_ids, request.num_computed_tokens) == ([], 0)
        assert step.preempted == tuple(sorted(step.preempted, key=lambda r: -int(r.arrival or 0)))
        self.preemptions += len(step.preempted)
        self.hits = self.pool.num_hit_tokens

    def check_pool(self) -> None:
        """What holds of the pool at any time."""
        block_size = self.scenario.block_size
        holders: Counter[int] = Counter()
        content: dict[int, Content] = {}
        for request in self.live.values():
            assert len(set(request.block_ids)) == len(request.block_ids)
            assert request.num_computed_tokens <= len(request.block_ids) * block_size
            assert len(request.block_ids) <= self.pool.blocks_for(request.num_tokens), "hoards blocks"
            holders.update(request.block_ids)
            for index, block_id in enumerate(request.block_ids):
                mine = tuple(request.tokens(0, (index + 1) * block_size))
                assert content.setdefault(block_id, mine) == mine, "unequal requests share a block"
        for block_id in range(self.pool.num_blocks):
            assert self.pool.ref_count(block_id) == holders[block_id]
        assert self.pool.num_free + len(holders) == self.pool.num_blocks
        self.shared += sum(count > 1 for count in holders.values())

    def check_outputs(self) -> None:
        """Every request said what it says alone, or the beginning of it if it was cut off."""
        scenario = self.scenario
        assert sorted(self.finished) == list(range(len(scenario.visits)))
        for number, visit in enumerate(scenario.visits):
            request = self.finished[number]
            limit = min(
                len(visit.prompt) + visit.max_tokens,
                scenario.max_model_len,
                scenario.num_blocks * scenario.block_size + 1,
            )
            expected, reason = alone(visit.prompt, limit)
            if request.finish_reason in ("aborted", "error"):
                assert request.finish_reason == visit.how
                assert request.output_token_ids == expected[: len(request.output_token_ids)]
            else:
                assert (request.output_token_ids, request.finish_reason) == (expected, reason)


def simulate(scenario: Scenario) -> Simulator:
    simulator = Simulator(scenario)
    simulator.run()
    simulator.check_outputs()
    return simulator


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Small pools, few different tokens, prompts that share prefixes: collisions are the rule."""
    block_size = draw(st.integers(1, 4))
    num_blocks = draw(st.integers(1, 14))
    max_model_len = draw(st.integers(2, 40))
    longest = min(max_model_len - 1, num_blocks * block_size)
    token = st.integers(1, 2)
    stems = draw(st.lists(st.lists(token, min_size=1, max_size=20), min_size=1, max_size=2))
    visits = []
    for _ in range(draw(st.integers(1, 9))):
        stem = draw(st.sampled_from(stems))
        prompt = stem[: draw(st.integers(1, len(stem)))] + draw(st.lists(token, max_size=6))
        ends_at = draw(st.none() | st.integers(0, 25))
        visits.append(
            Visit(
                arrives=draw(st.integers(0, 12)),
                prompt=prompt[:longest],
                max_tokens=draw(st.integers(1, 24)),
                ends_at=ends_at,
                how=draw(st.sampled_from(["aborted", "error"])),
                mid_step=draw(st.booleans()),
            )
        )
    return Scenario(
        num_blocks,
        block_size,
        max_num_seqs=draw(st.integers(1, 6)),
        budget=draw(st.integers(1, 24)),
        max_model_len=max_model_len,
        caching=draw(st.booleans()),
        visits=visits,
    )


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenarios())
def test_any_schedule_reads_what_its_requests_wrote(scenario: Scenario) -> None:
    simulate(scenario)


def crowd(seed: int, *, num_blocks: int, caching: bool) -> Scenario:
    """Sixty requests that share three prefixes, on a pool that holds a few of them."""
    rng = random.Random(seed)
    stems = [[rng.randrange(1, VOCAB) for _ in range(24)] for _ in range(3)]
    visits = []
    for _ in range(60):
        arrives = rng.randrange(40)
        prompt = rng.choice(stems)[: rng.randrange(1, 25)]
        prompt += [rng.randrange(1, VOCAB) for _ in range(rng.randrange(8))]
        ends_at = arrives + rng.randrange(30) if rng.random() < 0.4 else None
        how: FinishReason = rng.choice(["aborted", "error"])
        visits.append(Visit(arrives, prompt, rng.randrange(1, 40), ends_at, how, mid_step=rng.random() < 0.5))
    return Scenario(num_blocks, 4, max_num_seqs=6, budget=20, max_model_len=64, caching=caching, visits=visits)


@pytest.mark.parametrize("seed", range(6))
def test_a_crowd_on_a_small_pool(seed: int) -> None:
    """The same checks, and the proof that the hard cases happened."""
    simulator = simulate(crowd(seed, num_blocks=12, caching=True))
    assert simulator.preemptions > 0
    assert simulator.hits > 100
    assert simulator.shared > 10
    assert simulator.chunked > 0


def test_without_the_prefix_cache_no_block_is_ever_shared() -> None:
    simulator = simulate(crowd(0, num_blocks=12, caching=False))
    assert (simulator.hits, simulator.shared) == (0, 0)
    assert simulator.preemptions > 0


def test_a_large_pool_preempts_nobody() -> None:
    assert simulate(crowd(1, num_blocks=200, caching=True)).preemptions == 0
