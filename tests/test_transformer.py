"""The Transformer: where encodings are placed and stored, what order it can and cannot see, caches and generation."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from posenc import (
    FULL,
    ALiBi,
    ContentScoreEncoding,
    Encoding,
    EncodingSpec,
    Explicit,
    Geometric,
    GrowingCache,
    InputEncoding,
    KeyBias,
    Learned,
    Mask,
    NoPE,
    QKEncoding,
    Randomized,
    RoPE,
    ScoreBias,
    ScoreEncoding,
    ShapeError,
    Sinusoidal,
    StaticCache,
    T5Bias,
    TableBias,
    Tokens,
    Transformer,
    contiguous,
    decode,
    grid,
    packed,
    padded,
    shard,
)

DIM, HEADS, HEAD_DIM, VOCABULARY = 32, 4, 8, 50

ENCODINGS: dict[str, Callable[[], list[Encoding]]] = {
    "nope": lambda: [NoPE()],
    "sinusoidal": lambda: [Sinusoidal(DIM)],
    "learned": lambda: [Learned(64, DIM)],
    "rope": lambda: [RoPE(HEAD_DIM)],
    "alibi": lambda: [ALiBi(HEADS)],
    "t5": lambda: [T5Bias(HEADS)],
    "randomized": lambda: [Randomized(64), RoPE(HEAD_DIM)],
    "several": lambda: [RoPE(HEAD_DIM), T5Bias(HEADS), Learned(64, DIM)],
}
RELATIVE = ["nope", "rope", "alibi", "t5"]
FIXED = ["nope", "sinusoidal", "rope", "alibi", "randomized"]
every_encoding = pytest.mark.parametrize("name", list(ENCODINGS))


def transformer(encodings: Any, seed: int = 0, **more: Any) -> Transformer:
    torch.manual_seed(seed)
    shape: dict[str, Any] = {"dim": DIM, "layers": 2, "heads": HEADS, "kv_heads": 2} | more
    return Transformer(VOCABULARY, encodings=encodings, **shape).eval().double()


def named(name: str, **more: Any) -> Transformer:
    torch.manual_seed(1)
    return transformer(ENCODINGS[name](), **more)


def some_ids(length: int = 10, batch: int = 2) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(7))


def assert_same(a: Tensor, b: Tensor, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


# ------------------------------------------------------------------------------------------------ placing encodings


def test_a_list_is_shared_and_a_function_is_not() -> None:
    t5 = T5Bias(HEADS)
    shared = transformer([RoPE(HEAD_DIM), t5], layers=3)
    assert [key for key in shared.state_dict() if "relative_attention_bias" in key] == [
        "encodings.1.relative_attention_bias.weight"
    ]
    own = transformer(lambda layer: [T5Bias(HEADS)], layers=3)
    assert len([key for key in own.state_dict() if "relative_attention_bias" in key]) == 3
    assert len({p.data_ptr() for p in own.encodings.parameters()}) == 3
    one_for_two = transformer(lambda layer: [t5] if layer else [NoPE()], layers=3)
    assert len(list(one_for_two.encodings.parameters())) == 1


def test_each_layers_own_table_acts_in_that_layer_alone() -> None:
    model, ids = transformer(lambda layer: [T5Bias(HEADS)], layers=2), some_ids()
    inputs: list[Tensor] = []
    model.blocks[1].register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    before = model(ids, 0)
    with torch.no_grad():
        model.encodings[1].relative_attention_bias.weight[1] += 1.0
    after = model(ids, 0)
    assert torch.equal(inputs[0], inputs[1])
    assert not torch.allclose(before, after, atol=1e-3)
    with torch.no_grad():
        model.encodings[0].relative_attention_bias.weight[1] += 1.0
    model(ids, 0)
    assert not torch.allclose(inputs[1], inputs[2], atol=1e-3)


def test_a_layer_without_positions_is_one() -> None:
    """Of four layers the last is not rotated: as if no pair turned there."""
    ids = some_ids()
    mixed = transformer(lambda layer: [NoPE()] if layer == 3 else [RoPE(HEAD_DIM)], layers=4)
    standing = transformer(lambda layer: [RoPE(HEAD_DIM, Explicit((0.0,) * 4))] if layer == 3 else [RoPE(HEAD_DIM)], layers=4)
    rotated = transformer([RoPE(HEAD_DIM)], layers=4)
    assert_same(mixed(ids, 0), standing(ids, 0))
    assert not torch.allclose(mixed(ids, 0), rotated(ids, 0), atol=1e-3)


def test_layers_may_have_bases_of_their_own() -> None:
    ids = some_ids()
    bases = [1e4, 1e2]
    mixed = transformer(lambda layer: [RoPE(HEAD_DIM, Geometric(bases[layer]))])
    seen: list[Any] = []
    for layer, block in enumerate(mixed.blocks):
        block.register_forward_pre_hook(lambda module, args, layer=layer: seen.append((layer, args[2], args[3])))
    out = mixed(ids, 0)
    for layer, encodings, prepared in seen:
        expected = RoPE(HEAD_DIM, Geometric(bases[layer])).prepare(torch.arange(10), dtype=torch.float64)[0]
        assert torch.equal(prepared[encodings[0]][0].cos, expected.cos)
    for same in bases:
        assert not torch.allclose(out, transformer([RoPE(HEAD_DIM, Geometric(same))])(ids, 0), atol=1e-3)


@pytest.mark.parametrize("cached", [None, "growing", "static"])
def test_layers_may_have_windows_of_their_own(cached: str | None) -> None:
    """Windows of 2 and 3 reach one and two tokens back, so a token three back is heard and one four back is not."""
    windows = [2, 3]
    model = transformer([ALiBi(HEADS)], window=lambda layer: windows[layer])
    ids = some_ids(8, 1)

    def last(ids: Tensor) -> Tensor:
        if cached is None:
            return model(ids, 0)[:, -1]
        cache = model.new_cache() if cached == "growing" else model.new_cache(1, 12)
        model(ids[:, :5], 0, cache=cache)
        model(ids[:, 5:7], 5, cache=cache)
        return model(ids[:, 7:], 7, cache=cache)[:, -1]

    def changed(back: int) -> bool:
        other = ids.clone()
        other[:, -1 - back] = (other[:, -1 - back] + 1) % VOCABULARY
        return not torch.equal(last(other), last(ids))

    assert [changed(back) for back in range(6)] == [True, True, True, True, False, False]
    wide = transformer([ALiBi(HEADS)], window=lambda layer: None)
    assert_same(wide(ids, 0), transformer([ALiBi(HEADS)])(ids, 0))
    assert_same(transformer([ALiBi(HEADS)], window=8)(ids, 0), wide(ids, 0))


def test_inputs_and_position_transforms_belong_to_layer_0() -> None:
    first = transformer(lambda layer: [Sinusoidal(DIM), NoPE()] if layer == 0 else [NoPE()])
    assert torch.equal(first(some_ids(), 0), transformer([NoPE(), Sinusoidal(DIM)])(some_ids(), 0))
    for build in (lambda: Sinusoidal(DIM), lambda: Learned(64, DIM), lambda: Randomized(64)):
        encoding = build()
        with pytest.raises(ValueError, match=f"{type(encoding).__name__} in layer 1 acts on the .*layer 0 only"):
            transformer(lambda layer, encoding=encoding: [encoding] if layer == 1 else [NoPE()])
    with pytest.raises(TypeError, match="Transformer: Linear.*is no encoding"):
        transformer([nn.Linear(2, 2)])


def test_the_input_encoding_acts_once_on_the_scaled_embedding() -> None:
    model, ids = named("sinusoidal"), some_ids()
    seen: list[Tensor] = []
    model.blocks[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(ids, 3)
    code = Sinusoidal(DIM).table(torch.arange(3, 13), dtype=torch.float64)
    assert_same(seen[0], model.embed.weight[ids] * DIM**0.5 + code)


def test_position_transforms_act_before_every_other_encoding() -> None:
    """In training all encodings see the same drawn positions; in evaluation the plain ones."""
    table = Learned(64, DIM)
    model = transformer([table, RoPE(HEAD_DIM), Randomized(64)])
    ids = some_ids()
    drawn = Randomized(64)(contiguous(10).positions, torch.Generator().manual_seed(3))
    model.train()
    random = model(ids, 0, generator=torch.Generator().manual_seed(3))
    model.eval()
    assert torch.equal(random, model(ids, drawn))
    assert not torch.allclose(random, model(ids, 0), atol=1e-3)


# ------------------------------------------------------------------------------------------------ storing


@pytest.mark.parametrize("name", FIXED)
def test_fixed_encodings_store_nothing(name: str) -> None:
    model = named(name)
    assert model.encodings.state_dict() == {}
    assert not list(model.buffers())
    assert model.state_dict().keys() == named("nope").state_dict().keys()


def test_a_checkpoint_moves_between_fixed_encodings() -> None:
    source = named("rope")
    target = transformer([ALiBi(HEADS)], seed=5)
    target.load_state_dict(source.state_dict())
    assert torch.equal(target(some_ids(), 0), named("alibi")(some_ids(), 0))


@every_encoding
def test_copies_are_equal_and_independent(name: str) -> None:
    model, ids = named(name), some_ids()
    before = model(ids, 0)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(ids, 0), before)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.add_(0.5)
        assert torch.equal(model(ids, 0), before)


@every_encoding
def test_models_made_on_meta_are_right_once_loaded(name: str) -> None:
    """No table may live in memory that ``to_empty`` leaves as it finds it."""
    model, ids = named(name), some_ids()
    with torch.device("meta"):
        blank = Transformer(VOCABULARY, dim=DIM, layers=2, heads=HEADS, kv_heads=2, encodings=ENCODINGS[name]())
    assert {p.device.type for p in blank.parameters()} == {"meta"}
    assert blank(ids.to("meta"), 0).shape == (2, 10, VOCABULARY)
    hoard = [torch.full((n,), float("nan"), dtype=torch.float64) for n in (4, 8, 32, 64, 129, 2048) for _ in range(8)]
    del hoard
    loaded = blank.double().to_empty(device="cpu").eval()
    loaded.load_state_dict(model.state_dict())
    assert torch.equal(loaded(ids, 0), model(ids, 0))


@every_encoding
def test_calls_do_not_change_later_calls(name: str) -> None:
    model, ids = named(name), some_ids()
    before = model(ids, 0)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    attributes = {path: set(vars(module)) for path, module in model.named_modules()}
    model(ids[:, :4], 20)
    model(some_ids(30), 0)
    model(ids, padded(torch.ones(2, 10, dtype=torch.int64)))
    assert torch.equal(model(ids, 0), before)
    assert {path: set(vars(module)) for path, module in model.named_modules()} == attributes
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


@every_encoding
def test_two_training_steps_reach_every_parameter(name: str) -> None:
    model, ids = named(name).train(), some_ids()
    for _ in range(2):
        model.zero_grad()
        model(ids, 0, generator=torch.Generator().manual_seed(0)).square().mean().backward()
        for path, parameter in model.named_parameters():
            assert parameter.grad is not None, path
            assert bool(parameter.grad.isfinite().all()), path
            assert bool(parameter.grad.any()), path
        torch.optim.SGD(model.parameters(), 1e-2).step()


# ------------------------------------------------------------------------------------------------ order


def permuted_logits(model: Transformer, ids: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    return model(ids, 0)[:, order], model(ids[:, order], 0)


def test_an_encoder_sees_order_only_through_encodings() -> None:
    ids, order = some_ids(), torch.tensor([3, 7, 0, 1, 9, 4, 2, 8, 6, 5])
    a, b = permuted_logits(named("nope", kind="encoder"), ids, order)
    assert_same(a, b)
    builds: dict[str, list[Encoding]] = {name: ENCODINGS[name]() for name in ("sinusoidal", "learned", "rope")}
    builds["alibi"] = [ALiBi(HEADS, form="symmetric")]
    builds["t5"] = [T5Bias(HEADS, direction="bidirectional")]
    for name, encodings in builds.items():
        model = transformer(encodings, kind="encoder")
        if name == "t5":  # small at birth
            with torch.no_grad():
                model.encodings[0].relative_attention_bias.weight.mul_(50)
        if name == "learned":
            with torch.no_grad():
                model.encodings[0].weight.mul_(50)
        a, b = permuted_logits(model, ids, order)
        assert not torch.allclose(a, b, atol=1e-3), name
        moved = [contiguous(10).positions[order], model(ids[:, order], contiguous(10).positions[order])]
        assert_same(model(ids, 0)[:, order], moved[1])  # positions that move with their tokens change nothing


def test_a_decoder_without_positions_sees_order_from_its_second_layer_on() -> None:
    ids = some_ids()
    order = torch.tensor([4, 2, 0, 7, 1, 8, 3, 6, 5, 9])  # the last token stays the last
    one, two = named("nope", layers=1), named("nope", layers=2)
    assert_same(one(ids, 0)[:, -1], one(ids[:, order], 0)[:, -1])
    assert not torch.allclose(two(ids, 0)[:, -1], two(ids[:, order], 0)[:, -1], atol=1e-4)


@every_encoding
def test_a_decoder_does_not_see_the_future(name: str) -> None:
    model, ids = named(name), some_ids()
    before = model(ids, 0)
    for at in (1, 5, 9):
        other = ids.clone()
        other[:, at] = (other[:, at] + 1) % VOCABULARY
        after = model(other, 0)
        assert torch.equal(after[:, :at], before[:, :at])
        assert not torch.equal(after[:, at], before[:, at])


@pytest.mark.parametrize("name", RELATIVE)
def test_relative_encodings_see_distances_only(name: str) -> None:
    model, ids = named(name), some_ids()
    assert_same(model(ids, 0), model(ids, 1000), 1e-9)
    assert_same(model(ids, 0), model(ids, contiguous(10, -5).positions), 1e-9)


def test_absolute_encodings_see_where_they_are() -> None:
    for name in ("sinusoidal", "learned"):
        model = named(name)
        assert not torch.allclose(model(some_ids(), 0), model(some_ids(), 20), atol=1e-3)


# ------------------------------------------------------------------------------------------------ batches


@every_encoding
def test_padding_packing_and_batch_mates_do_not_matter(name: str) -> None:
    model, ids = named(name), some_ids()
    whole = model(ids, 0)
    for row in range(2):
        assert_same(model(ids[row : row + 1], 0), whole[row : row + 1])
    left = model(ids, padded(torch.tensor([[0] * 4 + [1] * 6, [1] * 10])))
    assert_same(left[:1, 4:], model(ids[:1, 4:], 0))
    assert_same(left[1:], whole[1:])
    right = model(ids, padded(torch.tensor([[1] * 6 + [0] * 4, [1] * 10])))
    assert_same(right[:1, :6], model(ids[:1, :6], 0))
    together = model(ids, packed(torch.tensor([0, 3, 9]), 10))
    assert_same(together[:, :3], model(ids[:, :3], 0))
    assert_same(together[:, 3:9], model(ids[:, 3:9], 0))
    assert bool(left.isfinite().all())
    assert bool(together.isfinite().all())


def test_padding_and_windows_in_an_encoder() -> None:
    model = transformer([RoPE(HEAD_DIM)], kind="encoder", window=3)
    ids = some_ids()
    out = model(ids, padded(torch.tensor([[0] * 4 + [1] * 6, [1] * 10])))
    assert_same(out[:1, 4:], model(ids[:1, 4:], 0))
    assert_same(out[1:], model(ids[1:], 0))
    one = transformer([RoPE(HEAD_DIM)], kind="encoder", window=3, layers=1)
    before = one(ids, 0)
    other = ids.clone()
    other[:, 5] = (other[:, 5] + 1) % VOCABULARY
    moved = (one(other, 0) != before).any(-1).all(0).tolist()
    assert moved == [3 <= i <= 7 for i in range(10)]  # two back, two ahead


@pytest.mark.parametrize("name", RELATIVE)
def test_tokens_in_another_order_are_the_same_tokens(name: str) -> None:
    """A shard layout of the whole sequence: the order says when, so every token's logits are the same."""
    model, ids = named(name), some_ids(8)
    order = torch.cat([shard(contiguous(8), rank, 2, layout="head_tail").positions for rank in range(2)])
    assert order.tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert_same(model(ids[:, order], Tokens(order, order=order)), model(ids, 0)[:, order])


