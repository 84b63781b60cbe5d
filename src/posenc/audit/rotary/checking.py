"""`check_rotary`: what a function that turns queries and keys really does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import torch

from posenc.audit.findings import Finding, Kind, Report
from posenc.audit.kinds import rotary as kinds
from posenc.audit.rotary import words
from posenc.audit.rotary.axes import Sizes, check_axes, check_dtype, check_tokens, sizes
from posenc.audit.rotary.call import NAME, Layout, PositionsAs, RaisedError, RotaryFunction, rotary_function, unit
from posenc.audit.rotary.gradient import check_gradient
from posenc.audit.rotary.memory import Recall, check_compiled, check_jumps, check_length, check_rows
from posenc.audit.rotary.planes import Planes, read_planes
from posenc.audit.rotary.precision import FLOAT32, angle_error, check_autocast, check_frequencies, check_precision
from posenc.audit.rotary.probe import doubling, matrices
from posenc.audit.rotary.promise import Promise, check_promise, compare_channels, compare_frequencies, promised_frequencies
from posenc.audit.rotary.sides import (
    check_content,
    check_norm,
    check_repeated,
    check_scores,
    check_side,
    compare_sides,
    one_sided,
)
from posenc.core.checks import check_integers
from posenc.core.rotary import Frequencies, Pairing
from posenc.hf.rotation import Rotation
from posenc.schedules.base import LengthRule


def check_rotary(
    fn: Callable[..., Any],
    *,
    head_dim: int,
    heads: int = 4,
    kv_heads: int | None = None,
    expect: Promise | None = None,
    pairing: Pairing | None = None,
    layout: Layout = "batch heads seq dim",
    positions: PositionsAs = "batch seq",
    positions_up_to: int = 8192,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    compile_backend: str | None = None,
    device: torch.device | str = "cpu",
) -> Report:
    """Infer what a rotary function does, from what it makes of one-hot and random inputs, and test what every one must keep.

    The thing people get wrong: they compare shapes. With the wrong pairing, with positions in bfloat16, or with the head
    axis turned instead of the sequence, every shape fits and the text stays fluent. Here the function is asked where each
    channel goes: which pair up, how fast each pair turns, with which gain, in which sense, from which offset; and then
    whether scores depend on distance alone, whether positions are honoured token by token, whether earlier calls leave a
    trace, and how exact the angles are in each dtype and under autocast.

    Without ``expect`` the function is described and tested for what holds for every rotation. A wrong base or pairing can
    only be found against a promise: give the schedule, or the layer's `Rotation` from `posenc.hf.plan`.

    Args:
        fn: ``(q, k, positions) -> (q, k)``, ``(q, k, v, positions) -> (q, k, v)`` or ``(x, positions) -> x``. The last
            is called once for queries and once for keys. Wrap others, see below. It runs some fifty times.
        head_dim: the width of a head.
        heads: of queries.
        kv_heads: of keys and values; as many by default.
        expect: what it should be: a `Rotation`, or a schedule for the channels that turn.
        pairing: what it should be; a `Rotation` says so itself.
        layout: the axes of queries and keys.
        positions: how it takes positions: int64 ``[batch, seq]``, ``[seq]`` for all rows, or the first one as an int
            (``"start"``; consecutive ones follow).
        positions_up_to: positions stay below this, 16 or more. Pass the length of its table if it has one.
        dtypes: of queries and keys, to judge precision in; all other questions are asked in the first.
        compile_backend: also compare with ``torch.compile(fn, backend=…)``, e.g. ``"aot_eager"``; slow.
        device: where it is called.

    Returns:
        A `Report`. ``described`` has pairing, channels, frequencies, amplitude and exactness; ``findings`` are of the kinds
        ``rotary-…``, and those of frequencies where ``expect`` is not met.

    Raises:
        TypeError: no function, a signature that says neither of the three, or a result that is not tensors.
        ValueError: it raises, returns other shapes, or is not linear; settings that do not fit.

    Example:
        >>> from posenc.encodings.rope import RoPE
        >>> rope = RoPE(64, Geometric(5e5), rotary_dim=32, pairing="interleaved")
        >>> report = check_rotary(lambda q, k, positions: rope(q, k, positions), head_dim=64, kv_heads=2, positions_up_to=512)
        >>> print("\\n".join(report.described))
        interleaved pairing
        32 of 64 channels, leading
        base 500,000
        amplitude 1
        angles as exact as float64 up to position 511
        cache-safe: positions are honoured token by token, earlier calls leave no trace
        >>> report.findings
        ()

    A transformers model's function and its table::

        rotary = model.model.rotary_emb
        check_rotary(
            lambda q, k, positions: apply_rotary_pos_emb(q, k, *rotary(q, positions)),
            head_dim=128, heads=32, kv_heads=8, expect=posenc.hf.plan(model.config).layers[0].rotation,
        )

    rotary-embedding-torch::

        rotary = RotaryEmbedding(dim=32)
        check_rotary(
            lambda x, start: rotary.rotate_queries_or_keys(x, offset=start),
            head_dim=64, positions="start", pairing="interleaved",
        )

    References:
        Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv:2104.09864.
    """
    if not dtypes or not all(isinstance(dtype, torch.dtype) and dtype.is_floating_point for dtype in dtypes):
        raise TypeError(f"{NAME}: dtypes = {dtypes!r}. Expected floating-point dtypes. Pass those that the model runs in.")
    call = rotary_function(fn, layout, positions, head_dim, heads, kv_heads, device, dtypes[0])
    check_promise(expect, pairing, head_dim)
    check_integers(NAME, 16, positions_up_to=positions_up_to)
    with torch.random.fork_rng(devices=[]):
        return _Examination(call, expect, pairing, positions_up_to, tuple(dtypes), compile_backend).report()


@final
class _Examination:
    """One function, question by question; an answer that makes later questions meaningless ends it."""

    def __init__(
        self,
        call: RotaryFunction,
        expect: Promise | None,
        pairing: Pairing | None,
        up_to: int,
        dtypes: tuple[torch.dtype, ...],
        backend: str | None,
    ) -> None:
        self.call, self.up_to, self.dtypes, self.backend = call, up_to, dtypes, backend
        self.expect, self.pairing = expect, pairing
        self.where = getattr(call.fn, "__qualname__", None) or type(call.fn).__name__
        self.generator = torch.Generator().manual_seed(0)
        self.found: list[Finding] = []
        self.described: list[str] = []
        self.checked: list[str] = []
        self.skipped: dict[str, str] = {}

    def report(self) -> Report:
        self._examine()
        kv = "" if self.call.kv_heads == self.call.heads else f", {self.call.kv_heads} of keys"
        subject = f"rotary function {self.where}: head_dim {self.call.head_dim}, {self.call.heads} heads{kv}"
        return Report.of(subject, self.found, described=self.described, checked=self.checked, skipped=self.skipped)

    def _ask(self, name: str, check: Callable[[], list[Finding]]) -> list[Finding]:
        """Run a check; one that the function refuses is skipped, with its reason."""
        try:
            found = check()
        except RaisedError as error:
            self.skipped[name] = str(error)
            return []
        self.checked.append(name)
        self.found += found
        return found

    def _has(self, *wanted: Kind) -> bool:
        return any(finding.kind in wanted and finding.severity == "error" for finding in self.found)

    def _examine(self) -> None:
        call, where, generator = self.call, self.where, self.generator
        size = sizes(call, where)
        self.checked.append("sizes")
        if isinstance(size, Finding):
            self.found.append(size)
            return
        self._ask("dtypes", lambda: [f for dtype in self._taken(size) for f in check_dtype(call, size, dtype, where)])
        if self._has(kinds.DTYPE):
            return
        self._ask("tokens", lambda: check_tokens(call, size, where, generator))
        if self._has(kinds.CALL_ORDER, kinds.AXIS, kinds.NORM):
            return
        self._ask("axes", lambda: check_axes(call, size, where, generator))
        if self._has(kinds.AXIS):
            return
        recall = Recall(call, self.up_to, where, generator)
        if self._ask("offsets", recall.check_offset):
            return
        if call.positions != "start" and self._ask("jumping positions", lambda: check_jumps(call, where, generator)):
            return
        planes = self._planes(size)
        if planes is not None:
            self._properties(planes)
        self._ask("call order", recall.check)
        if planes is not None and not self._has(kinds.CALL_ORDER, kinds.ROWS, kinds.BATCH):
            steady = kinds.LENGTH not in {finding.kind for finding in self.found}
            self.described += ["cache-safe: positions are honoured token by token, earlier calls leave no trace"] * steady

    def _taken(self, size: Sizes) -> list[torch.dtype]:
        """The dtypes that the function takes; others are skipped, with the reason."""
        taken = []
        for dtype in self.dtypes:
            try:
                check_dtype(self.call, size, dtype, self.where)
            except RaisedError as error:
                self.skipped[f"precision in {dtype}".replace("torch.", "")] = str(error)
            else:
                taken.append(dtype)
        self.dtypes = tuple(taken)
        return taken

    def _planes(self, size: Sizes) -> tuple[Planes, Planes] | None:
        at = doubling(self.up_to)
        self.dtype = self._widest(size)
        rounding = unit(self.dtype)
        both = matrices(self.call, at, self.dtype)
        if not all(bool(matrix.isfinite().all()) for matrix in both):
            self.found.append(
                kinds.NORM.at(
                    self.where, measured="results that are no finite numbers", expected="finite results of finite inputs"
                )
            )
            return None
        self.wide = any(bool((matrix.float().double() != matrix).any()) for matrix in both)
        self.checked.append("planes")
        alike = self.call.takes == "x"  # one function turns both, and what is wrong with it is said once
        read = [
            read_planes(matrix, at, self.where if alike else f"{self.where}, {side}", rounding)
            for matrix, side in zip(both, ("queries", "keys"), strict=True)
        ]
        alone = one_sided(read[0], read[1], self.where)
        if alone is not None:
            self.found.append(alone)
        wrong = [one for one in read if isinstance(one, Finding)]
        if wrong:
            self.found += [] if alone is not None else wrong
            turning = next((one for one in read if isinstance(one, Planes)), None)
            if turning is not None:
                self.described += words.channels(turning, self.call.head_dim)
            return None
        q, k = read
        assert isinstance(q, Planes)
        assert isinstance(k, Planes)
        return q, k

    def _widest(self, size: Sizes) -> torch.dtype:
        """float64 when the function takes it and keeps it: slow pairs then show more digits."""
        try:
            return self.call.dtype if check_dtype(self.call, size, torch.float64, self.where) else torch.float64
        except RaisedError:
            return self.call.dtype

    def _properties(self, planes: tuple[Planes, Planes]) -> None:
        call, where, generator, up_to = self.call, self.where, self.generator, self.up_to
        q, k = planes
        rounding = unit(self.dtype)
        self.described += words.channels(q, call.head_dim)
        self._ask("one rotation", lambda: compare_sides(q, k, where, rounding))
        self._ask("channels", lambda: compare_channels(q, self.expect, self.pairing, where))
        if not self._has(kinds.OPPOSITE, kinds.NOT_RELATIVE):
            self._ask("sense and offset", lambda: check_side(q, where, rounding))
        ladder = None if self.expect is None else promised_frequencies(q, self.expect, up_to)
        promised = ladder.inv_freq if isinstance(ladder, Frequencies) else None
        self._ask("each frequency once", lambda: check_repeated(q, promised, where))
        gains, decay = check_norm(q, k, where, 2.0**-6)  # a bfloat16 table leaves 2⁻⁸
        self.found += gains
        exact = not gains and self._precision(planes)
        if exact and decay is None:
            self._ask("norm", lambda: check_norm(q, k, where, 16 * rounding)[0])
        self._frequencies(planes, exact=exact)
        self.described += [] if decay is None else [decay]
        for dtype in self.dtypes:
            self._ask("content", partial(check_content, call, planes, dtype, up_to, where, generator))
        self._ask("gradient", lambda: check_gradient(call, up_to, where, generator))
        self._calls()
        steady = not self._has(*_SCORES) and kinds.LENGTH not in {finding.kind for finding in self.found}
        if exact and steady and decay is None:
            self._ask("scores", lambda: check_scores(call, q, self.dtype, up_to, where, generator))

    def _precision(self, planes: tuple[Planes, Planes]) -> bool:
        """Whether angles are exact, in each dtype and under autocast; the first that is not says enough."""
        rest = (self.up_to, self.where, self.generator)
        for dtype in dict.fromkeys(self.dtypes):
            check = partial(check_precision, self.call, planes, dtype, *rest)
            if self._ask(f"precision in {dtype}".replace("torch.", ""), check):
                return False
        if torch.float32 not in self.dtypes:
            return True
        return not self._ask("precision under autocast", partial(check_autocast, self.call, planes, *rest))

    def _calls(self) -> None:
        call, where, generator = self.call, self.where, self.generator
        if call.positions == "batch seq":
            self._ask("rows", lambda: check_rows(call, where, self.up_to, generator))
        else:
            self.skipped["rows"] = f"it takes positions as {call.positions!r}, the same for all rows"
        rule = self.expect.schedule if isinstance(self.expect, Rotation) else self.expect
        promised = isinstance(rule, LengthRule)
        self._ask("length", lambda: check_length(call, where, self.up_to, generator, promised=promised))
        if self.backend is not None:
            backend = self.backend
            self._ask("compiled", lambda: check_compiled(call, where, backend, self.up_to, generator))

    def _frequencies(self, planes: tuple[Planes, Planes], *, exact: bool) -> None:
        q, _ = planes
        if self._has(kinds.LAYOUT):
            return
        if unit(self.dtype) > FLOAT32:
            self.skipped["frequencies"] = "half precision shows three digits of them, which fit too many rules"
            return
        if kinds.TABLE_PRECISION in {finding.kind for finding in self.found}:
            self.skipped["frequencies"] = "cosines in half precision show three digits of them, which fit too many rules"
            return
        if self.expect is not None and not self._has(kinds.SPAN):
            self._ask("promised frequencies", partial(compare_frequencies, q, self.expect, self.up_to, self.where))
        found = words.reading(q, wide=self.wide)
        self.described += [str(found), f"amplitude {float(q.gains[0].median()):.6g}"]
        exact_ones = words.truth(found, q)
        if exact_ones is None and self.expect is None:
            self._ask("rounded frequencies", lambda: check_frequencies(q, self.where))
        if exact:
            target = q.turning if exact_ones is None else exact_ones
            error = angle_error(self.call, planes, target, self.up_to, self.dtype, self.generator)
            self.described.append(words.exactness(error, self.up_to, target))


_SCORES = (kinds.LAYOUT, kinds.OPPOSITE, kinds.NOT_RELATIVE, kinds.OFFSET, kinds.NORM)
"""Kinds that say already why scores do not depend on distance alone."""
