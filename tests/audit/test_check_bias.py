"""`check_bias` and `check_scores` read every released bias right, and say what is wrong with the others."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import posenc.audit
from posenc import (
    FIRE,
    KERPLE,
    ALiBi,
    LearnedALiBi,
    Sandwich,
    SwinBias,
    SwinV2Bias,
    T5Bias,
    grid,
    materialize,
    slice_heads,
)
from posenc.audit import Kind
from posenc.audit.biases.checking import check_bias, check_scores
from posenc.audit.biases.rules import max_distances, rule_of
from posenc.audit.kinds import biases, tables
from posenc.audit.tables.checking import check_table
from posenc.errors import ShapeError
from posenc.hf.rules import BiasRule


def of(encoding, dtype: torch.dtype = torch.float32):
    """A score encoding of posenc as (q_positions, k_positions) -> bias."""

    def bias(q: Tensor, k: Tensor) -> Tensor:
        with torch.no_grad():
            return materialize(encoding(), q, k, dtype=dtype)

    return bias


def seeded(encoding):
    """Parameters at random: fresh tables of zeros show nothing."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.normal_(generator=generator)
    return encoding


CAUSAL = [
    (ALiBi(8), "ALiBi: -slope · distance; slopes of the released rule"),
    (ALiBi(12), "ALiBi: -slope · distance; slopes of the released rule"),
    (ALiBi(1), "ALiBi: -slope · distance; slopes of the released rule"),
    (ALiBi(8, biased_heads=5), "5 of 8 heads carry a bias; slopes of the released rule"),
    (LearnedALiBi(6), "ALiBi: -slope · distance; slopes of the released rule"),
    (seeded(LearnedALiBi(6)), "slopes of no released rule"),
    (seeded(T5Bias(4)), "T5 buckets: 32, causal, max distance 128"),
    (seeded(T5Bias(4, buckets=4, max_distance=20)), "T5 buckets: 4, causal, max distance 19 to 24 (cannot be told apart)"),
    (seeded(KERPLE(4)), "falls with the distance, not as a line"),
    (seeded(KERPLE(4, "power")), "falls with the distance, not as a line"),
    (seeded(FIRE(4)), "a function of the distance near the start of a text, another one 1,000 tokens on"),
    (Sandwich(4), "a function of the distance, not falling throughout"),
]
BIDIRECTIONAL = [
    (ALiBi(8, form="symmetric"), "symmetric: past and future alike"),
    (seeded(LearnedALiBi(6, form="two-sided")), "slopes towards the future"),
    (seeded(T5Bias(4, direction="bidirectional")), "T5 buckets, future: 16, max distance 128"),
    (seeded(KERPLE(4)), "falls with the distance, not as a line"),
]


def said(report, words: str) -> bool:
    """Whether a report has all of these phrases."""
    return all(any(part in line for line in report.described) for part in words.split("; "))


@pytest.mark.parametrize(("encoding", "words"), CAUSAL, ids=lambda value: value if isinstance(value, str) else repr(value))
def test_posencs_own_biases_are_clean(encoding, words):
    report = check_bias(of(encoding), heads=encoding.heads, expect=encoding)
    assert report.at_least("warning") == (), str(report)
    assert said(report, words), report.described
    assert check_bias(of(encoding), heads=encoding.heads).at_least("warning") == ()


@pytest.mark.parametrize(
    ("encoding", "words"), BIDIRECTIONAL, ids=lambda value: value if isinstance(value, str) else repr(value)
)
def test_posencs_own_biases_for_encoders_are_clean(encoding, words):
    report = check_bias(of(encoding), heads=encoding.heads, expect=encoding, direction="bidirectional")
    assert report.at_least("warning") == (), str(report)
    assert said(report, words), report.described


