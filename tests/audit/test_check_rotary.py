"""check_rotary: what it reads off functions whose truth is known, written here from the formulas or taken from libraries."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from math import cos, sin
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.audit.bugs.rotary import angles, by_length, good, halves, neighbours
from torch import Tensor, nn

from posenc.audit import ladders
from posenc.audit.rotary.checking import check_rotary
from posenc.audit.rotary.planes import Planes, read_planes
from posenc.audit.rotary.probe import doubling
from posenc.encodings.rope import RoPE
from posenc.encodings.xpos import XPos
from posenc.hf.rotation import Axes, Rotation
from posenc.schedules.dynamic_ntk import DynamicNTK
from posenc.schedules.explicit import Explicit
from posenc.schedules.geometric import Geometric
from posenc.schedules.linear import Linear
from posenc.schedules.llama3 import Llama3
from posenc.schedules.longrope import LongRoPE
from posenc.schedules.ntk import NTK
from posenc.schedules.proportional import Proportional
from posenc.schedules.yarn import YaRN

SAFE = "cache-safe: positions are honoured token by token, earlier calls leave no trace"


def turning(encoding: Any) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    return lambda q, k, positions: encoding(q, k, positions)


# Matrices from the formula, in float64 loops


def matrix(position: int, frequencies: list[float], pairs: list[tuple[int, int]], width: int, gain: float) -> list[list[float]]:
    rows = [[float(i == j) for j in range(width)] for i in range(width)]
    for frequency, (i, j) in zip(frequencies, pairs, strict=True):
        angle = position * frequency
        rows[i][i], rows[i][j] = gain * cos(angle), -gain * sin(angle)
        rows[j][i], rows[j][j] = gain * sin(angle), gain * cos(angle)
    return rows


def paired(pairing: str, rotary_dim: int, start: int) -> list[tuple[int, int]]:
    if pairing == "half":
        return [(start + i, start + i + rotary_dim // 2) for i in range(rotary_dim // 2)]
    return [(start + 2 * i, start + 2 * i + 1) for i in range(rotary_dim // 2)]


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@given(
    frequencies=st.lists(st.floats(1e-6, 3.0), min_size=2, max_size=6),
    start=st.integers(0, 3),
    rest=st.integers(0, 3),
    gain=st.floats(0.5, 2.0),
    backwards=st.booleans(),
)
def test_planes_are_read_off_matrices(
    pairing: str, frequencies: list[float], start: int, rest: int, gain: float, backwards: bool
) -> None:
    frequencies = [-f if backwards else f for f in frequencies]
    width = start + 2 * len(frequencies) + rest
    at = doubling(8192)
    pairs = paired(pairing, 2 * len(frequencies), start)
    matrices = torch.tensor([matrix(p, frequencies, pairs, width, gain) for p in at], dtype=torch.float64)
    planes = read_planes(matrices, at, "here", 2.0**-24)
    assert isinstance(planes, Planes)
    assert (planes.pairing, planes.start, planes.rotary_dim) == (pairing, start, 2 * len(frequencies))
    assert planes.pairs == tuple(pairs)
    torch.testing.assert_close(planes.frequencies, torch.tensor(frequencies, dtype=torch.float64), rtol=1e-9, atol=1e-14)
    torch.testing.assert_close(planes.gains, torch.full_like(planes.gains, gain), rtol=1e-12, atol=0)


def test_slow_pairs_have_as_many_digits_as_fast_ones_in_float32():
    frequencies = [1.0, 1e-2, 1e-4, 3e-7]
    at = doubling(8192)
    pairs = paired("half", 8, 0)
    exact = torch.tensor([matrix(p, frequencies, pairs, 8, 1.0) for p in at], dtype=torch.float64)
    planes = read_planes(exact.float().double(), at, "here", 2.0**-24)
    assert isinstance(planes, Planes)
    relative = (planes.frequencies / torch.tensor(frequencies, dtype=torch.float64) - 1).abs()
    assert relative.max() <= 2.0**-23


# posenc's own

SCHEDULES = {
    "base 10,000": Geometric(),
    "base 500,000": Geometric(5e5),
    "base 10,000, all divided by 4 (linear)": Linear(Geometric(), 4.0),
    "base 500,000, Llama 3 ×8 from 8,192": Llama3(Geometric(5e5), 8.0, 8192),
    "base 1,000,000, YaRN ×4 from 32,768": YaRN(Geometric(1e6), 4.0, 32768),
}


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize(("rotary_dim", "start"), [(64, 0), (32, 0), (32, -32), (32, 16)])
@pytest.mark.parametrize("said", SCHEDULES)
def test_posenc_rope_reads_back(pairing, rotary_dim, start, said):
    schedule = SCHEDULES[said]
    rope = RoPE(64, schedule, rotary_dim=rotary_dim, start=start, pairing=pairing)
    rotation = Rotation(schedule, 64, rotary_dim, start % 64, pairing)
    report = check_rotary(turning(rope), head_dim=64, kv_heads=2, expect=rotation)
    assert report.findings == ()
    assert report.skipped == {}
    span = {0: "leading", -32: "trailing"}.get(start)
    place = "all 64 channels" if rotary_dim == 64 else f"32 of 64 channels, {span}" if span else "channels 16–47 of 64"
    assert report.described[:2] == (f"{pairing} pairing", place)
    # what a table leaves open is said, and the promise is among what makes it
    assert report.described[2].startswith(said) or "cannot be told apart" in report.described[2]
    assert report.described[4:] == ("angles as exact as float64 up to position 8,191", SAFE)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [16, 32])
@pytest.mark.parametrize(
    "schedule",
    [
        NTK(Geometric(), 4.0),
        Proportional(Geometric(1e6), 0.25),
        DynamicNTK(Geometric(), 2.0, 2048).at(4096),
        LongRoPE(Geometric(), (1.0,) * 16, tuple(1.0 + i for i in range(16)), 2048, factor=8.0).at(8192),
        Explicit((1.0, 0.4, 0.03, 2e-3, 1e-5, 0.7, 0.5, 0.25), 1.3),
    ],
    ids=lambda schedule: type(schedule).__name__,
)
def test_inferred_frequencies_reproduce_those_of_any_schedule(schedule, rotary_dim, pairing):
    try:
        truth = schedule.frequencies(rotary_dim)
    except ValueError:  # lists of factors are of one width
        return
    rope = RoPE(32, schedule, rotary_dim=rotary_dim, start=-rotary_dim, pairing=pairing)
    rotation = Rotation(schedule, 32, rotary_dim, 32 - rotary_dim, pairing)
    report = check_rotary(turning(rope), head_dim=32, expect=rotation)
    assert report.findings == ()
    reading = ladders.explain(truth.inv_freq, float(truth.amplitude))[0]
    if pairing == "half":  # neighbours that stand still at the end are not told from channels outside the rotation
        assert report.described[2] == str(reading)
    assert report.described[3] == f"amplitude {float(truth.amplitude):.6g}"


def test_float32_angles_are_told_from_float64_ones():
    exact = check_rotary(turning(RoPE(64)), head_dim=64)
    rounded = check_rotary(turning(RoPE(64, angle_dtype=torch.float32)), head_dim=64)
    assert exact.described[4] == "angles as exact as float64 up to position 8,191"
    assert rounded.described[4].startswith("angles as exact as float32: off by at most ")
    off = float(rounded.described[4].split("at most ")[1].split()[0])
    assert 1e-5 < off < 8192 * 2.0**-24 * 1.5  # half an ulp of an angle near 8,192 is 2⁻¹², its frequency is off as well
    assert rounded.findings == ()


def test_xpos_is_relative_and_decays():
    report = check_rotary(turning(XPos(32)), head_dim=32, positions_up_to=512)
    assert report.findings == ()
    assert any("(xPos)" in line for line in report.described)


# Other libraries


def modeling(name: str) -> Any:
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def table_of(name: str, **settings: Any) -> Any:
    config = getattr(importlib.import_module(f"transformers.models.{name}"), f"{name.title()}Config")
    return getattr(modeling(name), f"{name.title()}RotaryEmbedding")(config(**settings))


@pytest.mark.parametrize(
    ("name", "settings", "described"),
    [
        ("llama", {"rope_theta": 5e5}, ("half pairing", "all 32 channels", "base 500,000", "amplitude 1")),
        ("cohere", {"rope_theta": 8e6}, ("interleaved pairing", "all 32 channels", "base 8,000,000", "amplitude 1")),
        (
            "glm",
            {"head_dim": 32, "rope_theta": 1e4},
            ("interleaved pairing", "16 of 32 channels, leading", "base 10,000", "amplitude 1"),
        ),
    ],
)
def test_transformers_functions_read_right(name, settings, described):
    rotary = table_of(name, hidden_size=128, num_attention_heads=4, num_key_value_heads=2, **settings)
    turn = modeling(name).apply_rotary_pos_emb
    report = check_rotary(lambda q, k, positions: turn(q, k, *rotary(q, positions)), head_dim=32, kv_heads=2)
    assert report.at_least("warning") == ()
    assert report.described[:4] == described
    assert report.described[-1] == SAFE


def test_gptj_reads_right():
    gptj = modeling("gptj")
    table = gptj.create_sinusoidal_positions(2048, 16)

    def turn(x: Tensor, positions: Tensor) -> Tensor:
        sine, cosine = table[positions].to(x.dtype).chunk(2, dim=-1)
        return torch.cat((gptj.apply_rotary_pos_emb(x[..., :16], sine, cosine), x[..., 16:]), dim=-1)

    report = check_rotary(
        turn,
        head_dim=64,
        layout="batch seq heads dim",
        positions_up_to=2048,
        expect=Rotation(Geometric(), 64, 16, 0, "interleaved"),
    )
    assert report.findings == ()
    assert report.described[:4] == ("interleaved pairing", "16 of 64 channels, leading", "base 10,000", "amplitude 1")


def test_dynamic_tables_of_transformers_remember_the_longest_call():
    settings = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    rotary = table_of("llama", hidden_size=64, num_attention_heads=2, max_position_embeddings=1024, rope_parameters=settings)
    turn = modeling("llama").apply_rotary_pos_emb
    report = check_rotary(lambda q, k, positions: turn(q, k, *rotary(q, positions)), head_dim=32, heads=2)
    assert set(report.ids) == {"rotary-call-order", "rotary-batch", "rotary-length"}


def test_rotary_embedding_torch_reads_right():
    library = pytest.importorskip("rotary_embedding_torch")
    rotary = library.RotaryEmbedding(dim=32)
    report = check_rotary(
        lambda x, start: rotary.rotate_queries_or_keys(x, offset=start), head_dim=64, positions="start", dtypes=[torch.float32]
    )
    assert report.at_least("warning") == ()
    assert report.described[:4] == ("interleaved pairing", "32 of 64 channels, leading", "base 10,000", "amplitude 1")


# Forms of calling


def test_every_form_of_calling_gives_the_same_description():
    rope = RoPE(16)
    forms = {
        "q k v": (lambda q, k, v, positions: (*rope(q, k, positions), v), {}),
        "two of three": (lambda q, k, v, positions: rope(q, k, positions), {}),
        "x": (lambda x, positions: rope(x, x, positions)[0], {}),
        "seq": (lambda q, k, positions: rope(q, k, positions), {"positions": "seq"}),
        "start": (lambda q, k, start: rope(q, k, start), {"positions": "start"}),
        "module": (rope, {}),
        "seq first": (RoPE(16, head_axis=-2), {"layout": "batch seq heads dim"}),
    }
    seen = {name: check_rotary(fn, head_dim=16, heads=6, kv_heads=3, **settings) for name, (fn, settings) in forms.items()}
    assert {report.described for report in seen.values()} == {
        (
            "half pairing",
            "all 16 channels",
            "base 10,000",
            "amplitude 1",
            "angles as exact as float64 up to position 8,191",
            SAFE,
        )
    }
    assert all(report.findings == () for report in seen.values())


def test_a_function_may_write_to_what_it_is_given():
    def in_place(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        turned = good(q, k, positions)
        return q.copy_(turned[0]), k.copy_(turned[1])

    assert check_rotary(in_place, head_dim=32).findings == ()


def test_a_check_leaves_no_trace():
    module = RoPE(16).eval()
    before, state = torch.random.get_rng_state(), module.state_dict()

    def draws(q: Tensor, k: Tensor, positions: Tensor) -> Any:
        torch.rand(3)
        return module(q, k, positions)

    report = check_rotary(draws, head_dim=16)
    assert report.findings == ()
    assert torch.equal(before, torch.random.get_rng_state())
    assert not module.training
    assert list(module.state_dict()) == list(state)


# Notes, which are no warnings


def backwards(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return halves(q, -angles(positions)), halves(k, -angles(positions))


def later(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return good(q, k, positions + 3)


def wider(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return good(q.float(), k.float(), positions)


def per_head(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.arange(1, 5)[:, None, None] / 4
    return halves(q, angles(positions) * scale), halves(k, angles(positions) * scale)


@pytest.mark.parametrize(
    ("fn", "finding", "measured"),
    [
        (backwards, "rotary-sign", "queries and keys both turn backwards"),
        (later, "rotary-offset", "position 0 turns like position 3"),
        (wider, "rotary-dtype", "float32"),
        (per_head, "rotary-axis", "heads turn by different angles"),
        (torch.no_grad()(good), "rotary-gradient", "no gradient reaches queries or keys"),
    ],
)
def test_what_leaves_scores_alone_is_a_note(fn, finding, measured):
    report = check_rotary(fn, head_dim=32)
    assert report.at_least("warning") == ()
    assert finding in report.ids
    assert all(measured in found.measured for found in report.findings if found.id == finding)


def test_pairs_read_and_halves_written_are_said():
    def moved(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(
            torch.cat((x[..., ::2], x[..., 1::2]), -1)
            for x in (neighbours(q, angles(positions)), neighbours(k, angles(positions)))
        )  # type: ignore[return-value]

    report = check_rotary(moved, head_dim=32)
    assert report.at_least("warning") == ()
    assert report.described[0].startswith("interleaved pairing, written in another order of channels")
    assert report.described[2] == "base 10,000"


# Findings in numbers


def found(report: Any, finding: str) -> Any:
    return next(one for one in report.findings if one.id == finding)


def test_a_promise_that_is_not_kept_is_measured():
    rotation = Rotation(Geometric(), 32, 16, pairing="interleaved")
    report = check_rotary(good, head_dim=32, expect=rotation)
    assert found(report, "rotary-pairing").measured == "half: channels 0 and 16 turn together"
    assert found(report, "rotary-span").measured == "32 channels turn: 0–31"
    assert found(report, "rotary-span").expected == "16: 0–15"


def test_a_length_rule_that_is_promised_is_a_note():
    rule = DynamicNTK(Geometric(), 2.0, 2048)
    report = check_rotary(by_length, head_dim=32, expect=rule)
    assert found(report, "rotary-length").severity == "note"
    assert not any(one.startswith("frequency") for one in report.ids)


def test_text_positions_of_several_axes_are_one_ladder():
    axes = Axes(("t", "h", "w"), (0,) * 4 + (1,) * 6 + (2,) * 6, tuple(range(16)), 32, "blocks", text=True)
    assert check_rotary(good, head_dim=32, expect=Rotation(Geometric(), 32, 32, axes=axes)).findings == ()


def test_compiled_functions_are_compared_when_asked():
    def other_when_compiled(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return good(q, k, positions + 1 if torch.compiler.is_compiling() else positions)

    report = check_rotary(other_when_compiled, head_dim=32, compile_backend="aot_eager", positions_up_to=64)
    assert report.ids == ("rotary-compiled",)
    assert "compiled" in check_rotary(good, head_dim=32, compile_backend="aot_eager", positions_up_to=64).checked


def test_dtypes_that_the_function_refuses_are_skipped():
    def strict(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        if q.dtype != torch.float32:
            raise TypeError("float32 only")
        return good(q, k, positions)

    report = check_rotary(strict, head_dim=32)
    assert report.findings == ()
    assert list(report.skipped) == ["precision in bfloat16"]


def test_a_schedule_of_another_width_is_a_finding_of_channels():
    report = check_rotary(good, head_dim=32, expect=Explicit((1.0, 0.5)))
    assert found(report, "rotary-span").measured == "32 channels turn"


def test_frequencies_that_are_promised_twice_are_no_mistake_of_layout():
    twice = Explicit((1.0, 0.1, 0.01, 0.001) * 4)
    assert check_rotary(turning(RoPE(32, twice)), head_dim=32, expect=twice).findings == ()
    assert check_rotary(turning(RoPE(32, twice)), head_dim=32).ids == ("rotary-layout",)
    assert "rotary-layout" in check_rotary(turning(RoPE(32, twice)), head_dim=32, expect=Geometric()).ids


def test_whole_turns_per_position_cannot_be_told_and_are_not_blamed():
    fast = Explicit((7.0, 4.0, 1.0, 0.5))
    report = check_rotary(turning(RoPE(8, fast)), head_dim=8, expect=fast)
    assert report.at_least("warning") == ()
    assert found(report, "rotary-sign").measured.startswith("1 of 4 pairs turn backwards, or by more than half a turn")


def test_functions_of_half_precision_alone_are_asked_in_it():
    def half_only(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        if q.dtype != torch.bfloat16:
            raise TypeError("bfloat16 only")
        return good(q, k, positions)

    def rounded(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return half_only(q, k, positions.bfloat16())

    with pytest.raises(ValueError, match="bfloat16 only"):
        check_rotary(half_only, head_dim=32)
    report = check_rotary(half_only, head_dim=32, dtypes=[torch.bfloat16])
    assert report.findings == ()
    assert report.described[:2] == ("half pairing", "all 32 channels")
    assert "three digits" in report.skipped["frequencies"]
    assert check_rotary(rounded, head_dim=32, dtypes=[torch.bfloat16]).ids == ("rotary-position-rounding",)


def test_three_digits_of_a_frequency_are_not_compared():
    def rounded(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = (part.bfloat16().to(q.dtype) for part in (angles(positions).cos(), angles(positions).sin()))
        halved = [x.chunk(2, dim=-1) for x in (q, k)]
        return tuple(torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1) for a, b in halved)  # type: ignore[return-value]

    report = check_rotary(rounded, head_dim=32, expect=Geometric())
    assert report.ids == ("rotary-table-precision",)
    assert "three digits" in report.skipped["frequencies"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_results_that_are_not_finite_are_named(bad):
    def late(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        filled = torch.where(positions > 4000, bad, positions.float())
        return halves(q, angles(filled)), halves(k, angles(filled))

    report = check_rotary(late, head_dim=32)
    assert "rotary-norm" in report.ids
    assert "no finite numbers" in found(report, "rotary-norm").measured
    everywhere = check_rotary(lambda q, k, positions: (q * bad, k), head_dim=32)
    assert everywhere.ids == ("rotary-norm",)


def test_one_pair_of_channels_is_enough():
    report = check_rotary(turning(RoPE(2)), head_dim=2)
    assert report.findings == ()
    assert report.described[0] == "one pair of channels"


# Bad input


@pytest.mark.parametrize(
    ("fn", "settings", "error", "message"),
    [
        (3, {}, TypeError, "check_rotary: fn is int. Expected a function"),
        (lambda q: q, {}, TypeError, r"check_rotary: fn takes \(q\). Expected \(x, positions\)"),
        (lambda *x: x, {}, TypeError, "Wrap it: lambda q, k, positions"),
        (lambda q, k, cos, sin, x: q, {}, TypeError, r"fn takes \(q, k, cos, sin, x\)"),
        (lambda q, k, positions: q @ q, {}, ValueError, "the function raised RuntimeError"),
        (lambda q, k, positions: None, {}, TypeError, "the function returned NoneType. Expected queries and keys"),
        (lambda q, k, positions: (q, k[:1]), {}, ValueError, "Expected the shape of its input"),
        (lambda q, k, positions: (q * q, k), {}, ValueError, "the function is not linear"),
        (good, {"head_dim": 0}, ValueError, "head_dim = 0"),
        (good, {"head_dim": 32.0}, TypeError, "head_dim = 32.0"),
        (good, {"kv_heads": 0}, ValueError, "kv_heads = 0"),
        (good, {"layout": "bhsd"}, ValueError, "layout = 'bhsd'"),
        (good, {"positions": "rows"}, ValueError, "positions = 'rows'"),
        (good, {"positions_up_to": 8}, ValueError, "positions_up_to = 8"),
        (good, {"pairing": "both"}, ValueError, "pairing = 'both'"),
        (good, {"expect": 1e4}, TypeError, "expect = 10000.0. Expected a Rotation"),
        (good, {"expect": Rotation(Geometric(), 64, 64)}, ValueError, "expect has head_dim = 64, and head_dim = 32"),
        (good, {"expect": Rotation(Geometric(), 32, 32), "pairing": "interleaved"}, ValueError, "Leave pairing away"),
        (good, {"dtypes": []}, TypeError, "Expected floating-point dtypes"),
        (good, {"dtypes": [torch.int32]}, TypeError, "Expected floating-point dtypes"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(fn, settings, error, message):
    with pytest.raises(error, match=message):
        check_rotary(fn, **{"head_dim": 32, **settings})


def test_a_table_that_ends_is_named():
    table = torch.zeros(128, 16)

    def short(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angle = table[positions][:, None]
        return halves(q, angle), halves(k, angle)

    with pytest.raises(
        ValueError, match="raised IndexError.*Pass the layout.*positions_up_to= the length of its table"
    ) as raised:
        check_rotary(short, head_dim=32)
    assert isinstance(raised.value.__cause__, IndexError)


def test_functions_that_never_turn_are_named():
    report = check_rotary(lambda q, k, positions: (q, k), head_dim=32)
    assert report.ids == ("rotary-positions-ignored",)
    assert report.findings[0].measured == "nothing turns, at any position"


def test_randomness_is_named():
    dropout = nn.Dropout(0.5)
    report = check_rotary(lambda q, k, positions: (dropout(q), k), head_dim=32)
    assert report.ids == ("rotary-call-order",)
    assert report.findings[0].measured == "two equal calls give different results"
