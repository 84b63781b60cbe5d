"""`check_behaviour` drives models of every kind, leaves them as they were, and is silent on healthy ones."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from tests.audit.bugs import behaviour as behaviour_bugs
from tests.audit.bugs.behaviour import Decoder, Placed, Rotary
from tests.hf.tiny_models import Tiny, tiny
from torch import nn

from posenc import (
    KERPLE,
    ALiBi,
    FoX,
    Learned,
    NoPE,
    RoPE,
    ShawRelative,
    Sinusoidal,
    T5Bias,
    Transformer,
    XPos,
)
from posenc.audit import KINDS
from posenc.audit.behaviour import runner as behaviour_runner
from posenc.audit.behaviour.checking import CHECKS, check_behaviour
from posenc.audit.behaviour.known import KNOWN
from posenc.audit.behaviour.probe import rounding

CLEAN = (
    "llama", "mixtral", "gemma2", "falcon", "gpt_neox", "recurrent_gemma", "diffllama", "jetmoe", "modernbert-decoder", "lfm2", "nomic_bert",
)  # fmt: skip
"""Other architectures than the audit of clean models has: experts, windows, states, encoders, known deviations."""


@pytest.fixture(autouse=True, scope="module")
def _quiet():
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(level)


@pytest.mark.parametrize("model_type", CLEAN)
def test_healthy_models_have_no_warning(model_type):
    report = check_behaviour(tiny(model_type).build())
    assert report.at_least("warning") == (), str(report)
    assert len(report.checked) >= 6, report.skipped


@pytest.mark.parametrize(
    ("model_type", "changes", "kind"),
    [
        ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}, "decoder"),
        ("bloom", {"n_layer": 2, "n_head": 4}, "decoder"),
        ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}, "decoder"),
        ("bart", {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}, "decoder"),
        ("mamba", {}, "decoder"),
        ("roberta", {}, "encoder"),
        ("deberta-v2", {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, "encoder"),
    ],
)
def test_models_without_rotation_have_no_warning(model_type, changes, kind):
    report = check_behaviour(Tiny(model_type, changes, kind).build())
    assert report.at_least("warning") == (), str(report)


@pytest.mark.parametrize(
    ("encodings", "words"),
    [
        ([RoPE(8)], "relative: a shift of all positions changes nothing"),
        ([ALiBi(2)], "relative: a shift of all positions changes nothing"),
        ([T5Bias(2)], "relative: a shift of all positions changes nothing"),
        ([KERPLE(2)], "relative: a shift of all positions changes nothing"),
        ([XPos(8)], "relative: a shift of all positions changes nothing"),
        ([ShawRelative(8, 16)], "relative: a shift of all positions changes nothing"),
        ([Learned(32, 16)], "absolute"),
        ([Sinusoidal(16)], "absolute"),
    ],
    ids=lambda value: type(value[0]).__name__ if isinstance(value, list) else "",
)
def test_posencs_own_model_is_described_and_clean(encodings, words):
    report = check_behaviour(Transformer(48, dim=16, layers=2, heads=2, encodings=encodings))
    assert report.at_least("warning") == (), str(report)
    assert any(line.startswith(words) for line in report.described), report.described
    assert {"causal", "decoding with a cache equals one full pass", "packed documents stay apart, given documents"} <= set(
        report.described
    )


@pytest.mark.parametrize("encodings", [[NoPE()], [FoX(2, 16)]], ids=["NoPE", "FoX"])
def test_a_model_that_reads_no_positions_says_so_as_a_warning_at_most(encodings):
    report = check_behaviour(Transformer(48, dim=16, layers=2, heads=2, encodings=encodings))
    assert set(report.ids) <= {"positions-ignored"}
    assert report.at_least("error") == ()


def test_an_encoder_is_bidirectional_and_has_no_cache():
    report = check_behaviour(Transformer(48, dim=16, layers=2, heads=2, encodings=[RoPE(8)], kind="encoder"))
    assert report.findings == ()
    assert "bidirectional" in report.described
    assert report.skipped["decoding"] == "its forward takes no cache"


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, {"length-rule-cache", "call-order", "batch-dependence"}),
        (
            {
                "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, "factor": 2.0,
                "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0],
            },
            {"length-rule-cache", "batch-dependence"},
        ),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}, set()),
    ],
    ids=["dynamic", "longrope", "yarn"],
)  # fmt: skip
def test_what_length_rules_do_to_caches_is_a_note(parameters, expected):
    config = tiny("llama").config(rope_parameters=parameters, max_position_embeddings=64, initializer_range=0.2)
    report = check_behaviour(tiny("llama").build(config))
    assert report.at_least("warning") == (), str(report)
    assert set(report.ids) == expected, str(report)


def test_nothing_of_the_model_changes():
    config = tiny("llama").config(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0})
    model = tiny("llama").build(config).train()
    model.model.layers[0].eval()
    before = copy.deepcopy(model.state_dict())
    modes = [module.training for module in model.modules()]
    held = [(id(tensor), tensor.requires_grad) for tensor in (*model.parameters(), *model.buffers())]
    names = [sorted(vars(module)) for module in model.modules()]
    longest = model.model.rotary_emb.max_seq_len_cached
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    check_behaviour(model)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert modes == [module.training for module in model.modules()]
    assert held == [(id(tensor), tensor.requires_grad) for tensor in (*model.parameters(), *model.buffers())]
    assert names == [sorted(vars(module)) for module in model.modules()]
    assert model.model.rotary_emb.max_seq_len_cached == longest


def test_tables_that_a_model_shares_stay_usable_in_training():
    shared: dict[int, torch.Tensor] = {}

    class Shares(Rotary):
        def table(self, at, mask):
            if at.shape[1] not in shared:
                shared[at.shape[1]] = torch.ones(())
            cos, sin = super().table(at, mask)
            return cos * shared[at.shape[1]], sin

    model = Shares()
    check_behaviour(model)
    model(torch.ones(1, 7, dtype=torch.int64))[0].sum().backward()
    assert shared


def test_the_same_seed_gives_the_same_report_and_progress_names_the_checks():
    model, seen = tiny("gpt_neox").build(), []
    first = check_behaviour(model, seed=5, progress=seen.append)
    assert str(check_behaviour(model, seed=5)) == str(first)
    assert seen == list(CHECKS)
    assert check_behaviour(model, seed=6).at_least("warning") == ()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_models_in_other_dtypes(dtype):
    model = tiny("llama").build().to(dtype)
    report = check_behaviour(model)
    assert report.at_least("warning") == (), str(report)
    assert "relative: a shift of all positions changes nothing" in report.described
    assert next(model.parameters()).dtype == dtype


class Lines(nn.Module):
    """Answers something for ids in one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)


