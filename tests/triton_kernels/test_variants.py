"""Nothing compiles while serving: the kernels that warming up compiles are all that steps can reach.

Triton is asked for the key under which it would compile each launch, and nothing is compiled or launched: tensors are
on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import triton
import triton.language as tl

import octavo
import octavo.planner
from compiling import pretended
from octavo import kernels
from octavo.batch import AttentionBatch
from octavo.cache import PagedKVCache
from octavo.kernels import triton as family
from octavo.kernels.triton.launching import Call, compile_ahead, misaligned
from octavo.planner import Planner
from octavo.spec import AttentionSpec, KVShard
from octavo.warm_up import warm_up

SPECS = {
    "llama": AttentionSpec(32, 8, 128),
    "everything": AttentionSpec(6, 2, 80, window_left=100, logits_soft_cap=30.0, alibi="linear", sinks=True),
    "many heads a group": AttentionSpec(71, 1, 64),
    "one head a group": AttentionSpec(5, 5, 24, 40),
}
MODES = {
    "default": {},
    "invariant": {"batch_invariant": True},
    "ranks": {"shard": KVShard(2, 1, 4)},
}
LONGEST = 5000


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the CPU are planned and run as if a device with 132 multiprocessors held them."""
    monkeypatch.setattr(Planner, "on_device", staticmethod(lambda device: True))
    monkeypatch.setattr(octavo.planner, "_multiprocessors", lambda device: 132)
    for name in ("select", "for_device"):
        monkeypatch.setattr(kernels, name, lambda *arguments, **options: family)


@contextmanager
def keys(collected: set[Any], ahead: set[Any] | None = None) -> Iterator[None]:
    """Collect what Triton would look a compiled kernel up by, and launch nothing. ahead: of those only compiled."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    def note(self: Any, *arguments: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        *_, binder = self.device_caches[driver.active.get_current_device()]
        bound, specialisation, rest = binder(*arguments, **options)
        constants = [bound[p.name] for p in self.params if p.is_constexpr]
        (ahead if warmup else collected).add((self.__name__, str(specialisation), str(constants), str(rest)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "_active", pretended("sm_90"))
        patch.setattr(JITFunction, "run", note)
        yield


def make(spec: AttentionSpec, mode: str, kv_format: str) -> tuple[Planner, Any, dict[str, Any]]:
    cache = PagedKVCache(
        num_layers=1,
        num_blocks=2,
        block_size=16,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        value_dim=spec.v_dim,
        format=kv_format,
        dtype=torch.bfloat16,
    ).layer(0, v_descale=torch.ones(spec.num_kv_heads, spec.v_dim) if kv_format == "int8_kv" else None)
    planner = Planner(
        num_q_heads=spec.num_q_heads,
        value_dim=spec.v_dim,
        block_size=16,
        num_kv_heads=spec.num_kv_heads,
        check=False,
        **MODES[mode],
    )
    terms = {
        "alibi_slopes": torch.ones(spec.num_q_heads) if spec.alibi else None,
        "sinks": torch.ones(spec.num_q_heads) if spec.sinks and mode != "ranks" else None,
    }
    return planner, cache, terms


def serve(
    planner: Planner, spec: AttentionSpec, cache: Any, terms: Any, num_seqs: int, new: int, length: int, shared: int
) -> None:
    """A step of num_seqs sequences of `length` keys, of which the first has `new` new ones and the others one."""
    batch = AttentionBatch(
        query_start_loc=torch.zeros(num_seqs + 1, dtype=torch.int32),
        seq_lens=torch.full((num_seqs,), length, dtype=torch.int32),
        block_table=torch.zeros(num_seqs, -(-length // 16), dtype=torch.int32),
        num_tokens=num_seqs - 1 + new,
        max_query_len=new,
        max_seq_len=length,
        slot_mapping=torch.full((num_seqs - 1 + new,), -1),
    )
    q, k, v, out = (
        torch.empty(batch.num_tokens, heads, width, dtype=torch.bfloat16)
        for heads, width in (
            (spec.num_q_heads, spec.head_dim),
            (spec.num_kv_heads, spec.head_dim),
            (spec.num_kv_heads, spec.v_dim),
            (spec.num_q_heads, spec.v_dim),
        )
    )
    octavo.append(cache, k, v, batch.slot_mapping)
    octavo.run(planner.plan(batch, common_prefix_len=shared), spec, q, cache, out, **terms)


@pytest.mark.parametrize(
    ("name", "mode", "kv_format"),
    [
        *((name, mode, "auto") for name in SPECS for mode in MODES),
        ("llama", "default", "int8_kv"),
        ("llama", "ranks", "fp8_e4m3"),
        ("everything", "ranks", "int8_per_token"),
        ("one head a group", "default", "int8_k"),
    ],
)
def test_serving_reaches_nothing_new(name: str, mode: str, kv_format: str) -> None:
    """L04: numbers that Triton specialises on (1, multiples of 16), tiles, splits, prefixes."""
    spec = SPECS[name]
    planner, cache, terms = make(spec, mode, kv_format)
    warm: set[Any] = set()
    ahead: set[Any] = set()
    with keys(warm, ahead):
        warm_up(planner, spec, cache, torch.bfloat16, max_num_seqs=5000, max_seq_len=LONGEST, prefixes=True, **terms)
    assert {key for key in warm if key[0] == "attend_kernel"} == ahead
    served: set[Any] = set()
    with keys(served):
        for num_seqs in (1, 2, 3, 8, 16, 17, 255, 4097):
            for new in (1, 2, 3, 4, 5, 8, 9, 11, 15, 16, 17, 20, 32, 33, 64, 65, 129, 300, 2048):
                if num_seqs > 64 and new > 33 and num_seqs < 4097:
                    continue
                for length in (2048, LONGEST):
                    serve(planner, spec, cache, terms, num_seqs, new, length, 0)
                if num_seqs in (8, 16):
                    serve(planner, spec, cache, terms, num_seqs, new, LONGEST, 2048)
            serve(planner, spec, cache, terms, num_seqs, 1, 1, 0)
    assert {"attend_kernel", "append_kernel", "step_kernel"} <= {key[0] for key in served}
    new_keys = served - warm
    assert not new_keys, f"{len(new_keys)} of {len(served)} kernels are compiled while serving: {min(new_keys)}"


@triton.jit
def broken_kernel(x_ptr, N: tl.constexpr):
    tl.static_assert(N == 0)
    tl.store(x_ptr, 1.0)


def test_a_kernel_that_does_not_compile_is_left_to_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """And does not leave Triton in the mode in which kernels are compiled later."""
    from triton.runtime import driver

    monkeypatch.setattr(driver, "_active", pretended("sm_90"))
    x = torch.zeros(1)
    broken, whole = (Call(broken_kernel, (1, 1, 1), (x,), {"N": n}, {"num_warps": 1}) for n in (1, 0))
    compile_ahead([broken, whole])
    compile_ahead([whole])
    with pytest.raises(triton.CompilationError):
        broken.start()


def test_each_address_counts_for_alignment() -> None:
    assert misaligned(32, 16, 0) is None
    assert len({misaligned(8, 16), misaligned(16, 8), misaligned(8, 8), misaligned(4, 8)}) == 4