# ------------------------------------------------------------------------------------------------ caches


@pytest.mark.parametrize("kind", ["growing", "static"])
@every_encoding
@torch.no_grad()
def test_prefill_and_decode_are_the_whole(name: str, kind: str) -> None:
    ids = some_ids(12)
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 1e-6)):
        model = named(name).to(dtype)
        whole = model(ids, 0)
        for cuts in ([5, 6, 7, 8, 9, 10, 11], [1, 7], [3, 4, 10]):
            cache = model.new_cache() if kind == "growing" else model.new_cache(2, 16)
            pieces = [
                model(ids[:, first:last], first, cache=cache) for first, last in zip([0, *cuts], [*cuts, 12], strict=True)
            ]
            assert_same(torch.cat(pieces, 1), whole, tolerance * float(whole.abs().max()))


@pytest.mark.parametrize("kind", ["growing", "static"])
@torch.no_grad()
def test_rows_of_different_length_decode_together(kind: str) -> None:
    model, ids = named("several"), some_ids(12)
    mask = torch.tensor([[0] * 3 + [1] * 5, [1] * 8])
    cache = model.new_cache() if kind == "growing" else model.new_cache(2, 12)
    pieces = [model(ids[:, :8], padded(mask), cache=cache)]
    lengths = mask.sum(-1)
    for step in range(4):
        pieces.append(model(ids[:, 8 + step : 9 + step], decode(lengths + step), cache=cache))
    out = torch.cat(pieces, 1)
    assert_same(out[:1, 3:], model(ids[:1, 3:], 0))
    assert_same(out[1:], model(ids[1:], 0))


