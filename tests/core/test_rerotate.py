"""Rotated keys moved to other positions and frequencies, against rotating the originals in float64 loops."""

from __future__ import annotations

from math import cos, sin

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posenc import Explicit, Frequencies, Geometric, ShapeError, apply_rotary, rotary_table, rotary_table_nd
from posenc.core.rerotate import rerotate, rerotation_error

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
BASE, LONGER = Geometric(1e4).frequencies(16), Geometric(5e5).frequencies(16)
MOVES = {
    "another base": {"new_frequencies": LONGER},
    "other positions": {"new_positions": torch.tensor([0, 1, 2, 3, 999_999, 5, 9_999_999])},
    "an amplitude": {"new_frequencies": Frequencies(BASE.inv_freq, 1.19)},
    "from one amplitude to another": {"frequencies": Frequencies(BASE.inv_freq, 0.75), "new_frequencies": Frequencies(LONGER.inv_freq, 2.5)},
    "all at once": {"new_frequencies": Frequencies(LONGER.inv_freq / 8, 1.3), "new_positions": torch.arange(7) - 3},
    "nothing": {},
}  # fmt: skip
FAR = torch.tensor([0, 1, 77, 4095, 131_071, 1_000_003, 10_000_000])
FARTHEST = 1e7  # radians: the fastest pair turns by one radian per position


def turned(x, at, frequencies, pairing="half", start=0):
    """Rotation by a matrix per pair: x [..., seq, width] float64, inv_freq [pairs]."""
    out, pairs = x.double().clone(), frequencies.inv_freq.shape[-1]
    for token, position in enumerate(at.tolist()):
        for pair, rate in enumerate(frequencies.inv_freq.tolist()):
            a, b = (pair, pair + pairs) if pairing == "half" else (2 * pair, 2 * pair + 1)
            c, s = frequencies.amplitude * cos(position * rate), frequencies.amplitude * sin(position * rate)
            one, other = x[..., token, a + start].double(), x[..., token, b + start].double()
            out[..., token, a + start], out[..., token, b + start] = one * c - other * s, other * c + one * s
    return out


def lengths(x, pairing="half"):
    """The length of each channel's pair."""
    pairs = x.shape[-1] // 2
    if pairing == "half":
        return torch.hypot(x[..., :pairs], x[..., pairs:]).repeat(*[1] * (x.ndim - 1), 2)
    return torch.hypot(x[..., 0::2], x[..., 1::2]).repeat_interleave(2, dim=-1)


def error(result, truth, pairing="half"):
    """The largest error of a channel, relative to the length of its pair."""
    return ((result.double() - truth).abs() / lengths(truth, pairing)).max().item()


def stored(x, at, frequencies, **layout):
    dtype = F64 if x.dtype == F64 else F32
    return apply_rotary(x, rotary_table(at, frequencies, dtype=dtype), **({"pairing": "half"} | layout))


@pytest.mark.parametrize("dtype", [F64, F32, F16, BF16])
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_it_is_within_its_error_of_rotating_the_originals(dtype, move, pairing):
    x = torch.randn(2, 3, 7, 16, dtype=F64).to(dtype)
    move = {"frequencies": BASE} | MOVES[move]
    moved = rerotate(stored(x, FAR, move["frequencies"], pairing=pairing), FAR, pairing=pairing, **move)
    truth = turned(x, move.get("new_positions", FAR), move.get("new_frequencies", move["frequencies"]), pairing)
    assert moved.dtype == dtype
    assert moved.shape == x.shape
    assert error(moved, truth, pairing) <= rerotation_error(dtype, farthest=FARTHEST)


@pytest.mark.parametrize(("dtype", "loose"), [(F16, 2), (BF16, 2), (F32, 18)])
def test_the_error_is_not_far_above_what_occurs(dtype, loose):
    # half precision: both roundings fall the same way now and then. float32: 16 of the 18 units are its arithmetic's worst
    x = torch.randn(64, 1, 7, 16).to(dtype)
    moved = rerotate(stored(x, FAR, BASE), FAR, frequencies=BASE, new_frequencies=LONGER, pairing="half")
    assert error(moved, turned(x, FAR, LONGER)) > rerotation_error(dtype) / loose


