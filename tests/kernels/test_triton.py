"""The Triton kernel: under Triton's interpreter on the CPU, compiled for GPUs that are not here, and on one that is (`cuda`).

Triton decides while it is imported whether it interprets. So one test below runs this file again in a process of its own
where it does, and the cases run there.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import gpu
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from posenc import (
    BackendRefused,
    Geometric,
    MRoPE,
    RotaryTable,
    ShapeError,
    apply_rotary,
    axis_of_pair,
    explain,
    packed,
    rotary_table,
)
from posenc.core import rotary_backends

pytest.importorskip("triton", reason="triton is not installed")

ROOT = Path(__file__).parents[2]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PAIRINGS = ("half", "interleaved")
F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
DTYPES = (F32, F64, BF16, F16)


def in_a_new_process(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def table_of(*shape: int, dtype: torch.dtype = F32, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Any numbers: the arithmetic does not know that they are cosines."""
    return torch.randn(shape, dtype=dtype, device=device), torch.randn(shape, dtype=dtype, device=device)


class Cases:
    """What holds on any device."""

    device: str

    @pytest.fixture(autouse=True)
    def kernel(self):
        from posenc.kernels import triton_rotary

        self.kernel = triton_rotary

    def rotate(self, *arguments, **settings):
        return self.kernel.rotate(*arguments, **settings)

    def tensor(self, *shape: int, dtype: torch.dtype = F32) -> Tensor:
        return torch.randn(shape, device=self.device).to(dtype)

    def table(self, *shape: int, dtype: torch.dtype = F32) -> tuple[Tensor, Tensor]:
        return table_of(*shape, dtype=dtype, device=self.device)

    def expected(
        self, x: Tensor, table: tuple[Tensor, Tensor], pairing: str, first: int = 0, head_axis: int | None = -3
    ) -> Tensor:
        """The reference. Triton's interpreter cuts float32 off to bfloat16 where a GPU rounds."""
        settings = {"pairing": pairing, "start": first, "head_axis": head_axis, "backend": "reference"}
        if x.dtype == BF16 and self.device == "cpu":
            wide = apply_rotary(x.float(), RotaryTable(*table), **settings)
            return (wide.view(torch.int32) & -65536).view(F32).to(BF16)
        return apply_rotary(x, RotaryTable(*table), **settings)

    # --- values ---------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("pairing", PAIRINGS)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_two_tensors_in_one_launch_have_the_bits_of_the_reference(self, dtype, pairing):
        # 5 pairs from channel 6 of 24: no power of two, channels before and after; one head of keys, tables of their own
        q, k = self.tensor(2, 3, 19, 24, dtype=dtype), self.tensor(2, 1, 4, 24, dtype=dtype)
        wide = self.kernel.WIDE[dtype]
        tables = [self.table(2, 19, 5, dtype=wide), self.table(4, 5, dtype=wide)]
        for x, table, turned in zip((q, k), tables, self.rotate((q, k), tables, pairing=pairing, first=6), strict=True):
            assert turned.dtype == dtype
            assert torch.equal(turned, self.expected(x, table, pairing, 6))

    @pytest.mark.parametrize("pairing", PAIRINGS)
    def test_float32_is_within_two_roundings_of_the_truth(self, pairing, monkeypatch):
        monkeypatch.setattr(self.kernel, "_TILE", 64)  # five tiles
        # one rounding of each product and one of the sum, 2⁻²⁴ each; to first order, hence the hair more
        x, (cos, sin) = self.tensor(1, 2, 40, 16), self.table(40, 8)
        (turned,) = self.rotate((x,), [(cos, sin)], pairing=pairing)
        channels = torch.arange(16).reshape(2, 8) if pairing == "half" else torch.arange(16).reshape(8, 2).T
        a, b = (x[..., part].double() for part in channels)
        c, s = cos.double(), sin.double()
        for part, truth, size in (
            (channels[0], a * c - b * s, (a * c).abs() + (b * s).abs()),
            (channels[1], b * c + a * s, (b * c).abs() + (a * s).abs()),
        ):
            assert bool(((turned[..., part].double() - truth).abs() <= size * 2**-23 * (1 + 2**-20)).all())

    @pytest.mark.parametrize("first", [0, 6, 16])
    def test_other_channels_are_copied_bit_for_bit(self, first):
        x = torch.randint(-(2**31), 2**31, (1, 2, 5, 22), device=self.device).to(torch.int32).view(F32)  # NaNs of every kind
        (turned,) = self.rotate((x,), [self.table(5, 3)], pairing="half", first=first)
        others = [channel for channel in range(22) if channel not in range(first, first + 6)]
        assert torch.equal(turned[..., others].view(torch.int32), x[..., others].view(torch.int32))

    # --- layouts --------------------------------------------------------------------------------------------------------

    def layouts(self) -> dict[str, tuple[Tensor, tuple[Tensor, Tensor], int | None]]:
        by_token = self.tensor(2, 5, 3, 8)
        return {
            "transposed": (by_token.transpose(1, 2), self.table(2, 5, 4), -3),
            "heads after the sequence": (by_token, self.table(2, 5, 4), -2),
            "one token": (self.tensor(1, 6, 1, 8), self.table(1, 4), -3),
            "one token of each row": (self.tensor(3, 2, 1, 8), self.table(3, 1, 4), -3),
            "a table for each head": (self.tensor(2, 3, 5, 8), self.table(2, 3, 5, 4), None),
            "a table without heads": (self.tensor(2, 5, 8), self.table(5, 4), None),
            "no head": (self.tensor(5, 8), self.table(5, 4), None),
            "every other channel": (self.tensor(2, 3, 5, 16)[..., ::2], self.table(5, 4), -3),
            "a slice": (self.tensor(2, 9, 5, 20)[:, 1:7:2, :, 5:13], self.table(5, 4), -3),
            "expanded": (self.tensor(1, 1, 5, 8).expand(2, 3, 5, 8), self.table(5, 4), -3),
            "backwards in memory": (self.tensor(8, 5, 3, 2).permute(3, 2, 1, 0), self.table(2, 5, 4), -3),
            "two axes of batch": (self.tensor(2, 2, 3, 5, 8), self.table(2, 1, 5, 4), -3),
            "tables for all axes": (self.tensor(2, 2, 3, 2, 8), self.table(2, 2, 3, 2, 4), None),
            "a table of strides": (self.tensor(2, 3, 5, 8), tuple(t.mT for t in self.table(4, 5)), -3),
            "nobody": (self.tensor(2, 3, 0, 8), self.table(0, 4), -3),
        }

    @pytest.mark.parametrize(("pairing", "walked"), [("half", 4), ("interleaved", 1)])
    def test_any_layout(self, pairing, walked, monkeypatch):
        monkeypatch.setattr(self.kernel, "_MANY", 1 if walked == 4 else 2**40)  # tiles from which a program takes four heads
        for name, (x, table, head_axis) in self.layouts().items():
            (turned,) = self.rotate((x,), [table], pairing=pairing, head_axis=head_axis)
            assert torch.equal(turned, self.expected(x, table, pairing, head_axis=head_axis)), name
            if x.stride(-1) == 1:
                assert turned.stride() == torch.empty_like(x).stride(), name

    def test_two_tensors_of_five_axes(self):
        q, k = self.tensor(2, 2, 3, 3, 8), self.tensor(2, 2, 3, 2, 8)
        tables = [self.table(*x.shape[:-1], 4) for x in (q, k)]
        for x, table, turned in zip((q, k), tables, self.rotate((q, k), tables, pairing="half", head_axis=None), strict=True):
            assert torch.equal(turned, self.expected(x, table, "half", head_axis=None))

    @settings(max_examples=8)
    @given(data=st.data())
    def test_anything(self, data):
        draw = data.draw
        batch, seq, pairs = draw(st.integers(1, 2)), draw(st.integers(1, 33)), draw(st.integers(1, 9))
        first, after, heads = (
            draw(st.integers(0, 3)),
            draw(st.integers(0, 3)),
            draw(st.tuples(st.integers(1, 5), st.integers(1, 2))),
        )
        pairing, head_axis = draw(st.sampled_from(PAIRINGS)), draw(st.sampled_from([-3, -2]))
        dtype, tile, many = draw(st.sampled_from(DTYPES)), draw(st.sampled_from([32, 1024])), draw(st.sampled_from([1, 2**40]))
        xs = [self.tensor(batch, seq, n, first + 2 * pairs + after, dtype=dtype) for n in heads]
        if head_axis == -3:
            xs = [x.transpose(1, 2) if draw(st.booleans()) else x.transpose(1, 2).contiguous() for x in xs]
        own = [batch, seq] if draw(st.booleans()) else [seq]
        table = self.table(*own, pairs, dtype=self.kernel.WIDE[dtype])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.kernel, "_TILE", tile)
            patch.setattr(self.kernel, "_MANY", many)
            turned = self.rotate(xs, [table, table], pairing=pairing, first=first, head_axis=head_axis)
        for x, each in zip(xs, turned, strict=True):
            assert torch.equal(each, self.expected(x, table, pairing, first, head_axis))

    # --- in place -------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("pairing", PAIRINGS)
    def test_in_place_and_into_others(self, pairing):
        x, table = self.tensor(2, 19, 3, 12).transpose(1, 2), self.table(19, 5)
        expected, version = self.expected(x, table, pairing, 1), x._version
        other = torch.full((2, 3, 19, 12), torch.nan, device=self.device)
        assert self.rotate((x,), [table], pairing=pairing, first=1, outs=[other])[0] is other
        assert torch.equal(other, expected)
        assert self.rotate((x,), [table], pairing=pairing, first=1, outs=[x])[0] is x
        assert torch.equal(x, expected)
        assert x._version > version

    # --- gradients ------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("pairing", PAIRINGS)
    def test_gradients_are_the_transposed_rotation(self, pairing):
        table = self.table(2, 5, 3)
        grads = self.tensor(2, 3, 5, 8), self.tensor(2, 1, 5, 8)
        xs = [self.tensor(*grad.shape).requires_grad_() for grad in grads]
        found = torch.autograd.grad(self.rotate(xs, [table, table], pairing=pairing, first=1), xs, grads)
        for grad, back in zip(grads, found, strict=True):
            assert torch.equal(back, self.expected(grad, (table[0], -table[1]), pairing, 1))

    def test_gradients_of_one_of_two(self):
        q, k, table = self.tensor(1, 2, 3, 4).requires_grad_(), self.tensor(1, 1, 3, 4), self.table(3, 2)
        self.rotate((q, k), [table, table], pairing="half")[0].sum().backward()
        assert torch.equal(q.grad, self.expected(torch.ones_like(q), (table[0], -table[1]), "half"))
        assert k.grad is None
        assert not self.rotate((k,), [table], pairing="half")[0].requires_grad

    def test_finite_differences_agree(self):
        x, table = self.tensor(1, 2, 2, 4, dtype=F64).requires_grad_(), self.table(2, 2, dtype=F64)
        assert torch.autograd.gradcheck(lambda x: self.rotate((x,), [table], pairing="half")[0], x, fast_mode=True)

    def test_operators_are_what_they_say(self):
        xs, tables = [self.tensor(1, 2, 3, 4), self.tensor(1, 1, 4, 3).mT], [*self.table(3, 2), *self.table(4, 2)]
        tables[2:] = (part[:3] for part in tables[2:])
        rest = None, None, None, True, 0, -3, False
        outs = [torch.empty_like(xs[0]), self.tensor(1, 1, 3, 4)]
        torch.library.opcheck(torch.ops.posenc.triton_rotary_out, (xs, tables, *rest, outs), test_utils="test_schema")
        needing = [x.requires_grad_() for x in xs]
        how = "test_faketensor", "test_autograd_registration"
        torch.library.opcheck(torch.ops.posenc.triton_rotary, (needing, tables, *rest), test_utils=how)

    # --- rows of a table ------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    @pytest.mark.parametrize("pairing", PAIRINGS)
    def test_rows_by_position(self, pairing, dtype):
        q, k, (cos, sin) = self.tensor(2, 3, 19, 12), self.tensor(2, 1, 19, 12), self.table(30, 5)
        positions = torch.randint(0, 30, (2, 19), device=self.device)
        turned = self.kernel.rotate_gathered((q, k), (cos, sin), positions.to(dtype), pairing=pairing, first=2)
        for x, each in zip((q, k), turned, strict=True):
            assert torch.equal(each, self.expected(x, (cos[positions], sin[positions]), pairing, 2))

    def test_positions_without_a_batch_and_heads_last(self):
        x, (cos, sin) = self.tensor(2, 5, 3, 8), self.table(9, 4)
        positions = torch.tensor([8, 0, 3, 3, 1], device=self.device)
        (turned,) = self.kernel.rotate_gathered((x,), (cos, sin), positions, pairing="half", head_axis=-2)
        assert torch.equal(turned, self.expected(x, (cos[positions], sin[positions]), "half", head_axis=-2))

    def test_a_position_past_the_table_is_not_a_number_and_harms_nobody_else(self):
        # the table is the middle of a larger one, whose rows would be read without a word
        cos, sin = (part[10:15] for part in self.table(30, 4))
        x, positions = self.tensor(1, 2, 6, 10), torch.tensor([0, -1, 4, 5, 2**40, 2], device=self.device)
        (turned,) = self.kernel.rotate_gathered((x,), (cos, sin), positions, pairing="half")
        outside = torch.tensor([False, True, False, True, True, False], device=self.device)
        assert bool(turned[:, :, outside, :8].isnan().all())
        inside = positions[~outside]
        assert torch.equal(turned[:, :, ~outside], self.expected(x[:, :, ~outside], (cos[inside], sin[inside]), "half"))
        assert torch.equal(turned[..., 8:], x[..., 8:])

    @pytest.mark.parametrize("ends", [[0, 23], [0, 4, 4, 11, 12, 23], [0, 0, 7, 7], [0], [0, 30]])
    def test_documents_laid_end_to_end(self, ends, monkeypatch):
        monkeypatch.setattr(self.kernel, "_TILE", 32)  # three tiles
        x, (cos, sin) = self.tensor(23, 2, 8), self.table(23, 4)
        boundaries = torch.tensor(ends, device=self.device, dtype=torch.int32)
        (turned,) = self.kernel.rotate_gathered((x,), (cos, sin), pairing="interleaved", cu_seqlens=boundaries, head_axis=-2)
        real = min(ends[-1], 23)
        positions = packed(torch.tensor([min(end, 23) for end in ends]), 23).positions[:real].to(self.device)
        assert torch.equal(
            turned[:real], self.expected(x[:real], (cos[positions], sin[positions]), "interleaved", head_axis=-2)
        )
        assert torch.equal(turned[real:], x[real:])  # padding

    def test_a_document_longer_than_the_table_is_not_a_number(self):
        x, boundaries = self.tensor(2, 9, 8), torch.tensor([0, 3, 9], device=self.device)
        (turned,) = self.kernel.rotate_gathered((x,), self.table(4, 4), pairing="half", cu_seqlens=boundaries)
        assert turned.isnan().any(-1)[0].tolist() == [False] * 7 + [True] * 2

    @pytest.mark.parametrize("layout", ["chunked", "interleaved", "time_last"])
    def test_several_axes_are_the_tables_of_mrope(self, layout):
        sections = (2, 2, 2)
        rope, x = MRoPE(12, sections, layout=layout), self.tensor(2, 3, 7, 12)
        positions = torch.randint(0, 50, (2, 7, 3), device=self.device)
        every = rotary_table(torch.arange(50, device=self.device), Geometric(1e6).frequencies(12))
        axes = torch.tensor(axis_of_pair(sections, layout), device=self.device)
        for at in (positions, positions.mT.contiguous().mT):  # axes first in memory, as models have them
            (turned,) = self.kernel.rotate_gathered((x,), every, at, pairing="half", axis_of_pair=axes)
            assert torch.equal(turned, self.expected(x, rope.prepare(positions)[0], "half"))

    def test_an_axis_that_positions_lack_is_not_a_number(self):
        axes, at = torch.tensor([0, 3, 1, -1], device=self.device), torch.zeros(2, 3, dtype=torch.int64, device=self.device)
        (turned,) = self.kernel.rotate_gathered(
            (self.tensor(1, 2, 8),), self.table(3, 4), at, pairing="interleaved", axis_of_pair=axes
        )
        assert turned.isnan()[0].tolist() == [[False, False, True, True] * 2] * 2

    def test_gathered_gradients_and_in_place(self):
        x, (cos, sin) = self.tensor(1, 2, 5, 8), self.table(9, 4)
        positions = torch.tensor([8, 0, 3, 3, 1], device=self.device)
        needing = x.clone().requires_grad_()
        (turned,) = self.kernel.rotate_gathered((needing,), (cos, sin), positions, pairing="half")
        (back,) = torch.autograd.grad(turned, needing, x)
        assert torch.equal(back, self.expected(x, (cos[positions], -sin[positions]), "half"))
        self.kernel.rotate_gathered((x,), (cos, sin), positions, pairing="half", outs=[x])
        assert torch.equal(x, turned)

    # --- refusals -------------------------------------------------------------------------------------------------------

    def test_what_does_not_fit_is_refused(self):
        x, table = self.tensor(1, 2, 5, 8), self.table(5, 4)
        at, axes = torch.arange(5, device=self.device), torch.zeros(4, dtype=torch.int64, device=self.device)
        rotate, gathered = self.kernel.rotate, self.kernel.rotate_gathered
        for error, message, call in (
            (TypeError, "float64 with float64", lambda: rotate((x.double(),), [table], pairing="half")),
            (TypeError, "torch.int64", lambda: rotate((x.long(),), [table], pairing="half")),
            (ShapeError, "4 pairs from channel 1", lambda: rotate((x,), [table], pairing="half", first=1)),
            (ShapeError, "at most 5 axes", lambda: rotate((x[None, None],), [table], pairing="half")),
            (ShapeError, "a table of shape (6, 4)", lambda: rotate((x,), [self.table(6, 4)], pairing="half")),
            (ValueError, "pairing = 'neox'", lambda: rotate((x,), [table], pairing="neox")),
            (ShapeError, "channels side by side", lambda: rotate((x,), [table], pairing="half", outs=[x[:, :1]])),
            (ValueError, "outs with tensors that need", lambda: rotate((x.clone().requires_grad_(),), [table], pairing="half", outs=[x])),
            (ValueError, "neither of", lambda: gathered((x,), table, pairing="half")),
            (ValueError, "both of", lambda: gathered((x,), table, at, cu_seqlens=at, pairing="half")),
            (ShapeError, "[length, pairs]", lambda: gathered((x,), self.table(1, 5, 4), at, pairing="half")),
            (ShapeError, "axis_of_pair of shape (3,)", lambda: gathered((x,), table, at[:, None], axis_of_pair=axes[:3], pairing="half")),
            (TypeError, "positions is torch.float32", lambda: gathered((x,), table, at.float(), pairing="half")),
            (ShapeError, "positions of shape", lambda: gathered((x,), table, at[:4], pairing="half")),
        ):  # fmt: skip
            with pytest.raises(error, match=re.escape(message)):
                call()


