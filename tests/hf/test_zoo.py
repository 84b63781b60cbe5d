"""The zoo: every rotary table of the pinned transformers release is posenc's, bit for bit with float32 angles.

The fast tests compare all default configurations and a fixed sample of the crossed ones, and hold the committed counts
to themselves; ``pytest -m slow`` runs all of it again.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.hf import crossed
from tests.hf.crossed import PARAMETERS, RESULTS, ROPE_TYPES, STATUSES, compare, compare_default, crossed_cases, verdict
from tests.hf.zoo import Case, Table, cases, unloadable
from torch import nn

from posenc.core.rotary import RotaryTable
from posenc.errors import ConfigError
from posenc.hf import plan
from posenc.schedules.dynamic_ntk import DynamicNTK
from posenc.schedules.geometric import Geometric
from posenc.schedules.longrope import LongRoPE
from posenc.schedules.ntk import NTK
from posenc.schedules.yarn import YaRN

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers' own modules say while they are imported

PAGE = RESULTS.parents[1] / "hf-zoo.md"
COMMITTED: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
BASE = 10_000.0


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


@pytest.fixture
def same_release() -> None:
    committed = COMMITTED["environment"]["transformers"]
    if transformers.__version__ != committed:
        pytest.skip(f"the zoo was recorded with transformers {committed}, and {transformers.__version__} is installed")


def case_of(name: str) -> Case:
    """The zoo's case of this id."""
    return next(case for case in cases() if case.id == name)


# the committed numbers


@pytest.mark.usefixtures("same_release")
def test_no_class_came_or_went() -> None:
    assert unloadable() == {}
    assert sorted(case.id for case in cases()) == COMMITTED["classes"]
    assert [case.id for case in crossed_cases()] == COMMITTED["crossed"]["classes"]
    assert [parameters.id for parameters in PARAMETERS] == COMMITTED["crossed"]["parameters"]


def test_committed_counts_are_whole_and_without_a_mismatch() -> None:
    default, by_type = COMMITTED["default"], COMMITTED["crossed"]["counts"]
    assert tuple(by_type) == ROPE_TYPES
    assert sum(default["counts"].values()) == len(COMMITTED["classes"])
    assert len(default["reasons"]) == sum(default["counts"].values()) - default["counts"]["matched"]
    for rope_type, counts in by_type.items():
        sets = [parameters for parameters in PARAMETERS if parameters.rope_type == rope_type]
        assert len(sets) >= 3
        assert sum(counts.values()) == len(sets) * len(COMMITTED["crossed"]["classes"])
        assert counts["matched"] > sum(counts.values()) / 2
    for counts in (default["counts"], *by_type.values()):
        assert tuple(counts) == STATUSES
        assert counts["mismatched"] == 0
    for status in STATUSES[1:]:  # every count that is not a match has its reasons
        listed = sum(entry["count"] for entry in COMMITTED["crossed"]["reasons"] if entry["status"] == status)
        assert listed == sum(counts[status] for counts in by_type.values())
    assert all(entry["reason"] for entry in COMMITTED["crossed"]["reasons"])


def test_the_page_quotes_the_committed_counts() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert COMMITTED["command"] in page
    assert COMMITTED["environment"]["transformers"] in page
    rows = {"default configurations": COMMITTED["default"]["counts"]}
    rows |= {f"`{rope_type}`": counts for rope_type, counts in COMMITTED["crossed"]["counts"].items()}
    for name, counts in rows.items():
        assert f"| {name} | " + " | ".join(f"{counts[status]:,}" for status in STATUSES[:-1]) + " |" in page


# the tables


@pytest.mark.usefixtures("same_release")
def test_every_default_table_is_equal() -> None:
    outcomes = {case.id: compare_default(case) for case in cases()}
    others = {name: f"{o.status}: {o.reason}" for name, o in outcomes.items() if o.status != "matched"}
    assert others == COMMITTED["default"]["reasons"]


@pytest.mark.usefixtures("same_release")
def test_a_hundred_crossed_tables_are_equal() -> None:
    everything = [(case, parameters) for case in crossed_cases() for parameters in PARAMETERS]
    outcomes = {
        (case.id, parameters.id): compare(case, parameters) for case, parameters in random.Random(0).sample(everything, 100)
    }
    reasons = {(entry["status"], entry["reason"]) for entry in COMMITTED["crossed"]["reasons"]}
    others = {key: outcome for key, outcome in outcomes.items() if outcome.status != "matched"}
    assert {key: outcome for key, outcome in others.items() if (outcome.status, outcome.reason) not in reasons} == {}
    assert len(others) < 20


