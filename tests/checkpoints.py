"""Tiny random checkpoints of every family: complete directories, as released ones are, in a second or less.

The weights are large enough for greedy output that varies with the prompt and the images.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    InternVLConfig,
    InternVLForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from models import checkpoint

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "llava_onevision", "internvl")

HIDDEN = 64
TILE = 56  # pixels a side of a tile of the tiled families: 4 x 4 patches


def make(family: str, path: str | Path, seed: int = 0, layers: int = 2) -> Path:
    """Write a checkpoint of `family` with float32 weights to the directory `path`; equal arguments, equal files."""
    tokenizer = checkpoint.tokenizer(*_SPECIALS[family])
    model_class, config, image_processor, template, processor = _PARTS[family](tokenizer, layers)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config).eval()
        _randomise(model)
    checkpoint.save(path, model, tokenizer, image_processor, template, processor)
    return Path(path)


def _randomise(model: torch.nn.Module) -> None:
    """Weights that keep the scale of activations, with strong attention, so that outputs depend on all inputs."""
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            fan_in = HIDDEN if "embed" in name else parameter[0].numel()
            torch.nn.init.normal_(parameter, std=1.5 * fan_in**-0.5)
        elif name.endswith("bias") or "newline" in name:
            torch.nn.init.normal_(parameter, std=0.1)
        else:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.1)


_SPECIALS: dict[str, tuple[Any, ...]] = {
    "qwen2_vl": (),
    "qwen2_5_vl": (),
    "llava_onevision": ((*checkpoint.QWEN_SPECIALS[:3], "<image>", "<video>"),),
    "internvl": (
        (*checkpoint.QWEN_SPECIALS[:3], "<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        None,
        (),
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    ),
}


def _text(tokenizer: Any, layers: int, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": 288,
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    } | more


def _qwen(tokenizer: Any, layers: int, model: type, config: type, vision: dict[str, Any], processor: str) -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    made = config(
        text_config=_text(tokenizer, layers, rope_parameters=rope),
        vision_config={"depth": 2, "num_heads": 2, "patch_size": 14} | vision,
        tie_word_embeddings=False,
        **checkpoint.qwen_token_ids(tokenizer),
    )
    pixels = {"shortest_edge": 4 * 28 * 28, "longest_edge": 64 * 28 * 28}
    return (
        model,
        made,
        Qwen2VLImageProcessorPil(size=pixels),
        checkpoint.chat_template(),
        {"processor_class": processor},
    )


def _qwen2_vl(tokenizer: Any, layers: int) -> Any:
    vision = {"embed_dim": 32, "hidden_size": HIDDEN, "mlp_ratio": 2}
    return _qwen(tokenizer, layers, Qwen2VLForConditionalGeneration, Qwen2VLConfig, vision, "Qwen2VLProcessor")


def _qwen2_5_vl(tokenizer: Any, layers: int) -> Any:
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": HIDDEN,
        "window_size": 56,  # 2 x 2 embedding rows, so that even small images have several windows
        "fullatt_block_indexes": [1],
    }
    return _qwen(tokenizer, layers, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLConfig, vision, "Qwen2_5_VLProcessor")


def _llava_onevision(tokenizer: Any, layers: int) -> Any:
    sizes = [[TILE * y, TILE * x] for y in range(1, 4) for x in range(1, 4)]
    aspect = "anyres_max_2"  # more than 2 tiles' rows are scaled down
    config = LlavaOnevisionConfig(
        text_config=_text(tokenizer, layers, model_type="qwen2"),
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": TILE,
            "patch_size": 14,
            "vision_use_head": False,
        },
        image_grid_pinpoints=sizes,
        vision_aspect_ratio=aspect,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
    )
    processor = {
        "processor_class": "LlavaOnevisionProcessor",
        "num_image_tokens": 16,
        "vision_feature_select_strategy": "full",
        "vision_aspect_ratio": aspect,
    }
    return (
        LlavaOnevisionForConditionalGeneration,
        config,
        LlavaOnevisionImageProcessorPil(size={"height": TILE, "width": TILE}, image_grid_pinpoints=sizes),
        checkpoint.chat_template("<image>\n"),
        processor,
    )


def _internvl(tokenizer: Any, layers: int) -> Any:
    config = InternVLConfig(
        text_config=_text(tokenizer, layers, model_type="qwen2"),
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": [TILE, TILE],
            "patch_size": [14, 14],
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    return (
        InternVLForConditionalGeneration,
        config,
        GotOcr2ImageProcessorPil(size={"height": TILE, "width": TILE}, max_patches=6),
        checkpoint.chat_template("<IMG_CONTEXT>\n"),
        {"processor_class": "InternVLProcessor", "image_seq_length": 4},
    )


_PARTS = {
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "llava_onevision": _llava_onevision,
    "internvl": _internvl,
}
