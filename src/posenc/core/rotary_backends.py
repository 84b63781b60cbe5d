"""Who turns the channels: the compiled kernels, or the arithmetic written out in torch, which defines the result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple, final

import torch
from torch import Tensor
from torch.autograd import forward_ad

from posenc.core.rotary import Pairing, RotaryTable

Turned = tuple[Tensor, ...]


class RotaryCall(NamedTuple):
    """One call, checked: tensors with their tables, and where their channels turn.

    Shape:
        tensors: ``[*batch, heads, seq, head_dim]``, or as ``head_axis`` says; tables: ``[*batch, seq, pairs]``.
    """

    tensors: tuple[Tensor, ...]
    tables: tuple[RotaryTable, ...]
    pairing: Pairing
    head_axis: int | None
    first: int

    @property
    def needs_gradient(self) -> bool:
        return torch.is_grad_enabled() and any(x.requires_grad for x in self.tensors)


class RotaryBackend(ABC):
    """Turns channels, or says in one sentence why it does not."""

    name: str

    @abstractmethod
    def refusal(self, call: RotaryCall) -> str | None:
        """Why this backend does not serve the call, or ``None``."""

    @abstractmethod
    def run(self, call: RotaryCall) -> Turned:
        """The turned tensors, new ones."""

    def run_into(self, call: RotaryCall, out: Tensor) -> None:
        """The one turned tensor written to ``out``, which may be the tensor itself."""
        out.copy_(self.run(call)[0])


def outside_eager(call: RotaryCall) -> str | None:
    """Why a kernel that is opaque to torch must not serve the call: what looks through it needs the arithmetic."""
    if torch.compiler.is_compiling():
        return "the call is being compiled, and the compiler fuses the arithmetic with what surrounds it"
    if torch._C._get_tracing_state() is not None:
        return "the call is being traced"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation goes through the arithmetic"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "functorch transforms go through the arithmetic"
    if any(type(x) is not Tensor and type(x) is not torch.nn.Parameter for x in call.tensors):
        return f"{next(type(x).__name__ for x in call.tensors if type(x) is not Tensor)} is a subclass of Tensor"
    if torch.is_grad_enabled() and any(part.requires_grad for table in call.tables for part in table):
        return "the table needs a gradient"
    return None


@final
class Native(RotaryBackend):
    """The compiled kernel for the CPU."""

    name = "native"

    def refusal(self, call: RotaryCall) -> str | None:
        reason = outside_eager(call)
        if reason is not None:
            return reason
        from posenc.kernels import native

        devices = {x.device.type for x in (*call.tensors, *(t.cos for t in call.tables))}
        if devices != {"cpu"}:
            return f"it serves the CPU, and the tensors are on {', '.join(sorted(devices))}"
        dtypes = {x.dtype for x in call.tensors}
        if len(dtypes) > 1 or not dtypes <= set(native.CODES):
            return f"it serves one of float32, float64, bfloat16 and float16 at a time, not {', '.join(map(str, dtypes))}"
        if len({x.ndim for x in call.tensors}) > 1 or max(x.ndim for x in call.tensors) > 9:
            return "it serves tensors of the same number of axes, at most nine"
        return native.refusal()

    def run(self, call: RotaryCall) -> Turned:
        import posenc.kernels.native  # noqa: F401  (defines the operators)

        wide = torch.float64 if call.tensors[0].dtype == torch.float64 else torch.float32
        settings = call.pairing == "interleaved", call.first, call.head_axis or 0, False
        tables = [part.to(wide) for table in call.tables for part in table]
        operators = torch.ops.posenc
        if len(call.tensors) == 2:
            pair = operators.rotary_pair if call.needs_gradient else operators.rotary_pair_inference
            turned: Turned = pair(*call.tensors, *tables, *settings)
            return turned
        one = operators.rotary if call.needs_gradient else operators.rotary_inference
        return (one(*call.tensors, *tables, *settings),)

    def run_into(self, call: RotaryCall, out: Tensor) -> None:
        (x,) = call.tensors
        same = out.data_ptr() == x.data_ptr() and out.stride() == x.stride()
        shared = out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        if out.stride(-1) != 1 or (shared and not same):  # a view that is shifted against x would be read after it is written
            super().run_into(call, out)
            return
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        cos, sin = (part.to(wide) for part in call.tables[0])
        torch.ops.posenc.rotary_out(x, cos, sin, call.pairing == "interleaved", call.first, call.head_axis or 0, False, out)
        torch.autograd.graph.increment_version(out)


@final
class Reference(RotaryBackend):
    """The arithmetic in torch operations: defines the result, serves everything."""

    name = "reference"

    def refusal(self, call: RotaryCall) -> str | None:
        return None

    def run(self, call: RotaryCall) -> Turned:
        return tuple(_turn(x, table, call) for x, table in zip(call.tensors, call.tables, strict=True))


def _turn(x: Tensor, table: RotaryTable, call: RotaryCall) -> Tensor:
    cos, sin = table if call.head_axis is None else (t.unsqueeze(call.head_axis) for t in table)
    pairs, first = cos.shape[-1], call.first
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = cos.to(wide), sin.to(wide)
    before, middle, after = x[..., :first], x[..., first : first + 2 * pairs].to(wide), x[..., first + 2 * pairs :]
    if call.pairing == "half":
        a, b = middle[..., :pairs], middle[..., pairs:]
    else:
        a, b = middle[..., 0::2], middle[..., 1::2]
    turned = [(a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype)]
    if call.pairing == "interleaved":
        turned = [torch.stack(turned, dim=-1).flatten(-2)]
    return _join_like(x, [part for part in (before, *turned, after) if part.shape[-1]])


def _join_like(x: Tensor, parts: list[Tensor]) -> Tensor:
    """Concatenate channels, keeping x's order of strides so that [B, S, H, D].transpose(1, 2) stays one."""
    if not parts:
        return x.clone()
    if torch.compiler.is_compiling() or x.is_contiguous() or x.stride(-1) != 1:
        return torch.cat(parts, dim=-1)
    by_stride = sorted(range(x.ndim - 1), key=lambda axis: -x.stride()[axis])
    joined = torch.cat([part.permute(*by_stride, -1) for part in parts], dim=-1)
    back = sorted(range(x.ndim - 1), key=by_stride.__getitem__)
    return joined.permute(*back, -1)


ROTARY_BACKENDS: tuple[RotaryBackend, ...] = (Native(), Reference())
"""In the order in which ``"auto"`` asks them."""