class LastOnly(Lines):
    def forward(self, idx, targets=None):
        return self.head(self.embed(idx)[:, -1:]), None


class Draws(Lines):
    def forward(self, ids):
        return self.head(self.embed(ids) + torch.rand(8))


class Raises(Lines):
    def forward(self, ids):
        raise RuntimeError("no kernel\nlong explanation")


class NeedsMore(Lines):
    def forward(self, ids, memory):
        return self.head(self.embed(ids) + memory)


class Wrapped(Lines):
    def forward(self, *args, **kwargs):
        return self.head(self.embed(args[0]))


class NotFinite(Lines):
    def forward(self, ids):
        return self.head(self.embed(ids)) / 0


class AllZero(Lines):
    def forward(self, ids):
        return self.head(self.embed(ids)) * 0


class Words(Lines):
    def forward(self, ids):
        return "logits"


class Locked(Lines):
    def __init__(self) -> None:
        super().__init__()
        self.lock = __import__("threading").Lock()

    def forward(self, ids):
        return self.head(self.embed(ids))


class Square(Lines):
    def forward(self, ids):
        x = self.embed(ids)
        return x @ x.transpose(1, 2)


class Pictures(Lines):
    def forward(self, pixel_values=None):
        return pixel_values


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            LastOnly(),
            "the model answers (1, 1, 20) of torch.float32 for ids of shape (1, 2), not one row of real numbers per token",
        ),
        (Draws(), "two equal calls differ: it draws random numbers, or keeps a state"),
        (Raises(), "the model raises RuntimeError: no kernel"),
        (NeedsMore(), "its forward needs memory beside ids"),
        (Wrapped(), "its forward does not name what it takes; audit the module inside the wrapper"),
        (NotFinite(), "its answers are not finite"),
        (AllZero(), "its answers are all zero"),
        (Words(), "the model answers a str, not a tensor or something with logits"),
        (Locked(), "the model cannot be copied (TypeError: cannot pickle '_thread.lock' object)"),
        (Square(), "the width of its answers changes with the input: 2 and 12"),
        (Pictures(), "its forward takes pixel_values: no ids"),
        (nn.Linear(4, 4), "it has no embedding of ids"),
        (nn.Embedding(2, 4), "a vocabulary of 2 ids is too small to tell tokens apart"),
        (Decoder().to("meta"), "its weights are on the meta device"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_models_that_cannot_be_driven_say_why(model, reason):
    report = check_behaviour(model)
    assert report.skipped == {"behaviour": reason}
    assert report.findings == report.checked == ()


def test_large_models_are_left_alone(monkeypatch):
    monkeypatch.setattr(behaviour_runner, "LARGEST", 1000)
    reason = check_behaviour(Decoder()).skipped["behaviour"]
    assert reason.endswith("numbers: copies are made of models up to 1,000")


def test_not_a_module():
    with pytest.raises(TypeError, match="check_behaviour: a dict. Expected an nn.Module that takes ids. Load the model first."):
        check_behaviour({})


def test_a_model_that_mixes_nothing_is_described():
    class Alone(Lines):
        def forward(self, ids):
            return self.head(self.embed(ids))

    report = check_behaviour(Alone())
    assert report.at_least("warning") == ()
    assert "tokens do not change each other's answers" in report.described


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (behaviour_bugs.SharedPositions(), "the padding is hidden, positions or lengths are off"),
        (behaviour_bugs.PaddingInView(), "the padding is seen"),
    ],
)
def test_why_padding_matters_is_said(model, words):
    (finding,) = [finding for finding in check_behaviour(model).findings if finding.id == "left-padding"]
    assert finding.measured.endswith(words)


