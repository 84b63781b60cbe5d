"""`check_attention` reads off what attention functions and modules do, and compares it with what is expected."""

from __future__ import annotations

import math

import pytest
import torch
from tests.audit.bugs.attention import (
    GROUPS,
    HEADS,
    WIDTH,
    SelfAttention,
    biased,
    causal,
    lower,
    score,
    slopes,
    turn,
    turned,
    windowed,
)
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

from posenc import CAUSAL, FULL, ALiBi, T5Bias, attention, window
from posenc.audit.attention.checking import check_attention


def check(fn, **expected):
    return check_attention(fn, heads=HEADS, head_dim=WIDTH, **expected)


def described(fn, **expected):
    report = check(fn, **expected)
    assert report.at_least("warning") == (), str(report)
    return set(report.described)


def test_torchs_own_attention_is_full_and_its_masks_are_read():
    assert {"every key is seen", "scale 0.25 = 1/√16", "no bias on the scores"} <= described(sdpa, mask=FULL)
    seen = described(lambda q, k, v, attn_mask=None: sdpa(q, k, v, attn_mask=attn_mask))
    assert "attn_mask: booleans, true where seen" in seen


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda q, k, v, mask=None: weigh(q, k, v, add=mask), "mask: added to the scores"),
        (lambda q, k, v, mask=None: weigh(q, k, v, hide=mask), "mask: booleans, true where hidden"),
        (lambda q, k, v, key_padding_mask=None: weigh(q, k, v, hide=rows(key_padding_mask)),
         "key_padding_mask: booleans of keys, true where hidden"),
        (lambda q, k, v, attention_mask=None: weigh(q, k, v, hide=rows(attention_mask, 0)),
         "attention_mask: numbers of keys, 1 where seen"),
    ],
)  # fmt: skip
def test_masks_in_every_form(fn, words):
    assert words in described(fn)


def rows(mask, hidden=1):
    if mask is None:
        return None
    if mask.is_floating_point() or (hidden == 0 and mask.dtype == torch.bool):
        raise TypeError("another form")
    return (mask == hidden)[:, None, None, :]


def weigh(q, k, v, add=None, hide=None):
    scores = score(q, k) if add is None else score(q, k) + add
    if hide is not None:
        if hide.dtype != torch.bool:
            raise TypeError("booleans")
        scores = scores.masked_fill(hide, -math.inf)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("size", [1, 2, 8, 23, 40])
def test_windows_are_measured(size):
    def fn(q, k, v):
        return windowed(q, k, v, size)

    words = described(fn, mask=CAUSAL & window(size))
    assert f"causal, window {size}, own token included" in words
    assert "queries aligned with the last key" in words
    wrong = check(fn, mask=CAUSAL & window(size + 1))
    assert wrong.ids[0] == "attention-window"
    assert wrong.findings[0].expected.startswith(f"causal, window {size + 1}")


@pytest.mark.parametrize("scale", [0.01, 0.125, 1.0, 1 / 7])
def test_scales_are_measured(scale):
    def fn(q, k, v):
        return attention(q, k, v, mask=CAUSAL, scale=scale)

    assert any(line.startswith(f"scale {scale:.4g}") for line in described(fn, scale=scale))
    (finding,) = check(fn).at_least("warning")
    assert (finding.id, finding.measured.split(":")[0].split(" ")[0]) == ("attention-scale", f"{scale:.4g}")


@pytest.mark.parametrize(
    ("factor", "words"),
    [(4.0, "none is applied"), (0.25, "1/√head_dim is applied twice"), (0.5, "√(heads · head_dim) divides")],
)
def test_what_went_wrong_with_a_scale_is_named(factor, words):
    (finding,) = check(lambda q, k, v: attention(q, k, v, scale=factor / 4)).at_least("warning")
    assert words in finding.measured


def test_scale_and_bias_are_found_under_a_rotation():
    def fn(q, k, v):
        at = torch.arange(k.shape[2])
        scores = score(turn(q, at[-q.shape[2] :]), turn(k, at)) + slopes(q, k)
        return scores.masked_fill(~lower(q.shape[2], k.shape[2]), -math.inf).softmax(-1) @ v

    assert {"scale 0.25 = 1/√16", "bias as expected"} <= described(fn, bias=ALiBi(HEADS)())


@pytest.mark.parametrize(
    ("bias", "times", "words"),
    [
        (None, 0.0, "no bias on the scores"),
        (None, 1.0, "ALiBi: slopes 0.25, 0.0625, 0.01562, 0.003906"),
        (None, 0.5, "ALiBi times 0.5: slopes 0.125, 0.03125, 0.007812, 0.001953"),
        (ALiBi(HEADS)(), 1.0, "bias as expected"),
    ],
)
def test_biases_are_described(bias, times, words):
    assert words in described(lambda q, k, v: biased(q, k, v, times), bias=bias)