def test_the_error_by_dtype():
    assert rerotation_error(BF16) == 2 * 2**-8 + 2**-16 + 16 * 2**-24
    assert rerotation_error(F16) == 2 * 2**-11 + 2**-22 + 16 * 2**-24
    assert rerotation_error(F32) == 18 * 2**-24 + 2**-48
    assert rerotation_error(F64, farthest=1e7) == 18 * 2**-53 + 2**-106 + 2e7 * 2**-53
    assert rerotation_error(F32, farthest=1e3, angle_dtype=F32) == 18 * 2**-24 + 2**-48 + 2e3 * 2**-24


@pytest.mark.parametrize("dtype", [F64, F32, F16, BF16])
def test_what_does_not_move_comes_back_equal(dtype):
    keys = torch.randn(2, 3, 7, 16, dtype=F64).to(dtype)
    for frequencies in (BASE, Frequencies(BASE.inv_freq, 1.37), Frequencies(BASE.inv_freq, torch.tensor([1.37, 0.3]))):
        back = rerotate(keys, FAR, FAR.clone(), frequencies=frequencies, pairing="half")
        assert torch.equal(back, keys)
        assert back.data_ptr() != keys.data_ptr()


@given(st.integers(0, 10**6), st.integers(-(10**6), 10**6), st.floats(2, 1e7), st.sampled_from([F64, F32, F16, BF16]))
def test_there_and_back(position, shift, base, dtype):
    keys, at = torch.randn(1, 1, 16, dtype=F64).to(dtype), torch.tensor([position])
    there, other = {"pairing": "half"}, Geometric(base).frequencies(16)
    moved = rerotate(keys, at, at + shift, frequencies=BASE, new_frequencies=other, **there)
    back = rerotate(moved, at + shift, at, frequencies=other, new_frequencies=BASE, **there)
    # two rotations, of which the first has the place of the stored key's own
    assert error(back, keys.double()) <= rerotation_error(dtype, farthest=2e6)


def test_a_base_that_grows_with_length_is_repaired():
    # huggingface/transformers#25104: keys cached at length 2048 meet a query at length 4096
    grown = 30527.7367488067
    old, new = Geometric(1e4).frequencies(128), Geometric(grown).frequencies(128)
    pair = torch.zeros(1, 1, 128, dtype=F64)
    pair[..., 40] = 1.0
    cached, query = stored(pair, torch.tensor([100]), old), stored(pair, torch.tensor([4095]), new)
    assert (query * cached).sum().item() == pytest.approx(0.9883220365, abs=1e-10)
    moved = rerotate(cached, torch.tensor([100]), frequencies=old, new_frequencies=new, pairing="half")
    assert (query * moved).sum().item() == pytest.approx(0.9999830054, abs=1e-10)


def test_long_factors_take_over_with_their_amplitude():
    short = Explicit(tuple((BASE.inv_freq / torch.linspace(1, 1.2, 8)).tolist()), 1.19).frequencies(16)
    long = Explicit(tuple((BASE.inv_freq / torch.linspace(1, 40, 8)).tolist()), 1.24).frequencies(16)
    x, at = torch.randn(1, 2, 7, 16), torch.arange(4093, 4100)
    moved = rerotate(stored(x, at, short), at, frequencies=short, new_frequencies=long, pairing="half")
    assert error(moved, turned(x, at, long)) <= rerotation_error(F32)


def test_tokens_after_a_gap_close_up():
    # a sliding cache keeps 2 sinks and drops what follows; what is kept counts from 0 again
    x, kept = torch.randn(1, 2, 7, 16), torch.tensor([0, 1, 96, 97, 98, 99, 100])
    moved = rerotate(stored(x, kept, BASE), kept, 0, frequencies=BASE, pairing="half")
    assert error(moved, turned(x, torch.arange(7), BASE)) <= rerotation_error(F32)


def test_a_chunk_is_reused_elsewhere():
    x = torch.randn(1, 2, 7, 16)
    moved = rerotate(stored(x, torch.arange(7), BASE), 0, 500, frequencies=BASE, pairing="half")
    assert error(moved, turned(x, torch.arange(500, 507), BASE)) <= rerotation_error(F32)


