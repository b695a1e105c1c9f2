"""Profiles of models and GPUs that are not here, from their published sizes: a roofline with stated efficiencies.

    python -m epd_scheduler.simulation.roofline deploy/profiles

writes all of them. Compute-bound work runs at a share of the peak bf16 FLOPs, memory-bound work at a share of the
HBM bandwidth; the shares are those of good serving engines, not of this project, which has not run on these GPUs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import yaml

from epd_scheduler.profile import EncodeCost, ForwardCost, MigrateCost, Profile

BYTES = 2  # bf16
BLOCK_SIZE = 16  # tokens of a KV block in a migration
KERNELS_A_LAYER = 12  # of a vision layer
LAUNCH_S = 7e-6  # a kernel


class Efficiency(msgspec.Struct, frozen=True):
    """Shares of the peaks. Sources are in `SOURCES`."""

    language: float = 0.45
    vision: float = 0.40
    memory: float = 0.80
    link: float = 0.75


class Gpu(msgspec.Struct, frozen=True):
    """One device, from its datasheet."""

    name: str
    flops: float  # dense bf16 a second
    memory_bytes_s: float
    link_bytes_s: float  # to another device, one way
    source: str


class Shape(msgspec.Struct, frozen=True):
    """One model, from its published configuration."""

    name: str
    parameters: float  # of the language model, embeddings in and out excepted
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    vision_parameters: float
    vision_layers: int
    vision_hidden: int
    full_attention_layers: int  # of the vision layers; the others attend within small windows
    patches_a_row: int  # patches that become one embedding row
    pixels_a_patch: int
    source: str


GPUS = {
    "a100": Gpu("A100 80 GB SXM", 312e12, 2.039e12, 300e9, "nvidia.com A100 datasheet"),
    "h100": Gpu("H100 80 GB SXM", 989e12, 3.35e12, 450e9, "nvidia.com H100 datasheet"),
    "h200": Gpu("H200 141 GB SXM", 989e12, 4.8e12, 450e9, "nvidia.com H200 datasheet"),
}

_QWEN_VISION = (0.63e9, 32, 1280, 4, 4, 14 * 14)
MODELS = {
    "qwen2.5-vl-7b": Shape(
        "Qwen2.5-VL-7B", 6.53e9, 28, 3584, 28, 4, 128, 152064, *_QWEN_VISION, "config.json of Qwen2.5-VL-7B-Instruct"
    ),
    "qwen2.5-vl-32b": Shape(
        "Qwen2.5-VL-32B", 31.2e9, 64, 5120, 40, 8, 128, 152064, *_QWEN_VISION, "config.json of Qwen2.5-VL-32B-Instruct"
    ),
    "qwen2.5-vl-72b": Shape(
        "Qwen2.5-VL-72B", 70.2e9, 80, 8192, 64, 8, 128, 152064, *_QWEN_VISION, "config.json of Qwen2.5-VL-72B-Instruct"
    ),
    "minicpm-v-2.6": Shape(
        "MiniCPM-V-2.6", 6.53e9, 28, 3584, 28, 4, 128, 151666, 0.40e9, 27, 1152, 27, 16, 14 * 14,
        "config.json of MiniCPM-V-2_6: SigLIP-400M, 1024 patches of a slice to 64 rows; Qwen2-7B",
    ),
    "internvl2-8b": Shape(
        "InternVL2-8B", 6.98e9, 32, 4096, 32, 8, 128, 92553, 0.30e9, 24, 1024, 24, 4, 14 * 14,
        "config.json of InternVL2-8B: InternViT-300M-448px, 1024 patches of a tile to 256 rows; internlm2_5-7b",
    ),
    "internvl2-26b": Shape(
        "InternVL2-26B", 18.7e9, 48, 6144, 48, 8, 128, 92553, 5.54e9, 45, 3200, 45, 4, 14 * 14,
        "config.json of InternVL2-26B: InternViT-6B-448px, 1024 patches of a tile to 256 rows; internlm2-20b",
    ),
}  # fmt: skip

SOURCES = """\
Computed, not measured: scheduler/epd_scheduler/simulation/roofline.py.
Sizes: {model}. Peaks: {gpu}: {flops:.0f} TFLOP/s dense bf16, {memory:.2f} TB/s HBM, {link:.0f} GB/s link.
forward.overhead: 1 ms, an assumption: scheduling, sampling and launching CUDA graphs.
forward.floor, per_context: bytes of weights or KV at {e.memory:.0%} of the HBM bandwidth; 75-85 % is common for large
  contiguous reads.
forward.per_token, per_pair, per_row (logits): 2 FLOPs a parameter, 4 a query-key pair and head dimension, at
  {e.language:.0%} of the peak. RServe (Qwen2.5-VL-72B, four H100) saturates at 10,600-11,100 prompt tokens/s, which is
  38-39 % with pipeline bubbles and attention.