@pytest.mark.parametrize("name", RELATIVE)
@torch.no_grad()
def test_decoding_goes_on_after_tokens_in_another_order(name: str) -> None:
    model, ids = named(name), some_ids(11)
    order = torch.tensor([0, 1, 6, 7, 2, 3, 4, 5])
    cache = model.new_cache()
    model(ids[:, order], Tokens(order, order=order), cache=cache)
    pieces = [model(ids[:, 8:9], 8, cache=cache), model(ids[:, 9:11], 9, cache=cache)]
    assert_same(torch.cat(pieces, 1), model(ids, 0)[:, 8:])


def test_new_caches_fit_the_model() -> None:
    model = named("rope", layers=3)
    growing, static = model.new_cache(), model.new_cache(2, 16)
    assert [type(cache) for cache in growing] == [GrowingCache] * 3
    assert all(isinstance(cache, StaticCache) and cache.k.shape == (2, 2, 16, HEAD_DIM) for cache in static)
    assert static[0].k.dtype == torch.float64
    with pytest.raises(ValueError, match="an encoder sees the future"):
        named("nope", kind="encoder").new_cache()
    model(some_ids(16), 0, cache=static)
    with pytest.raises(ValueError, match="16 slots are filled and 1 tokens come"):
        model(some_ids(1), 16, cache=static)


