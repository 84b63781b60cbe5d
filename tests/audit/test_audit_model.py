"""`audit` of live models: what it finds, what it says, what it leaves alone."""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest
import torch
import transformers
from tests.hf.tiny_models import LEFT, Tiny, tiny
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import posenc
from posenc.audit import Report
from posenc.audit.live.auditing import audit
from posenc.hf import patch

LONG = {"hidden_size": 256, "head_dim": 64, "max_position_embeddings": 65536}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Any:
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(level)


def built(name: str, **changes: Any) -> Any:
    return tiny(name).build(tiny(name).config(**changes))


def static(model: nn.Module) -> Report:
    return audit(model, behaviour="skip")


# what it says


def test_a_model_is_described_in_words():
    report = static(built("llama", **LONG, rope_parameters=LLAMA3))
    assert report.findings == ()
    text = "\n".join(report.described)
    assert "2 of 2 layers: half pairing, 64 of 64 channels, base 500,000, Llama 3 ×8 from 8,192" in text
    assert "model.rotary_emb: the returned table is off by at most" in text
    assert report.subject == "LlamaForCausalLM"
    assert set(report.checked) >= {"rotary frequencies", "rotary tables", "layers", "masks"}
    assert report.skipped == {"behaviour": "asked to read tables only"}


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))], ids=["linear", "two"])
def test_a_model_without_positions_says_so(model: nn.Module):
    report = static(model)
    assert report.described == ("no positions: no rotary module, table or bias was found",)
    assert report.findings == ()


@pytest.mark.parametrize(
    ("thing", "error", "message"),
    [
        ("meta-llama", TypeError, r"audit: a str\. Expected a torch\.nn\.Module\. Load the model first\."),
        (nn.Linear, TypeError, r"audit: a type\. Expected a torch\.nn\.Module\. Load the model first\."),
    ],
)
def test_what_is_no_model_is_refused(thing: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        audit(thing)


def test_an_unknown_behaviour_is_refused():
    with pytest.raises(
        ValueError, match=r"audit: behaviour = 'walk'\. Expected 'run' or 'skip'\. Pass 'skip' to read tables only\."
    ):
        audit(nn.Linear(2, 2), behaviour="walk")  # type: ignore[arg-type]


def test_progress_is_told_in_order():
    steps: list[str] = []
    audit(built("llama"), behaviour="skip", progress=steps.append)
    assert steps == ["comparing rotary tables", "reading position tables", "comparing layers"]


def test_a_configuration_without_a_plan_is_skipped_with_the_reason():
    model = next(model for model, _ in LEFT if model.model_type == "hunyuan_vl_text")
    report = static(model.build())
    assert report.at_least("warning") == ()
    assert "different angles" in report.skipped["the promise of the model"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mistral_large4_text", "frequencies are learned"),
        ("flint", "no layer of 'flint' uses it"),
        ("dinov3_vit", "not called with positions"),
    ],
)
def test_what_cannot_be_compared_is_named(name: str, reason: str):
    model = next(model for model, _ in LEFT if model.model_type == name)
    report = static(model.build())
    assert report.at_least("warning") == ()
    assert reason in " ".join(report.skipped.values())


@pytest.mark.parametrize("name", ["gpt2", "bert", "bloom", "t5", "roformer"])
def test_architectures_that_do_not_rotate_are_clean(name: str):
    report = static(next(model for model, _ in LEFT if model.model_type == name).build())
    assert report.at_least("warning") == ()
    assert report.described


def test_rows_that_belong_to_padding_are_noted():
    report = static(Tiny("roberta", {"max_position_embeddings": 66, "pad_token_id": 1}, "encoder").build())
    (finding,) = report.findings
    assert (finding.id, finding.severity) == ("table-padding-rows", "note")
    assert finding.measured == "66 rows, the first token at row 2: 64 tokens fit"


def test_posencs_own_encodings_are_named():
    model = posenc.Transformer(8, dim=16, layers=1, heads=2, encodings=[posenc.RoPE(8)])
    report = static(model)
    assert report.findings == ()
    assert any("RoPE(8" in line for line in report.described)


def test_a_patched_model_is_no_longer_blamed_for_its_own_table():
    net = built("llama", **LONG).to(torch.bfloat16)
    assert static(net).at_least("error")
    with patch(net):
        report = static(net)
        assert report.at_least("warning") == ()
        assert "model.rotary_emb: posenc's tables, float64 angles" in report.described
    assert static(net).at_least("error")