encode.per_row, per_square: the same at {e.vision:.0%} of the peak. aiconfigurator-core 0.12.0 has 35 ms for one
  1920x1080 image of Qwen3-VL-8B on H200, which is 49 %; transformers' encoder, which RServe and EPD run, is below.
encode.overhead: {kernels} kernels a layer of {launch:.0f} us each, an assumption: what a small batch cannot go below.
Image preprocessing: {preprocess:.0f} ns a pixel, before the encoder and in its instance, as in this project and in
  transformers. JPEG decoding, resizing, normalising and cutting into patches took 77-105 ns a pixel on one core of a
  shared 2-core x86 host (Pillow 13, numpy); servers have faster and idle cores: an assumption of less than half.
migrate: KV bytes at {e.link:.0%} of the link, 0.2 ms a plan, an assumption.
"""


def make_profile(
    model: Shape, gpu: Gpu, efficiency: Efficiency | None = None, *, ways: int = 1, preprocess_s_pixel: float = 40e-9
) -> Profile:
    """Costs of a model on a GPU, or on `ways` of them in tensor parallel; pipeline stages share them out evenly.

    `preprocess_s_pixel` is the time for a pixel of what the encoder sees, before its computation.
    """
    e = efficiency or Efficiency()
    compute = gpu.flops * e.language * ways
    memory = gpu.memory_bytes_s * e.memory * ways
    kv_bytes = 2 * model.layers * model.kv_heads * model.head_dim * BYTES
    # Two all-reduces a layer and way of a ring, each of a token's hidden state.
    reduce_token = 4 * model.layers * model.hidden * BYTES * (ways - 1) / ways / (gpu.link_bytes_s * e.link)
    reduce_start = 2 * model.layers * 10e-6 if ways > 1 else 0.0  # 10 us: a small all-reduce over NVLink
    forward = ForwardCost(
        overhead=1e-3 + reduce_start,
        floor=model.parameters * BYTES / memory,
        per_token=2 * model.parameters / compute + reduce_token,
        per_pair=4 * model.layers * model.heads * model.head_dim / compute,
        per_row=2 * model.vocabulary * model.hidden / compute,
        per_context=kv_bytes / memory,
    )
    vision = gpu.flops * e.vision
    patches = model.patches_a_row
    encode = EncodeCost(
        overhead=model.vision_layers * KERNELS_A_LAYER * LAUNCH_S,
        per_row=patches * (2 * model.vision_parameters / vision + preprocess_s_pixel * model.pixels_a_patch),
        per_square=patches**2 * 4 * model.full_attention_layers * model.vision_hidden / vision,
    )
    source = SOURCES.format(
        model=model.source,
        gpu=gpu.source,
        flops=gpu.flops / 1e12,
        memory=gpu.memory_bytes_s / 1e12,
        link=gpu.link_bytes_s / 1e9,
        e=e,
        kernels=KERNELS_A_LAYER,
        launch=LAUNCH_S * 1e6,
        preprocess=preprocess_s_pixel * 1e9,
    )
    if ways > 1:
        source += (
            f"Tensor parallel over {ways}: two ring all-reduces a layer at the link's share, 10 us each to start.\n"
        )
    return Profile(
        model=model.name,
        device=gpu.name if ways == 1 else f"{ways} x {gpu.name}",
        encode=encode,
        forward=forward,
        kv_bytes_token=kv_bytes,
        embedding_bytes_row=model.hidden * BYTES,
        migrate=MigrateCost(0.2e-3, BLOCK_SIZE * kv_bytes / (gpu.link_bytes_s * e.link)),
        source=source,
    )


def main(directory: str) -> None:
    """Write a profile of every model on every GPU, and of the large one over four."""
    Path(directory).mkdir(parents=True, exist_ok=True)
    for gpu_name, gpu in GPUS.items():
        for model_name, model in MODELS.items():
            _save(make_profile(model, gpu), Path(directory) / f"{model_name}-{gpu_name}.yaml")
        big = make_profile(MODELS["qwen2.5-vl-72b"], gpu, ways=4)
        _save(big, Path(directory) / f"qwen2.5-vl-72b-4x{gpu_name}.yaml")


def _save(profile: Profile, path: Path) -> None:
    """As `save_profile`, but with the sources on top, in lines that can be read."""
    lines = "".join(f"  {line}\n" for line in profile.source.splitlines())
    numbers = yaml.safe_dump(msgspec.to_builtins(msgspec.structs.replace(profile, source="")), sort_keys=False)
    path.write_text(f"source: |\n{lines}" + numbers.replace("source: ''\n", ""))


if __name__ == "__main__":
    main(sys.argv[1])