@pytest.mark.slow
@pytest.mark.usefixtures("same_release")
def test_all_crossed_tables_are_equal() -> None:
    again = crossed.run(lambda items, title: items)
    assert again["default"] == COMMITTED["default"]
    assert again["crossed"] == COMMITTED["crossed"]


def test_a_table_one_unit_off_is_not_equal() -> None:
    polar, plain = case_of("Llama4TextRotaryEmbedding-Llama4TextConfig"), case_of("LlamaRotaryEmbedding-LlamaConfig")
    right = Table(torch.tensor([[[0.5, 0.7]]]), torch.tensor([[[-0.3, 0.0]]]))
    one = Table(torch.nextafter(right.cos, torch.ones(1)), right.sin)
    three = Table(torch.nextafter(torch.nextafter(one.cos, torch.ones(1)), torch.ones(1)), right.sin)
    assert verdict(plain, right, right).status == "matched"
    assert verdict(plain, right, one).status == "mismatched"
    assert verdict(polar, right, one).status == "one ulp"
    assert verdict(polar, right, three).status == "mismatched"
    assert verdict(plain, right, Table(right.cos[..., :1], right.sin[..., :1])).reason == "2 pairs there, 1 here"


# what transformers does otherwise: each finding of the page, shown


def llama(**changes: Any) -> Any:
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2, "max_position_embeddings": 128}
    return transformers.LlamaConfig(**{**sizes, **changes})


def rotary(config: Any) -> nn.Module:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    return LlamaRotaryEmbedding(config)


def ours(config: Any, length: int, layer: int = 0) -> RotaryTable:
    return plan(config).rotary_table(torch.arange(length)[None], layer=layer, length=length, angle_dtype=torch.float32)


def test_dynamic_tables_there_depend_on_the_calls_before() -> None:
    """long, then medium, then short: the medium call keeps the base of the long one; a short one resets it."""
    block = {"rope_type": "dynamic", "rope_theta": BASE, "factor": 4.0}
    used, x = rotary(llama(rope_parameters=dict(block))), torch.zeros(1)

    def call(module: nn.Module, length: int) -> torch.Tensor:
        return module(x, torch.arange(length)[None])[0][..., :32]

    def fresh(length: int) -> torch.Tensor:
        return call(rotary(llama(rope_parameters=dict(block))), length)

    assert torch.equal(call(used, 512), fresh(512))
    assert not torch.equal(call(used, 256), fresh(256))
    assert torch.equal(call(used, 64), fresh(64))
    assert torch.equal(call(used, 256), fresh(256))
    for length in (512, 256, 64):
        assert torch.equal(ours(llama(rope_parameters=dict(block)), length).cos, fresh(length))


def test_truncate_is_not_honoured_in_nested_blocks() -> None:
    """The function looks for it beside the labels, so a nested block is always rounded; a flat one is not."""
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 4096}

    def nested(truncate: bool) -> torch.Tensor:
        both = {label: {**yarn, "truncate": truncate} for label in ("full_attention", "sliding_attention")}
        return Gemma3RotaryEmbedding(transformers.Gemma3TextConfig(rope_parameters=both)).full_attention_inv_freq

    def flat(truncate: bool) -> torch.Tensor:
        return rotary(llama(rope_parameters={**yarn, "truncate": truncate})).inv_freq

    assert torch.equal(nested(False), nested(True))
    assert not torch.equal(flat(False), flat(True))
    both = {label: {**yarn, "truncate": False} for label in ("full_attention", "sliding_attention")}
    planned = plan(transformers.Gemma3TextConfig(rope_parameters=both))
    assert any("truncate = false is not honoured" in note for note in planned.notes)


def test_minimax_m3_does_not_read_its_rotary_dim() -> None:
    from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLRotaryEmbedding

    config = MiniMaxM3VLTextConfig(rotary_dim=64)
    assert 2 * MiniMaxM3VLRotaryEmbedding(config).inv_freq.numel() == config.head_dim == 128
    rotation = plan(config).layers[0].rotation
    assert rotation is not None
    assert rotation.rotary_dim == 128
    assert "rotary_dim = 64 is read by nothing here" in plan(config).notes


