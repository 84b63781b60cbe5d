"""`add_bias` on tiny transformers models: right beside padding, packing, caches, windows and training; undone without a trace."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from tests.hf.tiny_models import MODELS, Tiny, tiny
from torch import Tensor, nn

from posenc import ALiBi, RoPE, ShawRelative, T5Bias
from posenc.core.bias import FormulaBias, ScoreBias
from posenc.core.mask import CAUSAL, FULL
from posenc.core.sites import Encoding, ScoreEncoding
from posenc.errors import ConfigError, ShapeError
from posenc.hf import Bias, add_bias, remove_bias

SEQ, HEADS = 14, 4
THREE = ("llama", "qwen2", "gpt_neox")
CACHED = (*THREE, "mistral", "gemma3_text")  # windows of 8 in all layers of Mistral and in every other one of Gemma 3


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Any:
    """transformers' remarks on tiny configurations are not of interest."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(level)


class OfPlaces(ScoreEncoding):
    """Reads positions themselves, not distances: any shift of them shows."""

    spec = ALiBi.spec

    def forward(self) -> ScoreBias:
        return FormulaBias(_of_places, (), torch.arange(HEADS))


def _of_places(q: Tensor, k: Tensor, head: Tensor) -> Tensor:
    return ((q * 0.7 + k * 1.3 + head) * 0.9).sin() * 2


def net_of(model_type: str, **changes: Any) -> Any:
    """A model whose attention is far from uniform, so that a bias matters."""
    model = tiny(model_type)
    config = model.config(initializer_range=0.3, **changes)
    return model.build(config)


def ids_of(batch: int = 2, seq: int = SEQ) -> Tensor:
    return torch.randint(2, 64, (batch, seq), generator=torch.Generator().manual_seed(1))


def close(ours: Tensor, theirs: Tensor) -> None:
    """Float32 logits of two layers: 2 layers · about 10 sums each · √48 terms · 2⁻²⁴ of the largest, twice over."""
    bound = 2 * 2 * 10 * 48**0.5 * 2.0**-24 * float(theirs.abs().max())
    assert torch.isfinite(ours).all()
    assert float((ours - theirs).abs().max()) <= bound


def differs(ours: Tensor, theirs: Tensor) -> None:
    """By far more than rounding can explain."""
    assert float((ours - theirs).abs().max()) > 1e-2 * float(theirs.abs().max())


@torch.no_grad()
def logits(net: Any, ids: Tensor, **rest: Any) -> Tensor:
    return net(ids, **{"use_cache": False, **rest}).logits  # type: ignore[no-any-return]


Entry = Callable[[int, int, int], float]


def by_hand(net: Any, ids: Tensor, positions: Tensor, seen: Callable[[int, int, int], bool], entry: Entry) -> Tensor:
    """The model's own eager attention with mask and bias written out in loops."""
    batch, seq = ids.shape
    mask = torch.full((batch, HEADS, seq, seq), -1e9)
    for b in range(batch):
        for q in range(seq):
            for k in range(seq):
                if seen(b, q, k):
                    for head in range(HEADS):
                        mask[b, head, q, k] = entry(head, int(positions[b, q]), int(positions[b, k]))
    net = copy.deepcopy(net)
    net.set_attn_implementation("eager")
    return logits(net, ids, attention_mask=mask, position_ids=positions)


def alibi(head: int, q: int, k: int) -> float:
    return -(2.0 ** (-8 * (head + 1) / HEADS)) * (q - k)


def places(head: int, q: int, k: int) -> float:
    return float(_of_places(*(torch.tensor(float(x)) for x in (q, k, head))))


def causal(b: int, q: int, k: int) -> bool:
    return k <= q


def counted(attended: Tensor) -> Tensor:
    """Positions as ``generate`` makes them."""
    return (attended.cumsum(-1) - 1).clamp(min=0)


def left_padded() -> Tensor:
    attended = torch.ones(2, SEQ, dtype=torch.int64)
    attended[0, :5] = 0
    return attended


