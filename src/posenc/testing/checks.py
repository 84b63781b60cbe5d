"""What is asked of every encoding, one small function each."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from posenc.core.sites import ContentScoreEncoding, Encoding, PositionTransform, ScoreEncoding
from posenc.core.spec import ModelShape
from posenc.testing.subject import Outputs, Subject, allowance, assert_same, assert_within, content_for, run, truth

Check = Callable[[Subject], None]

FAR = (5, 4_095, 131_071, 1_000_003, 10_000_000)


def values(subject: Subject) -> None:
    """The oracle's numbers, also when the keys are other tokens than the queries."""
    encoding, at = subject.fresh(), torch.arange(7) + 3
    against_oracle(subject, encoding, at)
    if not isinstance(encoding, PositionTransform):
        against_oracle(subject, encoding, at, torch.tensor([9, 0, 2, 2, 40, 1, 5, 6, 7]))


def far_positions(subject: Subject) -> None:
    """The oracle's numbers at 10⁷, as exactly as the angles' precision allows; up to max_length if that is the end."""
    against_oracle(subject, subject.fresh(), _far(subject))


def dtypes(subject: Subject) -> None:
    """Results have their content's shape and dtype, and are right to that dtype's rounding, far away too."""
    half = () if isinstance(subject.fresh(), ScoreEncoding | PositionTransform) else (torch.bfloat16, torch.float16)
    for dtype in (torch.float64, torch.float32, *half):
        encoding = subject.fresh().double() if dtype == torch.float64 else subject.fresh()
        against_oracle(subject, encoding, _far(subject), dtype=dtype)


def _far(subject: Subject) -> Tensor:
    last = max(FAR) if "any-length" in subject.claims else subject.shape.max_length - 1
    return torch.tensor(FAR).clamp(max=last)