class TestInterpreted(Cases):
    __test__ = INTERPRETED
    device = "cpu"

    @pytest.mark.slow
    def test_the_benchmark_runs_dry(self, tmp_path, monkeypatch):
        monkeypatch.setattr(gpu, "imported", lambda name, module, missing: None)  # takes seconds
        result = CliRunner().invoke(gpu.main, ["--dry-run", "--quick", "--out", str(tmp_path / "result.json")])
        assert result.exit_code == 0, result.output
        written = json.loads((tmp_path / "result.json").read_text())
        assert written["command"].startswith("python benchmarks/gpu.py")
        assert len(written["checks"]) > 30
        assert {name for name in written["missing"] if "posenc" in name} == set()
        for rows in written["sections"].values():
            assert {"clone", "posenc", "posenc, interleaved", "posenc, rows by position"} <= set(rows)
        assert [path.name for path in tmp_path.iterdir()] == ["result.json"]

    def test_the_benchmark_finds_a_wrong_kernel(self, monkeypatch):
        right = self.kernel.rotate_gathered
        monkeypatch.setattr(
            self.kernel, "rotate_gathered", lambda *given, **rest: [x * (1 + 2**-20) for x in right(*given, **rest)]
        )
        found = gpu.checks(self.kernel, "cpu", 1)
        assert found["one token"]() <= 1 < found["documents"]()


