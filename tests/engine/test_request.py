"""What a caller may ask for, and how a request counts its tokens."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from octavo.engine.request import Request, SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -3),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", None),
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("temperature", math.nan),
        ("temperature", "hot"),
        ("top_k", 0),
        ("top_k", 2.0),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.01),
        ("min_p", 1.01),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", math.inf),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", 0.5),
        ("stop", ""),
        ("stop", ("a", "")),
        ("stop", (7,)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", ("a",)),
        ("logprobs", -1),
        ("logprobs", True),
    ],
)
def test_a_bad_value_is_refused_by_name_with_the_value_and_the_rule(name: str, value: Any) -> None:
    offender = value[-1] if isinstance(value, tuple) else value
    with pytest.raises(ValueError, match=name) as caught:
        SamplingParams(**{name: value})
    assert repr(offender) in str(caught.value)
    assert "must be" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 1),
        ("temperature", 0),
        ("top_k", 1),
        ("top_p", 1.0),
        ("top_p", 1e-9),
        ("min_p", 0.0),
        ("min_p", 1),
        ("repetition_penalty", 0.5),
        ("seed", 0),
        ("seed", 2**63 - 1),
        ("logprobs", 0),
    ],
)
def test_the_edges_of_each_range_are_allowed(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_the_default_is_greedy_with_every_option_off() -> None:
    params = SamplingParams()
    assert (params.max_tokens, params.temperature, params.ignore_eos) == (128, 0.0, False)
    assert (params.stop, params.stop_token_ids) == ((), ())
    for name in ("top_k", "top_p", "min_p", "repetition_penalty", "seed", "logprobs"):
        assert getattr(params, name) is None, name


def test_stop_takes_one_string_or_several_and_has_one_form() -> None:
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop_token_ids=[2, 3]).stop_token_ids == (2, 3)
    assert SamplingParams(stop=["a"]) == SamplingParams(stop="a")
    assert hash(SamplingParams(stop=["a"])) == hash(SamplingParams(stop="a"))


def test_params_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().max_tokens = 3  # type: ignore[misc]


def test_a_request_counts_prompt_and_output() -> None:
    prompt = [5, 6, 7]
    request = Request("a", prompt, SamplingParams(max_tokens=2))
    prompt.append(8)  # the caller's list is not the request's
    assert (request.num_prompt_tokens, request.num_tokens, request.token_limit) == (3, 3, 5)
    request.output_token_ids.append(9)
    assert request.token_ids == [5, 6, 7, 9]
    assert not request.is_at_limit
    request.output_token_ids.append(4)
    assert request.is_at_limit


def test_a_request_is_finished_once_it_has_a_reason() -> None:
    finished = Request("a", [1])
    finished.finish_reason = "length"
    assert finished.is_finished
    assert not Request("a", [1]).is_finished


def test_tokens_is_a_slice_of_token_ids_everywhere() -> None:
    request = Request("a", [0, 1, 2])
    for num_outputs in range(4):
        for start in range(8):
            for stop in range(8):
                assert request.tokens(start, stop) == request.token_ids[start:stop], (
                    num_outputs,
                    start,
                    stop,
                )
        request.output_token_ids.append(10 + num_outputs)


def test_requests_compare_by_identity_and_share_nothing() -> None:
    first, second = Request("a", [1]), Request("a", [1])
    assert first != second
    first.output_token_ids.append(1)
    first.block_ids.append(1)
    assert second.output_token_ids == []
    assert second.block_ids == []
