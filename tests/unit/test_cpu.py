"""The faster ways to compute against torch's own."""

import subprocess
import sys

import pytest
import torch
from epd_backend import cpu, weights
from torch import nn


@pytest.mark.parametrize("rows", [1, 3, 4, 8, 32, 33])
@pytest.mark.parametrize("bias", [True, False])
def test_linear(rows, bias):
    torch.manual_seed(rows)
    layer, x = nn.Linear(48, 80, bias=bias), torch.randn(1, rows, 48)
    with torch.inference_mode():
        expected = layer(x)
        cpu.speed_up(layer)
        torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-6)
        every_other = torch.randn(1, rows, 96)[..., ::2]
        torch.testing.assert_close(layer(every_other), nn.functional.linear(every_other, layer.weight, layer.bias))
    assert type(layer) is cpu.Linear


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bfloat16 on this CPU")
@pytest.mark.parametrize("rows", [1, 5, 64, 300])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_linear(rows, bias):
    torch.manual_seed(rows)
    layer = nn.Linear(48, 80, bias=bias, dtype=torch.bfloat16)
    x = torch.randn(1, rows, 96, dtype=torch.bfloat16)[..., ::2]
    with torch.inference_mode():
        expected = nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
        held = weights.weight_bytes(layer)
        cpu.speed_up(layer)
        torch.testing.assert_close(layer(x).double(), expected, rtol=1e-2, atol=1e-2)
    assert type(layer) is cpu.PackedLinear
    assert weights.weight_bytes(layer) == held


@pytest.mark.parametrize("size", [(2, 14, 14), (4, 28, 28)])
def test_convolution(size):
    """Of single patches, as in Qwen's vision towers, and of whole frames."""
    torch.manual_seed(0)
    layer, x = nn.Conv3d(3, 20, (2, 14, 14), (2, 14, 14)), torch.randn(5, 3, *size)
    with torch.inference_mode():
        expected = layer(x)
        cpu.speed_up(layer)
        torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-6)
    assert type(layer) is cpu.PatchProjection


FAULTS = """
import resource, threading, torch
from epd_backend import cpu
if {keep}:
    cpu.keep_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    [torch.ones(1_500_000 + 100_000 * i) for i in range(24)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
thread = threading.Thread(target=lambda: print(sum([faults() for _ in range(10)][4:])))
thread.start()
thread.join()
"""


def test_kept_memory_costs_no_page_faults():
    """Of the same work again and again, as a worker's thread does it."""

    def faults(keep: bool) -> int:
        command = [sys.executable, "-c", FAULTS.format(keep=keep)]
        return int(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)

    lost, kept = faults(keep=False), faults(keep=True)
    assert kept < lost / 4  # the other threads of the process have faults of their own
