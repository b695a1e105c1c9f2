"""The faster ways to compute against torch's own."""

import subprocess
import sys
import weakref

import pytest
import torch
from epd_backend import cpu, weights
from torch import nn

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN here")
HAS_BFLOAT16 = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


@needs_onednn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 8, 32, 33, 64, 300])
@pytest.mark.parametrize("bias", [True, False])
def test_linear(dtype, rows, bias):
    if dtype == torch.bfloat16 and not HAS_BFLOAT16:
        pytest.skip("oneDNN has no bfloat16 on this CPU")
    torch.manual_seed(rows)
    layer = nn.Linear(48, 80, bias=bias, dtype=dtype)
    contiguous, every_other = torch.randn(1, rows, 48, dtype=dtype), torch.randn(1, rows, 96, dtype=dtype)[..., ::2]
    rtol, atol = (1e-5, 1e-6) if dtype == torch.float32 else (1e-2, 1e-2)
    with torch.inference_mode():
        expected = [
            nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
            for x in (contiguous, every_other)
        ]
        held = weights.weight_bytes(layer)
        cpu.speed_up(layer)
        for x, product in zip((contiguous, every_other), expected, strict=True):
            torch.testing.assert_close(layer(x).double(), product, rtol=rtol, atol=atol)
    assert type(layer) is cpu.PackedLinear
    assert weights.weight_bytes(layer) == held


@needs_onednn
def test_packed_weights_take_the_place_of_the_others():
    block = nn.ModuleDict({name: nn.Linear(48, 64) for name in ("gate_proj", "up_proj", "down_proj")})
    before = [weakref.ref(parameter) for parameter in block.parameters()]
    cpu.speed_up(block)
    assert [parameter() for parameter in before] == [None] * 6


@needs_onednn
@pytest.mark.parametrize("rows", [1, 33])
def test_a_tied_head_keeps_its_weights(rows):
    torch.manual_seed(rows)
    model = nn.ModuleDict({"embedding": nn.Embedding(80, 48), "head": nn.Linear(48, 80, bias=False)})
    model["head"].weight = model["embedding"].weight
    x = torch.randn(1, rows, 48)
    with torch.inference_mode():
        expected = nn.functional.linear(x, model["embedding"].weight)
        cpu.speed_up(model)
        torch.testing.assert_close(model["head"](x), expected, rtol=1e-5, atol=1e-6)
    assert type(model["head"]) is cpu.Linear
    assert model["head"].weight is model["embedding"].weight


@needs_onednn
@pytest.mark.parametrize(("biases", "products_each"), [((True,) * 3, 1), ((False,) * 3, 1), ((True, False, True), 3)])
def test_layers_that_read_the_same_input_compute_together(biases, products_each, monkeypatch):
    torch.manual_seed(0)
    shapes = zip(("q_proj", "k_proj", "v_proj"), (64, 16, 32), biases, strict=True)
    block = nn.ModuleDict({name: nn.Linear(48, size, bias=bias) for name, size, bias in shapes})
    inputs = [torch.randn(1, 3, 48) for _ in range(4)]
    with torch.inference_mode():
        expected = [[layer(x) for layer in block.values()] for x in inputs]
        held = weights.weight_bytes(block)
        cpu.speed_up(block)
        assert weights.weight_bytes(block) == held
        products = []
        product = cpu.product
        monkeypatch.setattr(cpu, "product", lambda *args: products.append(args) or product(*args))
        results = [[layer(x) for layer in block.values()] for x in inputs]
        assert len(products) == products_each * len(inputs)
        torch.testing.assert_close(results, expected, rtol=1e-5, atol=1e-6)
        # Called in whatever order, with whatever tensors, each is a layer of its own.
        calls = [(2, 0), (0, 1), (1, 0), (1, 1), (0, 0), (2, 2), (2, 2), (0, 3)]
        layers = list(block.values())
        results = [layers[index](inputs[at]) for index, at in calls]
        torch.testing.assert_close(results, [expected[at][index] for index, at in calls], rtol=1e-5, atol=1e-6)


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
    lost, kept = (
        int(subprocess.run([sys.executable, "-c", FAULTS.format(keep=keep)], capture_output=True, check=True).stdout)
        for keep in (False, True)
    )
    assert kept < lost / 4  # the other threads of the process have faults of their own
