"""Checks on the values inside tensors, without ever waiting for a device."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def readable(tensor: Tensor) -> bool:
    """Whether the values can be read on the host now, for free."""
    return (
        tensor.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not isinstance(tensor, FakeTensor)
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def check_integers(name: str, least: int | None = None, **values: object) -> None:
    """Refuse counts and widths that are not integers, or are below ``least``: 2.5, True, "8".

    Raises:
        TypeError: not an integer. ValueError: below ``least``.
    """
    rule = "an integer" if least is None else f"an integer of {least} or more"
    for key, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
            raise TypeError(f"{name}: {key} = {value!r}. Expected {rule}. Pass a whole number.")
        if least is not None and value < least:
            raise ValueError(f"{name}: {key} = {value}. Expected {rule}. Look at the shape it stands for.")


def check_values(valid: Tensor, message: Callable[[], str]) -> None:
    """Raise ``ValueError(message())`` unless every entry of the boolean tensor ``valid`` is true.

    On the CPU the check is eager and the message is full. Under compilation and on other devices it becomes one
    asynchronous assertion with the same rule, so that nothing waits for the device; tensors without values (meta,
    fake, functorch-wrapped) are not checked.
    """
    if readable(valid):
        if not bool(valid.all()):
            raise ValueError(message())
    elif torch.compiler.is_compiling() or valid.device.type not in ("cpu", "meta"):
        torch._assert_async(valid.all(), "posenc: a value check failed; run the same call eagerly on the CPU to see which")


def check_softmax_scale(name: str, scale: object, default: str) -> None:
    """Refuse a softmax scale that is no finite number above 0; ``default`` says what leaving it out means."""
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not (isfinite(scale) and scale > 0):
        raise ValueError(
            f"{name}: scale = {scale!r}. Expected a finite number above 0, the softmax scale of the attention. "
            f"Leave it out for {default}."
        )
