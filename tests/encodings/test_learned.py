"""A row per position, and what happens where there is none."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posenc import Learned, ShapeError, padded
from posenc.testing import conform, oracles

POLICIES = {
    "raise": {},
    "clamp": {"past_end": "clamp"},
    "interpolate": {"past_end": "interpolate"},
    "offset": {"offset": 2, "padding_idx": 1},
}


def settings(name, num_positions):
    return POLICIES[name] | ({"length": 3 * num_positions} if name == "interpolate" else {})


@pytest.mark.parametrize("name", POLICIES)
def test_conforms(name):
    claims = {"raise": (), "offset": (), "clamp": ("any-length",), "interpolate": ()}
    conform(
        lambda shape: Learned(shape.max_length, shape.dim, **settings(name, shape.max_length)),
        oracles.learned,
        claims=claims[name],
        other=lambda shape: Learned(2 * shape.max_length, shape.dim),
    )


def ramp(num_positions=4, dim=1, **arguments):
    """A table whose row r holds r in every channel."""
    encoding = Learned(num_positions, dim, **arguments)
    with torch.no_grad():
        encoding.weight.copy_(torch.arange(len(encoding.weight))[:, None].expand_as(encoding.weight))
    return encoding


def read(encoding, positions):
    positions = torch.as_tensor(positions)
    return encoding(torch.zeros(*positions.shape, encoding.dim), positions)[..., 0].tolist()


def test_position_p_reads_row_p_after_the_offset():
    assert read(ramp(4), [0, 3, 1]) == [0, 3, 1]
    assert read(ramp(4, offset=2), [0, 3, 1]) == [2, 5, 3]


def test_padded_rows_read_as_in_roberta():
    # huggingface/transformers#11242: positions start at padding_idx + 1, padding reads its own row
    encoding = ramp(512, offset=2, padding_idx=1)
    ids = torch.tensor([[0, 5, 6, 2, 1, 1]])
    tokens = padded(ids != 1, fill=-1)
    assert encoding.rows(tokens.positions).tolist() == [[2, 3, 4, 5, 1, 1]]
    assert len(encoding.weight) == 514
    assert read(encoding, [511]) == [513]
    with pytest.raises(ValueError, match="position 512. Expected positions from -1 to 511"):
        read(encoding, [512])
    assert len(ramp(510, offset=4, padding_idx=3).weight) == 514


@pytest.mark.parametrize("positions", [[4], [0, 4], [-1], [1 << 40]])
def test_there_are_no_rows_elsewhere(positions):
    # turboderp-org/exllamav2#606: a negative index must not wrap around
    with pytest.raises(ValueError, match=r"Learned: position -?\d+. Expected positions from 0 to 3; .* no rows elsewhere"):
        read(ramp(4), positions)


@pytest.mark.parametrize("past_end", ["clamp", "interpolate"])
def test_negative_positions_are_refused_by_every_policy(past_end):
    length = 8 if past_end == "interpolate" else None
    with pytest.raises(ValueError, match="position -1"):
        read(ramp(4, past_end=past_end, length=length), [0, -1])


def test_compiled_calls_refuse_too():
    torch.compiler.reset()
    compiled = torch.compile(ramp(4), fullgraph=True, backend="aot_eager")
    assert compiled(torch.zeros(2, 1), torch.tensor([1, 3])).flatten().tolist() == [1, 3]
    with pytest.raises(RuntimeError, match="a value check failed"):
        compiled(torch.zeros(2, 1), torch.tensor([1, 4]))


def test_clamp_repeats_the_last_row():
    assert read(ramp(4, past_end="clamp"), [2, 3, 4, 1000]) == [2, 3, 3, 3]
    assert read(ramp(4, past_end="clamp", offset=2), [1000]) == [5]


@given(st.integers(1, 9), st.integers(0, 30))
def test_interpolation_spreads_the_table_evenly(num_positions, more):
    length = num_positions + more
    encoding = ramp(num_positions, past_end="interpolate", length=length)
    expected = [p * (num_positions - 1) / max(length - 1, 1) for p in range(length)]
    assert read(encoding, range(length)) == pytest.approx(expected, rel=4 * 2**-24)


def test_interpolation_at_equal_length_is_the_table_itself():
    encoding = Learned(16, 8, past_end="interpolate", length=16)
    assert torch.equal(encoding(torch.zeros(16, 8), 0), encoding.weight)


def test_interpolation_does_not_follow_the_call():
    """A stretch by the length of the call would move tokens that a cache already holds."""
    encoding = Learned(8, 4, past_end="interpolate", length=32)
    x = torch.zeros(20, 4)
    assert torch.equal(encoding(x, 0)[:5], encoding(x[:5], 0))


def test_interpolation_takes_real_positions_and_padding():
    assert read(ramp(4, past_end="interpolate", length=7), [0.5, 1.0, 6.0]) == [0.25, 0.5, 3.0]
    assert read(ramp(4, past_end="interpolate", length=7, offset=2, padding_idx=0), [-1, 0, 6]) == [0, 2, 5]
    with pytest.raises(ValueError, match="position 7"):
        read(ramp(4, past_end="interpolate", length=7), [7])


@pytest.mark.parametrize("past_end", ["raise", "interpolate"])
def test_the_padding_row_gets_no_gradient(past_end):
    length = 4 if past_end == "interpolate" else None
    encoding = Learned(4, 2, offset=2, padding_idx=1, past_end=past_end, length=length)
    assert encoding.weight[1].eq(0).all()
    encoding(torch.zeros(3, 2), torch.tensor([-1, 0, 2])).sum().backward()
    assert encoding.weight.grad[:, 0].tolist() == [0, 0, 1, 0, 1, 0]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_narrow_integers_do_not_wrap(dtype):
    at = torch.tensor([0, 100, 127], dtype=dtype)
    assert read(ramp(300, offset=200), at) == [200, 300, 327]
    assert read(ramp(300, past_end="clamp", offset=200), at) == [200, 300, 327]
    assert read(ramp(300, past_end="interpolate", length=300), at) == [0, 100, 127]


def test_checkpoints_of_an_embedding_load():
    checkpoint = torch.nn.Embedding(6, 4).state_dict()
    encoding = Learned(6, 4)
    encoding.load_state_dict(checkpoint)
    assert torch.equal(encoding.weight, checkpoint["weight"])


def test_rows_start_small():
    weight = Learned(1000, 64).weight
    # the deviation of 64,000 draws strays by σ/√(2n), here 0.3 %; five of those
    assert weight.std().item() == pytest.approx(0.02, rel=0.014)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4, {}), "num_positions = 0"),
        ((4, 0, {}), "dim = 0"),
        ((4, 4, {"offset": -1}), "offset = -1"),
        ((4, 4, {"past_end": "wrap"}), "past_end = 'wrap'"),
        ((4, 4, {"past_end": "interpolate"}), "length = None with past_end = 'interpolate'"),
        ((4, 4, {"length": 8}), "length = 8 with past_end = 'raise'"),
        ((4, 4, {"past_end": "interpolate", "length": 3}), "Expected length ≥ num_positions = 4"),
        ((4, 4, {"padding_idx": 1}), "padding_idx = 1 with offset = 0"),
    ],
)
def test_impossible_settings_are_refused(arguments, message):
    num_positions, dim, rest = arguments
    with pytest.raises(ValueError, match=f"Learned: .*{message}"):
        Learned(num_positions, dim, **rest)


@pytest.mark.parametrize(
    ("width", "positions", "error", "message"),
    [
        (3, 0, ShapeError, "x has width 3. Expected 4"),
        (4, torch.zeros(2), TypeError, "because each reads a row of the table"),
        (4, torch.zeros(2, dtype=torch.float16), TypeError, "half precision"),
        (4, torch.arange(3), ShapeError, "one position per token"),
    ],
)
def test_impossible_inputs_are_refused(width, positions, error, message):
    with pytest.raises(error, match=f"Learned: .*{message}"):
        Learned(4, 4)(torch.zeros(2, width), positions)