# what it finds


@pytest.mark.parametrize("pair", [0, 1, 3])
@pytest.mark.parametrize("relative", [1e-4, -1e-4, 0.5])
@pytest.mark.parametrize(("name", "key"), [("llama", "inv_freq"), ("gemma3_text", "sliding_attention_inv_freq")])
def test_one_wrong_frequency_is_found(name: str, key: str, pair: int, relative: float):
    """A float32 ladder is right to a few units of 6e-8; a ten-thousandth is somebody's mistake."""
    net = built(name)
    table = getattr(net.model.rotary_emb, key)
    assert static(net).at_least("warning") == ()
    table[pair] *= 1 + relative
    findings = static(net).at_least("error")
    assert findings
    assert all(finding.where == f"model.rotary_emb.{key}" for finding in findings)


@pytest.mark.parametrize("name", ["gptj", "codegen"])
def test_one_wrong_entry_of_a_whole_table_is_found(name: str):
    """These modules hold no frequencies, only sines and cosines of every position."""
    net = built(name)
    assert static(net).at_least("warning") == ()
    table = [module for module in net.modules() if hasattr(module, "embed_positions")][-1].embed_positions
    table[7, 0] += 1e-3
    (finding,) = static(net).at_least("warning")
    assert finding.id == "table-values"
    assert "at position 7" in finding.measured


def test_modules_that_layers_share_each_keep_their_base():
    bases = {"layer_rope_theta": [1e4, 5e5]}
    net = built("granite_swa", **bases)
    assert static(net).at_least("warning") == ()
    first, second = net.model.rotary_embs
    second.inv_freq.copy_(first.inv_freq)
    (finding,) = static(net).at_least("warning")
    assert finding.id == "layer-base"
    assert finding.measured == "none of them makes base 500,000"
    second.inv_freq.mul_(1.01)
    assert {finding.where for finding in static(net).at_least("warning")} == {"model.rotary_embs.1.inv_freq"}


def test_the_layer_type_whose_base_another_uses_is_named():
    net = built("gemma3_text")
    rotary = net.model.rotary_emb
    rotary.sliding_attention_inv_freq.copy_(rotary.full_attention_inv_freq)
    (finding,) = static(net).at_least("warning")
    assert finding.id == "layer-base"
    assert finding.where == "model.rotary_emb.sliding_attention_inv_freq"
    assert "the block of 'full_attention'" in finding.measured


def test_both_towers_of_a_model_that_sees_are_compared():
    config = transformers.Qwen2_5_VLConfig(
        text_config=tiny("qwen2_5_vl_text").config().to_dict(), vision_config=tiny("qwen2_5_vl_vision").config().to_dict()
    )
    net = transformers.Qwen2_5_VLForConditionalGeneration(config).eval()
    assert static(net).at_least("warning") == ()
    net.model.visual.rotary_pos_emb.inv_freq.mul_(0.5)
    assert {f.where for f in static(net).at_least("error")} == {"model.visual.rotary_pos_emb.inv_freq"}
    net.model.language_model.rotary_emb.inv_freq.fill_(torch.nan)
    assert {f.where for f in static(net).at_least("error")} == {
        "model.visual.rotary_pos_emb.inv_freq", "model.language_model.rotary_emb.inv_freq",
    }  # fmt: skip


@pytest.mark.parametrize("length", [40, 16])
def test_a_rule_of_the_length_may_stand_where_the_last_call_left_it(length: int):
    net = built("llama", max_position_embeddings=16, rope_parameters=DYNAMIC)
    model = tiny("llama")
    model.answer(net, **model.inputs(length))
    report = static(net)
    assert report.at_least("warning") == ()
    assert [finding.id for finding in report.findings] == ["upstream-deviation"]
    net.model.rotary_emb.inv_freq.mul_(1.01)
    assert static(net).at_least("error")


def test_what_transformers_itself_does_otherwise_is_a_note_with_the_reason():
    """PhiMoE as of transformers 5.24 never reads its long factors."""
    factors = {
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 1.5, 3.0, 6.0],
        "short_mscale": 1.25,
        "long_mscale": 1.5,
    }
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16, "factor": 2.0, **factors}
    net = built("phimoe", max_position_embeddings=32, rope_parameters=rope)
    report = static(net)
    assert report.at_least("warning") == ()
    assert "never takes its long factors" in " ".join(f.expected for f in report.findings if f.id == "upstream-deviation")
    net.model.rotary_emb.inv_freq.mul_(1.01)  # what transformers would not make is not excused
    assert static(net).at_least("error")