# ------------------------------------------------------------------------------------------------ encodings of others


class Doubling(QKEncoding):
    """Queries and keys times two to the power of a tenth of the distance from the origin."""

    def prepare(self, positions: Tensor, k_positions: Tensor | None = None, *, dtype: torch.dtype = torch.float32) -> Any:
        return 2.0 ** (positions.to(dtype) / 10)[..., None, :, None]

    def transform(self, q: Tensor, k: Tensor, prepared: Tensor) -> tuple[Tensor, Tensor]:
        return q * prepared, k / prepared


class Walls(ScoreEncoding):
    """A learned bias over distances on a grid."""

    axes = 2

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(HEADS, 5, 5))

    def forward(self) -> ScoreBias:
        return TableBias(self.table, (2, 2))


class Tagged(InputEncoding):
    """Adds a tenth of the position to the first channel."""

    def forward(self, x: Tensor, positions: Any) -> Tensor:
        return x + nn.functional.pad(positions[..., None] / 10, (0, x.shape[-1] - 1))


class Forgetting(ContentScoreEncoding):
    """A forgetting gate: after the softmax, minus the sum of log gates up to the key. The state is those sums."""

    spec: ClassVar[EncodingSpec] = EncodingSpec("forgetting", "a gate per token", lambda shape: [Forgetting()])

    reads_positions = False

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, HEADS)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        positions: Tensor,
        k_positions: Tensor | None = None,
        *,
        x: Tensor | None = None,
        state: Any = None,
        mask: Mask = FULL,
    ) -> tuple[ScoreBias, Any]:
        assert x is not None
        sums = nn.functional.logsigmoid(self.gate(x)).transpose(-1, -2).cumsum(-1)
        if state is not None:
            sums = torch.cat([state, state[..., -1:] + sums], -1)
        return KeyBias(-nn.functional.pad(sums, (0, k.shape[-2] - sums.shape[-1]))), sums