def test_each_sequence_may_have_its_own():
    x, places = torch.randn(2, 3, 5, 16, dtype=F64), torch.stack([torch.arange(5), torch.arange(5) + 40])
    inv_freq = torch.stack([BASE.inv_freq, LONGER.inv_freq])
    gains = torch.tensor([1.0, 1.5], dtype=F64)
    per_row = Frequencies(inv_freq, gains)
    keys = torch.stack([stored(x[row], places[row], BASE) for row in range(2)])
    moved = rerotate(keys, places, frequencies=BASE, new_frequencies=per_row, pairing="half")
    back = rerotate(moved, places, 3, frequencies=per_row, new_frequencies=BASE, pairing="half")
    for row in range(2):
        truth = turned(x[row], places[row], Frequencies(inv_freq[row], gains[row].item()))
        assert error(moved[row], truth) <= rerotation_error(F64, farthest=45)
        # one more rotation, so one more of its roundings: half of the error again, at most
        assert error(back[row], turned(x[row], torch.arange(3, 8), BASE)) <= 1.5 * rerotation_error(F64, farthest=45)


def test_frequencies_alone_may_have_the_batch():
    x, inv_freq = torch.randn(2, 3, 5, 16), torch.stack([BASE.inv_freq, LONGER.inv_freq])
    keys = stored(x, torch.arange(5), BASE)
    moved = rerotate(keys, 0, frequencies=BASE, new_frequencies=Frequencies(inv_freq), pairing="half")
    for row in range(2):
        alone = rerotate(keys[row], 0, frequencies=BASE, new_frequencies=Frequencies(inv_freq[row]), pairing="half")
        assert torch.equal(moved[row], alone)


def test_positions_of_several_axes():
    x, at = torch.randn(1, 2, 6, 8, dtype=F64), torch.tensor([[t, 3 * t] for t in range(6)])
    old = Frequencies(torch.tensor([[1.0, 0.0, 0.1, 0.0], [0.0, 0.7, 0.0, 0.01]], dtype=F64), 1.1)
    new = Frequencies(old.inv_freq / 2, 1.3)
    keys = apply_rotary(x, rotary_table_nd(at, old, dtype=F64), pairing="half")
    moved = rerotate(keys, at, at + torch.tensor([9, -4]), frequencies=old, new_frequencies=new, pairing="half", axes=2)
    for pair in range(4):
        rates = new.inv_freq[:, pair].tolist()
        for token, (first, second) in enumerate((at + torch.tensor([9, -4])).tolist()):
            angle = first * rates[0] + second * rates[1]
            a, b = x[0, :, token, pair], x[0, :, token, pair + 4]
            expected = 1.3 * torch.stack([a * cos(angle) - b * sin(angle), b * cos(angle) + a * sin(angle)])
            actual = moved[0, :, token, [pair, pair + 4]].T
            # each pair reads one axis, so sums over axes add zeros and the bound of one axis holds
            assert (actual - expected).abs().max() <= rerotation_error(F64, farthest=20) * expected.norm(dim=0).max()


@pytest.mark.parametrize("layout", [{"head_axis": -2}, {"head_axis": None}, {"start": 4}, {"start": -16}])
def test_layouts(layout):
    x, start = torch.randn(2, 3, 7, 24), layout.get("start", 0) % 24
    frequencies = {"frequencies": BASE, "new_frequencies": LONGER}
    rotating = turned(x, FAR, LONGER, start=start)
    layout = {"pairing": "half"} | layout
    if layout.get("head_axis") == -2:
        keys = stored(x.transpose(1, 2), FAR, BASE, **layout)
        moved = rerotate(keys, FAR, **frequencies, **layout).transpose(1, 2)
    else:
        moved = rerotate(stored(x, FAR, BASE, **layout), FAR, **frequencies, **layout)
    part = slice(start, start + 16)
    assert error(moved[..., part], rotating[..., part]) <= rerotation_error(F32)
    assert torch.equal(moved[..., start + 16 :], x[..., start + 16 :])
    assert torch.equal(moved[..., :start], x[..., :start])


