"""The sampler against Transformers' own `generate`, and the promises that it makes for each request."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from octavo.engine.request import Request, SamplingParams
from octavo.engine.sampler import SampledToken, Sampler

VOCAB = 64
PROMPT = (3, 1, 4, 1, 5)

SETTINGS: dict[str, Any] = {
    "temperature": 0.6,
    "top_k": 7,
    "top_p": 0.8,
    "min_p": 0.15,
    "repetition_penalty": 1.5,
}
ALONE_AND_IN_PAIRS = [names for n in (0, 1, 2) for names in itertools.combinations(SETTINGS, n)]
NEUTRAL: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}  # generate's own defaults are not


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.lm_head.weight.data.normal_(std=0.7)  # logits with a spread like a real model's
    return model


def generate(model: LlamaForCausalLM, seed: int | None, num_tokens: int, **options: Any) -> Any:
    """Transformers' run: .sequences, .logits (raw) and .scores (processed), one [1, vocab] a token."""
    if seed is not None:
        torch.manual_seed(seed)
        options = NEUTRAL | options
    return model.generate(
        torch.tensor([PROMPT]), do_sample=seed is not None, max_new_tokens=num_tokens,
        return_dict_in_generate=True, output_logits=True, output_scores=True, **options,
    )  # fmt: skip


def request(name: str = "r", **params: Any) -> Request:
    return Request(name, PROMPT, SamplingParams(**params))


def follow(sampler: Sampler, request: Request, logits: list[Tensor]) -> list[int]:
    """Samples from each of the logits in turn, [1, vocab] each, as the engine does."""
    for row in logits:
        (sampled,) = sampler.sample(row, [request])
        assert sampled.error is None
        assert sampled.token_id is not None
        request.output_token_ids.append(sampled.token_id)
    return request.output_token_ids


def random_logits(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


def test_greedy_is_argmax_in_every_dtype() -> None:
    logits = random_logits(5, VOCAB)
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        sampled = Sampler().sample(logits.to(dtype), [request(str(i)) for i in range(5)])
        assert sampled == [SampledToken(int(t)) for t in logits.to(dtype).float().argmax(-1)]


def test_greedy_ties_go_to_the_first_token_as_in_generate() -> None:
    logits = torch.zeros(1, 1000, dtype=torch.bfloat16)
    logits[0, [999, 400, 17]] = 2.0
    assert Sampler().sample(logits, [request()]) == [SampledToken(17)]


def test_greedy_ignores_what_only_shapes_sampling() -> None:
    logits = random_logits(1, VOCAB)
    assert Sampler().sample(logits, [request(top_k=3, top_p=0.1, min_p=0.5, seed=1)]) == [
        SampledToken(int(logits.argmax()))
    ]


@pytest.mark.parametrize("names", ALONE_AND_IN_PAIRS, ids="-".join)
def test_sampling_gives_the_tokens_of_generate_with_the_same_seed(
    model: LlamaForCausalLM, names: tuple[str, ...]
) -> None:
    options = {name: SETTINGS[name] for name in names}
    for seed in range(3):
        theirs = generate(model, seed, 24, **options)
        ours = follow(Sampler(), request(**{"temperature": 1.0, **options}, seed=seed), list(theirs.logits))
        assert ours == theirs.sequences[0, len(PROMPT) :].tolist()


def test_penalised_greedy_gives_the_tokens_of_generate(model: LlamaForCausalLM) -> None:
    theirs = generate(model, None, 24, repetition_penalty=1.5)
    tokens = theirs.sequences[0, len(PROMPT) :].tolist()
    assert tokens != [int(row.argmax()) for row in theirs.logits]  # the penalty matters here
    assert follow(Sampler(), request(repetition_penalty=1.5), list(theirs.logits)) == tokens


@pytest.mark.parametrize(
    "options", [{}, *({name: SETTINGS[name]} for name in SETTINGS), SETTINGS | {"temperature": 3.0}], ids=str
)
def test_frequencies_are_the_probabilities_of_generate(model: LlamaForCausalLM, options: dict[str, Any]) -> None:
    draws = 4000
    step = generate(model, 0, 1, **options)
    probs = step.scores[0][0].double().softmax(-1)
    requests = [request(str(seed), **{"temperature": 1.0, **options}, seed=seed) for seed in range(draws)]
    sampled = Sampler().sample(step.logits[0].expand(draws, -1), requests)
    counts = torch.bincount(torch.tensor([s.token_id for s in sampled]), minlength=VOCAB)
    assert (counts[probs == 0] == 0).all()
    # Pearson's statistic over the tokens expected at least 5 times, the rest as one; its mean is the number
    # of degrees of freedom and its variance twice that. The seeds are fixed: this passes always or never.
    common = probs * draws >= 5
    expected = torch.cat([probs[common], probs[~common].sum()[None]]) * draws
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    used = expected > 0
    statistic = float(((observed - expected)[used] ** 2 / expected[used]).sum())
    freedom = int(used.sum()) - 1
    assert freedom >= 3
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


def test_penalty_covers_prompt_and_output_once_and_each_row_its_own() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, 5] = 9.0  # in the prompt
    logits[:, 6] = 8.0  # in the output of the first request
    logits[:, 7] = 7.0
    long, short, free = (request(name, repetition_penalty=1.2) for name in "abc")
    long.output_token_ids += [6, 6, 6, 2, 2]
    free.prompt_token_ids = (0,)
    # Penalised once: 9 / 1.2 = 7.5 (twice would be 6.25), 8 / 1.2 = 6.67.
    tokens = [s.token_id for s in Sampler().sample(logits, [long, short, free])]
    assert tokens == [5, 6, 5]