OTHERS: dict[str, Callable[[], list[Encoding]]] = {
    "queries and keys": lambda: [Doubling()],
    "input": lambda: [Tagged()],
    "content": lambda: [Forgetting()],
    "content, own by layer, with more": lambda: [ALiBi(HEADS), Forgetting(), RoPE(HEAD_DIM)],
}


@pytest.mark.parametrize("kind", ["growing", "static"])
@pytest.mark.parametrize("name", list(OTHERS))
@torch.no_grad()
def test_encodings_of_third_parties_work(name: str, kind: str) -> None:
    build = OTHERS[name]
    model = transformer((lambda layer: build()) if "own" in name else build())
    ids = some_ids(12)
    whole = model(ids, 0)
    assert not torch.allclose(whole, transformer([NoPE()])(ids, 0), atol=1e-4)
    cache = model.new_cache() if kind == "growing" else model.new_cache(2, 12)
    pieces = [model(ids[:, a:b], a, cache=cache) for a, b in ((0, 4), (4, 6), *((n, n + 1) for n in range(6, 12)))]
    assert_same(torch.cat(pieces, 1), whole)
    generated = model.generate(ids[:, :4], 4)
    assert torch.equal(generated, greedy(model, ids[:, :4], 4))
    if "content" in name:
        assert all(list(c.states) == [0 if name == "content" else 1] for c in cache)


