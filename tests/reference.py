"""What plain transformers answers: the right answers of the "same tokens" tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

transformers.utils.logging.disable_progress_bar()

Messages = list[dict[str, Any]]
Prompt = Messages | tuple[str, Sequence[Image.Image]]
"""Chat messages, whose image parts are `{"type": "image", "image": <PIL image>}`, or raw text with its placeholders
and the images that stand in their places."""


def load_processor(path: str | Path) -> Any:
    """The checkpoint's processor with the Pillow image backend and no video processor, which needs torchvision."""
    base = getattr(transformers, PROCESSOR_MAPPING_NAMES[AutoConfig.from_pretrained(path).model_type])
    # The check of argument classes imports the video processor's.
    relaxed = type(base.__name__, (base,), {"check_argument_for_proper_class": lambda _self, _name, arg: type(arg)})
    parts = {
        "tokenizer": lambda: AutoTokenizer.from_pretrained(path),
        "image_processor": lambda: AutoImageProcessor.from_pretrained(path, backend="pil"),
        "video_processor": lambda: None,
    }
    settings, _ = base.get_processor_dict(path)
    return relaxed.from_args_and_dict([parts[name]() for name in base.get_attributes()], settings)


class Reference:
    """A checkpoint run by plain transformers: the whole model, float32 by default, greedy, one prompt at a time."""

    def __init__(self, path: str | Path, dtype: torch.dtype = torch.float32) -> None:
        self.processor = load_processor(path)
        self.model = AutoModelForImageTextToText.from_pretrained(path, dtype=dtype).eval()

    def inputs(self, prompt: Prompt) -> Any:
        """What the processor makes of a prompt: token ids `[1, n]`, pixels and their grids."""
        if isinstance(prompt, tuple):
            text, images = prompt
        else:
            text = self.processor.tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
            images = [part["image"] for message in prompt for part in message["content"] if "image" in part]
        # A flat list: for LLaVA-OneVision a nested one would mean that images of one prompt are not tiled.
        return self.processor(text=[text], images=list(images) or None, return_tensors="pt")

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Token ids of the prompt, placeholders expanded."""
        ids: list[int] = self.inputs(prompt)["input_ids"][0].tolist()
        return ids

    @torch.inference_mode()
    def generate(self, prompt: Prompt, max_tokens: int, ignore_eos: bool = False) -> list[int]:
        """Greedy continuation, without the end-of-sequence token that ended it."""
        inputs = self.inputs(prompt)
        ends = [] if ignore_eos else self.model.generation_config.eos_token_id
        out = self.model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False, eos_token_id=ends or None)
        tokens: list[int] = out[0, inputs["input_ids"].shape[1] :].tolist()
        return tokens[:-1] if tokens and tokens[-1] in ends else tokens

    def text(self, tokens: list[int]) -> str:
        """Tokens as text, without special tokens."""
        return str(self.processor.tokenizer.decode(tokens, skip_special_tokens=True))