# ----------------------------------------------------------------------------------------------------------------------
# one call


@pytest.mark.parametrize("model_type", THREE)
@pytest.mark.parametrize(("encoding", "entry"), [(ALiBi(HEADS), alibi), (OfPlaces(), places)], ids=["distances", "places"])
def test_scores_are_the_models_own_plus_the_bias(model_type: str, encoding: Encoding, entry: Entry):
    net, ids = net_of(model_type), ids_of()
    positions = torch.arange(SEQ).expand(2, -1)
    plain, want = logits(net, ids), by_hand(net, ids, positions, causal, entry)
    with add_bias(net, [encoding]):
        close(logits(net, ids), want)
    differs(plain, want)


def test_grouped_heads_have_a_bias_each():
    assert net_of("llama").config.num_key_value_heads == 2 < HEADS == len({alibi(head, 1, 0) for head in range(HEADS)})


@pytest.mark.parametrize("model_type", ["mistral", "gemma3_text"])
def test_sliding_windows_stay(model_type: str):
    net, ids = (
        net_of(model_type, **({"layer_types": ["sliding_attention"] * 2} if model_type == "gemma3_text" else {})),
        ids_of(),
    )
    window = net.config.sliding_window
    want = by_hand(net, ids, torch.arange(SEQ).expand(2, -1), lambda b, q, k: q - window < k <= q, alibi)
    with add_bias(net, [ALiBi(HEADS)]):
        close(logits(net, ids), want)


@pytest.mark.parametrize("numbered", ["attended", "all"])
def test_left_padding(numbered: str):
    net, ids, attended = net_of("llama"), ids_of(), left_padded()
    positions = counted(attended) if numbered == "attended" else torch.arange(SEQ).expand(2, -1)
    want = by_hand(net, ids, positions, lambda b, q, k: k <= q and bool(attended[b, k]), places)
    with add_bias(net, [OfPlaces()]):
        got = logits(net, ids, attention_mask=attended, position_ids=positions)
        close(got[attended.bool()], want[attended.bool()])
        assert torch.isfinite(got).all()
        ids[0, :5] = 63
        assert torch.equal(
            logits(net, ids, attention_mask=attended, position_ids=positions)[attended.bool()], got[attended.bool()]
        )


def test_packed_documents_are_told_apart_where_transformers_does():
    net, ids = net_of("llama"), ids_of(1)
    positions = torch.cat([torch.arange(5), torch.arange(SEQ - 5)])[None]
    with add_bias(net, [OfPlaces()]):
        alone = torch.cat([logits(net, ids[:, :5]), logits(net, ids[:, 5:])], 1)
        close(logits(net, ids, position_ids=positions), alone)


@pytest.mark.parametrize("model_type", THREE)
def test_no_later_token_reaches_an_earlier_one(model_type: str):
    net, ids = net_of(model_type), ids_of()
    with add_bias(net, [ALiBi(HEADS, form="symmetric")]):
        before = logits(net, ids)
        ids[:, 9:] = 7
        assert torch.equal(logits(net, ids)[:, :9], before[:, :9])


def test_an_encoder_sees_both_ways():
    net = tiny("eurobert").build(tiny("eurobert").config(initializer_range=0.3))
    ids, attended = ids_of(), left_padded()
    with torch.no_grad(), add_bias(net, [ALiBi(HEADS, form="symmetric")]):
        whole = net(ids).last_hidden_state
        ids[:, -1] = 7
        differs(net(ids).last_hidden_state[:, 0], whole[:, 0])
        padded = net(ids, attention_mask=attended).last_hidden_state[0, 5:]
        close(padded, net(ids[:1, 5:]).last_hidden_state[0])


def test_a_mask_of_four_axes_is_used_as_it_is():
    net, ids = net_of("llama"), ids_of(1)
    seen = torch.ones(SEQ, SEQ, dtype=torch.bool).tril()
    seen[9:, 2:4] = False
    want = by_hand(net, ids, torch.arange(SEQ)[None], lambda b, q, k: bool(seen[q, k]), alibi)
    with add_bias(net, [ALiBi(HEADS)]):
        close(logits(net, ids, attention_mask=seen[None, None]), want)


