"""A ladder in Hz, and sinusoids of seconds: the same instant has the same code at any rate."""

from __future__ import annotations

from math import cos, pi, sin

import pytest
import torch

from posenc import Explicit, Geometric, RoPE, Sinusoidal, seconds
from posenc.schedules.hertz import Hertz
from posenc.testing import conform

F64 = torch.float64


def ladder(slowest, fastest, pairs):
    """Equal steps of the logarithm from fastest to slowest, in radians per second."""
    return [2 * pi * fastest * (slowest / fastest) ** (i / (pairs - 1)) for i in range(pairs)]


@pytest.mark.parametrize("pairs", [2, 3, 32, 192])
@pytest.mark.parametrize(("slowest", "fastest"), [(1 / 30, 25.0), (0.1, 50), (1, 8_000.0)])
def test_frequencies_run_from_the_fastest_to_the_slowest(slowest, fastest, pairs):
    inv_freq = Hertz(slowest, fastest).frequencies(2 * pairs).inv_freq
    # a power of a ratio down to 1e-4 (ln 10 ≈ 9) and three products: some twenty roundings
    assert inv_freq.tolist() == pytest.approx(ladder(slowest, fastest, pairs), rel=20 * 2**-53)
    assert inv_freq[0] == 2 * pi * fastest
    assert inv_freq[-1].item() == pytest.approx(2 * pi * slowest, rel=20 * 2**-53)


def test_frames_give_the_widest_ladder():
    assert Hertz.of_frames(clip=30.0, hop=0.01) == Hertz(1 / 30, 50.0)
    table = Sinusoidal(8, schedule=Hertz.of_frames(clip=32, hop=0.0078125)).table(
        seconds(4096, 125, 16_000).positions, dtype=F64
    )
    # the slowest pair turns once per clip, so no two frames have its code; the fastest turns every second frame
    slowest = table[:, 6:]
    assert (slowest[1:] - slowest[:1]).norm(dim=-1).min() > 0.9 * 2 * pi / 4096
    torch.testing.assert_close(table[0::2, :2], table[:1, :2].expand(2048, -1), rtol=0.0, atol=4 * 2 * pi * 2048 * 2**-53)


RATES = [(16_000, 160), (24_000, 240), (8_000, 80), (44_100, 441), (16_000, 320), (48_000, 120)]


@pytest.mark.parametrize(("sample_rate", "hop"), RATES)
def test_the_same_instant_has_the_same_code(sample_rate, hop):
    instants = [0.0, 0.02, 1.5, 29.98]
    frames = torch.tensor([round(t * sample_rate / hop) for t in instants])
    at = seconds(int(frames.max()) + 1, hop, sample_rate).positions[frames]
    encoding = Sinusoidal(16, schedule=Hertz(1 / 30, 25.0))
    table = encoding.table(at, dtype=F64)
    for row, instant in zip(table.tolist(), instants, strict=True):
        expected = [wave(instant * w) for w in ladder(1 / 30, 25.0, 8) for wave in (sin, cos)]
        # angles of up to 30 s · 157 rad/s, off by four roundings of themselves and twenty of the frequency
        assert row == pytest.approx(expected, abs=24 * 30 * 157 * 2**-53)


def test_a_cut_in_the_middle_keeps_its_time():
    encoding, x = Sinusoidal(8, schedule=Hertz(1 / 30, 25.0)), torch.zeros(200, 8)
    whole = encoding(x, seconds(200, 160, 16_000).positions)
    later = encoding(x[150:], seconds(50, 160, 16_000, start=1.5).positions)
    # float32 codes of angles that agree to 1e-12
    torch.testing.assert_close(later, whole[150:], rtol=0.0, atol=2**-23)


def test_frame_numbers_give_another_code_at_another_hop():
    """Why positions should be seconds."""
    encoding = Sinusoidal(8)
    assert not torch.allclose(encoding.table(torch.tensor([150])), encoding.table(torch.tensor([75])), atol=0.1)


def oracle(encoding, x, positions):
    out = x.double().clone()
    for row, position in enumerate(positions.tolist()):
        for pair, w in enumerate(ladder(encoding.schedule.slowest, encoding.schedule.fastest, encoding.dim // 2)):
            out[row, 2 * pair] += sin(position * w)
            out[row, 2 * pair + 1] += cos(position * w)
    return out


def test_sinusoids_of_a_schedule_conform():
    # at most one radian per unit of position, which is what far positions are owed
    conform(lambda shape: Sinusoidal(shape.dim, schedule=Hertz(1e-4, 0.15)), oracle, claims=Sinusoidal.spec.claims)


def test_a_schedule_replaces_rule_and_base():
    plain = Sinusoidal(8, schedule=Geometric(500.0))
    at = torch.tensor([0, 3, 1000])
    assert torch.equal(plain.table(at), Sinusoidal(8, base=500.0).table(at))
    louder = Sinusoidal(4, schedule=Explicit((1.0, 0.5), amplitude=2.0), layout="concatenated")
    assert louder.table(torch.tensor([0])).tolist() == [[0, 0, 2, 2]]
    assert "schedule=Geometric(base=500.0)" in repr(plain)


def test_it_turns_queries_and_keys_as_well():
    rope, q = RoPE(8, Hertz(0.1, 10.0)), torch.randn(2, 1, 3, 8, dtype=F64)
    for rate, hop in ((16_000, 160), (8_000, 80)):
        at = seconds(3, hop, rate).positions
        torch.testing.assert_close(rope(q, q, at)[0], rope(q, q, torch.tensor([0, 0.01, 0.02], dtype=F64))[0])


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Hertz(25.0, 0.03), ValueError, "Hertz: slowest = 25, fastest = 0.03. Expected slowest below fastest"),
        (lambda: Hertz(1.0, 1.0), ValueError, "Expected slowest below fastest"),
        (lambda: Hertz(0.0, 1.0), ValueError, "Hertz: slowest = 0.0. Expected a finite number above 0"),
        (lambda: Hertz(1.0, float("inf")), ValueError, "Hertz: fastest = inf"),
        (lambda: Hertz("1", 2.0), TypeError, "Hertz: slowest = '1'"),
        (lambda: Hertz.of_frames(0.01, 0.01), ValueError, "Hertz.of_frames: clip = 0.01, hop = 0.01. .* more than two hops"),
        (lambda: Hertz.of_frames(30.0, 0.0), ValueError, "hop = 0.0"),
        (lambda: Hertz.of_frames(30.0, None), TypeError, "Hertz.of_frames: hop = None. Expected seconds"),
        (lambda: Hertz(0.1, 1.0).frequencies(2), ValueError, "Hertz.frequencies: rotary_dim = 2. Expected 4 or more"),
        (lambda: Hertz(0.1, 1.0).frequencies(7), ValueError, "Hertz.frequencies: rotary_dim = 7"),
        (lambda: Sinusoidal(8, schedule=10_000.0), TypeError, "Sinusoidal: schedule = 10000.0. Expected a schedule"),
        (lambda: Sinusoidal(8, schedule=Hertz(0.1, 1.0), base=100.0), ValueError, "base = 100 beside a schedule"),
        (
            lambda: Sinusoidal(8, schedule=Hertz(0.1, 1.0), frequency_rule="tensor2tensor"),
            ValueError,
            "frequency_rule = 'tensor2tensor', .* beside a schedule",
        ),
        (lambda: Sinusoidal(7, schedule=Hertz(0.1, 1.0)), ValueError, "Sinusoidal: dim = 7 with a schedule"),
    ],
)
def test_impossible_settings_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()