def test_layers_that_turn_in_silence_are_found_by_a_run():
    """The switch says that a layer does not turn; its code turns all the same."""
    net = built("smollm3", num_hidden_layers=4, no_rope_layers=[1, 1, 1, 0])
    assert "layer-plan" not in audit(net).ids
    attention = net.model.layers[3].self_attn

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.__dict__["use_rope"] = 1
        try:
            return type(self).forward(self, *args, **kwargs)
        finally:
            self.__dict__["use_rope"] = 0

    attention.forward = types.MethodType(forward, attention)
    assert "layer-plan" not in static(net).ids
    (finding,) = [finding for finding in audit(net).findings if finding.id == "layer-plan"]
    assert "it turns when run; 4 of 4 layers turn" in finding.measured
    assert finding.where == "model.layers.3.self_attn"


def test_a_rotary_module_that_raises_is_skipped_with_its_message():
    net = built("llama")

    def forward(self: Any, x: Tensor, position_ids: Tensor) -> Any:
        raise RuntimeError("out of cheese")

    net.model.rotary_emb.forward = types.MethodType(forward, net.model.rotary_emb)
    report = static(net)
    assert report.findings == ()
    assert "RuntimeError: out of cheese" in report.skipped["table of model.rotary_emb"]


# what it leaves alone


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "phi3", "gptj"])
def test_an_audit_leaves_no_trace(name: str):
    net = built(name, **({"max_position_embeddings": 16, "rope_parameters": DYNAMIC} if name == "llama" else {})).train()
    before = {key: value.clone() for key, value in (*net.named_parameters(), *net.named_buffers())}
    own = {id(module): {k: v for k, v in vars(module).items() if isinstance(v, (int, float, str))} for module in net.modules()}
    config, dice = copy.deepcopy(net.config.to_dict()), torch.random.get_rng_state()
    audit(net)
    after = dict((*net.named_parameters(), *net.named_buffers()))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert all(
        own[id(module)] == {k: v for k, v in vars(module).items() if isinstance(v, (int, float, str))}
        for module in net.modules()
    )
    assert net.training
    assert net.config.to_dict() == config
    assert torch.equal(torch.random.get_rng_state(), dice)


SEVEN_BILLION = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "head_dim": 128, "vocab_size": 32000, "max_position_embeddings": 4096,
}  # fmt: skip


def test_of_a_large_model_only_position_parts_are_read():
    config = transformers.LlamaConfig(**SEVEN_BILLION)
    with torch.device("meta"):
        net = transformers.LlamaForCausalLM(config)
    assert sum(p.numel() for p in net.parameters()) > 6e9
    report = audit(net)
    assert report.findings == ()
    assert "on the meta device" in report.skipped["tables of model.rotary_emb"]
    net.model.rotary_emb = type(net.model.rotary_emb)(config)
    report = audit(net)
    assert report.findings == ()
    assert "rotary tables" in report.checked
    assert not any("rotary" in key for key in report.skipped)
    assert any("meta device" in reason for reason in report.skipped.values())
    net.model.rotary_emb.inv_freq.div_(4)
    assert audit(net).at_least("error")