def test_phimoe_never_takes_its_long_factors() -> None:
    from transformers.models.phimoe.modeling_phimoe import PhimoeRotaryEmbedding

    config = transformers.PhimoeConfig(
        head_dim=8, max_position_embeddings=256,
        rope_parameters={"rope_type": "longrope", "rope_theta": BASE, "original_max_position_embeddings": 64,
                         "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "short_mscale": 1.0, "long_mscale": 1.5},
    )  # fmt: skip
    at = torch.arange(128)[None]
    theirs = PhimoeRotaryEmbedding(config)(torch.zeros(1), at)[0][..., :4]
    plain = plan(llama(head_dim=8)).rotary_table(at, angle_dtype=torch.float32).cos
    assert torch.equal(theirs, plain * 1.5)
    planned = plan(config)
    assert torch.equal(ours(config, 128).cos[:, 4], plain[:, 1] * 1.5)  # four times slower
    assert any("its long factors count here" in note for note in planned.notes)


def test_mimo_gives_its_share_to_plain_blocks_only() -> None:
    from transformers.models.mimo_v2_flash.modeling_mimo_v2_flash import MiMoV2FlashRotaryEmbedding

    def config(**block: Any) -> Any:
        both = {label: {"rope_theta": BASE, **block} for label in ("full_attention", "sliding_attention")}
        return transformers.MiMoV2FlashConfig(rope_parameters=both)

    plain, scaled = config(rope_type="default"), config(rope_type="linear", factor=2.0)
    widths = [2 * MiMoV2FlashRotaryEmbedding(c).full_attention_inv_freq.numel() for c in (plain, scaled)]
    assert widths == [64, 192]
    assert [plan(c).layers[0].rotation.rotary_dim for c in (plain, scaled)] == [64, 64]  # type: ignore[union-attr]


def test_a_share_of_an_mla_head_breaks_its_attention() -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding, apply_rotary_pos_emb

    config = transformers.DeepseekV3Config(
        rope_parameters={"rope_type": "linear", "rope_theta": BASE, "factor": 2.0, "partial_rotary_factor": 0.5}
    )
    cos, sin = DeepseekV3RotaryEmbedding(config)(torch.zeros(1), torch.arange(3)[None])
    assert cos.shape[-1] == config.qk_rope_head_dim // 2
    q = torch.zeros(1, 1, 3, config.qk_rope_head_dim)
    with pytest.raises(RuntimeError, match="must match the size"):
        apply_rotary_pos_emb(q, q, cos, sin)
    rotation = plan(config).layers[0].rotation
    assert rotation is not None
    assert rotation.rotary_dim == config.qk_rope_head_dim


def test_a_deepseek_v4_block_without_a_share_turns_the_whole_head() -> None:
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

    plain = {"rope_type": "default", "rope_theta": BASE}
    config = transformers.DeepseekV4Config(rope_parameters={"main": dict(plain), "compress": dict(plain)})
    assert config.partial_rotary_factor == 1 / 8
    assert 2 * DeepseekV4RotaryEmbedding(config).compress_inv_freq.numel() == config.head_dim == 512
    rotation = plan(config).layers[0].rotation
    assert rotation is not None
    assert rotation.rotary_dim == 64


@pytest.mark.parametrize("rope_type", ["yarn", "dynamic"])
def test_a_head_dim_of_none_breaks_scaled_rules(rope_type: str) -> None:
    from transformers.models.mixtral.modeling_mixtral import MixtralRotaryEmbedding

    block = {"rope_type": rope_type, "rope_theta": BASE, "factor": 2.0, "original_max_position_embeddings": 4096}
    config = transformers.MixtralConfig(rope_parameters=block)
    with pytest.raises(TypeError, match="NoneType"):
        MixtralRotaryEmbedding(config)
    assert plan(config).rotary_table(torch.arange(3)).cos.shape == (3, 64)


def test_longrope_cannot_be_configured_where_layers_differ_in_width() -> None:
    block = {"rope_type": "longrope", "rope_theta": BASE, "original_max_position_embeddings": 4096,
             "short_factor": [1.0] * 128, "long_factor": [2.0] * 128}  # fmt: skip
    with pytest.raises(Exception, match="'head_dim' is a per-layer attribute"):
        transformers.Gemma4TextConfig(
            rope_parameters={"sliding_attention": block, "full_attention": {"rope_type": "default", "rope_theta": BASE}}
        )


# what the zoo taught the reader


def test_a_share_is_read_where_the_class_reads_it() -> None:
    """A plain Llama block's share counts for nothing, a scaled one's for every class, an unknown type's always."""
    plain = llama(rope_parameters={"rope_type": "default", "rope_theta": BASE, "partial_rotary_factor": 0.5})
    scaled = llama(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": BASE, "partial_rotary_factor": 0.5})
    for config, pairs in ((plain, 32), (scaled, 16)):
        assert rotary(config).inv_freq.numel() == ours(config, 3).cos.shape[-1] == pairs
    note = (
        "rope_parameters.partial_rotary_factor = 0.5 is not read by 'llama' where rope_type is 'default': the whole head turns"
    )
    assert note in plan(plain).notes
    assert note not in plan(scaled).notes
    assert ours({**plain.to_dict(), "model_type": "something_else"}, 3).cos.shape[-1] == 16


def test_keys_that_one_architecture_reads() -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": BASE, "factor": 2.0, "alpha": 1000.0}
    longrope = {"rope_type": "longrope", "rope_theta": BASE, "original_max_position_embeddings": 64,
                "short_factor": [1.0] * 32, "long_factor": [2.0] * 32, "short_mscale": 1.3, "long_mscale": 1.4}  # fmt: skip
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64, "max_position_embeddings": 128}

    def schedule(model_type: str, block: dict[str, Any]) -> Any:
        rotation = (
            plan({"model_type": model_type, **sizes, "num_hidden_layers": 1, "rope_parameters": block}).layers[0].rotation
        )
        assert rotation is not None
        return rotation.schedule

    assert schedule("hunyuan_v1_dense", dynamic) == NTK(Geometric(BASE), 1000.0)
    assert schedule("llama", dynamic) == DynamicNTK(Geometric(BASE), 2.0, 128)
    for model_type, amplitudes in (("phimoe", (1.3, 1.4)), ("llama", (None, None))):
        rule = schedule(model_type, longrope)
        assert isinstance(rule, LongRoPE)
        assert (rule.short_amplitude, rule.long_amplitude) == amplitudes
    ignored = plan({"model_type": "llama", **sizes, "num_hidden_layers": 1, "rope_parameters": dynamic}).notes
    assert "rope_parameters.alpha = 1000.0 is read by nothing here" in ignored


def test_a_default_block_lends_its_share_only_where_its_class_does() -> None:
    gemma = {"model_type": "gemma4_text", "rope_parameters": {
        label: {"rope_type": "default", "rope_theta": BASE} for label in ("full_attention", "sliding_attention")}}  # fmt: skip
    nemotron = {"model_type": "nemotron", "rope_parameters": {"rope_type": "default", "rope_theta": BASE}}
    for data, share in ((gemma, 1.0), (nemotron, 0.5)):
        rotation = next(layer.rotation for layer in plan(data).layers if layer.kind == "full_attention")
        assert rotation is not None
        assert rotation.rotary_dim == share * rotation.head_dim


def test_the_class_s_own_base_beside_a_block_is_no_contradiction() -> None:
    """BailingHybrid and Cohere 2 MoE write their default base beside every block; transformers reads the block's."""
    block = {"rope_type": "default", "rope_theta": 123.0}
    config = transformers.Cohere2MoeConfig(rope_parameters=dict(block))
    assert config.to_dict()["rope_theta"] != 123.0
    rotation = next(layer.rotation for layer in plan(config).layers if layer.rotation)
    assert rotation.schedule == Geometric(123.0)
    with pytest.raises(ConfigError, match="rope_theta = 123.0 but rope_theta = 7.0. Expected the same base in both"):
        plan({**config.to_dict(), "rope_theta": 7.0})


def test_molmo_2_scales_the_layers_that_it_lists() -> None:
    from transformers.models.molmo2.configuration_molmo2 import Molmo2TextConfig
    from transformers.models.molmo2.modeling_molmo2 import Molmo2RotaryEmbedding

    block = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}
    config = Molmo2TextConfig(num_hidden_layers=3, rope_scaling_layers=[1], rope_parameters=block)
    at = torch.arange(100)[None]
    for layer, scaled in enumerate((False, True, False)):
        cos, sin = Molmo2RotaryEmbedding(config, scaled=scaled)(torch.zeros(1), at)
        table = ours(config, 100, layer)
        assert torch.equal(table.cos, cos[..., : table.cos.shape[-1]])
        assert torch.equal(table.sin, sin[..., : table.sin.shape[-1]])


def test_deepseek_v4_in_its_older_keys() -> None:
    """One flat block: it scales the compressing layers, which have a base of their own and no amplitude."""
    scaling = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65_536, "beta_fast": 32, "beta_slow": 1}
    data = {"num_hidden_layers": 4, "compress_ratios": [0, 0, 4, 128], "rope_theta": 10_000, "compress_rope_theta": 150_000}
    config = transformers.DeepseekV4Config(**data, rope_scaling=dict(scaling))
    filed, built = plan({"model_type": "deepseek_v4", **data, "rope_scaling": dict(scaling)}), plan(config)
    assert [(a.kind, a.rotation) for a in filed.layers] == [(b.kind, b.rotation) for b in built.layers]
    assert [layer.entry for layer in filed.layers] == ["main", "main", "compress", "compress"]
    rule = filed.layers[2].rotation.schedule  # type: ignore[union-attr]
    assert rule == YaRN(Geometric(150_000.0), 16.0, 65_536, amplitude=1.0)
