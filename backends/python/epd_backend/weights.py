"""Loading one half of a checkpoint: the vision side or the language side, never the other's weights.

transformers' own model class is subclassed and the unused half deleted in `__init__`. `from_pretrained` builds the
modules on the meta device and reads the keys that match, so what was deleted is never read from disk.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a checkpoint is a directory; nothing is fetched

import torch
import transformers
from torch import nn
from transformers.distributed import pipeline_parallel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from epd_backend import cpu, cpu_vision
from epd_backend.families import Family, of

transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]

Elsewhere: Any = pipeline_parallel.PipelineIdentityLayer  # in the place of a module that another stage holds
Part = Literal["vision", "language"]


def load_part(
    path: str | Path,
    part: Part,
    dtype: torch.dtype,
    device: torch.device,
    layers: tuple[int, int] | None = None,
) -> nn.Module:
    """Load a checkpoint's vision side or language side.

    `layers = (first, end)` keeps decoder layers `first ..< end` alone, the token embedding with the first of them and
    the final norm and head with the last; layers keep their index. On a GPU weights are copied there; on a CPU those in
    `dtype` already stay mapped from the file and are shared between the processes that load it, but for linear
    layers, which `cpu.PackedLinear` copies.
    """
    config = transformers.AutoConfig.from_pretrained(path)
    family = of(config.to_dict())
    base = getattr(transformers, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[config.model_type])

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        base.__init__(self, config, *args, **kwargs)
        if part == "vision":
            delattr(self.model, family.language)
            self.lm_head = None
        else:
            for name in family.vision:
                bare = isinstance(getattr(self.model, name), nn.Parameter)
                delattr(self.model, name)
                if bare:  # the model's own initialisation still names it
                    setattr(self.model, name, torch.empty(0))
            if layers is not None:
                _keep_layers(self, family, *layers)
        if not isinstance(self.lm_head, nn.Linear):
            self.all_tied_weights_keys = {}  # there is no head to tie to the token embedding

    # Same name and module: transformers finds the renaming of released checkpoints' keys by them.
    members = {
        "__init__": __init__,
        "__module__": base.__module__,
        "_keys_to_ignore_on_load_unexpected": [r".*"],
    }
    half: Any = type(base.__name__, (base,), members)
    model: nn.Module = half.from_pretrained(path, config=config, dtype=dtype)
    if device.type == "cpu":
        cpu.speed_up(model)
        if part == "vision":
            cpu_vision.speed_up(getattr(model.model, family.vision[0]))
    return model.eval().to(device)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the parameters and buffers that a model holds; tied ones count once."""
    tensors = {t.data_ptr(): t for t in (*model.parameters(), *model.buffers())}
    packed = {module.packed for module in model.modules() if isinstance(module, cpu.PackedLinear)}
    held = [*tensors.values(), *(each.weight for each in packed), *(p.bias for p in packed if p.bias is not None)]
    return sum(t.numel() * t.element_size() for t in held)


def _keep_layers(model: Any, family: Family, first: int, end: int) -> None:
    """Drop the decoder layers outside `first ..< end` and what belongs to them."""
    text = getattr(model.model, family.language)
    count = len(text.layers)
    for index in range(count):
        if not first <= index < end:
            text.layers[index] = Elsewhere()
    last = end == count
    if first > 0 and not (last and model.config.tie_word_embeddings):
        text.embed_tokens = Elsewhere()
    if not last:
        text.norm = Elsewhere()
        model.lm_head = Elsewhere()