class _Untouchable(TorchDispatchMode):
    """No operation reads these tensors."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs or {})):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() in self._storages:
                raise AssertionError(f"{func} reads a weight")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["llama", "opt", "gemma3_text"])
def test_without_a_run_no_other_weight_is_read(name: str):
    net = Tiny(name, {"ffn_dim": 48, "word_embed_proj_dim": 32}).build() if name == "opt" else built(name)
    others = [value for key, value in net.named_parameters() if "position" not in key]
    assert len(others) > 4
    with _Untouchable(others):
        assert static(net).at_least("warning") == ()
        with pytest.raises(AssertionError, match="reads a weight"):
            others[0].sum()


# plain PyTorch


class Plain(nn.Module):
    def __init__(self, base: float = 10_000.0, pairs: int = 16) -> None:
        super().__init__()
        self.register_buffer("inv_freq", base ** -(torch.arange(pairs) / pairs))


def test_frequencies_without_a_promise_are_read():
    report = static(nn.Sequential(nn.Linear(2, 2), Plain(500_000.0)))
    assert report.findings == ()
    (line,) = report.described
    assert line.startswith("1.inv_freq: ")
    assert "500000" in line.replace(",", "")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_frequencies_are_found_without_a_promise(dtype: torch.dtype):
    assert static(Plain().to(dtype)).ids == ("frequency-rounded",)


@pytest.mark.parametrize(("fill", "measured"), [(torch.nan, "16 of 16 entries are not finite"), (0.0, "zeros only")])
def test_garbage_in_a_plain_table_is_found(fill: float, measured: str):
    net = Plain()
    net.inv_freq.fill_(fill)
    (finding,) = static(net).findings
    assert (finding.id, finding.where, finding.measured) == ("table-garbage", "inv_freq", measured)


def test_a_cache_may_be_a_plain_attribute_and_a_table_may_not():
    net = Plain()
    net.cos_cached = torch.zeros(4, 4)
    assert static(net).findings == ()
    net.pos_embed = torch.zeros(4, 4)
    (finding,) = static(net).findings
    assert (finding.id, finding.where) == ("table-not-buffer", "pos_embed")


def test_infinite_entries_are_meant_in_a_bias_only():
    net = nn.Module()
    net.register_buffer("alibi", torch.tensor([0.0, -torch.inf]))
    assert static(net).findings == ()
    net.register_buffer("pos_table", torch.tensor([0.0, -torch.inf]))
    assert static(net).ids == ("table-garbage",)


def test_learned_tables_before_training_are_no_mistake():
    net = nn.Module()
    net.pos_embed = nn.Parameter(torch.zeros(1, 16, 8))
    assert static(net).findings == ()
    with torch.no_grad():
        net.pos_embed[0, :8] = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    (finding,) = static(net).findings
    assert finding.id == "table-untrained"
    assert finding.measured == "8 of 16 rows hold zeros: rows 8–15"


# fixed tables


def sinusoids(rows: int = 64, width: int = 32, dtype: torch.dtype = torch.float64) -> Tensor:
    """The paper's, interleaved, from its formula."""
    angle = torch.arange(rows, dtype=torch.float64)[:, None] / 1e4 ** (torch.arange(0, width, 2) / width)
    if dtype != torch.float64:
        angle = angle.to(dtype).double()
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1).float()


@pytest.mark.parametrize("shape", [(64, 32), (1, 64, 32), (64, 1, 32)])
def test_a_sinusoidal_buffer_is_read(shape: tuple[int, ...]):
    net = nn.Module()
    net.register_buffer("pe", sinusoids().reshape(shape))
    report = static(net)
    assert report.findings == ()
    assert "pe: 64 rows, sinusoidal, interleaved, paper frequencies, base 10,000" in report.described


def test_a_sinusoidal_buffer_of_half_precision_angles_is_found():
    net = nn.Module()
    net.register_buffer("pe", sinusoids(2048, dtype=torch.bfloat16))
    assert static(net).at_least("warning")
    assert all(finding.where == "pe" for finding in static(net).findings)


ENCODER_DECODER = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "decoder_start_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize(("name", "key", "rule"), [("marian", "weight", "paper"), ("m2m_100", "weights", "tensor2tensor")])
def test_the_promised_sinusoids_of_transformers_are_read_and_garbage_in_them_is_found(name: str, key: str, rule: str):
    net = Tiny(name, {**ENCODER_DECODER, "pad_token_id": 1}, "encoder").build()
    report = static(net)
    assert report.at_least("warning") == ()
    assert f"sinusoidal, concatenated, {rule} frequencies" in "\n".join(report.described)
    with torch.no_grad():
        getattr(net.decoder.embed_positions, key).uniform_(-1, 1, generator=torch.Generator().manual_seed(0))
    findings = static(net).at_least("error")
    assert {finding.where for finding in findings} == {f"decoder.embed_positions.{key}"}