def test_every_layer_may_have_its_own():
    net, ids = net_of("llama"), ids_of()
    mask = torch.zeros(2, HEADS, SEQ, SEQ).masked_fill(torch.ones(SEQ, SEQ).tril() == 0, -1e9)
    biased = mask + torch.tensor([[[alibi(h, q, k) for k in range(SEQ)] for q in range(SEQ)] for h in range(HEADS)])
    eager = copy.deepcopy(net)
    eager.set_attn_implementation("eager")
    eager.model.layers[1].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "attention_mask": biased}), with_kwargs=True
    )
    want = logits(eager, ids, attention_mask=mask)
    with add_bias(net, [[], [ALiBi(HEADS)]]):
        close(logits(net, ids), want)
        assert [len(layer) for layer in net.posenc_bias] == [0, 1]  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------------------------
# several calls with a cache


def in_chunks(net: Any, ids: Tensor, cache: Any, sizes: tuple[int, ...], attended: Tensor | None, positions: Tensor) -> Tensor:
    """Logits of a text that comes in pieces."""
    parts, start = [], 0
    for size in sizes:
        end = start + size
        parts.append(
            logits(
                net,
                ids[:, start:end],
                attention_mask=None if attended is None else attended[:, :end],
                position_ids=positions[:, start:end],
                cache=cache,
                use_cache=True,
            )
        )
        start = end
    return torch.cat(parts, 1)


def cache_of(kind: str, net: Any) -> Any:
    if kind == "growing":
        return transformers.DynamicCache(config=net.config)
    return transformers.StaticCache(config=net.config, max_cache_len=SEQ + 3)


@pytest.mark.parametrize("kind", ["growing", "static"])
@pytest.mark.parametrize("model_type", CACHED)
def test_pieces_equal_the_whole(model_type: str, kind: str):
    net, ids = net_of(model_type), ids_of()
    everything, positions = torch.ones(2, SEQ, dtype=torch.int64), torch.arange(SEQ).expand(2, -1)
    with add_bias(net, [OfPlaces()]):
        whole = logits(net, ids)
        for sizes, attended in (((6, 5, 1, 1, 1), None), ((6, 5, 1, 1, 1), everything), ((12, 1, 1), None)):
            close(in_chunks(net, ids, cache_of(kind, net), sizes, attended, positions), whole)


@pytest.mark.parametrize("kind", ["growing", "static"])
@pytest.mark.parametrize("model_type", CACHED)
@pytest.mark.parametrize("numbered", ["attended", "all"])
def test_padded_pieces_equal_the_whole(model_type: str, kind: str, numbered: str):
    net, ids, attended = net_of(model_type), ids_of(), left_padded()
    positions = counted(attended) if numbered == "attended" else torch.arange(SEQ).expand(2, -1)
    with add_bias(net, [OfPlaces()]):
        whole = logits(net, ids, attention_mask=attended, position_ids=positions)
        parts = in_chunks(net, ids, cache_of(kind, net), (7, 5, 1, 1), attended, positions)
        close(parts[attended.bool()], whole[attended.bool()])


@pytest.mark.parametrize("numbered", ["attended", "all"])
def test_padding_between_the_prompt_and_its_answer(numbered: str):
    """Right-padded prompts: counted back from the new token, cached positions would be off by the padding."""
    net, ids, attended = net_of("llama"), ids_of(), torch.ones(2, SEQ, dtype=torch.int64)
    attended[0, 6:10] = 0
    positions = counted(attended) if numbered == "attended" else torch.arange(SEQ).expand(2, -1)
    with add_bias(net, [OfPlaces()]):
        whole = logits(net, ids, attention_mask=attended, position_ids=positions)
        parts = in_chunks(net, ids, cache_of("growing", net), (10, 3, 1), attended, positions)
        close(parts[attended.bool()], whole[attended.bool()])


