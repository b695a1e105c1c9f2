"""The server's configuration: one YAML file, typed, unknown keys refused with the nearest name."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml


class ConfigError(ValueError):
    """The configuration file cannot be used; the message names the key and the remedy."""


Count = Annotated[int, msgspec.Meta(ge=1)]
AtLeastZero = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
AboveZero = Annotated[float, msgspec.Meta(gt=0)]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the file's sections."""


class KVConfig(Section, frozen=True):
    """The paged KV cache of a language instance's device."""

    block_size: Count = 16  # tokens a block
    blocks: Count = 1024  # blocks in each device's arena


class EmbeddingConfig(Section, frozen=True):
    """The paged embedding (MM) cache of a prefill instance's device."""

    block_size: Count = 16  # embedding rows a block
    blocks: Count = 512  # blocks in each device's arena


class SLOConfig(Section, frozen=True):
    """Time to first token that a request should have: `max(floor, scale x its estimated time alone)` seconds.

    A client may state its own. Without a profile there is no estimate, and the SLO is `floor`.
    """

    floor: AtLeastZero = 1.0
    scale: AtLeastZero = 5.0


class RPSConfig(Section, frozen=True):
    """Order `rps`: sand before pebbles before rocks, with aging."""

    classifier: Literal["impact", "modality"] = "impact"  # trained clusters of the profile, or the number of images
    pebble_delay: AtLeastZero | None = None  # seconds: a pebble outranks sand that came so much later; None: derived
    rock_delay: AtLeastZero | None = None
    share: Share = 0.1  # of the prompt tokens, due to waiting pebbles and to waiting rocks whatever their rank


class SchedulerConfig(Section, frozen=True):
    """What the core decides by."""

    order: Literal["fcfs", "edf", "rps"] = "fcfs"
    overlap: Literal["none", "intra", "full"] = "full"
    encode_tokens: Count = 256  # C of RServe's Algorithm 1: least tokens of an encoder batch
    token_budget: Count = 512  # B of RServe's Algorithm 2: most tokens of one forward
    max_rows: Count = 64  # most sequences of one forward
    async_scheduling: bool = True  # a worker gets its next plan while it computes one, else when it has nothing to do
    profile: str = ""  # costs and classes, made by `epd profile`; relative to the repository root
    client_priority: bool = True  # a client may state its own class ("priority") and deadline ("slo")
    slo: SLOConfig = SLOConfig()
    rps: RPSConfig = RPSConfig()

    def window(self, stages: int) -> int:
        """Most plans in flight on an instance: one a pipeline stage, and one more with `async_scheduling`."""
        return stages + self.async_scheduling


class LimitsConfig(Section, frozen=True):
    """What is refused at admission."""

    context: Count = 4096  # most tokens of a sequence, prompt and output
    output_tokens: Count = 2048  # most output tokens of a request
    images: Annotated[int, msgspec.Meta(ge=0)] = 32  # most images of a request
    image_bytes: Count = 32 * 1024 * 1024  # largest encoded image
    pixels: Count = 64_000_000  # largest image, width x height, checked before it is decoded
    requests: Count = 1024  # most requests at once; more are refused
    stall_seconds: AboveZero = 300.0  # a worker instance that makes no progress for so long counts as lost


class Config(Section, frozen=True):
    """The whole file."""

    model: str = "models/digits-vl"  # checkpoint directory, relative to the repository root
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    kv: KVConfig = KVConfig()
    embedding: EmbeddingConfig = EmbeddingConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    limits: LimitsConfig = LimitsConfig()


def config_path(model_directory: str) -> Path:
    """`$EPD_CONFIG`, else `deploy/epd.yaml` beside the model repository, which may be reached through symlinks.

    `model_directory` is the model's own directory in the repository. Raises ConfigError where there is none.
    """
    if chosen := os.environ.get("EPD_CONFIG"):
        return Path(chosen)
    directory = Path(model_directory)
    code = (directory / "1").resolve().parent  # `epd configure` links the code of another repository
    models = (directory.absolute(), directory.resolve(), code)
    beside = [path.parent.parent / "deploy" / "epd.yaml" for path in models]
    for path in beside:
        if path.exists():
            return path
    raise ConfigError(f"no configuration at {beside[0]}; set EPD_CONFIG to the path of the file")


def load(path: str | Path) -> Config:
    """Read the configuration; `EPD_MODEL` overrides `model`, and `model` becomes an absolute path.

    A relative `model` is looked up from the directory above the file's own (`deploy/epd.yaml` -> the repository).
    Raises ConfigError.
    """
    path = Path(path).resolve()
    try:
        raw = yaml.safe_load(path.read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if (model := os.environ.get("EPD_MODEL")) and isinstance(raw, dict):
        raw["model"] = model
    config = parse(raw, str(path))
    home = path.parent.parent
    root = Path.cwd() if os.environ.get("EPD_MODEL") else home
    profile = config.scheduler.profile and str((home / config.scheduler.profile).resolve())
    scheduler = msgspec.structs.replace(config.scheduler, profile=profile)
    return msgspec.structs.replace(config, model=str((root / config.model).resolve()), scheduler=scheduler)


def parse(raw: Any, source: str = "configuration") -> Config:
    """Check plain data against `Config`. Raises ConfigError."""
    _refuse_unknown_keys(raw, Config, source)
    try:
        return msgspec.convert(raw, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {error}") from error


def _refuse_unknown_keys(raw: Any, kind: type[Section], where: str) -> None:
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}: expected a mapping, got {type(raw).__name__}")
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    for key, value in raw.items():
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else f"; known keys: {', '.join(fields)}"
            raise ConfigError(f"{where}: unknown key '{key}'{hint}")
        section = fields[key].type
        if isinstance(section, type) and issubclass(section, Section):
            _refuse_unknown_keys(value, section, f"{where}: {key}")