@pytest.mark.parametrize("heads", [4, 12])
@pytest.mark.parametrize("shape", [(-1,), (-1, 1, 1)])
def test_slopes_are_read(heads: int, shape: tuple[int, ...]):
    """The numbers for 12 heads: exponents -1 to -8, then -0.5, -1.5, -2.5, -3.5."""
    exponents = [-2, -4, -6, -8] if heads == 4 else [-1, -2, -3, -4, -5, -6, -7, -8, -0.5, -1.5, -2.5, -3.5]
    net = nn.Module()
    net.register_buffer("slopes", (2.0 ** torch.tensor(exponents)).reshape(shape))
    report = static(net)
    assert report.findings == ()
    assert report.described == (f"slopes: ALiBi slopes of {heads} heads, released",)
    net.slopes = net.slopes * 2.0 ** (8 / 4) if heads == 4 else net.slopes
    expected = () if heads == 12 else ("bias-slopes",)
    assert tuple(finding.id for finding in static(net).at_least("warning")) == expected


def test_learned_slopes_are_nobodys_mistake():
    net = nn.Module()
    net.slopes = nn.Parameter(torch.ones(4))
    assert static(net).findings == ()


def test_weights_of_zero_hide_what_a_table_does():
    net = built("llama")
    with torch.no_grad():
        for layer in net.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    report = audit(net)
    assert "layer-plan" not in report.ids
    assert report.skipped["which layers turn"] == "no answer changes with the table"


def test_of_an_architecture_that_is_not_known_the_width_is_only_noted():
    """Its share of the head may stand under a key that nobody else has."""
    net = built("llama")
    net.config.__class__ = type("Own", (type(net.config),), {"model_type": "somebodys_own"})
    net.model.rotary_emb.inv_freq = net.model.rotary_emb.inv_freq[:2].clone()
    report = static(net)
    assert report.at_least("warning") == ()
    assert "frequency-width" in report.ids


@pytest.mark.parametrize(
    "config", [{"lr": 0.1}, types.SimpleNamespace(to_dict=lambda: {"rope_theta": 5.0})], ids=["plain", "to_dict"]
)
def test_what_others_call_a_config_is_no_promise(config: Any):
    net = Plain()
    net.config = config
    report = static(net)
    assert report.findings == ()
    assert report.described == ("inv_freq: base 10,000",)


def test_a_configuration_that_cannot_be_read_is_named():
    class Broken:
        model_type = "llama"

        def to_dict(self) -> Any:
            raise KeyError("cheese")

    net = Plain()
    net.config = Broken()
    assert "Broken cannot be read: KeyError: 'cheese'" in static(net).skipped["the promise of the model"]


@pytest.mark.parametrize(
    ("values", "measured"),
    [
        ([1.8e26, 3.1e-41] * 8, "frequencies down to 3.1e-41"),
        ([1.8e26, 0.0] * 8, "frequencies up to 1.8e+26"),
        ([1.0, -0.5] * 8, "8 of 16 are below zero, the least -0.5"),
    ],
)
def test_memory_that_was_never_written_is_found_in_plain_frequencies(values: list[float], measured: str):
    net = Plain()
    net.inv_freq.copy_(torch.tensor(values))
    (finding,) = static(net).findings
    assert (finding.id, finding.measured) == ("table-garbage", measured)


def test_a_lazy_module_is_passed_over():
    net = nn.Module()
    net.pos_embed = nn.UninitializedParameter()
    assert static(net).findings == ()


# whole rotary tables


def rows_of_angles(length: int = 512, pairs: int = 32, dtype: torch.dtype = torch.float32) -> Tensor:
    """Angles formed in a dtype, as people form them. float16 has no room for the slow pairs of a larger base."""
    base = 1e4 if dtype == torch.float16 else 5e5
    inv_freq = (base ** -(torch.arange(pairs, dtype=torch.float64) / pairs)).to(dtype)
    return (torch.arange(length).to(dtype)[:, None] * inv_freq).float()


def cached(form: str, dtype: torch.dtype = torch.float32, kept: torch.dtype = torch.float32) -> nn.Module:
    angle, net = rows_of_angles(dtype=dtype), nn.Module()
    if form == "complex":
        net.register_buffer("freqs_cis", torch.polar(torch.ones_like(angle), angle), persistent=False)
        return net
    angle = {"tiled": torch.cat((angle, angle), -1), "repeated": angle.repeat_interleave(2, -1), "half": angle}[form]
    net.register_buffer("cos_cached", angle.cos()[None, None].to(kept), persistent=False)
    net.register_buffer("sin_cached", angle.sin()[None, None].to(kept), persistent=False)
    return net


