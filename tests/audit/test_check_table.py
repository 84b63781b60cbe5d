"""`check_table` reads every released table right, and says what is wrong with the others."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from posenc import (
    FourierFeatures,
    GridSinusoidal,
    Hertz,
    Hybrid,
    Learned,
    LearnedGrid,
    Sinusoidal,
    Time2Vec,
    grid,
)
from posenc.audit.tables.checking import check_table
from posenc.audit.tables.codes import read_code
from posenc.errors import ShapeError
from posenc.hf.rules import InputTable

WIDTH = 64


def of(encoding, width: int = WIDTH):
    """An encoding of posenc as positions -> table."""
    return lambda p: encoding(torch.zeros(*p.shape, width), p)


def formula(positions: Tensor, width: int, *, layout: str, rule: str, base: float, first: str = "sine") -> Tensor:
    """The oracle: entry by entry, in Python's floats."""
    rows = []
    for p in positions.tolist():
        pairs = []
        for i in range(width // 2):
            exponent = 2 * i / width if rule == "paper" else i / (width // 2 - 1)
            angle = p / base**exponent
            pair = (math.sin(angle), math.cos(angle))
            pairs.append(pair if first == "sine" else pair[::-1])
        rows.append(
            [entry for pair in pairs for entry in pair]
            if layout == "interleaved"
            else [pair[0] for pair in pairs] + [pair[1] for pair in pairs]
        )
    return torch.tensor(rows, dtype=torch.float64)


@given(
    half=st.integers(2, 24),
    layout=st.sampled_from(["interleaved", "concatenated"]),
    first=st.sampled_from(["sine", "cosine"]),
    rule=st.sampled_from(["paper", "tensor2tensor"]),
    offset=st.sampled_from([0, 1, 2, 0.5, 17]),
    amplitude=st.sampled_from([1.0, 0.02, 8.0]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
@settings(max_examples=40, deadline=None)
def test_what_makes_a_table_is_read_back(half, layout, first, rule, offset, amplitude, dtype):
    width = 2 * half
    positions = torch.arange(200, dtype=torch.float64)
    rows = amplitude * formula(positions + offset, width, layout=layout, rule=rule, base=10_000.0, first=first)
    code = read_code(rows.to(dtype).double(), resolution=torch.finfo(dtype).eps / 2)
    assert code is not None
    if width > 4:  # two pairs fit both rules, at different bases
        assert code.ladder.rule == rule
    assert (code.layout, code.first, code.offset) == (layout, first, offset)
    assert code.amplitude == pytest.approx(amplitude, rel=2**-7)
    if dtype == torch.float64:
        wanted = [10_000.0 ** -(2 * i / width if rule == "paper" else i / (half - 1)) for i in range(half)]
        torch.testing.assert_close(code.ladder.frequencies, torch.tensor(wanted).double(), rtol=1e-6, atol=0)


@given(base=st.floats(50, 1e7), half=st.integers(3, 32))
@settings(max_examples=30, deadline=None)
def test_any_base_is_read_back(base, half):
    rows = formula(torch.arange(300), 2 * half, layout="interleaved", rule="paper", base=base)
    code = read_code(rows, resolution=2.0**-53)
    assert code is not None
    wanted = torch.tensor([base ** (-i / half) for i in range(half)], dtype=torch.float64)
    torch.testing.assert_close(code.ladder.frequencies, wanted, rtol=1e-6, atol=0)


def test_random_rows_are_no_code():
    generator = torch.Generator().manual_seed(0)
    assert read_code(torch.randn(100, 16, dtype=torch.float64, generator=generator)) is None
    assert read_code(torch.zeros(100, 16, dtype=torch.float64)) is None


@pytest.mark.parametrize(
    "encoding",
    [
        Sinusoidal(WIDTH),
        Sinusoidal(WIDTH, layout="concatenated"),
        Sinusoidal(WIDTH, frequency_rule="tensor2tensor"),
        Sinusoidal(WIDTH, base=500_000.0),
        Sinusoidal(WIDTH, layout="concatenated", frequency_rule="tensor2tensor", base=100.0),
        Learned(300, WIDTH),
        Learned(300, WIDTH, past_end="clamp", offset=2, padding_idx=1),
        Learned(100, WIDTH, past_end="interpolate", length=400),
        Hybrid(WIDTH, 32, 300),
        Time2Vec(WIDTH, 5000.0),
        FourierFeatures(WIDTH),
        FourierFeatures(WIDTH, kind="learned"),
    ],
    ids=repr,
)
def test_posencs_own_encodings_are_clean(encoding):
    report = check_table(of(encoding), width=WIDTH, expect=encoding)
    assert report.at_least("warning") == (), str(report)
    assert report.skipped.keys() <= {"precision of the angles"}


@pytest.mark.parametrize("encoding", [Sinusoidal(5), Sinusoidal(9, layout="concatenated"), Sinusoidal(2)], ids=repr)
def test_odd_and_small_widths(encoding):
    report = check_table(of(encoding, encoding.dim), width=encoding.dim, expect=encoding)
    assert report.at_least("warning") == (), str(report)
    assert "sinusoidal" in report.described


def test_codes_of_real_positions_depend_on_them_alone():
    for encoding in (FourierFeatures(16, kind="bands"), Sinusoidal(16, schedule=Hertz(0.5, 20.0))):
        report = check_table(of(encoding, 16), width=16, spacing=0.001, length=512, expect=encoding)
        assert report.at_least("warning") == (), str(report)
    frames = check_table(lambda t: Sinusoidal(16).table(torch.arange(t.shape[-1])), width=16, spacing=0.01)
    assert frames.ids[0] == "table-positions-ignored"


def test_what_a_table_is_in_words():
    report = check_table(of(Sinusoidal(WIDTH)), width=WIDTH)
    assert report.described == (
        "4,096 rows and more",
        "sinusoidal",
        "interleaved layout",
        "paper frequencies, base^(-2i/width), base 10,000",
        "float64 angles",
    )
    hybrid = check_table(of(Hybrid(WIDTH, 32, 300)), width=WIDTH)
    assert hybrid.described[0] == "300 rows, raises past the end"
    assert hybrid.described[1].startswith("channels 0 to 31: sinusoidal, interleaved layout")
    assert check_table(of(Learned(300, WIDTH)), width=WIDTH).described[1].startswith("no formula (learned or drawn)")


@pytest.mark.parametrize("encoding", [GridSinusoidal(WIDTH), GridSinusoidal(WIDTH, axis_order="height-first")])
def test_grids_of_posenc(encoding):
    def fn(height: int, width: int) -> Tensor:
        return encoding(torch.zeros(height * width, WIDTH), grid(height, width).positions)

    report = check_table(fn, width=WIDTH, reads="grid", expect=encoding)
    assert report.at_least("warning") == (), str(report)
    assert report.described[0].startswith(encoding.axis_order.replace("-", " "))
    assert all("base 10,000" in line for line in report.described[1:])


def test_learned_grids_and_prefixes():
    table = LearnedGrid(WIDTH, (4, 6), prefix=1)

    def fn(height: int, width: int) -> Tensor:
        return table(torch.zeros(1 + height * width, WIDTH), grid(height, width, prefix=1).positions)

    report = check_table(fn, width=WIDTH, reads="grid", grid=(4, 6), expect=table)
    assert report.at_least("warning") == (), str(report)
    assert report.described == ("1 row before the grid, not zero", "no formula in rows and columns (learned or drawn)")


def test_square_grids_cannot_show_a_transposition():
    report = check_table(
        lambda h, w: torch.rand(h * w, 8, generator=torch.Generator().manual_seed(0)), width=8, reads="grid", grid=(4, 4)
    )
    assert "transposed flattening" in report.skipped


def described(report) -> str:
    return "; ".join(report.described)


def test_transformers_own_tables():
    from transformers.models.distilbert.modeling_distilbert import create_sinusoidal_embeddings
    from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding
    from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding
    from transformers.models.vit_mae.modeling_vit_mae import build_2d_sinusoidal_position_embedding
    from transformers.models.whisper.modeling_whisper import sinusoids

    whisper = sinusoids(1500, WIDTH)
    report = check_table(lambda p: whisper[p], width=WIDTH, length=1500, expect="sinusoidal")
    assert report.at_least("warning") == (), str(report)
    assert "concatenated layout; tensor2tensor frequencies" in described(report)
    assert "float32 angles or wider" in report.described
    assert "table-negative" in report.ids  # a bare table read at -1

    m2m = M2M100SinusoidalPositionalEmbedding(512, WIDTH, 1)
    table = InputTable("sinusoidal", None, 2, "concatenated")
    report = check_table(lambda x: m2m(inputs_embeds=x), width=WIDTH, reads="embeddings", expect=table)
    assert report.at_least("warning") == (), str(report)
    assert "gives the table alone, without x" in report.described
    assert "the first row is that of position 2" in report.described
    rows = check_table(lambda p: m2m.weights[p], width=WIDTH, expect="sinusoidal")
    assert rows.at_least("warning") == (), str(rows)
    assert "row 1 is zero, for padding" in rows.described

    marian = MarianSinusoidalPositionalEmbedding(512, WIDTH)
    weight = marian.create_weight()
    report = check_table(lambda p: weight[p], width=WIDTH, expect=Sinusoidal(WIDTH, layout="concatenated"))
    assert report.at_least("warning") == (), str(report)

    distilbert = nn.Embedding(512, WIDTH)
    create_sinusoidal_embeddings(512, WIDTH, distilbert.weight.data)
    report = check_table(distilbert, width=WIDTH, length=512, expect=Sinusoidal(WIDTH))
    assert report.at_least("warning") == (), str(report)
    assert "512 rows, raises past the end" in report.described

    def canonical(height: int, width: int) -> Tensor:
        return build_2d_sinusoidal_position_embedding(height, width, WIDTH, cls_token=True)

    report = check_table(canonical, width=WIDTH, reads="grid", expect=GridSinusoidal(WIDTH, axis_order="height-first"))
    assert report.at_least("warning") == (), str(report)
    assert report.described[:2] == ("1 row before the grid, zero", "height first: the first half reads the row")
    assert check_table(canonical, width=WIDTH, reads="grid", expect=GridSinusoidal(WIDTH)).ids == ("table-grid-order",)
    # ViT-MAE's own initialisation swaps the halves, as its released weights need
    report = check_table(
        lambda h, w: canonical(h, w).roll(WIDTH // 2, -1), width=WIDTH, reads="grid", expect=GridSinusoidal(WIDTH)
    )
    assert report.at_least("warning") == (), str(report)


class Tutorial(nn.Module):
    """As tutorials write it: a buffer, a factor on x, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("pe", formula(torch.arange(300), WIDTH, layout="interleaved", rule="paper", base=10_000.0).float())
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x * math.sqrt(WIDTH) + self.pe[: x.shape[1]])


def test_a_module_is_called_in_evaluation_mode_and_left_as_it_was():
    module = Tutorial().train()
    module.dropout.eval()
    state = torch.random.get_rng_state()
    report = check_table(module, width=WIDTH, reads="embeddings", expect="sinusoidal")
    assert report.at_least("warning") == (), str(report)
    assert report.subject == "table Tutorial: x -> x + table"
    assert "x times 8 (√width)" in report.described
    assert module.training
    assert not module.dropout.training
    assert torch.equal(state, torch.random.get_rng_state())


def test_the_dtype_of_x_is_watched():
    pe = formula(torch.arange(300), 8, layout="interleaved", rule="paper", base=10_000.0).float()
    report = check_table(lambda x: x + pe[: x.shape[1]], width=8, reads="embeddings")
    assert report.ids == ("table-dtype",)
    assert "torch.float32" in report.findings[0].measured
    clean = check_table(lambda x: x + pe[: x.shape[1]].to(x.dtype), width=8, reads="embeddings")
    assert clean.ids == ()


def test_precision_names_what_was_rounded():
    def rounded(p: Tensor, which: str) -> Tensor:
        at = p.to(torch.float64)
        speeds = 10_000.0 ** -(torch.arange(0, WIDTH, 2).double() / WIDTH)
        if which == "frequencies":
            speeds = speeds.bfloat16().double()
        if which == "positions":
            at = at.bfloat16().double()
        angle = at[..., None] * speeds
        return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2).float()

    for which in ("frequencies", "positions"):
        report = check_table(lambda p, which=which: rounded(p, which), width=WIDTH)
        found = next(finding for finding in report.findings if finding.id == "table-precision")
        assert f"{which} rounded to bfloat16 explain it" in found.measured
    assert check_table(lambda p: rounded(p, "nothing"), width=WIDTH).ids == ()


def test_half_precision_storage_alone_is_no_finding():
    report = check_table(lambda p: Sinusoidal(WIDTH).table(p).bfloat16(), width=WIDTH, expect="sinusoidal")
    assert report.at_least("warning") == (), str(report)


def test_ends_of_tables():
    table = torch.randn(256, 16, generator=torch.Generator().manual_seed(0))
    clamped = check_table(lambda p: table[p.clamp(max=255)], width=16)
    assert [finding.severity for finding in clamped.findings if finding.id == "table-past-end"] == ["note"]
    short = check_table(lambda p: table[p.clamp(max=255)], width=16, length=300)
    assert [finding.severity for finding in short.findings if finding.id == "table-past-end"] == ["error"]
    grown = torch.cat([table, torch.full((8, 16), torch.nan)])
    garbage = check_table(lambda p: grown[p], width=16)
    assert "positions from 256 on are not finite" in str(garbage)
    assert garbage.ids[0] == "table-past-end"


def test_lengths_beyond_what_is_read_are_asked_for(monkeypatch):
    monkeypatch.setattr("posenc.audit.tables.checking._NUMBERS", 2**12)
    code = Sinusoidal(16)

    def ends(last: int):
        def fn(p: Tensor) -> Tensor:
            if (p > last).any():
                raise IndexError("past the end")
            return code.table(p)

        return fn

    assert check_table(ends(9999), width=16, length=10_000).ids == ()
    short = check_table(ends(9998), width=16, length=10_000)
    assert short.ids == ("table-past-end",)
    assert "position 9,999 raises" in short.findings[0].measured


def test_a_function_may_add_in_place():
    pe = Sinusoidal(8).table(torch.arange(300))

    def add(x: Tensor) -> Tensor:
        x *= 2
        x += pe[: x.shape[1]].to(x.dtype)
        return x

    report = check_table(add, width=8, reads="embeddings", expect="sinusoidal")
    assert report.ids == ()
    assert "x times 2" in report.described


def test_the_halves_of_a_grid_are_held_to_a_rule():
    def code(height: int, width: int) -> Tensor:
        at = grid(height, width).positions
        speeds = 10_000.0 ** -(torch.arange(8).double() / 32)  # over both axes' width
        return torch.cat([wave(at[:, axis, None] * speeds) for axis in (1, 0) for wave in (torch.sin, torch.cos)], -1)

    assert check_table(code, width=32, reads="grid", expect="sinusoidal").ids == ("table-base",)
    assert check_table(code, width=32, reads="grid").ids == ()


def test_an_exact_number_of_tokens():
    def whisper(x: Tensor) -> Tensor:
        return x + Sinusoidal(16).table(torch.arange(50))

    report = check_table(whisper, width=16, reads="embeddings", length=50)
    assert report.at_least("warning") == (), str(report)
    assert "exactly 50 tokens; other numbers raise" in report.described


def test_learned_promises():
    learned = Learned(64, 16)
    report = check_table(lambda p: learned.weight.detach()[(p + 1).clamp(max=63)], width=16, expect=learned)
    assert "table-offset" in report.ids
    other = Learned(64, 16)
    assert "table-formula" in check_table(of(other, 16), width=16, expect=learned).ids
    assert check_table(of(learned, 16), width=16, expect=InputTable("learned", 64)).ids == ()
    assert "table-past-end" in check_table(of(learned, 16), width=16, expect=InputTable("learned", 66)).ids


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"fn": 3}, TypeError, "check_table: fn is a int. Expected a callable positions -> table"),
        ({"fn": lambda a, b, c: a}, TypeError, "fn raised TypeError.*missing 2 required positional arguments"),
        ({"fn": lambda p: 1 / 0}, ValueError, "fn raised ZeroDivisionError: division by zero"),
        ({"fn": lambda p: [1.0]}, TypeError, "fn gave a list"),
        ({"fn": lambda p: torch.zeros(3, 3)}, ShapeError, r"fn gave \(3, 3\) for 16 positions. Expected \(16, 8\)"),
        ({"fn": lambda p: torch.rand(*p.shape, 8)}, ValueError, "two answers to the same call"),
        ({"fn": lambda x: x.square() + 1, "reads": "embeddings"}, ValueError, "more to x than scale it and add a table"),
        ({"fn": lambda x: x[0], "reads": "embeddings"}, ShapeError, r"fn gave \(6, 8\) for x of \(1, 6, 8\)"),
        ({"fn": lambda h, w: torch.zeros(3, 8), "reads": "grid"}, ShapeError, "for a picture of 16 × 24 patches"),
        ({"reads": "tokens"}, ValueError, "reads = 'tokens'"),
        ({"expect": "cosines"}, ValueError, "expect = 'cosines'"),
        ({"width": 0}, ValueError, "width = 0"),
        ({"width": 2.5}, TypeError, "width = 2.5"),
        ({"length": -1}, ValueError, "length = -1"),
        ({"spacing": 0.0}, ValueError, "spacing = 0.0"),
        ({"grid": 4}, ValueError, "grid = 4"),
    ],
)
def test_mistakes_are_one_sentence(settings, error, message):
    call = {"fn": lambda p: torch.zeros(*p.shape, 8), "width": 8} | settings
    drawn = torch.random.get_rng_state()
    with pytest.raises(error, match=message):
        check_table(**call)
    assert torch.equal(drawn, torch.random.get_rng_state())


def test_what_the_user_raised_is_kept():
    with pytest.raises(ValueError, match="fn raised KeyError") as caught:
        check_table(lambda p: {}["table"], width=8)
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("width", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
@pytest.mark.parametrize("value", [0.0, 1.0, -math.inf, math.nan, 60_000.0])
def test_garbage_is_reported(value, dtype, width):
    """Whatever a table holds, there is a report, which can be printed and written."""
    numbers = torch.randn(40, width, generator=torch.Generator().manual_seed(0))
    numbers[7:9] = value
    table = numbers.nan_to_num(posinf=0, neginf=0).clamp(-99, 99).to(dtype) if dtype == torch.int8 else numbers.to(dtype)
    for reads, fn in (
        ("positions", lambda p: table[p]),
        ("embeddings", lambda x: x + table[: x.shape[1]] if x.shape[1] <= 40 else None),
        ("grid", lambda h, w: table[: h * w]),
    ):
        report = check_table(fn, width=width, reads=reads, grid=(5, 8), expect="sinusoidal")
        assert report.findings
        assert report.ids[0] in str(report)
        assert report.ids[0] in report.to_json()
