"""The Numba kernel's threads: the same bits on any number of them, from several callers, after a fork; and what
happens without Numba."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import octavo
from conformance.harness import attend, make_plan
from octavo.bench.cases import Case, Problem, build
from octavo.kernels.cpu import compiled
from octavo.kernels.cpu.workers import Workers
from octavo.spec import AttentionSpec
from tolerance import assert_attention, assert_same_bits, assert_within

SPEC = AttentionSpec(8, 4, 32, window_left=200)


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two threads even for small problems; torch's own setting is put back."""
    monkeypatch.setattr(compiled._WORKERS, "least_bytes", 0)
    torch.set_num_threads(2)
    yield
    assert torch.get_num_threads() == 2, "the kernel changed torch's number of threads"
    torch.set_num_threads(1)


def problem(query_lens: tuple[int, ...], seq_lens: tuple[int, ...]) -> Problem:
    return build(Case("threads", SPEC, query_lens, seq_lens, dtype=torch.float32))


PROBLEMS = [
    ((60, 1, 130), (400, 90, 130)),
    ((1,), (700,)),
    ((1, 1, 3, 8), (300, 1, 77, 500)),
    ((1,) * 20, tuple(range(1, 200, 10))),
]


@pytest.mark.parametrize(("query_lens", "seq_lens"), PROBLEMS)
def test_two_threads_give_the_bits_of_one(query_lens, seq_lens, two_threads: None) -> None:
    p = problem(query_lens, seq_lens)
    torch.set_num_threads(1)
    alone = attend(p, make_plan(p))
    torch.set_num_threads(2)
    for _ in range(20):
        together = attend(p, make_plan(p))
        assert_same_bits("out", together[0], alone[0])
        assert_same_bits("lse", together[1], alone[1])
    assert_attention(p, *together)


def test_two_threads_write_and_merge_like_one(two_threads: None) -> None:
    random = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 100, 3, 16, generator=random)
    slots = torch.randperm(128, generator=random)[:100]
    outs, lses = torch.randn(3, 100, 4, 16, generator=random), torch.randn(3, 100, 4, generator=random)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        cache = octavo.PagedKVCache(
            num_layers=1, num_blocks=8, block_size=16, num_kv_heads=3, head_dim=16, dtype=torch.bfloat16
        ).layer(0)
        octavo.append(cache, k, v, slots)
        results.append((cache.k_cache, cache.v_cache, *octavo.merge_states(outs, lses)))
    for alone, together in zip(*results, strict=True):
        assert_same_bits("two threads", together, alone)
    assert torch.equal(results[0][0].flatten(0, 1)[slots], k.bfloat16())


def test_several_callers(two_threads: None) -> None:
    """Python threads that call at once share the workers and nothing else."""
    problems = [problem((1, 2), (400 + i, 90)) for i in range(4)]
    expected = [attend(p, make_plan(p)) for p in problems]
    with ThreadPoolExecutor(4) as callers:
        for _ in range(10):
            for (out, lse), (true_out, true_lse) in zip(
                callers.map(lambda p: attend(p, make_plan(p)), problems), expected, strict=True
            ):
                assert_same_bits("out", out, true_out)
                assert_same_bits("lse", lse, true_lse)


class Counted:
    """A kernel in Python: notes the threads that ran it."""

    def __init__(self) -> None:
        self.threads: list[int] = []
        self.together = threading.Barrier(2)
        self.kernel = ctypes.CFUNCTYPE(None, ctypes.c_int64)(self.run)

    def run(self, _job: int) -> None:
        self.together.wait(10)  # nobody gets on before both are here
        self.threads.append(threading.get_native_id())


JOB = ctypes.create_string_buffer(8)


@pytest.mark.parametrize("openmp", [True, False])
def test_two_threads_run_a_kernel_at_once(openmp: bool) -> None:
    workers, counted = Workers(), Counted()
    if openmp and workers._openmp is None:
        pytest.skip("PyTorch does not run on GNU OpenMP here")
    if not openmp:
        workers._forget()
    for _ in range(3):
        workers.run(counted.kernel, JOB, 2)
    assert len(counted.threads) == 6
    assert len(set(counted.threads)) == 2
    assert threading.get_native_id() in counted.threads


def test_the_threads_are_pytorch_s() -> None:
    """No thread of ours is made where PyTorch's serve."""
    workers = Workers()
    if workers._openmp is None:
        pytest.skip("PyTorch does not run on GNU OpenMP here")
    torch.set_num_threads(2)
    try:
        torch.randn(1 << 20).exp()  # PyTorch's threads are there now
        before = set(os.listdir("/proc/self/task"))
        workers.run(Counted().kernel, JOB, 2)
        assert set(os.listdir("/proc/self/task")) == before
    finally:
        torch.set_num_threads(1)


def test_a_forked_child_has_workers_of_its_own() -> None:
    """The parent's threads do not exist in the child; waiting for them would never end."""
    workers, counted = Workers(), Counted()
    workers.run(counted.kernel, JOB, 2)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends the child if it waits for nothing
        workers.run(counted.kernel, JOB, 2)
        os._exit(0 if len(counted.threads) == 4 else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_without_numba_it_says_so_once_and_computes() -> None:
    code = """
import sys, warnings
sys.modules["numba"] = None
import torch, octavo
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    i32 = lambda x: torch.tensor(x, dtype=torch.int32)
    for _ in range(3):
        out, lse = octavo.paged_attention(torch.zeros(1, 2, 8), torch.zeros(1, 4, 1, 8), torch.ones(1, 4, 1, 8),
                                          i32([[0]]), i32([4]), i32([0, 1]))
assert bool((out == 1).all()), out
assert ["octavo[cpu]" in str(w.message) for w in caught] == [True], caught
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("query_len", [1, 40])
def test_plans_of_one_planner_in_two_threads(query_len: int) -> None:
    """Scratch memory is a thread's own, for the decode kernel (1 row) and the prefill kernel (40)."""
    problems = [problem((query_len,), (200 + i,)) for i in range(2)]
    expected = [attend(p, make_plan(p)) for p in problems]
    planner = octavo.Planner(num_q_heads=8, value_dim=32, block_size=16)
    plans = [planner.plan(p.batch, num_splits=2) for p in problems]
    with ThreadPoolExecutor(2) as callers:
        for _ in range(10):
            results = list(callers.map(lambda which: attend(problems[which], plans[which]), range(2)))
            for p, (out, lse), (true_out, true_lse) in zip(problems, results, expected, strict=True):
                assert_within("out", out, true_out.double(), true_out)
                assert_within("lse", lse, true_lse.double(), true_lse)
                assert out.shape == p.q.shape
