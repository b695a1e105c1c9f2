"""Sampling against straightforward references, one sequence at a time."""

from __future__ import annotations

import math
import random

import msgspec
import numpy as np
import pytest
import torch
from epd_backend.sampler import Sampler, uniform
from epd_scheduler.protocol import SamplerState, Sampling

VOCABULARY = 50


def logits(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2


def one(sampling: Sampling, row: torch.Tensor, prompt=(), output=()):
    sampler = Sampler()
    sampler.open(7, SamplerState(sampling, tuple(prompt), tuple(output)))
    return sampler.sample([7], row)[0]


def adjusted(sampling: Sampling, row: list[float], prompt, output) -> list[float]:
    """vLLM's order, token by token: minimum length, bias, penalties."""
    out = []
    for token, value in enumerate(row):
        if len(output) < sampling.min_tokens and token in sampling.stop_token_ids:
            value = -math.inf
        value += sampling.logit_bias.get(token, 0.0)
        if token in prompt or token in output:
            value = value / sampling.repetition_penalty if value > 0 else value * sampling.repetition_penalty
        value -= sampling.frequency_penalty * output.count(token)
        value -= sampling.presence_penalty * (token in output)
        out.append(value)
    return out


def allowed(sampling: Sampling, row: list[float]) -> dict[int, float]:
    """Tokens that temperature, min_p, top_k and top_p leave, with their probabilities."""
    weights = np.exp(np.array(row) / sampling.temperature - max(row) / sampling.temperature)
    probabilities = weights / weights.sum()
    order = sorted(range(len(row)), key=lambda token: -probabilities[token])
    order = [token for token in order if probabilities[token] >= probabilities.max() * sampling.min_p]
    if sampling.top_k:
        order = order[: sampling.top_k]
    total = sum(probabilities[token] for token in order)
    kept, reached = [], 0.0
    for token in order:
        if kept and reached >= sampling.top_p:
            break
        kept.append(token)
        reached += probabilities[token] / total
    total = sum(probabilities[token] for token in kept)
    return {token: probabilities[token] / total for token in kept}


def test_greedy_takes_the_likeliest():
    assert one(Sampling(), torch.tensor([[0.1, 3.0, 2.0]])).token == 1


@pytest.mark.parametrize("seed", range(20))
def test_adjustments_are_those_of_the_reference(seed):
    rng = random.Random(seed)
    prompt = [rng.randrange(VOCABULARY) for _ in range(8)]
    output = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(12))]
    row = logits(seed)
    top = row[0].topk(3).indices.tolist()
    output += [top[0]] * rng.randrange(4)
    sampling = Sampling(
        repetition_penalty=rng.choice([1.0, 1.3, 2.0]),
        presence_penalty=rng.choice([0.0, 0.7, -0.5]),
        frequency_penalty=rng.choice([0.0, 0.4]),
        min_tokens=rng.choice([0, 20]),
        stop_token_ids=(top[1],),
        logit_bias={top[2]: 1.5, 3: -4.0},
    )
    expected = int(np.argmax(adjusted(sampling, row[0].tolist(), prompt, output)))
    assert one(sampling, row, prompt, output).token == expected


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.7, top_k=5),
        Sampling(temperature=1.3, top_p=0.8),
        Sampling(temperature=1.0, min_p=0.1),
        Sampling(temperature=1.5, top_k=9, top_p=0.7, min_p=0.02),
        Sampling(temperature=2.0, top_p=1e-9),
    ],
)
def test_draws_follow_the_filtered_distribution(sampling):
    row, count = logits(3), 4000
    expected = allowed(sampling, row[0].tolist())
    drawn = dict.fromkeys(expected, 0)
    sampler = Sampler()
    sampler.open(1, SamplerState(sampling))
    for _ in range(count):
        drawn[sampler.sample([1], row)[0].token] += 1  # KeyError: a token that was filtered out
    for token, probability in expected.items():
        deviation = math.sqrt(count * probability * (1 - probability))
        assert abs(drawn[token] - count * probability) <= 5 * deviation + 1


def test_the_random_number_depends_on_seed_and_index_alone():
    numbers = [uniform(seed, index) for seed in (0, 1, -1, 2**63) for index in range(200)]
    assert all(0 <= number < 1 for number in numbers)
    assert len(set(numbers)) == len(numbers)
    assert 0.45 < sum(numbers) / len(numbers) < 0.55
    assert uniform(42, 0) == 0.8201981477905065  # as on any machine, in any version


