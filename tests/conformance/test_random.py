"""Random problems: lengths, options and cuts drawn at will, against the oracle."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.backends import Backend
from conformance.harness import solve
from conformance.test_pairs import FACTORS, from_row
from octavo.bench.cases import build
from octavo.planner import PrefixGroup
from tolerance import assert_attention

LENGTHS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 90)), max_size=5)


@given(
    row=st.fixed_dictionaries({name: st.sampled_from(values) for name, values in FACTORS.items()}),
    lengths=LENGTHS,
    prefix=st.integers(0, 60),
    seed=st.integers(0, 1000),
)
@settings(max_examples=30)
def test_random_problems(backend: Backend, row: dict, lengths: list[tuple[int, int]], prefix: int, seed: int) -> None:
    case, cut = from_row(row)
    everyone = PrefixGroup(tuple(range(len(lengths))), prefix)
    shared = (everyone,) if prefix and lengths else ()
    case = replace(
        case,
        query_lens=tuple(q for q, _ in lengths),
        seq_lens=tuple(n for _, n in lengths),
        shared=shared,
    )
    cut = replace(cut, cascade=(shared,) if shared else ())
    assert_attention(build(case, seed=seed), *solve(backend, case, cut, seed=seed))
