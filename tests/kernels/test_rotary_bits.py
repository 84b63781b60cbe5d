"""The compiled kernel gives the bits of the arithmetic in torch: every number of 16 bits, every layout, every size."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch
from tests.kernels.same_bits import BF16, DTYPES, F16, F32, F64, PAIRINGS, bits, check_pair, same, table_of

from posenc import RotaryTable, apply_rotary, apply_rotary_, apply_rotary_pair

rotary = pytest.importorskip("posenc.kernels._rotary")
from posenc.kernels import native  # noqa: E402  (it needs the line above)

SOURCE = (Path(__file__).parents[2] / "src/posenc/kernels/rotary.c").read_text()
TILE_BYTES, SERIAL_BYTES = (int(re.search(rf"#define {name} (\d+)", SOURCE)[1]) for name in ("TILE_BYTES", "SERIAL_BYTES"))


# --- numbers of 16 bits -----------------------------------------------------------------------------------------------


def every(dtype):
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)


def turned_by(first, second, cos, sin, dtype, pairing):
    """Pairs (first, second) turned by (cos, sin), as one row of channels."""
    axis = -1 if pairing == "interleaved" else -2
    x = torch.stack([first, second], dim=axis).flatten().to(dtype)
    turned = [
        apply_rotary(x[None, None], RotaryTable(cos[None], sin[None]), pairing=pairing, backend=backend).flatten()
        for backend in ("native", "reference")
    ]
    assert same(*turned)
    return turned[0].reshape((-1, 2) if axis == -1 else (2, -1)).select(axis, 0)


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_every_number_passes_an_angle_of_zero_unchanged(dtype, pairing):
    # a·1 - 0·0 is a, zeros with their sign, subnormals, infinity and NaN as they are
    numbers = every(dtype)
    ones, zeros = torch.ones(2**16), torch.zeros(2**16)
    turned = turned_by(numbers, torch.zeros_like(numbers), ones, zeros, dtype, pairing)
    assert torch.equal(bits(turned), bits(numbers))
    assert 2 * (2 ** (7 if dtype == BF16 else 10) - 1) == int(turned.isnan().sum())


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_results_round_as_torch_rounds(dtype, pairing):
    # 1·c - 0·0 is c, so the cosine is what gets rounded: each number, halfway to the next, and one step to either side
    numbers = every(dtype).float()
    numbers = numbers[numbers.isfinite()].unique()
    halfway = (numbers[:-1] + numbers[1:]) / 2
    overflow = torch.tensor([float(numbers[-1]) * (1 + 2.0 ** -(8 if dtype == BF16 else 11))])  # would be halfway to 2ⁿ
    ties = torch.cat([halfway, overflow, -overflow])
    up, down = (torch.nextafter(ties, torch.tensor(to)) for to in (torch.inf, -torch.inf))
    anything = torch.randint(-(2**31), 2**31, (2**18,), dtype=torch.int32).view(F32)
    cos = torch.cat([numbers, ties, up, down, anything, torch.tensor([torch.inf, -torch.inf, torch.nan])])
    turned = turned_by(torch.ones_like(cos), torch.zeros_like(cos), cos, torch.zeros_like(cos), dtype, pairing)
    assert torch.equal(bits(turned), bits(cos.to(dtype)))


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_nan_and_numbers_near_overflow(dtype, pairing):
    odd = [0.0, -0.0, 1.0, -1.5, torch.inf, -torch.inf, torch.nan, torch.finfo(dtype).max, torch.finfo(dtype).tiny]
    x = torch.cartesian_prod(*[torch.tensor([*odd, torch.finfo(dtype).smallest_normal / 4], dtype=dtype)] * 2)
    for c, s in [(1.0, 0.0), (0.0, 1.0), (0.6, -0.8), (2.0, 2.0), (torch.inf, 0.0), (torch.nan, 1.0)]:
        wide = F64 if dtype == F64 else F32
        cos, sin = (torch.full((len(x),), value, dtype=wide) for value in (c, s))
        turned_by(x[:, 0], x[:, 1], cos, sin, dtype, pairing)


def test_small_halves_survive_where_denormal_floats_do_not():
    numbers = every(F16)[:1024].abs()  # the hardware's conversion is exact even where float arithmetic flushes
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormal numbers")
    try:
        turned_by(numbers, numbers, torch.full((1024,), 0.6), torch.full((1024,), 0.8), F16, "half")
    finally:
        torch.set_flush_denormal(False)


# --- layouts ----------------------------------------------------------------------------------------------------------

AT = torch.tensor([[0, 1, 2, 500, 7], [3, 3, 90, 11, 1_000_003]])


def randn(*shape, dtype):
    return torch.randn(shape).to(dtype)


LAYOUTS = {
    "plain": lambda d, t: (randn(2, 4, 5, 14, dtype=d), randn(2, 2, 5, 14, dtype=d), table_of(AT[0], 7, t), {}),
    "one batch": lambda d, t: (randn(1, 4, 5, 8, dtype=d), randn(1, 4, 5, 8, dtype=d), table_of(AT[:1], 4, t), {}),
    "table per batch": lambda d, t: (randn(2, 4, 5, 8, dtype=d), randn(2, 1, 5, 8, dtype=d), table_of(AT, 4, t), {}),
    "table of one batch": lambda d, t: (randn(2, 4, 5, 8, dtype=d), randn(2, 1, 5, 8, dtype=d), table_of(AT[:1], 4, t), {}),
    "no batch": lambda d, t: (randn(4, 5, 8, dtype=d), randn(2, 5, 8, dtype=d), table_of(AT[0], 4, t), {}),
    "tokens first": lambda d, t: (
        randn(2, 5, 4, 8, dtype=d), randn(2, 5, 2, 8, dtype=d), table_of(AT, 4, t), {"head_axis": -2},
    ),
    "tokens first in memory": lambda d, t: (
        randn(2, 5, 4, 8, dtype=d).transpose(1, 2), randn(2, 5, 2, 8, dtype=d).transpose(1, 2), table_of(AT, 4, t), {},
    ),
    "heads first in memory": lambda d, t: (
        randn(2, 4, 5, 8, dtype=d).transpose(1, 2), randn(2, 2, 5, 8, dtype=d).transpose(1, 2), table_of(AT, 4, t),
        {"head_axis": -2},
    ),
    "table per head": lambda d, t: (
        randn(2, 2, 5, 8, dtype=d), randn(2, 2, 5, 8, dtype=d), table_of(AT[:, None] + torch.tensor([0, 9])[:, None], 4, t),
        {"head_axis": None},
    ),
    "no heads": lambda d, t: (randn(2, 5, 8, dtype=d), randn(2, 5, 8, dtype=d), table_of(AT, 4, t), {"head_axis": None}),
    "one table for all": lambda d, t: (
        randn(2, 3, 5, 8, dtype=d), randn(3, 3, 4, 8, dtype=d), table_of([9], 4, t), {"head_axis": None},
    ),
    "a table of pairs alone": lambda d, t: (
        randn(5, 8, dtype=d), randn(3, 8, dtype=d), RotaryTable(*(x[0] for x in table_of([9], 4, t))), {"head_axis": None},
    ),
    "one vector": lambda d, t: (
        randn(8, dtype=d), randn(8, dtype=d), RotaryTable(*(x[0] for x in table_of([9], 4, t))), {"head_axis": None},
    ),
    "leading": lambda d, t: (randn(1, 2, 5, 11, dtype=d), randn(1, 2, 5, 11, dtype=d), table_of(AT[0], 3, t), {}),
    "middle": lambda d, t: (randn(1, 2, 5, 11, dtype=d), randn(1, 2, 5, 11, dtype=d), table_of(AT[0], 3, t), {"start": 3}),
    "trailing": lambda d, t: (randn(1, 2, 5, 11, dtype=d), randn(1, 2, 5, 11, dtype=d), table_of(AT[0], 3, t), {"start": -6}),
    "trailing of two widths": lambda d, t: (
        randn(1, 2, 5, 11, dtype=d), randn(1, 2, 5, 8, dtype=d), table_of(AT[0], 3, t), {"start": -6},
    ),
    "two widths": lambda d, t: (randn(1, 2, 5, 11, dtype=d), randn(1, 2, 5, 8, dtype=d), table_of(AT[0], 3, t), {"start": 1}),
    "no pairs": lambda d, t: (randn(1, 2, 5, 3, dtype=d), randn(1, 2, 5, 3, dtype=d), table_of(AT[0], 0, t), {"start": 1}),
    "slices of one projection": lambda d, t: (
        (x := randn(2, 5, 3, 4, 8, dtype=d)).select(2, 0).transpose(1, 2), x.select(2, 1).transpose(1, 2), table_of(AT, 4, t), {},
    ),
    "every other channel": lambda d, t: (
        randn(2, 4, 5, 16, dtype=d)[..., ::2], randn(2, 4, 5, 8, dtype=d), table_of(AT, 4, t), {},
    ),
    "channels outermost": lambda d, t: (
        randn(8, 2, 4, 5, dtype=d).permute(1, 2, 3, 0), randn(8, 2, 4, 5, dtype=d).permute(1, 2, 3, 0), table_of(AT, 4, t), {},
    ),
    "expanded": lambda d, t: (
        randn(2, 1, 5, 8, dtype=d).expand(2, 4, 5, 8), randn(1, 1, 5, 8, dtype=d).expand(2, 3, 5, 8), table_of(AT, 4, t), {},
    ),
    "overlapping": lambda d, t: (
        randn(100, dtype=d).as_strided((2, 3, 5, 8), (3, 2, 5, 1)), randn(40, dtype=d).unfold(0, 8, 4)[None, None, :5], table_of(AT[0], 4, t), {},
    ),
    "expanded table": lambda d, t: (
        randn(2, 3, 5, 8, dtype=d), randn(2, 3, 5, 8, dtype=d), RotaryTable(*(x.expand(5, 4) for x in table_of([9], 1, t))), {},
    ),
    "strided table": lambda d, t: (
        randn(2, 3, 5, 8, dtype=d), randn(2, 3, 5, 8, dtype=d), RotaryTable(*(x[:, ::2] for x in table_of(AT[0], 8, t))), {},
    ),
    "cosine and sine laid out differently": lambda d, t: (
        randn(2, 3, 5, 8, dtype=d), randn(2, 3, 5, 8, dtype=d),
        RotaryTable((x := table_of(AT[0], 4, t)).cos, x.sin.T.contiguous().T), {},
    ),
    "table of the other precision": lambda d, t: (
        randn(2, 3, 5, 8, dtype=d), randn(2, 3, 5, 8, dtype=d), table_of(AT, 4, F64 if t == F32 else F32), {},
    ),
    "nine axes": lambda d, t: (randn(1, 2, 1, 2, 2, 1, 3, 5, 8, dtype=d), randn(*[1] * 6, 3, 5, 8, dtype=d), table_of(AT[0], 4, t), {}),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    for dtype, pairing in itertools.product(DTYPES, PAIRINGS):
        q, k, table, settings = LAYOUTS[layout](dtype, F64 if dtype == F64 else F32)
        check_pair(q, k, table, pairing=pairing, **settings)


def test_ten_axes_are_turned_in_torch():
    x, table = torch.randn(1, 1, 1, 1, 1, 1, 2, 3, 5, 8), table_of(AT[0], 4)
    expected = apply_rotary(x[0], table, pairing="half")[None]
    assert same(apply_rotary(x, table, pairing="half"), expected)
    assert all(same(turned, expected) for turned in apply_rotary_pair(x, x, table, pairing="half"))


@pytest.mark.parametrize("pairs", [1, 3, 7, 8, 33, 63, 64, 65, 130])  # around vectors of 4, 8, 16 and chunks of 64
def test_numbers_of_pairs(pairs):
    for dtype, pairing in itertools.product(DTYPES, PAIRINGS):
        q, k = (randn(2, heads, 5, 2 * pairs + 3, dtype=dtype) for heads in (2, 1))
        table, k_table = (table_of(AT + shift, pairs, F64 if dtype == F64 else F32) for shift in (0, 13))
        check_pair(q, k, table, k_table, pairing=pairing, start=2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_addresses_that_are_not_aligned(dtype):
    table = table_of(AT[0], 16, F64 if dtype == F64 else F32)
    wide = table.cos.element_size()
    for offset in (1, 3):
        owner = bytearray(torch.randn(10, 32).to(dtype).view(torch.uint8).numpy().tobytes() + bytes(8))
        x = torch.frombuffer(memoryview(bytearray(offset) + owner), dtype=dtype, offset=offset, count=320).reshape(2, 5, 32)
        shifted = RotaryTable(
            *(
                torch.frombuffer(bytearray(offset) + part.numpy().tobytes(), dtype=part.dtype, offset=offset).reshape(5, 16)
                for part in table
            )
        )
        assert x.data_ptr() % x.element_size()
        assert shifted.cos.data_ptr() % wide
        for pairing in PAIRINGS:
            expected = apply_rotary(x.clone(), table, pairing=pairing, backend="reference")
            assert same(apply_rotary(x, shifted, pairing=pairing, backend="native"), expected)


# --- tiles and threads ------------------------------------------------------------------------------------------------


@pytest.fixture(params=[1, 2, "without torch_parallel_for"])
def threads(request):
    torch.set_num_threads(2 if request.param == 2 else 1)
    if request.param == "without torch_parallel_for":
        rotary.use_threads(0)
    yield
    torch.set_num_threads(1)
    rotary.use_threads(native._torch_threads() or 0)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_every_remainder_of_a_tile(threads, pairing):
    pairs, step = 24, 2048  # rows of the table lie far apart, so that a tile is a few tokens
    tile = TILE_BYTES // (2 * 4 * step + 1)
    assert tile >= 4, "or nothing is tiled"
    most = 4 * tile + 2
    wide = table_of(torch.arange(2 * most).reshape(2, most), pairs)
    room = [torch.zeros(2, most, step) for _ in wide]
    for part, into in zip(wide, room, strict=True):
        into[..., :pairs] = part
    for tokens in range(most):
        q, k = torch.randn(2, 9, tokens, 50), torch.randn(2, 2, tokens // 2, 54)[..., 1:-3]
        table, k_table = (RotaryTable(*(part[:, :n, :pairs] for part in room)) for n in (tokens, tokens // 2))
        by_token = q.transpose(1, 2).contiguous().transpose(1, 2)
        for x in (q, by_token):
            expected = apply_rotary_pair(x, k, table, k_table, pairing=pairing, start=1, backend="reference")
            assert all(map(same, apply_rotary_pair(x, k, table, k_table, pairing=pairing, start=1), expected))
            assert same(apply_rotary_(x, table, pairing=pairing, start=1), expected[0])  # nothing is turned twice
    assert q.numel() * 4 > SERIAL_BYTES  # in parallel, then


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_calls_are_shared_by_threads(threads, dtype):
    q, k = randn(3, 5, 67, 96, dtype=dtype), randn(3, 1, 45, 96, dtype=dtype)
    tables = [table_of(torch.arange(x.shape[2]), 40, F64 if dtype == F64 else F32) for x in (q, k)]
    for pairing in PAIRINGS:
        check_pair(q, k, *tables, pairing=pairing, start=-88)


def test_threads_are_torchs_own():
    assert native._torch_threads(), "torch 2.10 and later have torch_parallel_for"
    assert native.threads() == "torch's own threads"


# --- compiled by torch ------------------------------------------------------------------------------------------------


@pytest.mark.slow  # Inductor's first graph takes half a minute
@pytest.mark.parametrize("dtype", [F32, F64])
def test_inductor_gives_the_same_bits(dtype):
    torch.compiler.reset()

    @torch.compile(fullgraph=True)
    def compiled(q, k, cos, sin):
        table = RotaryTable(cos, sin)
        return [apply_rotary_pair(q, k, table, pairing=pairing, start=2) for pairing in PAIRINGS]

    q, k = randn(2, 3, 5, 70, dtype=dtype), randn(2, 1, 5, 70, dtype=dtype)
    table = table_of(AT, 33, dtype)
    for pairing, turned in zip(PAIRINGS, compiled(q, k, *table), strict=True):
        expected = apply_rotary_pair(q, k, table, pairing=pairing, start=2, backend="native")
        assert all(map(same, turned, expected))


# --- called by hand, with anything ------------------------------------------------------------------------------------

X, OUT, COS, SIN = torch.randn(2, 3, 8), torch.empty(2, 3, 8), torch.randn(3, 4), torch.randn(3, 4)
HEAD = [0, 0, 0, -3, 0]
TENSOR = [X.data_ptr(), OUT.data_ptr(), (2, 3, 8), (24, 8, 1), (24, 8, 1)]
TABLE = [COS.data_ptr(), SIN.data_ptr(), (3, 4), (4, 1)]


def test_a_call_by_hand_turns():
    rotary.rotate(*HEAD, *TENSOR, *TABLE)
    assert same(OUT, apply_rotary(X, RotaryTable(COS, SIN), pairing="half", backend="reference"))


@pytest.mark.parametrize("value", [None, "x", 1.5, b"12", [2, 3, 8], (2, 3, "8"), (2, None, 8), 2**80, -(2**80), (2**70, 3, 8)])
def test_wrong_types_are_errors(value):
    for at in range(14):
        arguments = [*HEAD, *TENSOR, *TABLE]
        arguments[at] = value
        with pytest.raises((TypeError, OverflowError, ValueError)):
            rotary.rotate(*arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({0: 4}, "unknown dtype"),
        ({0: -1}, "unknown dtype"),
        ({1: 2}, "unknown dtype, pairing"),
        ({3: 1}, "axis of heads"),
        ({3: -1}, "axis of heads"),
        ({3: -(2**32) - 3}, "axis of heads"),
        ({2: 1}, "turning channels"),
        ({2: -1}, "turning channels"),
        ({2: 2**63 - 1}, "turning channels"),
        ({12: (3, 5)}, "turning channels"),
        ({12: (3, 2**62)}, "turning channels"),
        ({12: (4, 4)}, "does not spread"),
        ({12: (1, 4)}, "does not spread"),
        ({12: (2, 2, 3, 4), 13: (0, 0, 4, 1)}, "more axes"),
        ({12: (4,), 13: (1,)}, "the table none of tokens"),
        ({7: (3, 8), 8: (8, 1), 9: (8, 1)}, "no axis of heads"),
        ({7: (), 8: (), 9: ()}, "or empty ones"),
        ({8: (8, 1)}, "different lengths"),
        ({9: (24, 8, 1, 1)}, "different lengths"),
        ({13: (1,)}, "different lengths"),
        ({7: (1,) * 10}, "at most 9"),
    ],
)
def test_wrong_values_are_errors(changes, message):
    arguments = [*HEAD, *TENSOR, *TABLE]
    for at, value in changes.items():
        arguments[at] = value
    with pytest.raises(ValueError, match=message):
        rotary.rotate(*arguments)


def test_a_wrong_number_of_arguments_is_an_error():
    for count in {*range(33)} - {14, 19, 23}:
        with pytest.raises(TypeError, match="one or two tensors of five arguments, then tables of four"):
            rotary.rotate(*([*HEAD, *TENSOR, *TABLE] * 3)[:count])
    with pytest.raises(TypeError):
        rotary.rotate(*HEAD, *TENSOR, *TABLE, x=1)
    for address in (None, "0", 2**80):
        with pytest.raises((TypeError, OverflowError)):
            rotary.use_threads(address)


@pytest.mark.parametrize("shared", [True, False])
def test_a_call_by_hand_turns_two(shared):
    second, turned = torch.randn(1, 3, 8), torch.empty(1, 3, 8)
    own = RotaryTable(COS, SIN) if shared else RotaryTable(torch.randn(3, 4), torch.randn(3, 4))
    tables = TABLE if shared else [*TABLE, own.cos.data_ptr(), own.sin.data_ptr(), (3, 4), (4, 1)]
    rotary.rotate(*HEAD, *TENSOR, second.data_ptr(), turned.data_ptr(), (1, 3, 8), (24, 8, 1), (24, 8, 1), *tables)
    assert same(OUT, apply_rotary(X, RotaryTable(COS, SIN), pairing="half", backend="reference"))
    assert same(turned, apply_rotary(second, own, pairing="half", backend="reference"))


def test_an_error_in_the_second_tensor_leaves_the_first_alone():
    OUT.fill_(7)
    wrong = [*TABLE]
    wrong[2] = (3, 5)
    with pytest.raises(ValueError, match="turning channels"):
        rotary.rotate(*HEAD, *TENSOR, *TENSOR, *TABLE, *wrong)
    assert torch.equal(OUT, torch.full_like(OUT, 7))