def test_content_biases_read_cached_keys():
    net, ids = net_of("llama"), ids_of()
    shaw = ShawRelative(8, 3, future=0)
    nn.init.normal_(shaw.distance_embedding.weight)
    everything, positions = torch.ones(2, SEQ, dtype=torch.int64), torch.arange(SEQ).expand(2, -1)
    plain = logits(net, ids)
    with add_bias(net, [shaw, ALiBi(HEADS)]):
        whole = logits(net, ids)
        close(in_chunks(net, ids, cache_of("growing", net), (9, 4, 1), everything, positions), whole)
    differs(plain, whole)


@pytest.mark.parametrize(
    "cache", [{}, {"cache_implementation": "static"}, {"num_beams": 2}], ids=["growing", "static", "beams"]
)
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_generation_equals_full_forwards(model_type: str, cache: dict[str, Any]):
    net, prompt = net_of(model_type), ids_of(2, 9)
    attended = torch.ones_like(prompt)
    attended[0, :4] = 0
    with add_bias(net, [OfPlaces()]):
        out = net.generate(
            prompt, attention_mask=attended, max_new_tokens=5, min_new_tokens=5, do_sample=False,
            return_dict_in_generate=True, output_logits=True, output_scores=True, **cache,
        )  # fmt: skip
        attended = torch.cat([attended, torch.ones(2, 5, dtype=torch.int64)], 1)
        whole = logits(net, out.sequences, attention_mask=attended, position_ids=counted(attended))[:, 8:-1]
    if "num_beams" in cache:  # the score of a beam is the mean log probability of its tokens
        close(out.sequences_scores, whole.log_softmax(-1).gather(-1, out.sequences[:, 9:, None]).mean((1, 2)))
    else:
        close(torch.stack(out.logits, 1), whole)
        assert torch.equal(out.sequences[:, 9:], whole.argmax(-1))


def test_positions_that_do_not_tell_those_of_cached_tokens_are_refused():
    net, ids = net_of("llama"), ids_of(1)
    gap = torch.tensor([[0, 1, 2, 10, 11, 12]])
    with add_bias(net, [ALiBi(HEADS)]):
        whole = logits(net, ids[:, :6], position_ids=gap, attention_mask=torch.ones(1, 6))
        want = by_hand(net_of("llama"), ids[:, :6], gap, causal, alibi)
        close(whole, want)  # without a cache any positions are right
        cache = cache_of("growing", net)
        close(logits(net, ids[:, :5], position_ids=gap[:, :5], cache=cache, use_cache=True), want[:, :5])
        with pytest.raises(
            ValueError, match=r"add_bias: position_ids \[\[12\]\] of tokens \[5\], with a cache\. Expected each"
        ):
            logits(net, ids[:, 5:6], position_ids=gap[:, 5:], cache=cache, use_cache=True)


# ----------------------------------------------------------------------------------------------------------------------
# learning, saving, copying


def bucketed(net: Any, weight: Tensor, ids: Tensor) -> Any:
    """The loss with eager attention and T5's buckets of distances below 16, which are the distances."""
    distance = torch.tensor([[min(max(q - k, 0), 15) for k in range(SEQ)] for q in range(SEQ)])
    mask = weight[distance].permute(2, 0, 1)[None].masked_fill(torch.ones(SEQ, SEQ).tril() == 0, -1e9)
    net.set_attn_implementation("eager")
    return net(ids, attention_mask=mask.expand(2, -1, -1, -1), labels=ids, use_cache=False).loss


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
def test_learned_biases_get_their_gradient(recomputed: bool):
    net, ids = net_of("gpt_neox").train(), ids_of()
    t5 = T5Bias(HEADS)
    by_itself = t5.relative_attention_bias.weight.detach().clone().requires_grad_()
    bucketed(copy.deepcopy(net), by_itself, ids).backward()
    assert by_itself.grad is not None
    if recomputed:
        net.activation_checkpointing_enable()
    add_bias(net, [t5])
    net(ids, labels=ids, use_cache=False).loss.backward()
    weight = net.posenc_bias[0].relative_attention_bias.weight
    assert weight.grad is not None
    close(weight.grad, by_itself.grad)
    assert float(by_itself.grad.abs().max()) > 0
    assert any(parameter is weight for parameter in net.parameters())


