"""The value term of relative vectors: the paper's sum, by hand, and who serves it."""

from __future__ import annotations

from math import exp

import pytest
import torch

from posenc import (
    CAUSAL,
    ALiBi,
    BackendRefused,
    ShapeError,
    Transformer,
    ValueTable,
    attention,
    causal,
    explain,
    packed,
    positional_attention,
)
from posenc.attn.attention import attention as attend
from posenc.attn.cache import GrowingCache
from posenc.encodings.shaw import ShawRelative

F64 = torch.float64


def by_hand(shaw, q, k, v, positions, k_positions, visible):
    """Shaw et al. 2018, equations 3 and 4: z_i = Σ_j α_ij (x_j W^V + a^V_ij), one number at a time."""
    keys = shaw.distance_embedding.weight.tolist()
    values = shaw.value_embedding.weight.tolist()
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=F64)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            group = h * k.shape[1] // q.shape[1]
            for i, m in enumerate(positions.tolist()):
                seen = [j for j in range(len(k_positions)) if visible(i, j)]
                rows = {j: shaw.max_distance + max(-shaw.max_distance, min(shaw.future, int(k_positions[j]) - m)) for j in seen}
                scores = {
                    j: sum(float(a) * (float(c) + e) for a, c, e in zip(q[b, h, i], k[b, group, j], keys[rows[j]], strict=True))
                    * shaw.scale
                    for j in seen
                }
                total = sum(exp(score) for score in scores.values())
                for j in seen:
                    weight = exp(scores[j]) / total
                    for c in range(v.shape[-1]):
                        out[b, h, i, c] += weight * (float(v[b, group, j, c]) + values[rows[j]][c])
    return out


def inputs(heads=4, kv_heads=2, seq=7, dim=6, value_dim=5):
    torch.manual_seed(0)
    q = torch.randn(2, heads, seq, dim, dtype=F64)
    k = torch.randn(2, kv_heads, seq, dim, dtype=F64)
    v = torch.randn(2, kv_heads, seq, value_dim, dtype=F64)
    shaw = ShawRelative(dim, 3, future=2, value_dim=value_dim, dtype=F64)
    with torch.no_grad():
        shaw.value_embedding.weight.mul_(50)  # as large as the values, or a mistake would hide behind them
    return shaw, q, k, v


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("start", [0, 40])
def test_it_is_the_papers_sum(mask, start):
    shaw, q, k, v = inputs()
    positions = torch.arange(7) + start
    seen = (lambda i, j: True) if mask == "full" else (lambda i, j: j <= i)
    kwargs = {} if mask == "full" else {"mask": CAUSAL}
    with torch.no_grad():
        got = positional_attention(q, k, v, encodings=[shaw], positions=positions, **kwargs)
        want = by_hand(shaw, q, k, v, positions, positions, seen)
    assert (got - want).abs().max() < 1e-13  # some fifty roundings of float64 on numbers near 1


def test_row_zero_belongs_to_the_farthest_past_key():
    shaw, q, k, v = inputs()
    with torch.no_grad():
        shaw.value_embedding.weight.zero_()
        shaw.value_embedding.weight[0] = 1.0
        out = positional_attention(torch.zeros_like(q), k, torch.zeros_like(v), encodings=[shaw], positions=0, mask=CAUSAL)
    past = torch.tensor([sum(i - j >= 3 for j in range(i + 1)) / (i + 1) for i in range(7)], dtype=F64)
    assert torch.allclose(out, past[:, None].expand_as(out), rtol=0, atol=1e-15)


def test_it_needs_weights_and_says_so():
    shaw, q, k, v = inputs()
    table = shaw.value_table()
    said = {verdict.backend: verdict for verdict in explain(attention, q, k, v, positions=0, value_table=table)}
    assert [name for name, verdict in said.items() if verdict.chosen] == ["reference"]
    with pytest.raises(BackendRefused, match="never forms the weights"):
        attend(q, k, v, positions=0, value_table=table, backend="sdpa")


def test_positions_none_means_contiguous_and_the_last_query_with_the_last_key():
    shaw, q, k, v = inputs()
    table = shaw.value_table()
    whole = attend(q, k, v, value_table=table, mask=CAUSAL)
    last = attend(q[:, :, -2:], k, v, value_table=table, mask=CAUSAL)
    assert torch.equal(whole[:, :, -2:], last)


@pytest.mark.parametrize("steps", [[7], [1] * 7, [3, 4]])
def test_any_split_over_a_cache_gives_the_whole(steps):
    shaw, q, k, v = inputs()
    whole = positional_attention(q, k, v, encodings=[shaw], positions=0, mask=CAUSAL)
    cache, parts, at = GrowingCache(), [], 0
    for n in steps:
        part = slice(at, at + n)
        new = (t[:, :, part] for t in (q, k, v))
        parts.append(positional_attention(*new, encodings=[shaw], positions=at, cache=cache, mask=CAUSAL))
        at += n
    assert (torch.cat(parts, dim=2) - whole).abs().max() < 1e-14


def test_packed_documents_are_what_they_are_apart():
    shaw, q, k, v = inputs()
    tokens = packed(torch.tensor([0, 3, 7]), 7)
    together = positional_attention(q, k, v, encodings=[shaw], positions=tokens, mask=causal(tokens, tokens))
    apart = [
        positional_attention(*(t[:, :, part] for t in (q, k, v)), encodings=[shaw], positions=0, mask=CAUSAL)
        for part in (slice(0, 3), slice(3, 7))
    ]
    assert (together - torch.cat(apart, dim=2)).abs().max() < 1e-14


def test_gradients_reach_the_rows():
    shaw, q, k, v = inputs(seq=4)
    rows = shaw.value_embedding.weight.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda r, w: attend(q, k, w, value_table=ValueTable(r.flip(0), 2)), (rows, v.requires_grad_())
    )


def test_a_decoder_trains_and_generates_with_it():
    torch.manual_seed(0)
    model = Transformer(11, dim=16, layers=2, heads=2, encodings=lambda layer: [ShawRelative(8, 4, future=0, value_dim=8)])
    ids = torch.randint(0, 11, (1, 6))
    whole = model(ids, 0)
    whole.sum().backward()
    assert all(encoding.value_embedding.weight.grad.abs().sum() > 0 for encoding in model.encodings)
    cache, steps = model.new_cache(), []
    for i in range(6):
        steps.append(model(ids[:, i : i + 1], i, cache=cache))
    assert (torch.cat(steps, dim=1) - whole).abs().max() < 1e-5  # float32: reductions in another order, logits near 1


def test_mistakes_are_named():
    shaw, q, k, v = inputs()
    with pytest.raises(ShapeError, match=r"values of width 4. Expected rows \[span, 4\]"):
        attend(q, k, v[..., :4], value_table=shaw.value_table())
    with pytest.raises(TypeError, match=r"value_table is Parameter. Expected a ValueTable"):
        attend(q, k, v, value_table=shaw.value_embedding.weight)
    with pytest.raises(TypeError, match=r"a ValueTable with torch.float32 positions. Expected integers"):
        attend(q, k, v, value_table=shaw.value_table(), positions=torch.arange(7.0))
    with pytest.raises(ValueError, match="2 encodings add to the values. Expected one at most"):
        positional_attention(q, k, v, encodings=[shaw, ShawRelative(6, 3, value_dim=5, dtype=F64)], positions=0)
    with pytest.raises(ValueError, match="value_dim = 0"):
        ShawRelative(8, 4, value_dim=0)
    assert positional_attention(q, k, v, encodings=[shaw, ALiBi(4)], positions=0).shape == (2, 4, 7, 5)
