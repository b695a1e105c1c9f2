"""Executes encode plans: image bytes to embedding rows in the consumer's arena."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from epd_scheduler.config import Config
from epd_scheduler.protocol import ArenaInfo, EncodePlan, EncodeUnit
from transformers import AutoImageProcessor

from epd_backend import families, images


class EncodeError(RuntimeError):
    """A whole plan cannot be executed: orchestrator and encoder disagree about what it means."""


class Arenas(Protocol):
    """Where the executor finds the arena that a plan names."""

    def open(self, info: ArenaInfo) -> torch.Tensor:
        """The arena as a tensor of `info.shape`."""


class EncodeExecutor:
    """The vision side of a model, with transformers' own image processor.

    `model` is a ForConditionalGeneration model that holds the vision side at least. Images of a batch do not see each
    other: the embeddings of one are the same whatever the others are, up to the rounding of matrix products.
    """

    def __init__(self, config: Config, model: Any, arenas: Arenas) -> None:
        self._model = model
        self._family = families.of(model.config.to_dict())
        self._arenas = arenas
        # The Pillow backend: no torchvision, and equal results on every machine.
        self._processor = AutoImageProcessor.from_pretrained(config.model, backend="pil")  # type: ignore[no-untyped-call]
        self.copies = torch.cuda.Stream(model.device) if model.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def run(self, plan: EncodePlan, media: Sequence[bytes | memoryview]) -> dict[int, str]:
        """Encode the plan's units in one batch and write their embeddings into its arena.

        `media` has the encoded image of each unit. Returns why units failed through their media's fault, by index in
        `plan.units`; the others are encoded all the same. On a GPU the work has been launched, not finished: its end
        is that of `copies`, a stream of their own for the embeddings' copies, beside the next plan's computation.
        Raises EncodeError.
        """
        errors: dict[int, str] = {}
        good: list[EncodeUnit] = []
        inputs: list[dict[str, torch.Tensor]] = []
        for index, (unit, data) in enumerate(zip(plan.units, media, strict=True)):
            try:
                inputs.append(self._prepare(data))
                good.append(unit)
            except ValueError as error:  # ImageError, or a size that the image processor refuses
                errors[index] = str(error)
        if good:
            arena = self._arenas.open(plan.arena)
            embeddings = self._encode(inputs)
            with self._copying(embeddings):
                for unit, embedding in zip(good, embeddings, strict=True):
                    _check(unit, embedding, arena)
                    _write(arena, unit.blocks, embedding.to(arena.dtype))
        return errors

    @contextlib.contextmanager
    def _copying(self, embeddings: Sequence[torch.Tensor]) -> Iterator[None]:
        if self.copies is None:
            yield
            return
        self.copies.wait_stream(torch.cuda.current_stream(self.copies.device))
        with torch.cuda.stream(self.copies):
            yield
        for embedding in embeddings:
            embedding.record_stream(self.copies)  # their memory is not reused before they are copied

    def _prepare(self, data: bytes | memoryview) -> dict[str, torch.Tensor]:
        """Pixels and their description of one image, as the model takes them. Raises ValueError."""
        made = self._processor(images=[images.load(data)], return_tensors="pt", **self._family.options)
        pixels = made["pixel_values"]
        # LLaVA-OneVision has an axis of images before that of tiles; all others begin with tiles or patches.
        tensors = {"pixel_values": pixels[0] if pixels.dim() == 5 else pixels}
        return tensors | {name: made[name] for name in self._family.features}

    def _encode(self, inputs: Sequence[dict[str, torch.Tensor]]) -> Sequence[torch.Tensor]:
        """Embeddings `[rows, width]` of each image."""
        device = self._model.device
        batch = {name: torch.cat([one[name] for one in inputs]).to(device) for name in inputs[0]}
        batch["pixel_values"] = batch["pixel_values"].to(self._model.dtype)
        features = self._model.model.get_image_features(**batch, return_dict=True).pooler_output
        if isinstance(features, torch.Tensor):  # one entry a tile, not one an image
            features = torch.split(features, [len(one["pixel_values"]) for one in inputs])
        return [feature.flatten(0, -2) for feature in features]


def _check(unit: EncodeUnit, embedding: torch.Tensor, arena: torch.Tensor) -> None:
    rows, width = embedding.shape
    _, block_size, arena_width = arena.shape
    needed = -(-unit.rows // block_size)
    if (rows, width, len(unit.blocks)) != (unit.rows, arena_width, needed):
        raise EncodeError(
            f"item {unit.item} of sequence {unit.seq} has {rows} embedding rows of width {width}; its plan has "
            f"{unit.rows} rows of width {arena_width} in {len(unit.blocks)} blocks of {block_size}; orchestrator and "
            "encoder must run the same version and serve the same checkpoint"
        )


def _write(arena: torch.Tensor, blocks: Sequence[int], embedding: torch.Tensor) -> None:
    """Copy `[rows, width]` into blocks of `[blocks, block_size, width]`; the last may stay partly as it was.

    Copies alone, one a run of consecutive blocks: between two GPUs they all run on the stream of the source, whose
    event then says that they are done.
    """
    block_size = arena.shape[1]
    rows = arena.flatten(0, 1)
    done = 0
    for first, end in _runs(blocks):
        count = min((end - first) * block_size, len(embedding) - done)
        at = first * block_size
        rows[at : at + count].copy_(embedding[done : done + count], non_blocking=True)
        done += count


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Consecutive block numbers as ranges (first, end)."""
    first = end = blocks[0]
    for block in blocks:
        if block != end:
            yield first, end
            first = block
        end = block + 1
    yield first, end