@pytest.mark.parametrize("more", [[], [Forgetting()]], ids=["alone", "with content"])
def test_grid_encodings_read_grids(more: list[Encoding]) -> None:
    model = transformer([Walls(), *more], kind="encoder")
    ids, cells = some_ids(6, 2), grid(2, 3)
    order = torch.tensor([5, 0, 3, 1, 4, 2])
    out = model(ids, cells)
    assert not torch.allclose(out, transformer([NoPE(), *more], kind="encoder")(ids, cells), atol=1e-3)
    if not more:
        assert_same(model(ids[:, order], cells.positions[order]), out[:, order])
    shifted = Tokens(cells.positions + torch.tensor([3, 8]), axes=2)
    assert_same(model(ids, shifted), out)
    with pytest.raises(TypeError, match="Expected a tensor .*for 2 axes"):
        model(ids, 0)


def test_grid_encodings_decode() -> None:
    model = transformer([Walls()])
    ids, cells = some_ids(6, 2), grid(2, 3)
    whole = model(ids, cells)
    for cache in (model.new_cache(), model.new_cache(2, 8)):
        pieces = [model(ids[:, a:b], Tokens(cells.positions[a:b], axes=2), cache=cache) for a, b in ((0, 3), (3, 4), (4, 6))]
        assert_same(torch.cat(pieces, 1), whole)