def test_masks_of_booleans_are_given_where_integers_are_refused():
    class Booleans(Decoder):
        def forward(self, ids, attention_mask=None):
            if attention_mask is not None and attention_mask.dtype != torch.bool:
                raise TypeError("expected booleans")
            return super().forward(ids, attention_mask)[0]

    report = check_behaviour(Booleans())
    assert {"left padding", "right padding"} <= set(report.checked)
    assert report.findings == ()


def test_a_mask_that_is_true_for_padding():
    class Torch(Decoder):
        def forward(self, src, src_key_padding_mask=None):
            mask = None if src_key_padding_mask is None else (~src_key_padding_mask).long()
            return super().forward(src, mask)[0]

    assert check_behaviour(Torch()).findings == ()


def test_positions_that_are_needed_are_given():
    class Needs(Placed):
        def forward(self, ids, positions):
            return self.run(ids, positions)[0]

    report = check_behaviour(Needs())
    assert report.findings == ()
    assert "takes ids, positions" in report.described


def test_rows_that_are_the_sequence_are_no_finding():
    class SequenceFirst(Decoder):
        causal = False

        def forward(self, src):
            return super().forward(src.T)[0].transpose(0, 1)

    report = check_behaviour(SequenceFirst())
    assert report.at_least("warning") == (), str(report)
    assert report.skipped["behaviour"].startswith("rows meet and the tokens of a row do not: it takes [seq, batch]")