def test_what_is_learned_is_saved_and_comes_back(tmp_path: Any):
    net, ids = net_of("llama"), ids_of()
    t5 = T5Bias(HEADS)
    nn.init.normal_(t5.relative_attention_bias.weight)
    bias = add_bias(net, [t5])
    assert "posenc_bias.0.relative_attention_bias.weight" in net.state_dict()
    want = logits(net, ids)
    net.save_pretrained(tmp_path)
    torch.save(bias.encodings.state_dict(), tmp_path / "bias.pt")
    assert "posenc" not in (tmp_path / "config.json").read_text()
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    add_bias(again, [T5Bias(HEADS)])
    differs(logits(again, ids), want)
    again.posenc_bias.load_state_dict(torch.load(tmp_path / "bias.pt"))
    assert torch.equal(logits(again, ids), want)


def test_models_keep_their_own_bias_though_built_from_one_configuration():
    model = tiny("llama")
    config = model.config(initializer_range=0.3)
    first, second, third = (model.build(config) for _ in range(3))
    ids = ids_of()
    plain = logits(third, ids)
    add_bias(first, [ALiBi(HEADS)])
    add_bias(second, [OfPlaces()])
    with_alibi, with_places = logits(first, ids), logits(second, ids)
    assert torch.equal(logits(third, ids), plain)
    differs(with_alibi, plain)
    differs(with_places, with_alibi)
    remove_bias(first)
    assert torch.equal(logits(first, ids), plain)
    assert torch.equal(logits(second, ids), with_places)


@pytest.mark.parametrize("way", ["deepcopy", "saved"])
def test_a_copy_has_a_bias_of_its_own(way: str):
    net, ids = net_of("llama"), ids_of()
    add_bias(net, [T5Bias(HEADS)])
    want = logits(net, ids)
    if way == "deepcopy":
        other = copy.deepcopy(net)
    else:
        buffer = io.BytesIO()
        torch.save(net, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    assert torch.equal(logits(other, ids), want)
    nn.init.normal_(other.posenc_bias[0].relative_attention_bias.weight)
    differs(logits(other, ids), want)
    assert torch.equal(logits(net, ids), want)
    remove_bias(other)
    other.set_attn_implementation("eager")
    logits(other, ids)
    assert torch.equal(logits(net, ids), want)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_undoing_leaves_no_trace(implementation: str):
    net, ids = net_of("llama"), ids_of()
    net.set_attn_implementation(implementation)
    before = logits(net, ids)
    traces = [{**m.__dict__, "_modules": None, "config": None} for m in net.modules()]
    keys, config = list(net.state_dict()), net.config.to_dict()
    with add_bias(net, [ALiBi(HEADS)]) as bias:
        assert isinstance(bias, Bias)
        assert bias.encodings is net.posenc_bias
        assert "ALiBi(4" in repr(bias)
    assert torch.equal(logits(net, ids), before)
    assert (list(net.state_dict()), net.config.to_dict()) == (keys, config)
    assert net.config._attn_implementation == implementation
    assert [{**m.__dict__, "_modules": None, "config": None}.keys() for m in net.modules()] == [t.keys() for t in traces]
    assert not any(m._forward_pre_hooks for m in net.modules())
    remove_bias(net)  # nothing to undo


def test_half_precision_models_keep_wide_biases():
    net, ids = net_of("llama").to(torch.bfloat16), ids_of()
    with add_bias(net, [T5Bias(HEADS)]):
        assert net.posenc_bias[0].relative_attention_bias.weight.dtype == torch.float32
        assert logits(net, ids).dtype == torch.bfloat16


# ----------------------------------------------------------------------------------------------------------------------
# refusals


def test_attention_and_mask_are_registered_together():
    net = net_of("llama")
    add_bias(net, [ALiBi(HEADS)])
    name = net.config._attn_implementation
    assert name in transformers.AttentionInterface()
    assert name in transformers.AttentionMaskInterface()


def test_another_implementation_cannot_displace_a_bias_in_silence():
    net, ids = net_of("llama"), ids_of()
    add_bias(net, [ALiBi(HEADS)])
    net.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match=r"add_bias: the attention implementation of LlamaForCausalLM was set to 'sdpa'"):
        logits(net, ids)
    with pytest.raises(ValueError, match=r"add_bias: the attention implementation of LlamaModel was set to 'sdpa'"):
        net.model(ids)
    remove_bias(net)
    logits(net, ids)