@pytest.mark.parametrize(
    ("times", "words"),
    [(2.0, "twice the expected bias"), (-1.0, "the expected bias with the other sign"), (0.0, "no bias"), (3.0, "3 times")],
)
def test_what_went_wrong_with_a_bias_is_named(times, words):
    (finding,) = check(lambda q, k, v: biased(q, k, v, times), bias=ALiBi(HEADS)()).at_least("warning")
    assert finding.id == "attention-bias"
    assert finding.measured.startswith(words)


def test_a_learned_bias_and_another_one():
    one, other = T5Bias(HEADS, direction="causal"), T5Bias(HEADS, direction="causal")
    for bias in (one, other):
        nn.init.normal_(bias.relative_attention_bias.weight)

    def fn(q, k, v):
        return attention(q, k, v, mask=CAUSAL, bias=one())

    assert "bias as expected" in described(fn, bias=one())
    (finding,) = check(fn, bias=other()).at_least("warning")
    assert (finding.id, finding.measured.split(":")[0]) == ("attention-bias", "another bias")


def test_grouped_heads_are_described():
    def fn(q, k, v):
        return attention(q, k, v, mask=CAUSAL)

    assert f"{HEADS} query heads read {GROUPS} key-value heads in groups" in described(fn, kv_heads=GROUPS)


def test_keys_alone_tiled():
    def fn(q, k, v):
        return causal(q, k.repeat(1, HEADS // GROUPS, 1, 1), v.repeat_interleave(HEADS // GROUPS, 1))

    (finding,) = check(fn, kv_heads=GROUPS).at_least("warning")
    assert (finding.id, finding.where) == ("attention-heads", "fn, keys")
    assert "[0, 1, 0, 1]: tiled" in finding.measured


def test_sinks_and_soft_caps_are_described_and_no_finding():
    def sink(q, k, v):
        scores = score(q, k).masked_fill(~lower(q.shape[2], k.shape[2]), -math.inf)
        return nn.functional.pad(scores, (0, 1)).softmax(-1)[..., :-1] @ v

    assert any(line.startswith("weights sum to 0.") for line in described(sink, mask=CAUSAL))

    def cap(q, k, v):
        scores = 5 * (score(q, k) / 5).tanh()
        return scores.masked_fill(~lower(q.shape[2], k.shape[2]), -math.inf).softmax(-1) @ v

    report = check(cap, mask=CAUSAL)
    assert report.at_least("warning") == ()
    assert report.skipped["scale"] == "scores are not linear in q·k: a soft cap, or norms of queries and keys"


def test_scores_rounded_to_bfloat16_are_a_note_and_float32_scores_are_not():
    assert [finding.severity for finding in check(causal).findings] == ["note"]

    def wide(q, k, v):
        return causal(q.float(), k.float(), v.float()).to(q.dtype) if q.dtype == torch.bfloat16 else causal(q, k, v)

    assert check(wide).findings == ()


def test_one_query_against_many_keys_is_what_the_last_row_sees():
    # the reference behaviour of is_causal: with 1 query and 4 keys the mean of values 0 … 3 should be 1.5, and is 0
    values = torch.arange(4.0)[None, None, :, None].expand(1, 1, 4, 2)
    zeros = torch.zeros(1, 1, 4, 2)
    assert sdpa(zeros[:, :, :1], zeros, values, is_causal=True)[0, 0, 0, 0] == 0.0
    report = check(lambda q, k, v: sdpa(q, k, v, is_causal=True), mask=CAUSAL)
    (finding,) = report.at_least("warning")
    assert finding.id == "causal-alignment"
    assert "queries are aligned with the first key" in finding.measured


def test_a_function_for_equal_lengths_alone_skips_the_alignment():
    def square(q, k, v):
        if q.shape[2] != k.shape[2]:
            raise ValueError("equal lengths only")
        return causal(q, k, v)

    report = check(square, mask=CAUSAL)
    assert report.at_least("warning") == ()
    assert report.skipped["alignment"] == "it raises ValueError: equal lengths only"


def test_modules_are_run_as_models():
    report = check(SelfAttention(turned), mask=CAUSAL)
    assert report.findings == ()
    assert {"causal", "decoding with a cache equals one full pass"} <= set(report.described)
    assert "values" in report.checked
    broken = check(SelfAttention(lambda q, k, v: score(q, k).softmax(-1) @ v), mask=CAUSAL)
    assert "future-leak" in broken.ids


@pytest.mark.parametrize(
    ("attend", "mask"), [(causal, CAUSAL), (lambda q, k, v: score(q, k).softmax(-1) @ v, FULL)], ids=["causal", "full"]
)
def test_a_module_may_find_positions_in_its_input(attend, mask):
    report = check(SelfAttention(attend), mask=mask)
    assert report.at_least("warning") == (), str(report)
    assert "no positions of its own" in report.described


def test_a_module_of_queries_keys_and_values_is_asked_like_a_function():
    class Core(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, q, k, v):
            return self.drop(causal(q, k, v))

    module = Core().train()
    assert "causal" in described(module)
    assert module.training


def test_one_head_and_narrow_heads():
    report = check_attention(causal_of(2), heads=1, head_dim=2, mask=CAUSAL)
    assert report.at_least("warning") == (), str(report)


def causal_of(width):
    return lambda q, k, v: score(q, k, width**-0.5).masked_fill(~lower(q.shape[2], k.shape[2]), -math.inf).softmax(-1) @ v


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: check(3), TypeError, "check_attention: a int. Expected a function or module. Pass (q, k, v) -> out."),
        (
            lambda: check_attention(sdpa, heads=3, head_dim=8, kv_heads=2), ValueError,
            "check_attention: heads = 3, kv_heads = 2, head_dim = 8. Expected heads a multiple of kv_heads",
        ),
        (lambda: check_attention(sdpa, heads=0, head_dim=8), ValueError, "check_attention: heads = 0."),
        (lambda: check(sdpa, mask=torch.ones(2)), TypeError, "check_attention: mask is a Tensor. Expected a posenc Mask"),
        (lambda: check(sdpa, bias=ALiBi(HEADS)), TypeError, "check_attention: bias is a ALiBi. Expected a posenc ScoreBias"),
        (lambda: check(sdpa, bias=ALiBi(3)()), ValueError, "check_attention: a bias of 3 heads for 4. Expected 1 or 4."),
        (lambda: check(sdpa, scale=0.0), ValueError, "check_attention: scale = 0.0. Expected a number above 0"),
        (lambda: check(lambda q, k: q), TypeError, "check_attention: the function takes 2 arguments. Expected (q, k, v, …)."),
        (
            lambda: check(lambda q, k, v, table: q), TypeError,
            "check_attention: the function needs table beside queries, keys and values.",
        ),
        (
            lambda: check(lambda q, k, v: v[..., :3]), ValueError,
            "check_attention: the function cannot be called: it answers (1, 4, 24, 3), not (1, 4, 24, 16)",
        ),
        (lambda: check(lambda q, k, v: q @ k), ValueError, "check_attention: the function cannot be called: it raises RuntimeError"),
        (lambda: check(lambda q, k, v: None), ValueError, "it answers NoneType"),
        (
            lambda: check(nn.Linear(5, 5)), ValueError,
            "check_attention: Linear cannot be called with x of shape [3, 12, 64]: the model raises RuntimeError",
        ),
        (lambda: check(SelfAttention(turned).to("meta")), ValueError, "its weights are on the meta device"),
    ],
)  # fmt: skip
def test_bad_input_is_a_clear_error(call, error, message):
    with pytest.raises(error) as raised:
        call()
    assert message in str(raised.value)


