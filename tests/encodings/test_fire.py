"""Distance as a part of the position: the paper's numbers, true document positions, memory, checkpoints."""

from __future__ import annotations

from math import log

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from posenc import (
    CAUSAL,
    Transformer,
    attention,
    causal,
    contiguous,
    materialize,
    packed,
    padded,
    positional_attention,
    score_mod,
    slice_heads,
)
from posenc.attn.cache import GrowingCache, StaticCache
from posenc.encodings.fire import FIRE
from posenc.testing import CHECKS, SHAPE, Subject, conform

F64 = torch.float64


def normalised(m, n, c, threshold):
    """Li et al. 2024, §3.2 and its released code: log of the distance over log of the thresholded position."""
    return log(abs(c) * max(m - n, 0) + 1) / (log(abs(c) * max(m, threshold) + 1) + 1e-6)


def oracle(encoding, positions, k_positions):
    """The paper's f, unit by unit, over every pair."""
    numbers = {name: value.detach().double().tolist() for name, value in encoding.named_parameters()}
    threshold = abs(numbers["L_multiplier"] * encoding.threshold)
    bias = torch.zeros(encoding.heads, len(positions), len(k_positions), dtype=F64)
    for i, m in enumerate(positions.tolist()):
        for j, n in enumerate(k_positions.tolist()):
            x = normalised(m, n, numbers["c"], threshold)
            units = zip(numbers["mlp.0.weight"], numbers["mlp.0.bias"], strict=True)
            units = [max(0.0, rise * x + shift) for (rise,), shift in units]
            for head, (row, offset) in enumerate(zip(numbers["mlp.2.weight"], numbers["mlp.2.bias"], strict=True)):
                bias[head, i, j] = sum(a * b for a, b in zip(row, units, strict=True)) + offset
    return bias


def test_conforms():
    # in float64, and without its own word on dtypes, which the next test has: what conform allows is relative to the bias,
    # and a network may cancel to nearly nothing
    conform(
        lambda shape: FIRE(shape.heads).double(),
        oracle,
        claims=FIRE.spec.claims,
        other=lambda shape: FIRE(shape.heads, hidden=5, threshold=4, init_c=2.0).double(),
        skip={"casts", "dtypes"},
    )
    CHECKS["casts"](Subject(lambda shape: FIRE(shape.heads), oracle, FIRE.spec.claims, SHAPE))


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_each_dtype_is_as_exact_as_its_network_can_be(dtype):
    encoding, at = FIRE(4, threshold=8, dtype=dtype), torch.tensor([0, 1, 5, 90, 4_000, 10_000_000])
    absolute = FIRE(4, threshold=8, dtype=F64)
    with torch.no_grad():
        for own, size in zip(encoding.parameters(), absolute.parameters(), strict=True):
            size.copy_(own.abs())
    # twelve roundings up to a unit of f (ten in its input), thirty-three in the sum over units, each of them at most as
    # large as the network with all signs positive; as many in the oracle, which counts in float64
    allowed = 45 * (torch.finfo(dtype).eps / 2 + 2**-53) * oracle(absolute, at, at)
    result = materialize(encoding(), at, dtype=dtype)
    assert result.dtype == dtype
    assert bool(((result.double() - oracle(encoding, at, at)).abs() <= allowed).all())


@pytest.mark.parametrize(
    ("m", "n", "expected"),
    [
        (20, 10, 0.1752547529),
        (511, 0, 0.9995149164),
        (1023, 0, 0.9999997844),
        (1023, 1013, 0.1494612396),
        (2047, 1024, 0.8706856675),
    ],
)
def test_worked_inputs_of_the_network(m, n, expected):
    encoding = FIRE(1).double()
    with torch.no_grad():  # a network that passes its input on
        for value, layer in ((1.0, encoding.mlp[0]), (1 / 32, encoding.mlp[2])):
            layer.weight.fill_(value)
            layer.bias.zero_()
        encoding.c.fill_(0.1)
    result = materialize(encoding(), torch.tensor([m]), torch.tensor([n]), dtype=F64)
    assert abs(result.item() - expected) <= 5e-11


def test_distance_alone_does_not_decide_past_the_threshold():
    encoding, at = FIRE(2, threshold=16).double(), torch.tensor([3, 10])
    near, shifted, far = (materialize(encoding(), at + shift, dtype=F64)[:, 1, 0] for shift in (0, 6, 600))
    torch.testing.assert_close(near, shifted, rtol=0, atol=1e-14)  # both queries stand at 16 or before
    assert bool(((near - far).abs() > 1e-3).all())