def test_rows_of_different_lengths_do_not_share_penalties() -> None:
    """Token i is the best of row i unless it is penalised there; only the histories of other rows hold it."""
    rows = torch.arange(VOCAB)
    logits = torch.zeros(VOCAB, VOCAB)
    logits[rows, rows] = 9.0
    logits[rows, (rows + 3) % VOCAB] = 8.0
    requests = [request(str(i), repetition_penalty=1.2) for i in range(VOCAB)]
    for i, one in enumerate(requests):
        one.prompt_token_ids = ((i + 1) % VOCAB,) * (1 + i % 5)
    assert [s.token_id for s in Sampler().sample(logits, requests)] == rows.tolist()


def test_tokens_of_a_seed_do_not_depend_on_the_batch_or_on_preemption() -> None:
    steps = random_logits(12, VOCAB, seed=1)
    params: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.1, "seed": 42}
    alone = follow(Sampler(), request(**params), list(steps[:, None]))
    assert len(set(alone)) > 4

    sampler, watched, batched = Sampler(), request("watched", **params), []
    for step, logits in enumerate(steps):
        if step % 3 == 1:  # preempted: the others go on without it
            sampler.sample(random_logits(1, VOCAB), [request("other", temperature=1.0)])
        others = [request(f"{step}-{i}", **{**params, "seed": i, "top_k": 3 if i % 2 else None}) for i in range(step)]
        where = step % (len(others) + 1)
        rows = random_logits(len(others) + 1, VOCAB, seed=step)
        rows[where] = logits
        sampled = sampler.sample(rows, [*others[:where], watched, *others[where:]])[where].token_id
        assert sampled is not None
        watched.output_token_ids.append(sampled)
        batched.append(sampled)
    assert batched == alone


def test_forget_starts_a_seed_again_and_knows_no_strangers() -> None:
    sampler, steps = Sampler(), list(random_logits(8, VOCAB)[:, None])
    start = follow(sampler, request(temperature=1.0, seed=7), steps)
    assert follow(sampler, request(temperature=1.0, seed=7), steps) != start  # the same id goes on
    sampler.forget("r")
    sampler.forget("never seen")
    assert follow(sampler, request(temperature=1.0, seed=7), steps) == start


