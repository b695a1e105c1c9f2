"""Executes the plans of the language model: stages, sampling, and the tokens that one step hands to the next."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
import transformers
from epd_scheduler.config import Config
from epd_scheduler.protocol import ArenaInfo, BatchPlan, EncodePlan, MigratePlan

from epd_backend import arena, weights
from epd_backend.arena import Arena, ArenaMap
from epd_backend.language import LanguageStage
from epd_backend.pipeline import Job
from epd_backend.sampler import Sampler


class LanguageExecutor:
    """The language model of one instance, in one or several pipeline stages.

    `devices` has one entry a stage; stages on one device share its arena. `step(index, job)` is called for each
    stage in its own thread, `settle(job)` in the last one's, for failed jobs too.
    """

    def __init__(
        self, config: Config, devices: Sequence[str], namespace: str, arenas: ArenaMap, *, embeddings: bool
    ) -> None:
        dtype = getattr(torch, config.dtype)
        text = transformers.AutoConfig.from_pretrained(config.model).get_text_config()
        layers = text.num_hidden_layers
        if len(devices) > layers:
            raise ValueError(
                f"{len(devices)} pipeline stages for {layers} decoder layers; set `stages` to that or less"
            )
        cuts = [layers * index // len(devices) for index in range(len(devices) + 1)]
        self.stages = [
            LanguageStage(config.model, dtype, device, (cuts[i], cuts[i + 1])) for i, device in enumerate(devices)
        ]
        self.kv: tuple[ArenaInfo, ...] = ()
        self.embedding: ArenaInfo | None = None
        join = partial(_join, arenas, namespace, dtype)
        if embeddings:
            rows_shape = (config.embedding.blocks, config.embedding.block_size, text.hidden_size)
            self.embedding = join(devices[0], "embedding", rows_shape).info
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        for device in dict.fromkeys(devices):
            held = [stage for stage, where in zip(self.stages, devices, strict=True) if where == device]
            first, end = held[0].first, held[-1].end
            shape = (config.kv.blocks, end - first, 2, config.kv.block_size, text.num_key_value_heads, head_dim)
            made = join(device, "kv", shape, first)
            self.kv += (made.info,)
            for stage in held:
                rows = arenas.open(self.embedding) if self.embedding is not None and stage.first == 0 else None
                stage.attach(made.tensor, first, rows)
        self._arenas = arenas
        self._sampler = Sampler()
        self._pending: Counter[int] = Counter()  # sequence -> plans in the stages that will change its last token
        self._settled = threading.Condition()

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights held, summed over the stages."""
        return sum(weights.weight_bytes(stage.model) for stage in self.stages)

    def step(self, index: int, job: Job) -> None:
        """Run one stage's part of a plan."""
        stage = self.stages[index]
        if isinstance(job.plan, MigratePlan):
            stage.pull(job.plan, self._arenas)
        elif isinstance(job.plan, BatchPlan):
            if index == 0:
                job.forward = stage.embed(job.plan, self._last_token)
                with self._settled:
                    self._pending.update(_changed(job.plan))
            assert job.forward is not None
            job.forward = stage.advance(job.forward)
            if index + 1 == len(self.stages):
                self._sample(job.plan, job)

    def settle(self, job: Job) -> None:
        """Close what a plan closes, unless its sampling did, and let the first stage have the new tokens."""
        if isinstance(job.plan, EncodePlan):
            return
        if job.error is not None or not isinstance(job.plan, BatchPlan):
            self._close(job.plan)
        if isinstance(job.plan, BatchPlan) and job.forward is not None:
            with self._settled:
                self._pending.subtract(_changed(job.plan))
                self._pending += Counter()  # drops the zeros
                self._settled.notify_all()

    def _sample(self, plan: BatchPlan, job: Job) -> None:
        self._close(plan)
        for row in plan.rows:
            if row.open is not None:
                self._sampler.open(row.seq, row.open)
        seqs = [row.seq for row in plan.rows if row.sample]
        if seqs:
            assert job.forward is not None
            job.samples = tuple(self._sampler.sample(seqs, self.stages[-1].logits(job.forward)))

    def _close(self, plan: BatchPlan | MigratePlan) -> None:
        for seq in plan.close:
            self._sampler.close(seq)

    def _last_token(self, seq: int) -> int:
        """The token sampled last, once the later stages have sampled it. Every job settles, so the wait ends."""
        with self._settled:
            self._settled.wait_for(lambda: not self._pending[seq])
        return self._sampler.last(seq)


def _changed(plan: BatchPlan) -> list[int]:
    """Sequences whose last token the plan changes."""
    return [row.seq for row in plan.rows if row.sample or row.open is not None]


def _join(
    arenas: ArenaMap,
    namespace: str,
    dtype: torch.dtype,
    device: str,
    kind: Literal["kv", "embedding"],
    shape: tuple[int, ...],
    first_layer: int = 0,
) -> Arena:
    made = arena.join(namespace, device, kind, shape, dtype, first_layer)
    arenas.add(made)
    return made