def test_keys_in_the_future_count_as_the_query_itself():
    bias = materialize(FIRE(3, threshold=4)(), torch.arange(6))
    future = torch.ones(6, 6, dtype=torch.bool).triu()
    assert torch.equal(bias[:, future], bias[:, :1, :1].flatten(1).expand(3, 21))


def parts(length, heads=4, kv_heads=2, dim=8):
    q = torch.randn(2, heads, length, dim, dtype=F64)
    k, v = torch.randn(2, 2, kv_heads, length, dim, dtype=F64).unbind()
    return q, k, v


def near(actual, expected):
    # a dozen scores of 8 products near 8 at most, exponentials and sums: some hundred roundings of numbers near 1
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=256 * 2**-53 * 8)


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_attention_is_that_of_the_paper(kv_heads):
    encoding, (q, k, v) = FIRE(4, threshold=3).double(), parts(9, kv_heads=kv_heads)
    result = positional_attention(q, k, v, encodings=[encoding], positions=0, mask=CAUSAL)
    k, v = (t.repeat_interleave(4 // kv_heads, 1) for t in (k, v))
    scores = q @ k.mT / 8**0.5 + oracle(encoding, torch.arange(9), torch.arange(9))
    near(result, scores.masked_fill(~torch.ones(9, 9, dtype=torch.bool).tril(), -torch.inf).softmax(-1) @ v)


def test_packed_documents_and_padding_need_their_own_positions():
    encoding, (q, k, v) = FIRE(4, threshold=2).double(), parts(9)
    tokens = packed(torch.tensor([0, 5, 9]), 9)
    together = positional_attention(q, k, v, encodings=[encoding], positions=tokens, mask=causal(tokens))
    second = [t[:, :, 5:] for t in (q, k, v)]
    alone = positional_attention(*second, encodings=[encoding], positions=0, mask=CAUSAL)
    near(together[:, :, 5:], alone)
    running = tokens._replace(positions=torch.arange(9))
    wrong = positional_attention(q, k, v, encodings=[encoding], positions=running, mask=causal(tokens))
    assert float((wrong[:, :, 5:] - alone).detach().abs().max()) > 1e-4
    real = torch.tensor([[0] * 5 + [1] * 4]).expand(2, -1)
    left = padded(real)
    near(positional_attention(q, k, v, encodings=[encoding], positions=left, mask=causal(left))[:, :, 5:], alone)


@pytest.mark.parametrize("steps", [[7], [1] * 7, [3, 1, 3]])
def test_any_split_over_a_cache_gives_the_whole(steps):
    encoding, (q, k, v) = FIRE(4, threshold=3).double(), parts(7)
    whole = positional_attention(q, k, v, encodings=[encoding], positions=0, mask=CAUSAL)
    for cache in (GrowingCache(), StaticCache(2, 2, 10, 8, dtype=F64)):
        results, start = [], 0
        for n in steps:
            tokens, new = contiguous(n, start), slice(start, start + n)
            mask = CAUSAL if isinstance(cache, GrowingCache) else causal(*cache.place(tokens))
            call = {"encodings": [encoding], "positions": tokens, "cache": cache, "mask": mask}
            results.append(positional_attention(q[:, :, new], k[:, :, new], v[:, :, new], **call))
            start += n
        near(torch.cat(results, 2), whole)


def test_positions_are_needed():
    q, k, v = parts(3)
    with pytest.raises(TypeError, match="positions=None with FormulaBias"):
        attention(q, k, v, bias=FIRE(4)())


def test_blocks_heads_rows_and_single_entries_are_parts_of_the_whole():
    encoding, at = FIRE(5, threshold=4).double(), torch.stack([torch.arange(7), torch.arange(7) + 30])
    bias = encoding()
    whole = materialize(bias, at, dtype=F64)
    assert whole.shape == (2, 5, 7, 7)

    def same(part, expected):  # a product of another shape may sum its 32 terms in another order
        torch.testing.assert_close(part, expected, rtol=0.0, atol=64 * 2**-53)

    same(materialize(bias, at[:, 2:5], at, dtype=F64), whole[:, :, 2:5])
    same(materialize(bias, at[1], dtype=F64), whole[1])
    same(materialize(bias, at[:, 3:], at[0], dtype=F64)[0], whole[0, :, 3:])
    same(materialize(slice_heads(bias, slice(1, 3)), at, dtype=F64), whole[:, 1:3])
    one = score_mod(slice_heads(bias, slice(2, 5)), at)
    index = [torch.tensor(i) for i in (1, 1, 6, 2)]
    same(one(torch.zeros((), dtype=F64), *index), whole[1, 3, 6, 2])


class Largest(TorchDispatchMode):
    """The most elements that any operation gave."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.untyped_storage().nbytes():
            self.elements = max(self.elements, result.untyped_storage().nbytes() // result.element_size())
        return result


def test_hidden_units_are_shared_by_heads():
    bias, at = FIRE(16, hidden=8)(), torch.arange(20)
    with Largest() as largest:
        materialize(bias, at)
    assert largest.elements == 20 * 20 * 16


def test_gradients_reach_all_parameters_and_are_finite_everywhere():
    encoding, (q, k, v) = FIRE(2, hidden=3, threshold=2).double(), parts(5, 2, 1, 4)

    def call(q, *_):
        return positional_attention(q, k, v, encodings=[encoding], positions=0, backend="reference")

    assert torch.autograd.gradcheck(call, (q.requires_grad_(), *encoding.parameters()), fast_mode=True)
    at = torch.arange(5)
    for c in (0.0, -5.0, 1e30):  # what training may reach: only the size of c counts
        encoding.zero_grad()
        with torch.no_grad():
            encoding.c.fill_(c)
        bias = materialize(encoding(), at, dtype=F64)
        torch.testing.assert_close(bias, oracle(encoding, at, at), rtol=0.0, atol=64 * 2**-53)
        bias.square().sum().backward()
        assert all(bool(p.grad.isfinite().all()) for p in encoding.parameters())


def test_half_precision_and_autocast_leave_the_bias_wide():
    encoding, at = FIRE(3), torch.arange(40)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = materialize(encoding(), at)
    assert torch.equal(inside, materialize(encoding(), at))
    half = FIRE(3, dtype=torch.bfloat16)
    assert {t.dtype for t in half().tensors()} == {torch.float32}


def decoder():
    return Transformer(11, dim=16, layers=2, heads=4, kv_heads=2, encodings=lambda layer: [FIRE(4, threshold=5)])


def test_a_decoder_trains():
    model, ids = decoder(), torch.randint(0, 11, (2, 9))
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.05), []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(torch.nn.functional.cross_entropy(model(ids, 0)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))
        losses[-1].backward()
        assert all(bool((p.grad != 0).any()) for fire in model.encodings for p in fire.parameters() if p.ndim != 1)
        optimizer.step()
    assert losses[2] < losses[1] < losses[0]


@pytest.mark.parametrize("length", [None, 12])
def test_a_decoder_generates_the_same_with_and_without_a_cache(length):
    model, ids = decoder().double().eval(), torch.randint(0, 11, (2, 6))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    cache = None if length is None else model.new_cache(2, length)
    new = model.generate(ids, 4, attention_mask=mask, cache=cache)
    alone = torch.cat([ids[:1, 2:], new[:1]], 1)  # without padding, without a cache
    assert torch.equal(model(alone, 0)[:, 3:-1].argmax(-1), new[:1])
    assert torch.equal(model(torch.cat([ids[1:], new[1:]], 1), 0)[:, 5:-1].argmax(-1), new[1:])


def test_checkpoints_of_the_released_code_load():
    sizes = {
        "c": (),
        "L_multiplier": (),
        "mlp.0.weight": (32, 1),
        "mlp.0.bias": (32,),
        "mlp.2.weight": (4, 32),
        "mlp.2.bias": (4,),
    }
    given = {name: torch.randn(size) for name, size in sizes.items()}
    model = torch.nn.ModuleDict({"fire": FIRE(4)})
    model.load_state_dict({f"fire.{name}": value for name, value in {**given, "init_L": torch.tensor(512.0)}.items()})
    assert {name: tuple(value.shape) for name, value in FIRE(4).state_dict().items()} == sizes
    assert all(torch.equal(value, given[name]) for name, value in model["fire"].state_dict().items())
    with pytest.raises(RuntimeError, match=r"FIRE: fire.init_L = 256 in the state dict. Expected 512.*threshold=256"):
        model.load_state_dict({f"fire.{name}": value for name, value in {**given, "init_L": torch.tensor(256.0)}.items()})


@pytest.mark.parametrize(
    ("arguments", "rest", "error", "message"),
    [
        ((0,), {}, ValueError, "heads = 0. Expected an integer of 1 or more"),
        ((4.0,), {}, TypeError, "heads = 4.0"),
        ((4,), {"hidden": 0}, ValueError, "hidden = 0"),
        ((4,), {"threshold": 0}, ValueError, "threshold = 0. Expected a finite number above 0, of positions"),
        ((4,), {"threshold": torch.inf}, ValueError, "threshold = inf"),
        ((4,), {"init_c": -0.1}, ValueError, "init_c = -0.1"),
        ((4,), {"init_c": True}, ValueError, "init_c = True"),
    ],
)
def test_impossible_settings_are_refused(arguments, rest, error, message):
    with pytest.raises(error, match=f"FIRE: {message}"):
        FIRE(*arguments, **rest)