def test_a_start_without_a_cache_is_not_taken_for_one():
    class Offset(Decoder):
        def forward(self, ids, start_pos=0):
            return self.run(ids, torch.arange(start_pos, start_pos + ids.shape[1]).expand(ids.shape))[0]

    report = check_behaviour(Offset())
    assert report.findings == ()
    assert report.skipped["decoding"] == "its forward takes no cache"


def test_experts_are_not_taken_for_layers():
    class Experts(nn.Module):
        def __init__(self, layers: int, experts: int) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(9, 9) for _ in range(experts)) for _ in range(layers))

    assert rounding(Experts(3, 64)) == rounding(Experts(3, 2)) == 2.0**-24 * 3 * 8 * 4 * 4


def test_a_small_table_is_asked_with_fewer_tokens():
    class Small(Decoder):
        max_length = 9

        def forward(self, ids, attention_mask=None):
            return super().forward(ids, attention_mask)[0]

    report = check_behaviour(Small())
    assert report.findings == ()
    assert "right padding" in report.checked


def test_known_deviations_name_kinds_that_exist_and_are_notes_with_a_reason():
    assert {kind for _, kind in KNOWN} <= set(KINDS)
    report = check_behaviour(tiny("minimax").build())
    assert report.ids == ("decode-offset",)
    assert all(finding.severity == "note" and "Known of transformers" in finding.expected for finding in report.findings)


def test_a_mistake_in_a_model_whose_configuration_promises_rotation_is_an_error(monkeypatch):
    model = tiny("llama").build()
    rotary = type(model.model.rotary_emb)
    forward = rotary.forward

    def unread(self, x, position_ids):
        return forward(self, x, torch.zeros_like(position_ids))

    monkeypatch.setattr(rotary, "forward", unread)
    report = check_behaviour(model)
    (finding,) = [finding for finding in report.findings if finding.id == "positions-ignored"]
    assert finding.severity == "error"
    assert finding.expected == "other answers: the model has a rotation"


def test_attention_registered_without_its_mask_is_found():
    """What transformers does when a custom attention has no mask of its own: none is made."""

    def attend(module, q, k, v, attention_mask, scaling=None, **rest):
        k, v = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (k, v))
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask, scale=scaling)
        return out.transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("posenc_test_unmasked", attend)
    model = tiny("llama").build()
    model.set_attn_implementation("posenc_test_unmasked")
    report = check_behaviour(model)
    assert {"future-leak", "right-padding", "left-padding"} <= set(report.ids), str(report)


def test_a_cache_that_forgets_its_length_is_found_in_a_real_model(monkeypatch):
    monkeypatch.setattr(transformers.DynamicCache, "get_seq_length", lambda self, layer_idx=0: 0)
    report = check_behaviour(tiny("llama").build())
    assert {"decode-offset", "chunked-prefill"} <= set(report.ids), str(report)
    (finding,) = [finding for finding in report.findings if finding.id == "decode-offset"]
    assert finding.severity == "warning"
    assert finding.measured.endswith("with positions given they do not; token 9 stands at 0")


@pytest.mark.parametrize("name", ["past_key_values", "kv_cache"])
def test_caches_by_their_other_names(name):
    scope = {"Rotary": Rotary}
    exec(f"def forward(self, ids, {name}=None):\n    return Rotary.forward(self, ids, cache={name})", scope)
    model = type("Named", (Rotary,), {"forward": scope["forward"]})()
    report = check_behaviour(model)
    assert report.findings == ()
    assert "decoding with a cache equals one full pass" in report.described


def test_a_language_model_of_permutations_may_see_what_follows() -> None:
    keys = {"vocab_size": 64, "d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16}
    model = transformers.XLNetLMHeadModel(transformers.XLNetConfig(**keys)).eval()
    assert check_behaviour(model).at_least("warning") == ()
