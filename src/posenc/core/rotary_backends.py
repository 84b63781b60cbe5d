"""Who turns the channels: the compiled kernels, or the arithmetic written out in torch, which defines the result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.autograd import forward_ad

from posenc.core.rotary import Pairing, RotaryTable

Turned = tuple[Tensor, ...]

_PROXY = torch._C._TorchDispatchModeKey.PROXY
MOST_TRIES = 1000
"""How long two tensors are searched for memory that they share, before they are taken to."""


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

    def hesitation(self, call: RotaryCall) -> str | None:
        """Why ``"auto"`` passes it over although it could serve the call, or ``None``."""
        return None

    @abstractmethod
    def run(self, call: RotaryCall) -> Turned:
        """The turned tensors, new ones."""

    def run_into(self, call: RotaryCall, outs: Turned) -> None:
        """The turned tensors written to ``outs``, which may be the tensors themselves."""
        for out, turned in zip(outs, self.run(call), strict=True):
            out.copy_(turned)


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
    if torch._C._get_dispatch_mode(_PROXY) is not None or torch._ops._get_dispatch_mode_pre_dispatch(_PROXY) is not None:
        return "the call is being recorded by make_fx, whose graph may be transformed"
    parts = [part for table in call.tables for part in table]
    for x in (*call.tensors, *parts):
        if type(x) is not Tensor and type(x) is not torch.nn.Parameter:
            return f"{type(x).__name__} is a subclass of Tensor"
    if torch.is_grad_enabled() and any(part.requires_grad for part in parts):
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
        from posenc.kernels import native

        parts = [part.to(native.TABLE[call.tensors[0].dtype]) for table in call.tables for part in table]
        turned: Any = native.OPERATORS[len(call.tensors), call.needs_gradient](*call.tensors, *parts, *_settings(call))
        turned = turned if len(call.tensors) == 2 else (turned,)
        # of an operator all results need a gradient; one that does not comes out of the other's graph
        return tuple(
            out.detach() if out.requires_grad > x.requires_grad else out for x, out in zip(call.tensors, turned, strict=True)
        )

    def run_into(self, call: RotaryCall, outs: Turned) -> None:
        from posenc.kernels import native

        parts = [part.to(native.TABLE[call.tensors[0].dtype]) for table in call.tables for part in table]
        if any(out.stride(-1) != 1 or out.is_neg() for out in outs) or _read_after_written(call.tensors, parts, outs):
            super().run_into(call, outs)
            return
        native.INTO[len(outs)](*call.tensors, *parts, *_settings(call), *outs)
        count_write(outs)


def _settings(call: RotaryCall) -> tuple[bool, int, int, bool]:
    """How the kernel's operators are told: interleaved, first channel, axis of heads or 0, transposed."""
    return call.pairing == "interleaved", call.first, call.head_axis or 0, False


def count_write(outs: Turned) -> None:
    """Tell autograd that they were overwritten, so that a backward that saved one raises instead of being wrong."""
    for out in outs:
        if not out.is_inference():  # those have no version to count
            torch.autograd.graph.increment_version(out)


def _read_after_written(tensors: Turned, parts: Sequence[Tensor], outs: Turned) -> bool:
    """Whether writing the results may spoil what is still to be read. A tensor turned exactly in place is read first."""
    for index, out in enumerate(outs):
        x = tensors[index]
        in_place = out.data_ptr() == x.data_ptr() and out.stride() == x.stride()
        read = [*parts, *(other for at, other in enumerate(tensors) if at != index or not in_place)]
        if any(may_share(part, out) for part in read):
            return True
    return False


def may_share(one: Tensor, other: Tensor) -> bool:
    """Whether entries of two tensors lie in the same memory, whoever owns it; true where it takes too long to find out.

    Where there are no addresses (meta and fake tensors, transforms, compilation) only a tensor and itself do.
    """
    if not (_has_address(one) and _has_address(other)):
        return one is other
    if not one.numel() or not other.numel():
        return False
    distance = other.data_ptr() - one.data_ptr()
    if not -_extent(other) < distance < _extent(one):
        return False
    reaches: dict[int, list[int]] = {1: [1 - other.element_size(), one.element_size() - 1]}  # bytes of one entry
    for side, x in enumerate((one, other)):
        for size, step in zip(x.shape, x.stride(), strict=True):
            reach = reaches.setdefault(step * x.element_size(), [0, 0])
            reach[1 - side] += (size - 1) * (1 - 2 * side)
    return _sums_to(distance, sorted(((step, low, high) for step, (low, high) in reaches.items() if step), reverse=True))


def _extent(x: Tensor) -> int:
    """Bytes from its first entry to the end of its last."""
    return (sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True)) + 1) * x.element_size()