# ------------------------------------------------------------------------------------------------ generation


def lively(name: str) -> Transformer:
    """A model whose layers outweigh the embedding, so that what it says next depends on order; at birth it repeats."""
    model = named(name)
    with torch.no_grad():
        for parameter in model.blocks.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6)
    return model


def greedy(model: Transformer, ids: Tensor, new_tokens: int) -> Tensor:
    """The likeliest id of a full recomputation, again and again."""
    prompt = ids.shape[1]
    for _ in range(new_tokens):
        ids = torch.cat([ids, model(ids, 0)[:, -1:].argmax(-1)], 1)
    return ids[:, prompt:]


@every_encoding
@torch.no_grad()
def test_generation_is_full_recomputation(name: str) -> None:
    model, ids = lively(name), some_ids(6)
    expected = greedy(model, ids, 7)
    assert torch.equal(model.generate(ids, 7), expected)
    assert torch.equal(model.generate(ids, 7, cache=model.new_cache(2, 13)), expected)
    assert len(expected.unique()) > 4


@every_encoding
@torch.no_grad()
def test_a_row_generates_as_it_does_alone(name: str) -> None:
    model, ids = lively(name), some_ids(8)
    mask = torch.tensor([[0] * 3 + [1] * 5, [1] * 8])
    for cache in (None, model.new_cache(2, 15)):
        out = model.generate(ids, 6, attention_mask=mask, cache=cache)
        assert torch.equal(out[:1], model.generate(ids[:1, 3:], 6))
        assert torch.equal(out[1:], model.generate(ids[1:], 6))


@torch.no_grad()
def test_generation_goes_on_at_each_rows_own_position() -> None:
    model, at = named("rope"), []
    model.register_forward_pre_hook(lambda module, args: at.append(args[1].positions.tolist()))
    model.generate(some_ids(5), 3, attention_mask=torch.tensor([[0, 0, 1, 1, 1], [1] * 5]))
    assert at == [[[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]], [[3], [5]], [[4], [6]]]
    at.clear()
    model.generate(some_ids(5), 2)
    assert at == [[0, 1, 2, 3, 4], [[5], [5]]]


@torch.no_grad()
def test_a_row_ends_at_the_stop_id() -> None:
    model, ids = lively("rope"), some_ids(6)
    free = model.generate(ids, 8)
    stop = int(free[0, 2])
    stopped = model.generate(ids, 8, stop=stop)
    assert len(free[0, 3:].unique()) > 1
    for row in range(2):
        ends = (free[row] == stop).nonzero().flatten().tolist()
        last = ends[0] if ends else 7
        assert torch.equal(stopped[row, : last + 1], free[row, : last + 1])
        assert bool((stopped[row, last + 1 :] == stop).all())
    assert bool((stopped[0] == stop).any())


@torch.no_grad()
def test_sampling_follows_the_generator_and_the_temperature() -> None:
    model, ids = named("rope"), some_ids(6)

    def sample(temperature: float, seed: int) -> Tensor:
        return model.generate(ids, 12, temperature=temperature, generator=torch.Generator().manual_seed(seed))

    assert torch.equal(sample(1.0, 0), sample(1.0, 0))
    assert not torch.equal(sample(1.0, 0), sample(1.0, 1))
    assert torch.equal(sample(1e-6, 0), model.generate(ids, 12))
    one = named("nope", layers=1)
    many = one.generate(ids[:1, :1].expand(4000, 1), 1, temperature=1.0, generator=torch.Generator().manual_seed(0))
    share = one(ids[:1, :1], 0)[0, -1].softmax(-1)
    counts = torch.bincount(many.flatten(), minlength=VOCABULARY) / 4000
    assert bool(((counts - share).abs() <= 5 * (share * (1 - share) / 4000).sqrt()).all())  # five standard deviations


