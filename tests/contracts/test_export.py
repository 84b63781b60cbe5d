"""Rotary encodings captured whole, exported with a dynamic length, and as one node of ONNX."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from posenc import AxialRoPE, Geometric, MRoPE, RoPE, YaRN, contiguous, grid, multimodal

TRACED, USED = 5, 9  # 9 = 3 · 3 tokens, the length that export did not see

ROTARY = {
    "rope": (RoPE(16), lambda n: contiguous(n, 100).positions[None]),
    "rope-interleaved": (RoPE(16, pairing="interleaved"), lambda n: contiguous(n, 100).positions[None]),
    "rope-partial-yarn": (RoPE(16, YaRN(Geometric(), 4.0, 64), rotary_dim=8), lambda n: contiguous(n, 100).positions[None]),
    "mrope": (MRoPE(16, (2, 3, 3)), lambda n: contiguous(n).positions[None, :, None] * torch.tensor([1, 2, 3])),
    "axial": (AxialRoPE(16), lambda n: grid(3, 3).positions[None] if n == USED else grid(1, n).positions[None]),
}


class Rotates(nn.Module):
    def __init__(self, encoding):
        super().__init__()
        self.encoding = encoding

    def forward(self, q, k, positions):
        return self.encoding(q, k, positions)


def inputs_for(positions, tokens):
    generator = torch.Generator().manual_seed(tokens)
    q, k = torch.randn(1, 4, tokens, 16, generator=generator), torch.randn(1, 2, tokens, 16, generator=generator)
    return q, k, positions(tokens)


def dynamic(positions):
    length = torch.export.Dim("length", min=2, max=4096)
    return ({2: length}, {2: length}, {positions(TRACED).ndim - 1 if positions(TRACED).ndim == 2 else 1: length})


@pytest.mark.parametrize("name", ROTARY)
def test_captured_whole_and_exported_for_other_lengths(name):
    encoding, positions = ROTARY[name]
    captured = torch.compile(Rotates(encoding), fullgraph=True, backend="aot_eager", dynamic=True)
    program = torch.export.export(Rotates(encoding), inputs_for(positions, TRACED), dynamic_shapes=dynamic(positions))
    inputs = inputs_for(positions, USED)
    expected = encoding(*inputs)
    for run in (captured, program.module()):
        for one, other in zip(run(*inputs), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["rope", "rope-interleaved", "rope-partial-yarn"])
def test_rope_is_one_onnx_node_per_tensor_and_the_runtime_agrees(name, tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    encoding, positions = ROTARY[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own dependencies warn
        program = torch.onnx.export(
            Rotates(encoding).eval(),
            inputs_for(positions, TRACED),
            dynamo=True,
            opset_version=23,
            dynamic_shapes=dynamic(positions),
            verbose=False,
        )
    operators = [node.op_type for node in program.model.graph]
    assert operators.count("RotaryEmbedding") == 2, "one for q, one for k"
    assert not {"Slice", "Neg", "Concat", "Split"} & set(operators), "nothing of the rotation is left outside"
    program.save(tmp_path / "rope.onnx")
    session = runtime.InferenceSession(tmp_path / "rope.onnx", providers=["CPUExecutionProvider"])
    inputs = inputs_for(positions, USED)
    names = [value.name for value in session.get_inputs()]
    results = session.run(None, {name: value.numpy() for name, value in zip(names, inputs, strict=True)})
    for one, other in zip(results, encoding(*inputs), strict=True):
        torch.testing.assert_close(torch.from_numpy(one), other, rtol=0, atol=1e-6)


def test_multimodal_positions_are_captured_whole_for_other_lengths():
    build = torch.compile(multimodal, fullgraph=True, backend="aot_eager", dynamic=True)
    for blocks in ([(3, 0, 0), (1, 2, 2), (2, 0, 0)], [(1, 3, 3), (4, 0, 0)]):
        grids = torch.tensor([blocks])
        total = sum(t if not h else t * h * w for t, h, w in blocks)
        assert torch.equal(build(grids, total).positions, multimodal(grids, total).positions)
