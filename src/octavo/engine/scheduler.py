"""Which tokens of which requests the next step computes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from octavo.engine.block_pool import BlockPool
from octavo.engine.request import FinishReason, Request


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """The tokens of `request` at positions [start, start + num_tokens), to be computed in one step."""

    request: Request
    start: int  # everything before it is in the cache
    num_tokens: int
    samples: bool  # the chunk reaches the request's last token: one token is sampled after it

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class Step:
    """One run of the model. Chunks of one token (the decodes) stand before longer ones."""

    scheduled: tuple[ScheduledChunk, ...]
    preempted: tuple[Request, ...]  # lost their blocks to this step, newest first

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.scheduled)


class Scheduler:
    """Continuous batching with chunked prefill, prefix caching and preemption by recompute.

    One turn: `step = schedule()`, run the model, `complete(step)`; then, for each chunk that samples and
    whose request has not been finished meanwhile, append a token to `request.output_token_ids`, and call
    `finish` where the request ends: with "length" as soon as `request.is_at_limit`. If the model fails, call
    `finish(request, "error", message)` for each request of the step and then `complete(step)`, which passes
    over finished ones: nothing half-written becomes findable.

    All requests form one queue in order of arrival, cut in two: `running` is its head, `waiting` its tail.
    Admission moves the oldest waiting request over the cut, preemption the newest running one back. So nobody
    is overtaken, and the oldest request is in every step: it can take the blocks of all others, and `add` saw
    to it that they suffice.

    A request is admitted when blocks for all its tokens are free, and gets them at once; only a decode that
    enters a new block has to find one later. Admission also needs budget that the running requests left over.
    So there are never more of them than the budget has tokens, and only the newest can be in the middle of
    its prompt: every other one decodes in every step.
    """

    def __init__(self, pool: BlockPool, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> None:
        for name, value, low in (
            ("max_num_seqs", max_num_seqs, 1),
            ("max_num_batched_tokens", max_num_batched_tokens, 1),
            ("max_model_len", max_model_len, 2),
        ):
            if value < low:
                raise ValueError(f"{name} is {value}; it must be >= {low}")
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self._unfinished: dict[str, Request] = {}
        self._num_arrived = 0
        self._in_flight: Step | None = None

    @property
    def has_unfinished(self) -> bool:
        return bool(self._unfinished)

    def add(self, request: Request) -> None:
        """Queues a request and lowers its token_limit to what the model and the whole pool can hold.

        The last token of a request is never computed, so it needs a position of the model but no slot of the
        pool. Raises ValueError for a request that could not yield a single token.
        """
        name = f"request {request.request_id!r}"
        length, capacity = request.num_prompt_tokens, self.pool.capacity
        if request.request_id in self._unfinished or request.arrival is not None:
            raise ValueError(f"{name} was added before; make a new Request with an id of its own")
        if length == 0:
            raise ValueError("the prompt is empty; it must have at least one token")
        if length > self.max_model_len - 1:
            raise ValueError(
                f"the prompt has {length} tokens; at most {self.max_model_len - 1} fit a model length of "
                f"{self.max_model_len} with one token to generate: shorten the prompt"
            )
        if length > capacity:
            raise ValueError(
                f"the prompt has {length} tokens; the cache holds {capacity} ({self.pool.num_blocks} blocks of "
                f"{self.pool.block_size}): shorten the prompt or give the cache more memory"
            )
        request.token_limit = min(request.token_limit, self.max_model_len, capacity + 1)
        request.arrival = self._num_arrived
        self._num_arrived += 1
        self._unfinished[request.request_id] = request
        self.waiting.append(request)

    def schedule(self) -> Step | None:
        """The next step, or None if no request is left. Raises RuntimeError if the last one is not completed:
        its blocks must not be given away while it may still write them."""
        if self._in_flight is not None:
            raise RuntimeError("the last step has not been completed; call complete(step) before schedule()")
        if not self._unfinished:
            return None
        for request in self.running:
            if _num_left(request) < 1 or request.is_at_limit:
                raise RuntimeError(
                    f"request {request.request_id!r} has {request.num_tokens} tokens (limit "
                    f"{request.token_limit}), {request.num_computed_tokens} of them computed: append the "
                    "sampled token, or finish the request"
                )
        budget = self.max_num_batched_tokens
        chunks: list[ScheduledChunk] = []
        preempted = self._make_room_for_decodes()
        for request in self.running:  # decodes, then at most one prefill: see the class
            chunks.append(_chunk(request, budget))
            budget -= chunks[-1].num_tokens
        # A preempted request may fit again at once, on blocks of equal content that another one holds. It
        # waits for the next step all the same, so that no request is both preempted and scheduled.
        while not preempted and budget > 0 and self._admit_oldest():
            chunks.append(_chunk(self.running[-1], budget))
            budget -= chunks[-1].num_tokens
        if not chunks:
            raise RuntimeError(
                f"request {self.waiting[0].request_id!r} cannot start: {self.pool.num_free} of "
                f"{self.pool.num_blocks} blocks are free with no request running; give back the others"
            )
        chunks.sort(key=lambda chunk: chunk.num_tokens > 1)
        self._in_flight = Step(tuple(chunks), tuple(preempted))
        return self._in_flight

    def complete(self, step: Step) -> None:
        """Marks the step's tokens as computed and lets other requests find the blocks that it filled."""
        if step is not self._in_flight:
            raise RuntimeError("this step is not the one in flight; complete each step of schedule() once")
        self._in_flight = None
        block_size = self.pool.block_size
        for chunk in step.scheduled:
            request = chunk.request
            if request.is_finished:  # aborted or failed while the step ran; its blocks are gone
                continue
            request.num_computed_tokens = chunk.stop
            first, last = chunk.start // block_size, chunk.stop // block_size
            if last > first:
                self.pool.commit(request.block_ids, first, request.tokens(first * block_size, last * block_size))

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """Ends a request and gives its blocks back. Raises ValueError if it is not one of ours."""
        if self._unfinished.get(request.request_id) is not request:
            raise ValueError(f"request {request.request_id!r} is finished already or was never added")
        del self._unfinished[request.request_id]
        (self.running if request in self.running else self.waiting).remove(request)
        request.finish_reason = reason
        request.error = error
        self._give_back(request)

    def abort(self, request_id: str) -> bool:
        """Ends a request with "aborted". False if there is none: it may just have finished by itself."""
        request = self._unfinished.get(request_id)
        if request is None:
            return False
        self.finish(request, "aborted")
        return True

    def _make_room_for_decodes(self) -> list[Request]:
        """Gives each running request the block that its next token needs, from the oldest on; returns the
        requests that had to go for it, newest first."""
        preempted: list[Request] = []
        index = 0
        while index < len(self.running):
            request = self.running[index]
            new_blocks = self.pool.allocate(self.pool.blocks_for(request.num_tokens) - len(request.block_ids))
            if new_blocks is None:
                preempted.append(self._preempt_newest())  # perhaps the request itself
                continue
            request.block_ids += new_blocks
            index += 1
        return preempted

    def _preempt_newest(self) -> Request:
        request = self.running.pop()
        self._give_back(request)
        request.num_preemptions += 1
        self.waiting.appendleft(request)
        return request

    def _admit_oldest(self) -> bool:
        # Without a free block no look-up can help, since a last token always needs one: spare the hashing.
        if not self.waiting or len(self.running) >= self.max_num_seqs or self.pool.num_free == 0:
            return False
        request = self.waiting[0]
        matched = self.pool.match_prefix(request.token_ids)
        missing = self.pool.blocks_for(request.num_tokens) - len(matched)
        # One block for each running request stays free: without it the next decode that enters a block would
        # throw the newcomer out again, and its prefill would have been for nothing.
        if self.pool.num_free < missing + len(self.running):
            self.pool.release(matched)
            return False
        new_blocks = self.pool.allocate(missing)
        assert new_blocks is not None
        num_matched = len(matched) * self.pool.block_size
        self.pool.record_lookup(request.num_tokens, num_matched)
        request.block_ids = matched + new_blocks
        request.num_computed_tokens = num_matched
        if request.num_preemptions == 0:
            request.num_cached_tokens = num_matched
        self.running.append(self.waiting.popleft())
        return True

    def _give_back(self, request: Request) -> None:
        self.pool.release(request.block_ids)
        request.block_ids = []
        request.num_computed_tokens = 0


def _num_left(request: Request) -> int:
    return request.num_tokens - request.num_computed_tokens


def _chunk(request: Request, budget: int) -> ScheduledChunk:
    num_left = _num_left(request)
    num_tokens = min(num_left, budget)
    return ScheduledChunk(request, request.num_computed_tokens, num_tokens, samples=num_tokens == num_left)