@pytest.mark.parametrize("encoding", [seeded(SwinBias(3, (2, 3))), seeded(SwinV2Bias(3, (2, 3)))], ids=repr)
def test_posencs_windows_are_clean(encoding):
    def fn(height: int, width: int) -> Tensor:
        with torch.no_grad():
            return materialize(encoding(), grid(height, width).positions)

    report = check_bias(fn, heads=3, takes="grid", expect=encoding)
    assert report.at_least("warning") == (), str(report)
    assert report.described == ("a function of the offset in rows and columns, 15 offsets, 15 biases",)
    turned = check_bias(lambda h, w: fn(h, w).mT, heads=3, takes="grid", expect=encoding)
    assert turned.ids == ("bias-bucket-sides",)


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 20, 32])
def test_rules_of_slopes(heads):
    lower = 2 ** int(math.log2(heads))
    released = [2 ** (-8 * j / lower) for j in range(1, lower + 1)]
    released += [2 ** (-8 * j / (2 * lower)) for j in range(1, 2 * lower, 2)][: heads - lower]
    assert rule_of(torch.tensor(released).double(), 1e-6) == "the released rule"
    pure = torch.tensor([2 ** (-8 * j / heads) for j in range(1, heads + 1)]).double()
    assert rule_of(pure, 1e-6) == ("the released rule" if heads == lower else "pure")
    assert rule_of(pure * 2 ** (8 / heads), 1e-6) == "from zero"
    assert rule_of(pure * 1.01, 1e-6) is None


@given(side=st.integers(4, 40), max_distance=st.integers(21, 2000), bidirectional=st.booleans())
@settings(max_examples=30, deadline=None)
def test_buckets_are_read_back(side, max_distance, bidirectional):
    starts = []
    exact = side // 2
    for distance in range(max_distance + 1):
        bucket = (
            distance
            if distance < exact
            else min(side - 1, exact + int(math.log(distance / exact) / math.log(max_distance / exact) * (side - exact) + 1e-9))
        )
        if bucket >= len(starts) and bucket == len(starts):
            starts.append(distance)
    if len(starts) == side:  # every bucket has a distance
        assert max_distance in max_distances(tuple(starts))


def of_lengths(fn):
    return {"fn": fn, "takes": "lengths"}


def test_transformers_own_biases():
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor as falcon_alibi
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    for heads in (8, 12):
        bloom = check_bias(
            lambda q, k, heads=heads: build_alibi_tensor(torch.ones(1, k, dtype=torch.int64), heads, torch.float32),
            heads=heads,
            takes="lengths",
            expect=BiasRule("alibi", heads),
        )
        assert bloom.at_least("warning") == (), str(bloom)
        assert said(bloom, "slopes of the released rule; a term of the key alone, the same after the softmax")
        mpt = check_bias(
            lambda q, k, heads=heads: build_mpt_alibi_tensor(heads, k),
            heads=heads,
            takes="lengths",
            expect=BiasRule("alibi", heads),
        )
        assert mpt.at_least("warning") == (), str(mpt)
        assert said(mpt, "slopes of the released rule")
        # Falcon forms it in bfloat16: a known deviation upstream, harmless to 256 tokens where slopes are powers of two
        falcon = check_bias(
            lambda q, k, heads=heads: falcon_alibi(torch.ones(1, k, dtype=torch.int64), heads, torch.float32),
            heads=heads,
            takes="lengths",
            expect="alibi",
        )
        assert falcon.ids == ("bias-precision",), str(falcon)
        assert said(falcon, "slopes of the released rule")


@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
def test_transformers_own_buckets(direction):
    from transformers.models.t5 import modeling_t5

    module = next(part for part in vars(modeling_t5).values() if hasattr(part, "_relative_position_bucket"))
    bucket = module._relative_position_bucket
    report = check_bias(
        lambda q, k: bucket(k - q[:, None], bidirectional=direction == "bidirectional"),
        heads=1,
        direction=direction,
        expect=BiasRule("t5", 1, (("buckets", 32), ("farthest", 128))),
    )
    assert report.at_least("warning") == (), str(report)
    assert report.described == (f"T5 buckets: 32, {direction}, max distance 128",)


def test_slopes_that_ship_are_described_and_held_to_a_promise():
    pure = torch.tensor([2 ** (-8 * j / 12) for j in range(1, 13)])

    def fn(q: Tensor, k: Tensor) -> Tensor:
        return -pure[:, None, None] * (q[:, None] - k)

    assert check_bias(fn, heads=12, expect="alibi").ids == ()
    assert said(check_bias(fn, heads=12), "slopes 2^(-8j/heads), one ratio for all")
    assert check_bias(fn, heads=12, expect=ALiBi(12)).ids == ("bias-slopes",)
    assert check_bias(lambda q, k: 3 * fn(q, k), heads=12, expect="alibi").ids == ("bias-slopes",)
    assert check_bias(lambda q, k: 3 * fn(q, k), heads=12).ids == ()


