"""Make the checkpoint of the speed measurements: Qwen2.5-VL with 118 M random parameters.

    python -m benchmarks.make_bench_checkpoint OUT [--dtype float32]

A 448 x 448 image is 256 tokens. The tokenizer is trained on the sources of Python's standard library, so that every
token that the model can sample is text. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from models import checkpoint

VOCABULARY = 8192  # special tokens included


def byte_pairs(size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of a byte-level BPE of `size` symbols."""
    files = sorted(str(path) for path in Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train(files, trainers.BpeTrainer(vocab_size=size, show_progress=False, initial_alphabet=alphabet))
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


def configuration(tokenizer: Any) -> Qwen2_5_VLConfig:
    """A vision tower of 32 M parameters and a text model of 86 M with 12 layers."""
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]},
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "depth": 8,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_heads": 8,
        "out_hidden_size": 768,
        "window_size": 112,
        "fullatt_block_indexes": [3, 7],
    }
    ids = checkpoint.qwen_token_ids(tokenizer)
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)


def make(path: Path, dtype: torch.dtype = torch.float32, seed: int = 0) -> Qwen2_5_VLForConditionalGeneration:
    """Write the checkpoint directory; returns the model."""
    vocab, merges = byte_pairs(VOCABULARY - len(checkpoint.QWEN_SPECIALS))
    tokenizer = checkpoint.tokenizer(vocab=vocab, merges=merges)
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(configuration(tokenizer)).to(dtype).eval()
    image_processor = Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 1280 * 28 * 28})
    processor = {"processor_class": "Qwen2_5_VLProcessor"}
    checkpoint.save(path, model, tokenizer, image_processor, checkpoint.chat_template(), processor)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the benchmark checkpoint.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    model = make(args.out, getattr(torch, args.dtype), args.seed)
    vision, total = (sum(p.numel() for p in part.parameters()) / 1e6 for part in (model.model.visual, model))
    print(f"{args.out}: {total:.1f} M parameters, {vision:.1f} M of them in the vision tower")


if __name__ == "__main__":
    main()
