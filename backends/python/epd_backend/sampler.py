"""Choosing the next token from logits. The meaning of each parameter is vLLM's.

A sequence's random number depends on its seed and the index of the token alone, so that the output is the same
whatever else is in the batch, on whatever instance, and after preemption.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from epd_scheduler.protocol import Sample, SamplerState, Sampling

_GREEDY = 1e-5  # temperatures below are greedy


@dataclass
class _Sequence:
    """What sampling one sequence needs to remember."""

    sampling: Sampling
    length: int  # tokens generated so far
    last: int | None
    prompt: tuple[int, ...]
    output: list[int] = field(default_factory=list)  # kept only for penalties

    @property
    def plain(self) -> bool:
        """Greedy and nothing else: the batched argmax is enough."""
        return self.greedy and not self.adjusted and self.sampling.logprobs is None

    @property
    def greedy(self) -> bool:
        return self.sampling.temperature < _GREEDY

    @property
    def adjusted(self) -> bool:
        """Whether the logits change before the choice."""
        return self.penalised or bool(self.sampling.logit_bias) or self.length < self.sampling.min_tokens

    @property
    def penalised(self) -> bool:
        s = self.sampling
        return s.repetition_penalty != 1.0 or s.presence_penalty != 0.0 or s.frequency_penalty != 0.0


class Sampler:
    """The sampling state of an instance's sequences, between `Row.open` and `Plan.close`."""

    def __init__(self) -> None:
        self._sequences: dict[int, _Sequence] = {}

    def open(self, seq: int, state: SamplerState) -> None:
        """Start or replace a sequence."""
        last = state.output[-1] if state.output else None
        sequence = _Sequence(state.sampling, len(state.output), last, state.prompt)
        if sequence.penalised:
            sequence.output = list(state.output)
        self._sequences[seq] = sequence

    def close(self, seq: int) -> None:
        """Forget a sequence; unknown ones are ignored."""
        self._sequences.pop(seq, None)

    def last(self, seq: int) -> int:
        """The token sampled last. Raises LookupError when this instance has none."""
        sequence = self._sequences.get(seq)
        if sequence is None or sequence.last is None:
            raise LookupError(f"no token was sampled here for sequence {seq}; name the row's token, or open its state")
        return sequence.last

    def sample(self, seqs: Sequence[int], logits: torch.Tensor) -> list[Sample]:
        """One token for each sequence from `logits [len(seqs), vocabulary]`, and remember it.

        Raises LookupError for a sequence that was not opened.
        """
        missing = [seq for seq in seqs if seq not in self._sequences]
        if missing:
            raise LookupError(
                f"sequences {missing} were not opened on this instance; send Row.open with their first row"
            )
        sequences = [self._sequences[seq] for seq in seqs]
        if all(sequence.plain for sequence in sequences):
            tokens = logits.argmax(-1).tolist()
            samples = [Sample(seq, token) for seq, token in zip(seqs, tokens, strict=True)]
        else:
            raw = logits.float()
            adjusted = _adjust(raw, sequences)
            tokens = adjusted.argmax(-1).tolist()
            chance = [i for i, sequence in enumerate(sequences) if not sequence.greedy]
            if chance:
                drawn = _draw(adjusted[chance], [sequences[i] for i in chance])
                for i, token in zip(chance, drawn, strict=True):
                    tokens[i] = token
            samples = [
                _report(seq, token, row, sequence.sampling.logprobs)
                for seq, token, row, sequence in zip(seqs, tokens, raw, sequences, strict=True)
            ]
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.length += 1
            sequence.last = token
            if sequence.penalised:
                sequence.output.append(token)
        return samples


def uniform(seed: int, index: int) -> float:
    """The random number in [0, 1) of a sequence's token `index`, a multiple of 2**-32 (Philox, counter-based)."""
    generator = np.random.Philox(key=seed & (2**64 - 1), counter=index)
    return float(generator.random_raw() >> 32) * 2.0**-32


def _report(seq: int, token: int, logits: torch.Tensor, alternatives: int | None) -> Sample:
    """A sample with log-probabilities of the unchanged logits, if they were asked for."""
    if alternatives is None:
        return Sample(seq, token)
    logprobs = logits.log_softmax(-1)
    values, indices = logprobs.topk(min(alternatives, len(logprobs)))
    top = tuple(zip(indices.tolist(), values.tolist(), strict=True))
    return Sample(seq, token, float(logprobs[token]), top)