@pytest.mark.parametrize("form", ["complex", "tiled", "repeated", "half"])
def test_whole_rotary_tables_are_read(form: str):
    report = static(cached(form))
    assert report.findings == ()
    assert "512 positions" in report.described[0]
    assert report.described[0].endswith("base 500,000")


@pytest.mark.parametrize("form", ["complex", "tiled", "repeated", "half"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_whole_rotary_tables_of_half_precision_angles_are_found(form: str, dtype: torch.dtype):
    (finding,) = static(cached(form, dtype)).findings
    assert finding.id == "table-half-angles"


@pytest.mark.parametrize("form", ["tiled", "repeated", "half"])
@pytest.mark.parametrize("kept", [torch.float16, torch.bfloat16])
def test_tables_that_are_only_kept_in_half_precision_are_right(form: str, kept: torch.dtype):
    assert static(cached(form, kept=kept)).findings == ()


def test_a_table_of_zeros_and_ones_is_no_sinusoid():
    net = nn.Module()
    net.register_buffer("pos_onehot", torch.eye(16).repeat_interleave(2, 0))
    net.register_buffer("pos_bits", torch.randint(0, 2, (64, 8), generator=torch.Generator().manual_seed(0)).float())
    assert static(net).findings == ()


# layers and masks


@pytest.mark.parametrize(
    ("layer", "window", "measured", "expected"),
    [
        (0, None, "no window", "a window of 8 tokens"),
        (0, 64, "a window of 64 tokens", "a window of 8 tokens"),
        (1, 8, "a window of 8 tokens", "no window"),
    ],
)
def test_windows_are_compared_layer_by_layer(layer: int, window: int | None, measured: str, expected: str):
    net = built("gemma3_text", num_hidden_layers=3, layer_types=["sliding_attention", "full_attention", "full_attention"])
    net.model.layers[layer].self_attn.sliding_window = window
    (finding,) = static(net).findings
    assert (finding.id, finding.where) == ("layer-window", f"model.layers.{layer}.self_attn")
    assert (finding.measured, finding.expected) == (measured, expected)


def test_a_layer_that_takes_itself_for_another_kind_is_found():
    net = built("gemma3_text")
    net.model.layers[1].self_attn.layer_type = "sliding_attention"
    (finding,) = static(net).findings
    assert (finding.id, finding.measured) == ("layer-window", "a layer of kind 'sliding_attention'")


@pytest.mark.parametrize("switch", [[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
def test_switches_of_rotation_are_counted(switch: list[int]):
    net = built("smollm3", num_hidden_layers=4, no_rope_layers=[1, 1, 1, 0])
    for layer, value in zip(net.model.layers, switch, strict=True):
        layer.self_attn.use_rope = value
    (finding,) = static(net).findings
    assert finding.id == "layer-plan"
    assert f"{sum(switch)} of 4 layers turn" in finding.measured
    assert finding.expected == "3 of 4 layers"


def test_biases_of_posenc_come_with_their_mask():
    net = built("llama")
    with posenc.hf.add_bias(net, [posenc.ALiBi(4)]):
        report = static(net)
    assert report.findings == ()
    assert any("ALiBi(4" in line for line in report.described)


def test_a_learned_table_with_a_number_that_is_none_is_found():
    net = next(model for model, _ in LEFT if model.model_type == "gpt2").build()
    with torch.no_grad():
        net.wpe.weight[5, 3] = torch.inf
    (finding,) = static(net).findings
    assert (finding.id, finding.where) == ("table-garbage", "wpe.weight")
    assert finding.measured == "1 of 2048 entries are not finite"


def test_a_table_that_ends_before_the_promise_is_found():
    net = built("gptj")
    rotary = net.transformer.rotary_emb
    rotary.embed_positions = rotary.embed_positions[:40].clone()
    (finding,) = static(net).findings
    assert (finding.id, finding.where) == ("table-rows", "transformer.rotary_emb")
    assert finding.measured.startswith("position 63 raises IndexError")


def test_a_plain_attribute_that_transformers_moves_itself_is_noted():
    net = Tiny("videomae", {"num_frames": 2, "tubelet_size": 2}, "encoder").build()
    (finding,) = static(net).findings
    assert (finding.id, finding.severity) == ("table-not-buffer", "note")


def test_fixed_tables_before_they_are_filled_are_no_sinusoids():
    net = nn.Module()
    net.pos_embed = nn.Parameter(torch.zeros(1, 16, 8), requires_grad=False)
    assert static(net).findings == ()
