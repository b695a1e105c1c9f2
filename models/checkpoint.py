"""Writing complete checkpoint directories: what a released checkpoint has, made without a network.

Shared by the training of digits-vl, the benchmark checkpoint and the tests' tiny checkpoints. Works without
torchvision: the processor files are written one by one, because transformers' `ProcessorMixin.save_pretrained`
insists on a video processor, whose class needs torchvision.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel
from transformers import GenerationConfig, PreTrainedModel, Qwen2Tokenizer

QWEN_SPECIALS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|im_start|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

_TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}\
{% for part in message['content'] %}\
{% if part['type'] == 'image' or 'image' in part or 'image_url' in part %}IMAGE\
{% elif 'text' in part %}{{ part['text'] }}{% endif %}\
{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def chat_template(image: str = "<|vision_start|><|image_pad|><|vision_end|>") -> str:
    """Qwen's chat markup without a system prompt; `image` stands for each image."""
    return _TEMPLATE.replace("IMAGE", image)


def tokenizer(
    specials: Sequence[str] = QWEN_SPECIALS,
    vocab: Mapping[str, int] | None = None,
    merges: Sequence[tuple[str, str]] = (),
    names: Mapping[str, str] | None = None,
) -> Qwen2Tokenizer:
    """A byte-level tokenizer; without `vocab`, of the 256 bytes alone, so that any text is one token a byte.

    The specials follow the vocabulary, and the first two end and pad a sequence. `names` are the attributes under
    which a processor looks for some of them.
    """
    made = Qwen2Tokenizer(
        vocab=dict(vocab) if vocab else {symbol: i for i, symbol in enumerate(sorted(ByteLevel.alphabet()))},
        merges=list(merges),
        unk_token=None,
        eos_token=specials[0],
        pad_token=specials[1],
        model_max_length=32768,
        **({"extra_special_tokens": dict(names)} if names else {}),
    )
    made.add_special_tokens({"additional_special_tokens": list(specials[2:])})
    return made


def qwen_token_ids(tokenizer: Qwen2Tokenizer) -> dict[str, Any]:
    """The token ids that the configuration of a Qwen2-VL or Qwen2.5-VL model names."""
    tokens = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    return {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>") for name, token in tokens.items()}


def save(
    path: str | Path,
    model: PreTrainedModel,
    tokenizer: Qwen2Tokenizer,
    image_processor: Any,
    template: str,
    processor: Mapping[str, Any],
) -> None:
    """Write weights, configuration, tokenizer, chat template and processor files.

    `processor` is the content of processor_config.json and names at least `processor_class`.
    """
    path = Path(path)
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    model.generation_config = GenerationConfig(eos_token_id=[eos, pad], pad_token_id=pad, do_sample=False)
    model.save_pretrained(path)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    image_processor.save_pretrained(path)
    file = path / "preprocessor_config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"processor_class": processor["processor_class"]}, indent=2)
    )
    (path / "processor_config.json").write_text(json.dumps(processor, indent=2))