def _has_address(x: Tensor) -> bool:
    return (
        type(x) in (Tensor, torch.nn.Parameter)
        and x.device.type != "meta"
        and not torch.compiler.is_compiling()
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def _sums_to(total: int, terms: list[tuple[int, int, int]]) -> bool:
    """Whether a whole multiple of each step, between its two bounds, can be found so that they add up to the total.

    Largest step first, each narrowed by what the smaller ones can still reach: for tensors that slicing and transposing
    make there are hardly two multiples to try.
    """
    rest = [(0, 0)]
    for step, low, high in reversed(terms):
        rest.append((rest[-1][0] + step * low, rest[-1][1] + step * high))
    open_ends = [(total, 0)]
    for _ in range(MOST_TRIES):
        if not open_ends:
            return False
        left, at = open_ends.pop()
        if at == len(terms):
            return True
        (step, low, high), (rest_low, rest_high) = terms[at], rest[len(terms) - 1 - at]
        first, last = max(low, -((rest_high - left) // step)), min(high, (left - rest_low) // step)
        open_ends += [(left - multiple * step, at + 1) for multiple in range(first, min(last, first + MOST_TRIES) + 1)]
    return True


@final
class Triton(RotaryBackend):
    """The Triton kernel for CUDA devices; checked under Triton's interpreter and not yet run on a GPU."""

    name = "triton"

    def refusal(self, call: RotaryCall) -> str | None:
        devices = {x.device for x in (*call.tensors, *(part for table in call.tables for part in table))}
        if {device.type for device in devices} != {"cuda"}:
            return f"it needs CUDA, and the tensors are on {', '.join(sorted(map(str, devices)))}"
        if len(devices) > 1:
            return f"the tensors are on different devices, {', '.join(sorted(map(str, devices)))}"
        reason = outside_eager(call)
        if reason is not None:
            return reason
        if torch.version.hip is not None:
            return "it is for NVIDIA devices, and this torch is built for ROCm"
        capability = torch.cuda.get_device_capability(call.tensors[0].device)
        if capability < (8, 0):
            return f"the device has compute capability {capability[0]}.{capability[1]}, and Triton serves 8.0 and later"
        try:
            from posenc.kernels import triton_rotary
        except ImportError as error:
            return f"triton cannot be imported ({error})"
        dtypes = {x.dtype for x in call.tensors}
        if len(dtypes) > 1 or not dtypes <= set(triton_rotary.WIDE):
            named = ", ".join(sorted(map(str, dtypes)))
            return f"it serves one of float32, float64, bfloat16 and float16 at a time, not {named}"
        if max(x.ndim for x in call.tensors) > triton_rotary.MOST_AXES:
            return f"it serves tensors of at most {triton_rotary.MOST_AXES} axes"
        if len({table.cos.shape[-1] for table in call.tables}) > 1:
            return "the tables differ in width"
        return triton_rotary.refusal()

    def run(self, call: RotaryCall) -> Turned:
        return tuple(self._rotate(call, None))

    def run_into(self, call: RotaryCall, outs: Turned) -> None:
        parts = [part for table in call.tables for part in table]
        if any(out.stride(-1) != 1 for out in outs) or _read_after_written(call.tensors, parts, outs):
            super().run_into(call, outs)
            return
        self._rotate(call, list(outs))

    @staticmethod
    def _rotate(call: RotaryCall, outs: list[Tensor] | None) -> list[Tensor]:
        from posenc.kernels import triton_rotary

        wide = triton_rotary.WIDE[call.tensors[0].dtype]
        tables = [(table.cos.to(wide), table.sin.to(wide)) for table in call.tables]
        return triton_rotary.rotate(
            call.tensors, tables, pairing=call.pairing, first=call.first, head_axis=call.head_axis, outs=outs
        )


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
    if torch.compiler.is_compiling() or x.is_contiguous():
        return torch.cat(parts, dim=-1)
    if x.stride(-1) != 1:
        return torch.cat(parts, dim=-1).contiguous()  # cat keeps the order of an image's channels
    by_stride = sorted(range(x.ndim - 1), key=lambda axis: -x.stride()[axis])
    joined = torch.cat([part.permute(*by_stride, -1) for part in parts], dim=-1)
    back = sorted(range(x.ndim - 1), key=by_stride.__getitem__)
    return joined.permute(*back, -1)


ROTARY_BACKENDS: tuple[RotaryBackend, ...] = (Native(), Reference(), Triton())
"""In the order in which ``"auto"`` asks them. Triton's kernel comes after the one that serves everything, so it runs only
where it is named, until it has run on a GPU."""
