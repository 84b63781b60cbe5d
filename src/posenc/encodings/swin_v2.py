"""A bias from a small network of logarithmic offsets inside a window of a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.core.autocast import without_autocast
from posenc.core.bias import ScoreBias, TableBias
from posenc.core.checks import check_integers
from posenc.core.sites import ScoreEncoding
from posenc.core.spec import EncodingSpec, Reference


@final
class SwinV2Bias(ScoreEncoding):
    """Adds ``16 · sigmoid(f(offset))`` to each score; f is a small network of the offset (rows, columns) in a window.

    The thing people get wrong: which window an offset is measured against. A model that was pretrained with another
    window keeps counting in that one, ``pretrained_window``: offsets past it are new inputs of f, which the logarithm keeps
    near the known ones. Measured against the new window, every offset means another distance than f was trained on.

    ``sign(o) · log2(1 + 8 · |o| / (size - 1)) / 3`` goes into f, for rows and for columns; f is linear, ReLU, linear
    without an offset. It runs over the ``(2 · height - 1) · (2 · width - 1)`` offsets, not over pairs of cells. Positions
    are cells, as ``grid(height, width)`` makes them; offsets past the window read the row at its border. The rest of Swin
    v2's attention is not here: it takes the cosine of q and k, times a learned factor per head, in place of the scaled
    product; normalise q and k, multiply q by the factor, and attend with ``scale=1``.

    Args:
        heads: 1 or more.
        window: ``(height, width)`` in cells.
        pretrained_window: the window that offsets are measured against, ``window`` by default. Released configurations
            write 0 for that.
        hidden: the width of f.

    Shape:
        cpb_mlp.0.weight: ``[hidden, 2]``; cpb_mlp.2.weight: ``[heads, hidden]``, named as in the released code, whose tables
        of offsets a checkpoint may hold beside them; they are fixed, and passed over. transformers calls the network
        ``continuous_position_bias_mlp``.

    Returns:
        A `TableBias` of float32 or wider; positions must be integers, ``[*batch, seq, 2]``.

    Raises:
        TypeError: sizes that are no integers.
        ValueError: a size below 1, a window that is no pair.

    Example:
        >>> materialize(SwinV2Bias(3, (2, 3))(), grid(2, 3).positions).shape
        torch.Size([3, 6, 6])

    Differs from:
        transformers: the same numbers; NaN there for a window of one column and more rows, or the reverse: 0 / 0.

    References:
        Liu et al. 2022, "Swin Transformer V2: Scaling Up Capacity and Resolution", arXiv:2111.09883, §3.3.
    """

    spec = EncodingSpec(
        name="swin-v2",
        summary="adds a bounded small network of logarithmic offsets of rows and columns to the scores",
        build=lambda shape: [SwinV2Bias(shape.heads, (8, 8))],
        claims=frozenset({"shift-invariant", "any-length"}),
        references=(Reference("Liu et al. 2022", "Swin Transformer V2: Scaling Up Capacity and Resolution", "2111.09883"),),
    )
    axes = 2

    def __init__(
        self,
        heads: int,
        window: tuple[int, int],
        *,
        pretrained_window: tuple[int, int] | None = None,
        hidden: int = 512,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_integers("SwinV2Bias", 1, heads=heads, hidden=hidden)
        pretrained = window if pretrained_window is None else pretrained_window
        for name, size in (("window", window), ("pretrained_window", pretrained)):
            if not isinstance(size, Sequence) or len(size) != 2:
                raise ValueError(f"SwinV2Bias: {name} = {size!r}. Expected (height, width). Pass both, in cells.")
            check_integers("SwinV2Bias", 1, **{f"{name} height": size[0], f"{name} width": size[1]})
        self.heads, self.window = heads, (window[0], window[1])
        self.pretrained_window = (pretrained[0], pretrained[1])
        self.cpb_mlp = nn.Sequential(
            nn.Linear(2, hidden, device=device, dtype=dtype),
            nn.ReLU(),
            nn.Linear(hidden, heads, bias=False, device=device, dtype=dtype),
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights from N(0, 0.02²), cut at ±2; offsets 0."""
        rise, shift, last = self.cpb_mlp.parameters()
        for weight in (rise, last):
            nn.init.trunc_normal_(weight, std=0.02)
        nn.init.zeros_(shift)

    def extra_repr(self) -> str:
        pretrained = "" if self.pretrained_window == self.window else f", pretrained_window={self.pretrained_window}"
        return f"{self.heads}, window={self.window}{pretrained}"

    def forward(self) -> ScoreBias:
        learned = tuple(self.cpb_mlp.parameters())
        wide, device = torch.promote_types(learned[0].dtype, torch.float32), learned[0].device
        rise, shift, last = (parameter.to(wide) for parameter in learned)
        sizes = zip(self.window, self.pretrained_window, strict=True)
        rows, columns = (_logarithmic(size, known, wide, device) for size, known in sizes)
        offsets = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1)
        with without_autocast(device):
            table = 16 * F.linear(F.linear(offsets, rise, shift).relu(), last).sigmoid()
        height, width = self.window
        return TableBias(table.movedim(-1, 0), (height - 1, width - 1))

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Released checkpoints hold the fixed tables of offsets beside what is learned."""
        fixed = {f"{prefix}relative_coords_table", f"{prefix}relative_position_index"}
        rest = {key: value for key, value in state_dict.items() if key not in fixed}
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)


def _logarithmic(size: int, known: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The offsets of one axis as f reads them, 1 at 7/8 of the known window's largest."""
    offsets = torch.arange(1 - size, size, dtype=dtype, device=device)
    offsets = 8 * offsets / max(known - 1, 1)
    return offsets.sign() * offsets.abs().add(1).log2() / 3