def test_a_model_that_is_only_set_to_it_is_refused():
    net = net_of("llama")
    with add_bias(net_of("llama"), [ALiBi(HEADS)]):
        net.set_attn_implementation("posenc")
        with pytest.raises(ConfigError, match=r"add_bias: LlamaAttention is set to 'posenc' attention but has no bias"):
            logits(net, ids_of())


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("falcon", r"add_bias: FalconForCausalLM does not compute attention through transformers' attention interface"),
        ("gpt_neox_japanese", r"GPTNeoXJapaneseForCausalLM does not compute attention through"),
        ("persimmon", r"add_bias: PersimmonForCausalLM does not hand position_ids to PersimmonAttention\. Expected an arch"),
        ("gpt_oss", r"add_bias: GptOssForCausalLM changes its scores by s_aux\. Expected plain softmax attention"),
        ("gemma2", r"add_bias: Gemma2ForCausalLM changes its scores by softcap"),
    ],
)
def test_architectures_that_it_does_not_fit_are_named(model_type: str, message: str):
    model = tiny(model_type)
    net = model.build()
    want = model.answer(net)
    with pytest.raises(ConfigError, match=message):  # noqa: SIM117
        with add_bias(net, [ALiBi(HEADS)]):
            model.answer(net)
    assert torch.equal(model.answer(net), want)


def test_positions_of_several_axes_are_refused():
    model = tiny("glm4v_moe_text")
    net = model.build()
    add_bias(net, [ALiBi(HEADS)])
    with pytest.raises(ConfigError, match=r"hands position_ids of shape \(3, 2, 12\) to Glm4vMoeTextAttention"):
        model.answer(net)


@pytest.mark.parametrize(
    ("encodings", "error", "message"),
    [
        (ALiBi(HEADS), TypeError, r"add_bias: encodings = ALiBi\. Expected a list of score encodings"),
        ([], TypeError, r"add_bias: encodings = \[\]\. Expected at least one"),
        ([RoPE(8)], TypeError, r"add_bias: RoPE acts on queries and keys\. Expected encodings of the score"),
        (["alibi"], TypeError, r"add_bias: 'alibi' is no encoding"),
        ([ALiBi(8)], ShapeError, r"add_bias: ALiBi has 8 heads for the model's 4\. Expected as many, or 1"),
        ([[ALiBi(HEADS)]], ShapeError, r"add_bias: 1 lists of encodings for 2 layers\. Expected one per layer"),
    ],
)
def test_encodings_that_do_not_fit_are_refused(encodings: Any, error: type[Exception], message: str):
    net = net_of("llama")
    with pytest.raises(error, match=message):
        add_bias(net, encodings)
    assert not hasattr(net, "posenc_bias")


def test_what_cannot_take_a_bias_is_refused():
    net = net_of("llama")
    with pytest.raises(TypeError, match=r"add_bias: a Linear\. Expected a model of the transformers library"):
        add_bias(nn.Linear(1, 1), [ALiBi(HEADS)])
    with pytest.raises(ValueError, match=r"add_bias: backend = 'fast'\. Expected 'auto' or one of .*reference"):
        add_bias(net, [ALiBi(HEADS)], backend="fast")
    add_bias(net, [ALiBi(HEADS)])
    with pytest.raises(ValueError, match=r"add_bias: the model has a bias already"):
        add_bias(net, [ALiBi(HEADS)])
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    )
    with pytest.raises(ConfigError, match=r"add_bias: T5ForConditionalGeneration (has the parts|attends to another sequence)"):
        add_bias(t5, [ALiBi(2)])