@pytest.mark.cuda
class TestOnCuda(Cases):
    device = "cuda"

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_apply_rotary_uses_it(self, dtype):
        x, table = self.tensor(2, 3, 5, 8, dtype=dtype), RotaryTable(*self.table(5, 4))
        assert torch.equal(
            apply_rotary(x, table, pairing="half", backend="triton"),
            apply_rotary(x, table, pairing="half", backend="reference"),
        )
        verdicts = {verdict.backend: verdict for verdict in explain(apply_rotary, x, table, pairing="half")}
        assert verdicts["triton"].chosen


# --- without a GPU ------------------------------------------------------------------------------------------------------

WITHOUT_A_GPU = """
import re, sys, torch
from posenc import RotaryTable, apply_rotary, explain

x, table = torch.ones(1, 1, 2, 4), RotaryTable(torch.ones(2, 2), torch.ones(2, 2))
apply_rotary(x, table, pairing="half")
print(next(verdict.reason for verdict in explain(apply_rotary, x, table, pairing="half") if verdict.backend == "triton"))
print("triton" in sys.modules)

from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from posenc.kernels import triton_rotary

class Absent:
    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)
    def get_current_device(self):
        return 0
    def get_current_stream(self, device):
        return 0

class Compiled:
    def __init__(self, **options):
        self.options = options
    def __getitem__(self, grid):
        return lambda *arguments, **constants: made.append(kernel.warmup(*arguments, grid=grid, **constants | self.options))

made, kernel = [], triton_rotary._turn
driver.set_active(Absent())
q, k, table = torch.empty(1, 4, 32, 64), torch.empty(1, 1, 32, 64), [torch.empty(32, 32)] * 2
ends = torch.tensor([0, 64])
for Absent.capability, dtype, ends, interleaved, options in (
    (80, torch.bfloat16, None, False, {}),
    (90, torch.float32, ends, True, {}),
    (90, torch.float32, None, False, {"enable_fp_fusion": True}),
):
    triton_rotary._turn = Compiled(**options)
    xs = [x.to(dtype) for x in ((q, k) if dtype == torch.bfloat16 else (q,))]
    triton_rotary._turn_into(xs, table * len(xs), None, None, ends, interleaved, 0, -3, False, [torch.empty_like(x) for x in xs])
    ptx = made[-1].asm["ptx"]
    assert "cubin" in made[-1].asm
    narrow = re.findall(r"(?:ld|st)\\.global\\.(?:b16|b32|b64)", ptx)
    print(len(re.findall(r"fma\\.rn\\.f", ptx)), len(narrow) if ends is None else 0)
"""


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    result = in_a_new_process("-c", WITHOUT_A_GPU, TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("triton")))
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.skipif(INTERPRETED, reason="runs in the other process")
class TestHere:
    """What holds in a process where Triton compiles, on a machine without a GPU."""

    def test_the_cases_hold_under_the_interpreter(self):
        result = in_a_new_process("-m", "pytest", "-p", "no:cacheprovider", __file__, TRITON_INTERPRET="1")
        assert result.returncode == 0, result.stdout + result.stderr
        assert re.search(r"\d\d passed", result.stdout), result.stdout

    def test_the_cpu_never_loads_triton(self, output):
        assert output[:2] == ["refuses: it needs CUDA, and the tensors are on cpu", "False"]

    def test_it_compiles_without_fused_multiply_add_in_words_of_16_bytes(self, output):
        plain, documents, fused = (tuple(map(int, line.split())) for line in output[2:])
        assert plain == documents == (0, 0)
        assert fused[0] > 0  # what the first two would be if they were allowed

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_the_benchmark_needs_a_gpu(self):
        result = CliRunner().invoke(gpu.main, [])
        assert result.exit_code == 2
        assert result.output == (
            "benchmarks/gpu.py: no CUDA device. Expected a machine with one. Try --dry-run here, which checks without timing.\n"
        )

    def test_the_cpu_is_refused(self):
        x, table = torch.ones(1, 1, 2, 4), RotaryTable(torch.ones(2, 2), torch.ones(2, 2))
        with pytest.raises(BackendRefused, match="triton: it needs CUDA, and the tensors are on cpu"):
            apply_rotary(x, table, pairing="half", backend="triton")

    def test_every_other_refusal_has_its_reason(self, monkeypatch):
        """With tensors that only say they are on a GPU."""
        backend, capability = rotary_backends.Triton(), (9, 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

        def refusal(x: Tensor, *more: Tensor, table_device: str = "cuda:0") -> str | None:
            tables = [RotaryTable(*(torch.empty(5, 4, device=table_device) for _ in range(2))) for _ in (x, *more)]
            return backend.refusal(rotary_backends.RotaryCall((x, *more), tuple(tables), "half", -3, 0))

        with FakeTensorMode():
            x = torch.empty(1, 2, 5, 8, device="cuda:0")
            assert refusal(x, table_device="cpu") == "it needs CUDA, and the tensors are on cpu, cuda:0"
            assert refusal(x, table_device="cuda:1") == "the tensors are on different devices, cuda:0, cuda:1"
            assert refusal(x) == "FakeTensor is a subclass of Tensor"
            monkeypatch.setattr(rotary_backends, "outside_eager", lambda call: None)
            assert refusal(x) is None
            assert "not torch.float8_e4m3fn" in refusal(x.to(torch.float8_e4m3fn))
            assert "not torch.float16, torch.float32" in refusal(x, x.half())
            assert refusal(torch.empty(1, 1, 1, 2, 5, 8, device="cuda:0")) == "it serves tensors of at most 5 axes"
            wider = RotaryTable(*(torch.empty(5, 2, device="cuda:0") for _ in range(2)))
            both = RotaryTable(*(torch.empty(5, 4, device="cuda:0") for _ in range(2))), wider
            assert backend.refusal(rotary_backends.RotaryCall((x, x), both, "half", -3, 0)) == "the tables differ in width"
            capability = (7, 5)
            assert refusal(x) == "the device has compute capability 7.5, and Triton serves 8.0 and later"
            capability = (9, 0)
            monkeypatch.setattr("triton.__version__", "3.2.0")
            assert refusal(x) == "triton is 3.2.0, and the kernel needs 3.3 or later"
            monkeypatch.setattr(torch.version, "hip", "6.3")
            assert refusal(x) == "it is for NVIDIA devices, and this torch is built for ROCm"
            monkeypatch.setattr(torch.version, "hip", None)
            monkeypatch.setitem(sys.modules, "posenc.kernels.triton_rotary", None)
            monkeypatch.delattr("posenc.kernels.triton_rotary")
            assert refusal(x).startswith("triton cannot be imported (")
