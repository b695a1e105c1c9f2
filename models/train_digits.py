"""Make digits-vl again: train a small Qwen2.5-VL to read handwritten digits, from scratch, on a CPU.

    python -m models.train_digits OUT [--steps 3000] [--threads 2]

Three kinds of samples: `multi`, 1 to 8 images of one digit each (56 px, 4 embedding rows); `row56` and `row112`, one
image with a row of 1 to 8 digits (4 or 16 rows a digit). Question: "Read the digits."; answer: the digits.
The scans are scikit-learn's digits (1,797); 397 are held out, are never trained on, and ship in `heldout.npz`.
Equal arguments give equal samples in equal order; floating-point sums differ between machines.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from epd_backend.positions import positions
from PIL import Image
from torch.nn import functional
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from models import checkpoint
from models.digits import HELDOUT, QUESTION

MAX_DIGITS = 8
ROW_SHARE = 0.4  # of the samples: one image with a row
LARGE_SHARE = 0.25  # of the rows: 112 px high
PEAK_RATE, WARM_UP, FINAL = 1.5e-3, 100, 0.03
CURRICULUM = 0.35  # the share of the steps over which the number of digits grows from 2 to MAX_DIGITS
IGNORED = -100  # label of a position whose next token is not trained


@dataclass(frozen=True)
class Sample:
    """Images (grey, sides divisible by 28) and the digits on them."""

    images: list[npt.NDArray[np.uint8]]
    answer: str


def load_scans() -> tuple[Any, Any, Any, Any]:
    """(training scans, digits, held-out scans, digits); scans are uint8 `[n, 8, 8]`, white on black."""
    from sklearn.datasets import load_digits

    data = load_digits()
    scans, digits = (data.images / 16 * 255).astype(np.uint8), data.target.astype(np.uint8)
    order = np.random.default_rng(1234).permutation(len(scans))
    held, train = order[:397], order[397:]
    return scans[train], digits[train], scans[held], digits[held]


class Data:
    """Samples of one part of the scans, varied if it is for training."""

    def __init__(self, scans: Any, digits: Any, seed: int, varied: bool) -> None:
        self._scans, self._digits, self._varied = scans, digits, varied
        self._rng = np.random.default_rng(seed)

    def sample(self, most: int, row: bool | None = None, large: bool | None = None) -> Sample:
        """1 to `most` digits; `row` and `large` as given or by chance."""
        rng = self._rng
        chosen = rng.integers(0, len(self._scans), int(rng.integers(1, most + 1)))
        row = rng.random() < ROW_SHARE if row is None else row
        large = row and (rng.random() < LARGE_SHARE if large is None else large)
        images = [self._draw(self._scans[index], 112 if large else 56) for index in chosen]
        answer = "".join(str(digit) for digit in self._digits[chosen])
        return Sample([np.concatenate(images, axis=1)] if row else images, answer)

    def _draw(self, scan: Any, px: int) -> npt.NDArray[np.uint8]:
        """The scan at `px` x `px`; if varied: scaled, rotated, sheared, shifted, with noise and another contrast."""
        image = Image.fromarray(scan).resize((px, px), Image.Resampling.BICUBIC)
        if not self._varied:
            return np.asarray(image)
        rng = self._rng
        scale, angle, shear = rng.uniform(0.85, 1.12), rng.uniform(-0.18, 0.18), rng.uniform(-0.15, 0.15)
        cos, sin = math.cos(angle) / scale, math.sin(angle) / scale
        matrix = np.array([[cos, sin + shear], [-sin, cos]])
        shift = px / 2 + rng.uniform(-0.07, 0.07, 2) * px - matrix @ np.array([px / 2, px / 2])
        affine = (*matrix[0], shift[0], *matrix[1], shift[1])
        turned = image.transform((px, px), Image.Transform.AFFINE, affine, Image.Resampling.BILINEAR)
        pixels = np.asarray(turned, np.float32) * rng.uniform(0.75, 1.1) + rng.normal(0, 4, (px, px))
        return np.clip(pixels, 0, 255).astype(np.uint8)


class Batcher:
    """Samples to padded tensors, prompts and positions as the server makes them."""

    def __init__(self, tokenizer: Any, image_processor: Any) -> None:
        self._tokenizer, self._processor = tokenizer, image_processor
        self._pad = tokenizer.pad_token_id
        tokenizer.chat_template = checkpoint.chat_template()

    def __call__(self, samples: list[Sample]) -> dict[str, torch.Tensor]:
        """Inputs of the model and `labels`, which hold each position's next token."""
        images = [Image.fromarray(image).convert("RGB") for sample in samples for image in sample.images]
        pixels = self._processor(images=images, return_tensors="pt")
        grids = iter([(t, h // 2, w // 2) for t, h, w in pixels["image_grid_thw"].tolist()])
        rows = [self._tokens(sample, grids) for sample in samples]
        length = max(len(tokens) for tokens, _, _ in rows)
        ids = torch.full((len(rows), length), self._pad)
        labels = torch.full_like(ids, IGNORED)
        attended = torch.zeros_like(ids)
        places = torch.zeros(3, len(rows), length, dtype=torch.long)
        for index, (tokens, answer, items) in enumerate(rows):
            count = len(tokens)
            ids[index, :count] = torch.tensor(tokens)
            labels[index, count - 1 - answer : count - 1] = ids[index, count - answer : count]
            attended[index, :count] = 1
            places[:, index, :count] = torch.from_numpy(positions("mrope", count, items)[0])
        inputs = {"input_ids": ids, "labels": labels, "attention_mask": attended, "position_ids": places}
        return inputs | {name: pixels[name] for name in ("pixel_values", "image_grid_thw")}

    def _tokens(self, sample: Sample, grids: Any) -> tuple[list[int], int, list[Any]]:
        """(token ids, how many of them are the answer, the images' (start, rows, grid))."""
        content = [{"type": "image"}] * len(sample.images) + [{"type": "text", "text": QUESTION}]
        messages = [{"role": "user", "content": content}]
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        first, *others = text.split("<|image_pad|>")
        tokens, items = self._tokenizer(first).input_ids, []
        image_pad = self._tokenizer.convert_tokens_to_ids("<|image_pad|>")
        for other in others:
            grid = next(grids)
            items.append((len(tokens), math.prod(grid), grid))
            tokens = tokens + [image_pad] * math.prod(grid) + self._tokenizer(other).input_ids
        answer = [*self._tokenizer(sample.answer).input_ids, self._tokenizer.eos_token_id]
        return tokens + answer, len(answer), items


def build(tokenizer: Any) -> Qwen2_5_VLForConditionalGeneration:
    """The model, 1.8 M parameters, with random weights."""
    text = {
        "vocab_size": 288,
        "hidden_size": 160,
        "intermediate_size": 448,
        "num_hidden_layers": 4,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]},
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "depth": 3,
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_heads": 3,
        "out_hidden_size": 160,
        "window_size": 112,
        "fullatt_block_indexes": [2],
        "tokens_per_second": 2,
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=True,
        **checkpoint.qwen_token_ids(tokenizer),
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def answers(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits `[n, vocabulary]` and labels `[n]` at the positions of the answers."""
    labels = batch["labels"]
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    hidden = model.model(**inputs, use_cache=False).last_hidden_state
    wanted = labels != IGNORED
    return model.lm_head(hidden[wanted]), labels[wanted]


@torch.inference_mode()
def evaluate(model: Any, batcher: Batcher, scans: Any, digits: Any, batches: int = 3) -> dict[str, float]:
    """Share of right digits on held-out scans for each kind of sample, the digits before given (teacher forcing)."""
    model.eval()
    result: dict[str, float] = {}
    for kind, row, large in (("multi", False, False), ("row56", True, False), ("row112", True, True)):
        data, right, total = Data(scans, digits, seed=7, varied=False), 0, 0
        for _ in range(batches):
            logits, labels = answers(model, batcher([data.sample(MAX_DIGITS, row, large) for _ in range(32)]))
            digit = labels != model.config.text_config.eos_token_id
            right += int((logits.argmax(-1) == labels)[digit].sum())
            total += int(digit.sum())
        result[kind] = right / total
    model.train()
    return result


def train(model: Any, batcher: Batcher, steps: int, batch_size: int, seed: int) -> list[dict[str, float]]:
    """Train in place; returns the log."""
    scans, digits, *held = load_scans()
    data = Data(scans, digits, seed, varied=True)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.98), fused=True)
    started, log = time.monotonic(), []
    model.train()
    for step in range(1, steps + 1):
        done = step / steps
        decay = FINAL + (1 - FINAL) * 0.5 * (1 + math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATE * min(1, step / WARM_UP) * decay
        most = min(MAX_DIGITS, 2 + int(done / CURRICULUM * (MAX_DIGITS - 1)))
        logits, labels = answers(model, batcher([data.sample(most) for _ in range(batch_size)]))
        loss = functional.cross_entropy(logits, labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0 or step == steps:
            entry = {"step": step, "minutes": (time.monotonic() - started) / 60, "loss": loss.item()}
            log.append(entry | evaluate(model, batcher, *held))
            print(" ".join(f"{name} {value:.4g}" for name, value in log[-1].items()), flush=True)
    return log


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Train digits-vl from scratch and write its checkpoint directory.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)

    tokenizer = checkpoint.tokenizer()
    image_processor = Qwen2VLImageProcessorPil(size={"shortest_edge": 28 * 28, "longest_edge": 1280 * 28 * 28})
    model = build(tokenizer)
    log = train(model, Batcher(tokenizer, image_processor), args.steps, args.batch, args.seed)

    processor = {"processor_class": "Qwen2_5_VLProcessor"}
    checkpoint.save(
        args.out, model.eval().to(torch.bfloat16), tokenizer, image_processor, checkpoint.chat_template(), processor
    )
    _, _, scans, digits = load_scans()
    np.savez_compressed(args.out / HELDOUT, scans=scans, labels=digits)
    (args.out / "train_log.json").write_text(json.dumps(log, indent=1))


if __name__ == "__main__":
    main()