def test_generation_keeps_no_graph_and_may_make_nothing() -> None:
    model = named("t5")
    out = model.generate(some_ids(3), 2)
    assert not out.requires_grad
    assert out.dtype == torch.int64
    assert model.generate(some_ids(3), 0).shape == (2, 0)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"temperature": -1.0}, ValueError, "temperature = -1.0"),
        ({"new_tokens": -1}, ValueError, "new_tokens = -1"),
        ({"attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])}, ValueError, "a row ends with padding"),
        ({"ids": torch.zeros(2, 0, dtype=torch.int64)}, ShapeError, "at least one id per row"),
        ({"ids": torch.zeros(3, dtype=torch.int64)}, ShapeError, "Add a batch axis"),
        ({"ids": torch.zeros(2, 3)}, ShapeError, "ids are torch.float32"),
        ({"attention_mask": torch.ones(2, 4, dtype=torch.int64)}, ShapeError, "for a sequence of 3"),
        ({"attention_mask": torch.ones(2, 3)}, TypeError, "attention_mask is torch.float32"),
    ],
)
def test_bad_generation_is_refused(given: dict[str, Any], error: type[Exception], message: str) -> None:
    call: dict[str, Any] = {"ids": some_ids(3), "new_tokens": 2} | given
    with pytest.raises(error, match=message):
        named("rope").generate(**call)


def test_an_encoder_does_not_generate() -> None:
    with pytest.raises(ValueError, match="an encoder sees the future"):
        named("nope", kind="encoder").generate(some_ids(3), 2)


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"heads": 5}, "heads = 5"),
        ({"heads": 4, "kv_heads": 3}, "kv_heads = 3"),
        ({"layers": 0}, "layers = 0"),
        ({"vocabulary": 0}, "vocabulary = 0"),
        ({"kind": "both"}, "kind = 'both'. Expected 'decoder' or 'encoder'"),
        ({"window": 0}, r"windows = \[0\]"),
        ({"layers": 2, "window": lambda layer: [3, -1][layer]}, r"windows = \[3, -1\]"),
    ],
)
def test_shapes_that_cannot_be_are_refused(given: dict[str, Any], message: str) -> None:
    call: dict[str, Any] = {"vocabulary": 10, "dim": 32, "layers": 1, "heads": 4, "encodings": [NoPE()]} | given
    with pytest.raises(ValueError, match=message):
        Transformer(**call)


def test_tokens_must_fit_the_ids() -> None:
    model, ids = named("rope"), some_ids(6)
    with pytest.raises(ShapeError, match="for a sequence of 6"):
        model(ids, contiguous(5))
    with pytest.raises(ShapeError, match=r"Expected \[\*batch, 6\]"):
        model(ids, torch.arange(5))
    with pytest.raises(TypeError, match="half precision"):
        model(ids, torch.arange(6).half())
    with pytest.raises(ShapeError, match="Add a batch axis"):
        model(ids[0], 0)


@every_encoding
def test_an_empty_sequence_gives_no_logits(name: str) -> None:
    assert named(name)(some_ids(0), 0).shape == (2, 0, VOCABULARY)


def test_dropout_acts_in_training_only() -> None:
    model, ids = named("rope", dropout=0.5), some_ids()
    calm = model(ids, 0)
    assert torch.equal(calm, named("rope")(ids, 0))
    assert not torch.allclose(model.train()(ids, 0), calm, atol=1e-3)


def test_the_named_backend_is_used_throughout() -> None:
    ids = some_ids()
    for name in ENCODINGS:
        assert_same(named(name, backend="reference")(ids, 0), named(name, backend="sdpa")(ids, 0))
    with pytest.raises(ValueError, match="backend = 'fast'"):
        named("rope", backend="fast")(ids, 0)