def test_same_seed_same_output_whatever_else_is_in_the_batch_and_after_preemption():
    rows = logits(11, rows=8)
    sampling = Sampling(temperature=1.0, top_p=0.9, seed=5)
    alone = Sampler()
    alone.open(1, SamplerState(sampling))
    expected = [alone.sample([1], rows[i : i + 1])[0].token for i in range(8)]

    crowd = Sampler()
    crowd.open(1, SamplerState(sampling))
    crowd.open(2, SamplerState(Sampling(temperature=0.5, top_k=3, seed=9)))
    crowd.open(3, SamplerState(Sampling(repetition_penalty=1.5)))
    got = [crowd.sample([3, 1, 2], rows[[(i + 1) % 8, i, (i + 2) % 8]])[1].token for i in range(4)]
    assert got == expected[:4]

    resumed = Sampler()
    resumed.open(1, SamplerState(sampling, output=tuple(expected[:4])))
    assert [resumed.sample([1], rows[i : i + 1])[0].token for i in range(4, 8)] == expected[4:]


def test_other_seeds_give_other_output():
    rows = logits(11, rows=8)
    outputs = set()
    for seed in range(5):
        sampler = Sampler()
        sampler.open(1, SamplerState(Sampling(temperature=1.5, seed=seed)))
        outputs.add(tuple(sampler.sample([1], rows[i : i + 1])[0].token for i in range(8)))
    assert len(outputs) == 5


def test_logprobs_are_of_the_unchanged_logits():
    row = torch.tensor([[1.0, 2.0, 4.0]])
    sample = one(Sampling(logprobs=2, logit_bias={0: 100.0}), row)
    total = math.log(math.e + math.e**2 + math.e**4)
    assert sample.token == 0
    assert sample.logprob == pytest.approx(1 - total, abs=1e-6)
    assert [token for token, _ in sample.top] == [2, 1]
    assert [value for _, value in sample.top] == pytest.approx([4 - total, 2 - total], abs=1e-6)


def test_logprobs_zero_reports_the_token_alone():
    sample = one(Sampling(logprobs=0), torch.tensor([[0.0, 0.0]]))
    assert sample.logprob == pytest.approx(-math.log(2))
    assert sample.top == ()


def test_minimum_length_ends():
    row = torch.tensor([[0.0, 5.0, 1.0]])
    sampling = Sampling(min_tokens=2, stop_token_ids=(1,))
    sampler = Sampler()
    sampler.open(1, SamplerState(sampling))
    assert [sampler.sample([1], row)[0].token for _ in range(3)] == [2, 2, 1]


def test_penalties_count_tokens_as_they_are_generated():
    row = torch.tensor([[1.0, 0.9, 0.0]])
    sampler = Sampler()
    sampler.open(1, SamplerState(Sampling(frequency_penalty=0.15)))
    assert [sampler.sample([1], row)[0].token for _ in range(4)] == [0, 1, 0, 1]


def test_tokens_outside_the_vocabulary_are_no_reason_to_fail():
    sampling = Sampling(repetition_penalty=1.5, logit_bias={99: 1.0}, min_tokens=1, stop_token_ids=(98,))
    assert one(sampling, torch.tensor([[0.0, 1.0]]), prompt=(97,)).token == 1


def test_unknown_sequences_are_named():
    sampler = Sampler()
    with pytest.raises(LookupError, match=r"sequences \[4\] were not opened"):
        sampler.sample([4], logits(0))
    sampler.open(4, SamplerState(Sampling()))
    with pytest.raises(LookupError, match="no token was sampled here for sequence 4"):
        sampler.last(4)
    sampler.sample([4], logits(0))
    assert sampler.last(4) == int(logits(0).argmax())
    sampler.close(4)
    with pytest.raises(LookupError, match="were not opened"):
        sampler.sample([4], logits(0))


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_broken_logits_still_give_a_token_of_the_vocabulary(broken):
    """An id outside it would fail the next batch, and all requests in it."""
    row = torch.full((1, VOCABULARY), broken)
    assert 0 <= one(Sampling(temperature=1.0, top_p=0.9), row).token < VOCABULARY
    assert 0 <= one(Sampling(), row).token < VOCABULARY


@pytest.mark.parametrize("temperature", [1e-5, 1.0, 1e30])
@pytest.mark.parametrize("penalty", [1e-20, 1e20])
def test_the_widest_parameters_leave_the_distribution_whole(temperature, penalty):
    sampling = Sampling(
        temperature=temperature, repetition_penalty=penalty, min_tokens=9, stop_token_ids=(3,), top_p=0.9, min_p=0.1
    )
    row = logits(1) * 20
    row[0, 0] = 0.0
    for seed in range(20):
        token = one(msgspec.structs.replace(sampling, seed=seed), row, prompt=(0, 1, 2), output=(4,)).token
        assert 0 <= token < VOCABULARY
        assert token != 3