def test_float32_frequencies_are_undone_as_they_were_applied():
    # their angles are off by up to 10⁶ · 2⁻²⁴ = 0.06 radians, but what is undone is what was done
    old, new = (Geometric(base).frequencies(16, dtype=F32) for base in (1e4, 5e5))
    x, at = torch.randn(1, 2, 3, 16), torch.tensor([99, 77_777, 1_000_003])
    moved = rerotate(stored(x, at, old), at, frequencies=old, new_frequencies=new, pairing="half")
    direct = stored(x, at, new)
    allowed = 2 * rerotation_error(F32, farthest=at.max().item(), angle_dtype=F32)
    assert error(moved, direct.double()) <= allowed
    same = rerotate(stored(x, at, old), at, at, frequencies=old, pairing="half")
    assert torch.equal(same, stored(x, at, old))


def test_integers_beyond_float32_meet_real_positions():
    x, at = torch.randn(1, 1, 1, 16, dtype=F64), torch.tensor([2**24 + 1])
    moved = rerotate(stored(x, at, BASE), at, torch.tensor([0.5]), frequencies=BASE, pairing="half")
    assert error(moved, turned(x, torch.tensor([0.5]), BASE)) <= rerotation_error(F64, farthest=2**24 + 1)


def test_it_is_differentiable():
    keys, at = torch.randn(1, 2, 3, 8, dtype=F64, requires_grad=True), torch.tensor([0, 5, 70])
    old, new = (Geometric(base).frequencies(8) for base in (1e4, 5e5))

    def moved(keys):
        return rerotate(keys, at, at - 3, frequencies=old, new_frequencies=Frequencies(new.inv_freq, 1.2), pairing="half")

    assert torch.autograd.gradcheck(moved, (keys,))


def test_one_graph_for_all_lengths():
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()
    counter, gains = CompileCounterWithBackend("aot_eager"), torch.tensor([1.0, 1.3])

    def move(keys, at, gains):
        new = Frequencies(LONGER.inv_freq, gains)
        return rerotate(keys, at, at - 2, frequencies=Frequencies(BASE.inv_freq, gains), new_frequencies=new, pairing="half")

    compiled = torch.compile(move, fullgraph=True, backend=counter)
    for length in (4, 9, 17, 5):
        keys, at = torch.randn(2, 2, length, 16), torch.arange(length)
        assert torch.equal(compiled(keys, at, gains), move(keys, at, gains))
    assert counter.frame_count <= 2


def test_inputs_are_not_changed():
    keys, at = torch.randn(1, 2, 7, 16), FAR.clone()
    kept = keys.clone()
    rerotate(keys, at, at - 1, frequencies=BASE, new_frequencies=LONGER, pairing="half")
    assert torch.equal(keys, kept)
    assert torch.equal(at, FAR)


GAINS = torch.tensor([1.0, 0.0])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"frequencies": Frequencies(BASE.inv_freq, 0.0)}, ValueError, "rerotate: amplitude = 0.0. Expected a finite number other than 0"),
        ({"frequencies": Frequencies(BASE.inv_freq, float("inf"))}, ValueError, "rerotate: amplitude = inf"),
        ({"frequencies": Frequencies(BASE.inv_freq, GAINS)}, ValueError, "rerotate: amplitude = 0.0. Expected"),
        ({"new_frequencies": Geometric().frequencies(8)}, ShapeError, "rerotate: frequencies of 8 pairs and new ones of 4. Expected as many"),
        ({"new_frequencies": Geometric().frequencies(16, dtype=F32)}, TypeError, "inv_freq is torch.float64 and the new one torch.float32"),
        ({"frequencies": Frequencies(BASE.inv_freq.half())}, TypeError, "rerotate: inv_freq is torch.float16"),
        ({"positions": torch.arange(6)}, ShapeError, "rerotate: positions have shape"),
        ({"new_positions": torch.arange(6)}, ShapeError, r"rerotate \(new\): positions have shape"),
        ({"new_positions": torch.arange(7).half()}, TypeError, r"rerotate \(new\): positions are torch.float16"),
        ({"pairing": "neox"}, ValueError, "pairing = 'neox'"),
        ({"start": 4}, ShapeError, "start = 4 for head_dim = 16"),
    ],
)  # fmt: skip
def test_what_cannot_be_moved_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        rerotate(torch.ones(2, 3, 7, 16), **({"positions": FAR, "frequencies": BASE, "pairing": "half"} | arguments))
