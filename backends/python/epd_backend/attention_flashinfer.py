"""flashinfer's paged kernels behind `attention.attend`: one launch a layer instead of one a row.

Used on a GPU in half precision where the flashinfer package is installed; `tests/gpu` compares it with the SDPA path.
"""

from __future__ import annotations

import importlib
import importlib.util
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from epd_backend.attention import Ragged

_WORKSPACE_BYTES = 128 * 2**20  # what flashinfer's documentation recommends
_HEAD_DIMS = (64, 128, 256)  # compiled kernels


def usable(arena: torch.Tensor) -> bool:
    """Whether the kernels can read a KV arena `[blocks, layers, 2, block_size, kv_heads, head_dim]`."""
    return (
        arena.is_cuda
        and arena.dtype in (torch.float16, torch.bfloat16)
        and arena.shape[-1] in _HEAD_DIMS
        and importlib.util.find_spec("flashinfer") is not None
    )


class FlashInfer:
    """The kernels over one stage's KV arena."""

    def __init__(self, arena: torch.Tensor) -> None:
        flashinfer: Any = importlib.import_module("flashinfer")
        self._arena = arena
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=arena.device)
        self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        self._planned: Ragged | None = None

    def attend(self, query: torch.Tensor, ragged: Ragged, layer: int, scaling: float | None) -> torch.Tensor:
        """Attention of `query [tokens, heads, dim]` over layer `layer` of the arena, which has its keys and values."""
        if self._planned is not ragged:  # once a forward
            self._plan(query, ragged, scaling)
            self._planned = ragged
        out: torch.Tensor = self._wrapper.run(query.contiguous(), self._arena[:, layer])
        return out

    def _plan(self, query: torch.Tensor, ragged: Ragged, scaling: float | None) -> None:
        block_size, kv_heads, dim = self._arena.shape[3:]

        def int32(values: Any) -> torch.Tensor:
            return torch.as_tensor(values, dtype=torch.int32).to(query.device)

        self._wrapper.plan(
            int32(list(accumulate(ragged.lengths, initial=0))),
            int32(list(accumulate((len(table) for table in ragged.tables), initial=0))),
            int32(list(chain.from_iterable(ragged.tables))),
            int32([(context - 1) % block_size + 1 for context in ragged.contexts]),
            query.shape[1],
            kv_heads,
            dim,
            block_size,
            causal=True,
            sm_scale=scaling,
            q_data_type=query.dtype,
            kv_data_type=self._arena.dtype,
        )