def test_an_encoders_bias_need_not_be_aligned():
    slopes = torch.tensor([2.0**-j for j in range(1, 9)])[:, None, None]

    def fn(q_len: int, k_len: int) -> Tensor:
        return -slopes * (torch.arange(q_len)[:, None] - torch.arange(k_len)).abs()

    encoder = check_bias(fn, heads=8, takes="lengths", direction="bidirectional", expect=ALiBi(8, form="symmetric"))
    assert [(finding.id, finding.severity) for finding in encoder.findings] == [("bias-alignment", "note")]
    assert said(encoder, "slopes of the released rule; symmetric: past and future alike")
    assert check_bias(fn, heads=8, takes="lengths").ids == ("bias-alignment",)


def test_a_shard_of_the_heads():
    share = slice_heads(ALiBi(8)(), slice(4, 8))
    report = check_bias(lambda q, k: materialize(share, q, k), heads=4, expect=share)
    assert report.ids == ()


def test_masks_and_constants_do_not_matter():
    slopes = torch.tensor([2.0**-j for j in range(1, 9)])[:, None, None]

    def masked(q: Tensor, k: Tensor) -> Tensor:
        bias = -slopes * (q[:, None] - k) + 3.0  # the softmax drops the 3
        return bias.masked_fill(q[:, None] < k, torch.finfo(torch.float32).min)

    for direction in ("causal", "bidirectional"):
        report = check_bias(masked, heads=8, direction=direction, expect=ALiBi(8))
        assert report.at_least("warning") == (), str(report)
        assert report.described[0] == "the causal mask is part of it"


def test_what_a_causal_mask_hides_may_be_anything():
    slopes = torch.tensor([2.0**-j for j in range(1, 9)])[:, None, None]

    def roots(q: Tensor, k: Tensor) -> Tensor:
        return -slopes * (q[:, None] - k).float().sqrt()  # NaN in the future

    assert check_bias(roots, heads=8).ids == ()
    assert check_bias(lambda q, k: roots(torch.arange(k - q, k), torch.arange(k)), heads=8, takes="lengths").ids == ()
    assert check_bias(roots, heads=8, direction="bidirectional").ids == ("bias-not-finite",)
    nothing = check_bias(lambda q, k: torch.full((8, len(q), len(k)), -1e9), heads=8)
    assert nothing.at_least("warning") == ()


def test_one_head_of_slope_1_is_no_mistake():
    assert check_bias(lambda q, k: -(q[:, None] - k).abs().float(), heads=1).ids == ()