def against_oracle(
    subject: Subject,
    encoding: Encoding,
    at: Tensor,
    keys: Tensor | None = None,
    *,
    shape: ModelShape | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Raise AssertionError unless the encoding's results are the oracle's, of the content's shape and dtype."""
    lengths = len(at), None if keys is None else len(keys)
    content = content_for(encoding, shape or subject.shape, *lengths, dtype=dtype)
    expected = truth(subject, encoding, content, at, keys)
    results = run(encoding, content, at, keys, dtype=dtype)
    for given, result in zip(content, results, strict=False):
        assert result.dtype == given.dtype, f"{given.dtype} in, {result.dtype} out"
    places = at if keys is None else torch.cat([at, keys])
    for result, right in zip(results, expected, strict=True):
        allowed = allowance(right, encoding, content, places, dtype=dtype, angle_dtype=subject.angle_dtype)
        assert_within(result, right, allowed, f"differs from the oracle ({dtype}, positions up to {places.max()})")


def strides(subject: Subject) -> None:
    """Views of any strides give the numbers of a plain copy; what was given is not changed."""
    encoding, at = subject.fresh(), torch.arange(7)
    content = content_for(encoding, subject.shape, 7, batch=(2,))
    expected = run(encoding, content, at)
    for view in (_every_other, _transposed):
        given = tuple(view(c) for c in content)
        assert_same(run(encoding, given, at), expected, f"input as a view ({view.__name__.strip('_')}) differs")
        assert_same(given, content, "the input was changed in place")


def _every_other(x: Tensor) -> Tensor:
    return torch.stack([x, torch.zeros_like(x)], dim=-1).flatten(-2)[..., ::2]


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def gradients(subject: Subject) -> None:
    """Analytic gradients of content and parameters equal finite differences in float64."""
    encoding, at = subject.fresh().double(), torch.arange(5)
    content = tuple(c.requires_grad_() for c in content_for(encoding, subject.shape, 5, dtype=torch.float64))
    inputs = (*content, *(p for p in encoding.parameters() if p.requires_grad))
    if inputs:
        # gradcheck moves its inputs in place, parameters among them
        torch.autograd.gradcheck(lambda *_: run(encoding, content, at, dtype=torch.float64), inputs, fast_mode=True)


def graph_capture(subject: Subject) -> None:
    """One graph without breaks, compiled at most twice for any number of lengths, with the eager numbers."""
    from torch._dynamo.testing import CompileCounterWithBackend

    encoding = subject.fresh()
    counter = CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()

    def captured(*inputs: Tensor) -> Outputs:
        return run(encoding, inputs[:-1], inputs[-1])

    compiled = torch.compile(captured, fullgraph=True, backend=counter)
    counts = []
    for length in (8, 16, 24, 40):
        content, at = content_for(encoding, subject.shape, length), torch.arange(length)
        for actual, eager in zip(compiled(*content, at), captured(*content, at), strict=True):
            allowed = allowance(eager, encoding, content, at, dtype=torch.float32)
            assert_within(actual, eager, allowed, f"compiled differs from eager at length {length}")
        counts.append(counter.frame_count)
    assert counts[-1] == counts[1], f"recompiled after the second length: {counts} graphs after lengths 8, 16, 24, 40"


def two_instances(subject: Subject) -> None:
    """Encodings with different settings, used in turn, each compute their own numbers."""
    wider = replace(
        subject.shape,
        dim=2 * subject.shape.dim,
        heads=2 * subject.shape.heads,
        head_dim=2 * subject.shape.head_dim,
        max_length=2 * subject.shape.max_length,
    )
    makers = [(subject.make, subject.shape), (subject.make, wider), (subject.other or subject.make, subject.shape)]
    encodings = [(subject.fresh(make, shape), shape) for make, shape in makers]
    for length in (6, 4, 6):
        for encoding, shape in encodings:
            against_oracle(subject, encoding, torch.arange(length), shape=shape)


def history(subject: Subject) -> None:
    """A result does not depend on the calls before it: long then short, another start, another dtype."""
    encoding = subject.fresh()
    calls = ((40, 0, torch.float32), (6, 0, torch.float32), (6, 9, torch.bfloat16), (6, 9, torch.float32))
    for length, start, dtype in calls:
        against_oracle(subject, encoding, torch.arange(length) + start, dtype=dtype)


def casts(subject: Subject) -> None:
    """Casting a model to half precision and back leaves every table as it was; so does autocast."""
    at = torch.arange(40)
    expected = _use(subject.fresh(), subject.shape, at)
    for dtype in (torch.bfloat16, torch.float16):
        encoding = subject.fresh()
        saved = [p.detach().clone() for p in encoding.parameters()]
        encoding.to(dtype)
        if "parameter-free" in subject.claims:
            assert_same(_use(encoding, subject.shape, at), expected, f"a model cast to {dtype} computes other tables")
            with torch.autocast("cpu", dtype=dtype):
                assert_same(_use(encoding, subject.shape, at), expected, f"autocast to {dtype} computes other tables")
        encoding.to(torch.float32)
        with torch.no_grad():
            for parameter, value in zip(encoding.parameters(), saved, strict=True):
                parameter.copy_(value)
        assert_same(_use(encoding, subject.shape, at), expected, f"tables are lost in a cast to {dtype} and back")


def copies(subject: Subject) -> None:
    """A deep copy and a pickle compute the same, before and after use."""
    at = torch.arange(6)
    encoding = subject.fresh()
    for _ in range(2):
        for name, twin in (("deepcopy", copy.deepcopy(encoding)), ("pickle", pickle.loads(pickle.dumps(encoding)))):
            assert_same(_use(twin, subject.shape, at), _use(encoding, subject.shape, at), f"{name} differs")


def meta_init(subject: Subject) -> None:
    """Made on the meta device, then filled from a state dict, it is the same encoding."""
    at, ready = torch.arange(6), subject.fresh()
    with torch.device("meta"):
        empty = subject.fresh()
    empty.to_empty(device="cpu")
    with torch.no_grad():  # what raw memory holds is chance; NaN shows what nothing fills
        for tensor in (*empty.parameters(), *empty.buffers()):
            tensor.fill_(torch.nan if tensor.is_floating_point() else -1)
    empty.load_state_dict(ready.state_dict())
    assert_same(_use(empty, subject.shape, at), _use(ready, subject.shape, at), "meta-device init loses something")


def batches(subject: Subject) -> None:
    """A row of a batch, with positions of its own, gives what it gives alone."""
    encoding = subject.fresh()
    at = torch.stack([torch.arange(6) + start for start in (0, 5, 11)])
    content = content_for(encoding, subject.shape, 6, batch=(3,))
    together = run(encoding, content, at)
    for row in range(3):
        alone = run(encoding, tuple(c[row] for c in content), at[row])
        for actual, expected in zip(together, alone, strict=True):
            allowed = allowance(expected, encoding, content, at, dtype=torch.float32)
            assert_within(actual[row], expected, allowed, f"row {row} of a batch differs from the same row alone")
    if content:
        shared, per_row = (run(encoding, content, places) for places in (at[1], at[1].expand(3, -1)))
        assert_same(shared, per_row, "positions shared by the batch differ from the same ones per row")


def no_tokens(subject: Subject) -> None:
    """An empty sequence gives an empty result."""
    encoding = subject.fresh()
    results, content = _use(encoding, subject.shape, torch.arange(0)), content_for(encoding, subject.shape, 0)
    shapes = [given.shape for given in content]
    if isinstance(encoding, ContentScoreEncoding):
        shapes = [torch.Size([subject.shape.heads, 0, 0])]
    for actual, shape in zip(results, shapes, strict=False):
        assert actual.shape == shape, f"an empty sequence gives shape {tuple(actual.shape)}"


def _use(encoding: Encoding, shape: ModelShape, at: Tensor, dtype: torch.dtype = torch.float32) -> Outputs:
    content = content_for(encoding, shape, len(at), dtype=dtype)
    return run(encoding, content, at, dtype=dtype)


CHECKS: dict[str, Check] = {
    check.__name__.replace("_", " "): check
    for check in (
        values, far_positions, dtypes, strides, gradients, graph_capture, two_instances, history, casts, copies, meta_init,
        batches, no_tokens,
    )
}  # fmt: skip
"""The checks that every encoding has to pass, by name."""