def test_the_error_of_a_function_is_kept():
    def broken(q, k, v):
        raise ZeroDivisionError("mine")

    with pytest.raises(ValueError, match="it raises ZeroDivisionError: mine") as raised:
        check(broken)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda q, k, v: q * math.nan, "its answers are not finite"),
        (lambda q, k, v: score(q, k) @ v, "its weights are not those of a softmax"),
        (lambda q, k, v: score(q, k).sigmoid() @ v, "its weights are not those of a softmax"),
        (lambda q, k, v: score(q, k).softmax(-2) @ v, "its weights are not those of a softmax"),
        (lambda q, k, v: 0 * q, "its weights are not those of a softmax: they sum to 0 … 0 in a row"),
    ],
)
def test_what_is_no_softmax_is_left_alone(fn, reason):
    report = check(fn, mask=CAUSAL, bias=ALiBi(HEADS)())
    assert report.findings == report.checked == ()
    assert list(report.skipped) == ["attention"]
    assert report.skipped["attention"].startswith(reason)


def test_rows_that_see_nothing_may_answer_nan():
    def earlier(q, k, v):
        seen = lower(q.shape[2], k.shape[2]).tril(k.shape[2] - q.shape[2] - 1)
        return score(q, k).masked_fill(~seen, -math.inf).softmax(-1) @ v

    report = check(earlier)
    assert report.at_least("warning") == (), str(report)
    assert "causal, own token not seen, window 24, own token included" not in report.described
    assert any(line.startswith("causal, own token not seen") for line in report.described)