def test_without_a_seed_every_request_has_its_own_randomness() -> None:
    steps = list(torch.zeros(16, 1, VOCAB))
    runs = {tuple(follow(Sampler(), request(temperature=1.0), steps)) for _ in range(4)}
    assert len(runs) == 4  # by chance equal: 64 ** -16


def test_sampling_leaves_torchs_global_generator_and_the_logits_alone() -> None:
    logits = random_logits(2, VOCAB)
    before, state = logits.clone(), torch.get_rng_state()
    Sampler().sample(logits, [request("a", temperature=1.0), request("b", repetition_penalty=2.0)])
    assert torch.equal(logits, before)
    assert torch.equal(torch.get_rng_state(), state)


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = random_logits(4, VOCAB).to(torch.bfloat16)
    params: dict[str, Any] = {"temperature": 0.3, "top_k": 2, "repetition_penalty": 1.5, "seed": 0}
    requests = [request(str(n), **params, logprobs=n) for n in (None, 0, 3, VOCAB + 5)]
    none, chosen, three, every = Sampler().sample(logits, requests)
    assert none.logprob is None
    for row, sampled, n in ((1, chosen, 0), (2, three, 3), (3, every, VOCAB)):
        logp = logits[row].float().log_softmax(-1)
        assert sampled.logprob is not None
        assert sampled.logprob.token_id == sampled.token_id
        assert sampled.logprob.logprob == logp[sampled.token_id].item()
        best = sorted(enumerate(logp.tolist()), key=lambda pair: -pair[1])[:n]
        assert [value for _, value in sampled.logprob.top] == [value for _, value in best]
        assert all(value == logp[token].item() for token, value in sampled.logprob.top)
        assert len({token for token, _ in sampled.logprob.top}) == n
    assert every.logprob is not None
    assert sum(math.exp(value) for _, value in every.logprob.top) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("params", [{}, {"repetition_penalty": 1.2}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_fails_alone(params: dict[str, Any], bad: float) -> None:
    good = random_logits(3, VOCAB)
    logits = good.clone()
    logits[1, :] = bad if bad == -math.inf else logits[1, :]
    logits[1, 40] = bad
    before = Sampler().sample(good, [request(name, **params, logprobs=1) for name in "abc"])
    first, failed, last = Sampler().sample(logits, [request(name, **params, logprobs=1) for name in "abc"])
    assert [first, last] == [before[0], before[2]]
    assert first.error is None
    assert failed.token_id is None
    assert failed.logprob is None
    assert failed.error is not None
    assert "request b" in failed.error
    assert "not finite" in failed.error


def test_masked_tokens_are_fine_and_never_drawn() -> None:
    logits = torch.full((200, VOCAB), -math.inf)
    logits[:, 10:12] = 0.0
    sampled = Sampler().sample(logits, [request(str(i), temperature=1.0, seed=i) for i in range(200)])
    assert {s.token_id for s in sampled} == {10, 11}


def test_a_temperature_that_overflows_fails_that_request_only() -> None:
    logits = random_logits(2, VOCAB)
    failed, fine = Sampler().sample(logits, [request("a", temperature=1e-39), request("b", temperature=1e-5)])
    assert failed.token_id is None
    assert "temperature=1e-39" in str(failed.error)
    assert fine.token_id == int(logits[1].argmax())


def test_no_requests_and_wrong_shapes() -> None:
    assert Sampler().sample(torch.empty(0, VOCAB), []) == []
    with pytest.raises(ValueError, match=r"shape \[2, 64\] for 1 requests; they must be \[1, vocab\]"):
        Sampler().sample(torch.zeros(2, VOCAB), [request()])
    with pytest.raises(ValueError, match=r"shape \[64\]"):
        Sampler().sample(torch.zeros(VOCAB), [request()])