def test_equal_numbers_by_chance_in_half_precision():
    table = torch.randn(169, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert len(table.unique()) < 169

    def window(height: int, width: int) -> Tensor:
        cells = torch.cartesian_prod(torch.arange(height), torch.arange(width))
        down, across = (cells[:, None] - cells[None]).unbind(-1)
        return table[(down + height - 1) * (2 * width - 1) + across + width - 1][None]

    report = check_bias(window, heads=1, takes="grid", grid=(6, 7))
    assert report.ids == ()
    assert "different offsets apart" in report.skipped


def test_a_table_of_zeros_is_described():
    report = check_bias(lambda q, k: torch.zeros(4, len(q), len(k)), heads=4)
    assert report.ids == ()
    assert said(report, "no bias, or a table of zeros")


def test_symmetric_windows_are_no_collision():
    def rows(height: int, width: int) -> Tensor:
        cells = torch.cartesian_prod(torch.arange(height), torch.arange(width))
        down, across = (cells[:, None] - cells[None]).abs().unbind(-1)
        return down * width + across

    report = check_bias(rows, heads=1, takes="grid")
    assert report.ids == ()
    assert said(report, "symmetric: mirrored offsets share a bias")


def test_a_promise_of_another_function():
    kerple, t5 = seeded(KERPLE(4)), seeded(T5Bias(4))
    assert check_bias(of(kerple), heads=4, expect="alibi").ids == ("bias-formula",)
    assert check_bias(of(ALiBi(4)), heads=4, expect="t5").ids == ("bias-formula",)
    assert check_bias(of(ALiBi(4)), heads=4, expect=kerple).ids == ("bias-formula",)
    assert check_bias(of(seeded(T5Bias(4, max_distance=160))), heads=4, expect=t5).ids == ("bias-buckets",)


def test_promises_in_words_and_rules():
    t5, sandwich = seeded(T5Bias(4)), Sandwich(4)
    rule = BiasRule("t5", 4, (("buckets", 32), ("farthest", 128)))
    assert check_bias(of(t5), heads=4, expect=rule).ids == ()
    assert check_bias(of(t5), heads=4, expect="t5").ids == ()
    assert check_bias(of(seeded(T5Bias(4, max_distance=160))), heads=4, expect=rule).ids == ("bias-buckets",)
    assert check_bias(of(seeded(T5Bias(4, buckets=16))), heads=4, expect=rule).ids == ("bias-buckets",)
    for promise in ("t5", rule, "alibi", BiasRule("alibi", 4)):
        assert check_bias(of(sandwich), heads=4, expect=promise).ids == ("bias-formula",)
    assert check_bias(of(sandwich), heads=4, expect="relative").ids == ()
    assert check_bias(of(sandwich), heads=4, expect=BiasRule("swin")).ids == ()
    wide = BiasRule("alibi", 8, (("largest_exponent", 16),))
    slopes = torch.tensor([4.0**-j for j in range(1, 9)])[:, None, None]
    assert check_bias(lambda q, k: -slopes * (q[:, None] - k), heads=8, expect=wide).ids == ()
    assert check_bias(lambda q, k: -slopes * (q[:, None] - k), heads=8, expect=BiasRule("alibi", 8)).ids == ("bias-slopes",)


def test_slopes_towards_the_future_are_promised_too():
    past, future = ALiBi(8, form="symmetric"), seeded(LearnedALiBi(8, form="two-sided"))
    with torch.no_grad():
        future.learned_logslopes.copy_(torch.tensor(past.slopes).log()[:, None, None])
    report = check_bias(of(future), heads=8, direction="bidirectional", expect=past)
    assert report.ids == ("bias-slopes",)
    assert "slopes towards the future" in report.findings[0].measured


def test_a_learned_bias_rounded_to_half_precision_keeps_its_promise():
    t5 = seeded(T5Bias(4))
    report = check_bias(lambda q, k: of(t5)(q, k).bfloat16().float(), heads=4, expect=t5)
    assert report.at_least("warning") == (), str(report)


def test_absolute_terms_are_noted_unless_a_promise_forbids_them():
    table = torch.randn(4, 4096, generator=torch.Generator().manual_seed(0))

    def fn(q: Tensor, k: Tensor) -> Tensor:
        return table[:, q][..., None] * table[:, k][:, None]

    assert [finding.severity for finding in check_bias(fn, heads=4).findings] == ["note"]
    assert [finding.severity for finding in check_bias(fn, heads=4, expect="relative").findings] == ["error"]
    assert check_bias(fn, heads=4, expect=ALiBi(4)).ids == ("bias-not-relative",)


def test_half_precision_up_to_where_it_matters():
    slopes = torch.tensor([2.0**-j for j in range(1, 9)])[:, None, None]

    def fn(q: Tensor, k: Tensor) -> Tensor:
        return (-slopes * (q[:, None] - k)).bfloat16()

    assert check_bias(fn, heads=8, length=256).ids == ()  # bfloat16 holds the integers up to 256
    far = check_bias(fn, heads=8, length=512)
    assert far.ids == ("bias-precision",)
    assert "distances 256 and 257 share a value" in far.findings[0].measured


def test_scores():
    def scores(q: Tensor, k: Tensor, order: str) -> Tensor:
        at = torch.arange(k.shape[-2])
        bias = materialize(ALiBi(4)(), at[-q.shape[-2] :], at)
        scale = q.shape[-1] ** -0.5
        return (q @ k.mT + bias) * scale if order == "inside" else q @ k.mT * scale + bias

    for expect in (None, "alibi", ALiBi(4), BiasRule("alibi", 4)):
        right = check_scores(lambda q, k: scores(q, k, "outside"), heads=4, head_dim=16, expect=expect)
        assert right.ids == ()
        assert right.described[0] == "scale 0.25 (1/√head_dim)"
        wrong = check_scores(lambda q, k: scores(q, k, "inside"), heads=4, head_dim=16, expect=expect)
        assert wrong.ids == ("bias-scale-order",), str(wrong)
    content = check_scores(lambda q, k: (q @ k.mT).square(), heads=4, head_dim=16)
    assert "scale" in content.skipped


def test_probes_leave_no_trace():
    encoding = seeded(T5Bias(4))
    state, dtype = torch.random.get_rng_state(), torch.get_default_dtype()
    before = encoding.relative_attention_bias.weight.detach().clone()
    check_bias(of(encoding), heads=4, expect=encoding)
    assert torch.equal(before, encoding.relative_attention_bias.weight)
    assert encoding.relative_attention_bias.weight.grad is None
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.get_default_dtype() == dtype


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"fn": "alibi"}, TypeError, "check_bias: fn is a str. Expected a callable"),
        ({"fn": lambda a: a}, TypeError, "fn raised TypeError.*takes 1 positional argument"),
        ({"fn": lambda q, k: {}["bias"]}, ValueError, "fn raised KeyError"),
        ({"fn": lambda q, k: None}, TypeError, "fn gave a NoneType"),
        ({"fn": lambda q, k: torch.zeros(len(q), len(k), 8)}, ShapeError, r"fn gave \(24, 24, 8\) for 24 queries and 24 keys"),
        ({"fn": lambda q, k: torch.zeros(8, len(q), len(k), dtype=torch.complex64)}, TypeError, "fn gave torch.complex64"),
        ({"fn": lambda q, k: torch.zeros(8, len(q), len(k), device="meta")}, TypeError, r"without values \(meta\)"),
        ({"takes": "tokens"}, ValueError, "takes = 'tokens'"),
        ({"direction": "both"}, ValueError, "direction = 'both'"),
        ({"expect": "rope"}, ValueError, "expect = 'rope'"),
        ({"heads": 0}, ValueError, "heads = 0"),
        ({"heads": True}, TypeError, "heads = True"),
        ({"length": 1}, ValueError, "length = 1"),
        ({"grid": 7}, ValueError, "grid = 7"),
        ({"expect": ALiBi(4)}, ShapeError, "a promise of 4 heads for a bias of 8"),
        ({"takes": "grid", "fn": lambda h, w: torch.zeros(8, 3, 3)}, ShapeError, "for a window of 2 × 3"),
    ],
)
def test_mistakes_are_one_sentence(settings, error, message):
    slopes = torch.tensor([2.0**-j for j in range(1, 9)])[:, None, None]
    call = {"fn": lambda q, k: -slopes * (q[:, None] - k), "heads": 8} | settings
    with pytest.raises(error, match=message):
        check_bias(**call)


PAGES = Path(__file__).parents[2] / "docs/findings"
OURS = [kind.id for area in (tables, biases) for kind in vars(area).values() if isinstance(kind, Kind)]


def block(page: str, heading: str) -> str:
    """The first fenced block after a heading."""
    return re.search(rf"## {heading}\n.*?```(?:python)?\n(.*?)```", page, re.DOTALL).group(1)


@pytest.mark.parametrize("name", OURS)
def test_pages_show_what_happens(name, monkeypatch, capsys):
    for check in (check_bias, check_scores, check_table):
        monkeypatch.setattr(posenc.audit, check.__name__, check, raising=False)
    page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    wrong, mend = block(page, "The wrong thing"), block(page, "The mend")
    exec(wrong, {})
    assert block(page, "How it looks").strip() in capsys.readouterr().out
    setup, call = wrong.rsplit("\n\n", 1)
    exec(f"{setup}\n\n{mend}\n{call}", {})
    assert f"[{name}]" not in capsys.readouterr().out