def test_masks_that_cannot_be_read_are_refused():
    net, ids = net_of("llama"), ids_of(1)
    cache = cache_of("growing", net)
    with add_bias(net, [ALiBi(HEADS)]):
        with pytest.raises(
            TypeError, match=r"add_bias: attention_mask is torch\.float32 of shape \(1, 1, 14, 14\)\. Expected booleans"
        ):
            logits(net, ids, attention_mask=torch.zeros(1, 1, SEQ, SEQ))
        logits(net, ids[:, :5], cache=cache, use_cache=True)
        with pytest.raises(ConfigError, match=r"gives attention 1 queries, 6 keys and a mask that did not come from"):
            logits(net, ids[:, 5:6], attention_mask=torch.ones(1, 1, 1, 6, dtype=torch.bool), cache=cache, use_cache=True)


def test_a_model_that_cuts_its_mask_is_refused():
    model = tiny("deepseek_v32")
    net = model.build()
    with add_bias(net, [ALiBi(HEADS)]), pytest.raises(TypeError, match=r"add_bias: the model cuts the attention mask"):
        model.answer(net)


def test_a_mask_of_other_keys_is_refused():
    model = tiny("minimax")  # its mask is sized by the cache of a layer that has no keys
    net, prompt = model.build(), model.inputs(8)["input_ids"]
    with (
        add_bias(net, [ALiBi(HEADS)]),
        pytest.raises(ShapeError, match=r"a mask of 1 × 1 for 1 queries and \d+ keys of MiniMax"),
    ):
        net.generate(prompt, max_new_tokens=2, min_new_tokens=2, do_sample=False)  # type: ignore[operator]


def test_keys_of_another_sequence_are_refused():
    from posenc.hf.seen import Seen

    five = torch.arange(5)[None]
    for mask, offset, keys in ((FULL, 0, 7), (CAUSAL, 3, 5)):
        with pytest.raises(ShapeError, match=rf"add_bias: {keys} keys from token 0 on for 5 queries from token {offset} on"):
            Seen(mask, (1, 5, keys), offset, 0, None).key_positions(five)


def test_a_mask_moves_to_another_device_whole():
    from posenc.hf.seen import Seen, Written

    seen = Seen(Written(torch.ones(2, 3, 4, dtype=torch.bool)), (2, 3, 4), 1, 0, torch.ones(2, 4, dtype=torch.bool))
    moved = seen.to("meta")
    assert moved.shape == seen.shape == (2, 1, 3, 4)
    assert moved.attended is not None
    assert {moved.attended.device.type, *(tensor.device.type for tensor in moved.mask.tensors())} == {"meta"}
    assert str(moved) == "Seen(Written(), (2, 3, 4))"
    with pytest.raises(ShapeError, match=r"add_bias: a mask of 3 × 4 for 3 queries and 5 keys"):
        seen.mask.allowed(3, 5, device="cpu")


# ----------------------------------------------------------------------------------------------------------------------
# long


@pytest.mark.slow
@pytest.mark.parametrize("model", [model for model in MODELS if model.kind != "picture"], ids=lambda model: model.model_type)
def test_a_bias_of_zero_changes_no_architecture(model: Tiny):
    net = model.build()
    want = model.answer(net)
    zero = T5Bias(net.config.num_attention_heads)
    nn.init.zeros_(zero.relative_attention_bias.weight)
    try:
        with add_bias(net, [zero]):
            close(model.answer(net), want)
    except (ConfigError, TypeError) as error:
        pytest.skip(str(error))
    assert torch.equal(model.answer(net), want)


@pytest.mark.slow
def test_it_compiles_as_one_graph():
    net, ids, attended = net_of("llama"), ids_of(), left_padded()
    add_bias(net, [T5Bias(HEADS)])
    want = logits(net, ids, attention_mask=attended)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    close(logits(compiled, ids, attention_mask=attended), want)