def _adjust(logits: torch.Tensor, sequences: Sequence[_Sequence]) -> torch.Tensor:
    """Bias, minimum length and penalties, in vLLM's order; leaves `logits` as it is."""
    if not any(sequence.adjusted for sequence in sequences):
        return logits
    logits = logits.clone()
    for row, sequence in zip(logits, sequences, strict=True):
        sampling = sequence.sampling
        if sequence.length < sampling.min_tokens and sampling.stop_token_ids:
            row[_known(sampling.stop_token_ids, row)] = float("-inf")
        if sampling.logit_bias:
            ids = _known(tuple(sampling.logit_bias), row)
            row[ids] += torch.tensor([sampling.logit_bias[i] for i in ids.tolist()], device=row.device)
        if sequence.penalised:
            _penalise(row, sequence)
    return logits


def _penalise(row: torch.Tensor, sequence: _Sequence) -> None:
    """Repetition over prompt and output, presence and frequency over the output alone; in place."""
    sampling = sequence.sampling
    if sampling.repetition_penalty != 1.0:
        ids = _known(tuple({*sequence.prompt, *sequence.output}), row)
        seen = row[ids]
        row[ids] = torch.where(seen > 0, seen / sampling.repetition_penalty, seen * sampling.repetition_penalty)
    counts = Counter(sequence.output)
    ids = torch.tensor(list(counts), dtype=torch.int64, device=row.device)
    times = torch.tensor(list(counts.values()), dtype=torch.float32, device=row.device)
    row[ids] -= sampling.frequency_penalty * times + sampling.presence_penalty


def _known(ids: tuple[int, ...], row: torch.Tensor) -> torch.Tensor:
    """Token ids inside the vocabulary: placeholders of images may lie outside."""
    return torch.tensor([i for i in ids if 0 <= i < len(row)], dtype=torch.int64, device=row.device)


def _draw(logits: torch.Tensor, sequences: Sequence[_Sequence]) -> list[int]:
    """Temperature, min_p, top_k, top_p, then one draw a row by inverting the cumulative distribution."""

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=logits.device)[:, None]

    samplings = [sequence.sampling for sequence in sequences]
    logits = logits / column([s.temperature for s in samplings])
    if any(s.min_p > 0 for s in samplings):
        probabilities = logits.softmax(-1)
        least = probabilities.amax(-1, keepdim=True) * column([s.min_p for s in samplings])
        logits = logits.masked_fill(probabilities < least, float("-inf"))
    if any(s.top_k > 0 or s.top_p < 1 for s in samplings):
        logits = _top(logits, [s.top_k for s in samplings], column([s.top_p for s in samplings]))
    cumulative = logits.double().softmax(-1).cumsum(-1)
    draws = [uniform(s.seed, sequence.length) for s, sequence in zip(samplings, sequences, strict=True)]
    targets = torch.tensor(draws, dtype=torch.float64, device=logits.device)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, targets, right=True).squeeze(-1)
    # Logits that are not finite must not give an id outside the vocabulary, which would fail the whole next batch.
    valid: list[int] = tokens.clamp(max=logits.shape[-1] - 1).tolist()
    return valid


def _top(logits: torch.Tensor, top_k: list[int], top_p: torch.Tensor) -> torch.Tensor:
    """Keep the `top_k` likeliest (0: all), of these the fewest that reach probability `top_p [rows, 1]`."""
    values, order = logits.sort(stable=True, dim=-1, descending=True)
    vocabulary = values.shape[-1]
    kept = torch.tensor([k if k > 0 else vocabulary for k in top_k], device=logits.device)[:, None]
    rank = torch.arange(vocabulary, device=logits.device)
    values = values.masked_fill(rank >= kept, float("-inf"))
    probabilities = values.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities  # what the likelier ones reach without this one
    values = values.masked_fill((before >= top_p) & (top_p < 1) & (rank > 0), float("-inf"))
    return torch.full_like(logits, float("-inf")).scatter(-1, order, values)
