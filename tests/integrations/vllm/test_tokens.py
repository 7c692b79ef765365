"""Tokens through vLLM with Octavo are those of vLLM's own CPU backend; Octavo's formats hold more of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import OCTAVO, SENTENCE, SHORT, Generated, generate

LONG = (SENTENCE * 60 + "One night the keeper", SENTENCE * 60 + "The ships in the harbour")
"""Some 1,300 tokens: several chunks of prefill, several blocks, more than Gemma's window of 512."""


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_tokens_are_those_of_vllms_own_backend(model: str, request: pytest.FixtureRequest) -> None:
    """Mixed steps, chunked prefill, prefixes found in the cache, prompts past the window."""
    folder = request.getfixturevalue(model)
    own = generate(folder, SHORT + LONG, again=3)
    ours = generate(folder, SHORT + LONG, again=3, **OCTAVO)
    assert own.impl.startswith("vllm.")
    assert ours.impl == "octavo.plugins.vllm.impl"
    assert min(ours.cached[-2:]) >= 1024, f"the prompts' prefixes were not found in the cache: {ours.cached}"
    assert ours.tokens == own.tokens
    assert ours.capacity == own.capacity


@pytest.fixture(scope="module")
def plain(smollm2: Path) -> Generated:
    return generate(smollm2, SHORT, max_tokens=1, **OCTAVO)


@pytest.mark.parametrize(
    ("octavos", "options", "bytes_of_row"),
    [
        ("int8_per_token", {"kv_cache_dtype": "int8_per_token_head"}, 2 * (64 + 4)),
        ("fp8_e4m3", {"kv_cache_dtype": "fp8"}, 2 * 64),
        ("int8_k", {"additional_config": {"octavo": {"kv_format": "int8_k"}}}, 64 + 4 + 4 * 64),
    ],
)
def test_eight_bit_formats_are_octavos_own(
    octavos: str, options: dict[str, object], bytes_of_row: int, smollm2: Path, plain: Generated
) -> None:
    """Tokens are those of Octavo's own engine with the same format; the same memory holds more of them."""
    from octavo import LLM, SamplingParams

    # Few tokens: the two engines' matrix products round differently, and later choices are closer than that.
    ours = generate(smollm2, SHORT, max_tokens=12, **options, **OCTAVO)
    llm = LLM(str(smollm2), dtype="float32", kv_format=octavos, kv_cache_bytes=2**28)
    alone = [llm.generate([prompt], SamplingParams(max_tokens=12))[0].token_ids for prompt in SHORT]
    assert [list(tokens) for tokens in alone] == ours.tokens
    expected = plain.capacity * (2 * 4 * 64) / bytes_of_row
    assert ours.capacity == pytest.approx(expected, rel=0.02)
