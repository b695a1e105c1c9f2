"""What intake needs of a checkpoint directory; reads no weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epd_backend import families
from epd_backend.families import Family
from tokenizers import Tokenizer

from epd_orchestrator.template import ChatTemplate


class CheckpointError(ValueError):
    """The directory is not a checkpoint that can be served; the message names the file and the remedy."""


@dataclass(frozen=True)
class Checkpoint:
    """Tokenizer, templates and settings of a checkpoint."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    family: Family
    config: dict[str, Any]  # config.json
    preprocessor: dict[str, Any]  # `families.read_preprocessor`
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    context: int  # most tokens of a sequence that the model has positions for

    @classmethod
    def load(cls, path: str | Path) -> Checkpoint:
        """Read a checkpoint directory. Raises CheckpointError and families.UnsupportedModelError."""
        path = Path(path)
        config = _read(path / "config.json")
        tokenizer_config = _read(path / "tokenizer_config.json", {})
        special_tokens = _special_tokens(tokenizer_config)
        template = _chat_template_source(path, tokenizer_config)
        text_config = {**config, **config.get("text_config", {})}
        _require(path / "tokenizer.json")
        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return cls(
            tokenizer=tokenizer,
            chat_template=ChatTemplate(template, special_tokens) if template else None,
            family=families.of(config),
            config=config,
            preprocessor=families.read_preprocessor(path),
            eos_token_ids=_eos_token_ids(path, text_config, tokenizer.token_to_id(special_tokens.get("eos_token", ""))),
            vocab_size=text_config["vocab_size"],
            context=text_config["max_position_embeddings"],
        )


def _require(path: Path) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; 'model' must name a checkpoint directory as released")


def _read(path: Path, default: dict[str, Any] | None = None) -> dict[str, Any]:
    if default is not None and not path.is_file():
        return default
    _require(path)
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}; copy it from the released checkpoint") from error
    return dict(value)


def _special_tokens(tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, ... as a template may name them."""
    tokens = {key: value for key, value in tokenizer_config.items() if key.endswith("_token") and value}
    named = {key: value["content"] if isinstance(value, dict) else value for key, value in tokens.items()}
    return {key: value for key, value in named.items() if isinstance(value, str)}


def _chat_template_source(path: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """Where transformers looks, in its order; of several named templates the one called "default"."""
    if (path / "chat_template.jinja").is_file():
        return (path / "chat_template.jinja").read_text()
    template = _read(path / "chat_template.json", tokenizer_config).get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _eos_token_ids(path: Path, config: dict[str, Any], tokenizer_eos: int | None) -> tuple[int, ...]:
    """What ends generation: generation_config.json decides, as in transformers; then config.json, the tokenizer."""
    for eos in (_read(path / "generation_config.json", {}).get("eos_token_id"), config.get("eos_token_id")):
        if eos is not None:
            return tuple(eos) if isinstance(eos, list) else (eos,)
    return () if tokenizer_eos is None else (tokenizer_eos,)
