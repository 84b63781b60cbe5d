"""Layers of plans against transformers' own models, run without values on the meta device.

`observe` builds a model of eight layers, calls it, and writes down what each attention layer does: whether it turns
its queries, which channels make a plane, which table it takes, what its mask lets a query see, its softmax scale. None
of that is listed here, so a new release of transformers is read anew.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", minversion="5.24.0")

from posenc.errors import ConfigError  # noqa: E402
from posenc.hf import LogTemperature, plan  # noqa: E402
from posenc.hf.defaults import model_defaults  # noqa: E402
from posenc.hf.families import FAMILIES  # noqa: E402

LAYERS = 8
SEQ = 6


@dataclass
class Seen:
    """One attention layer, as it ran."""

    turns: bool = False
    planes: frozenset[frozenset[int]] | None = None
    backwards: bool = False
    width: int = 0
    table: int = 0
    window: int | None = None
    scale: float | None = None
    notes: list[str] = field(default_factory=list)


def needed(model_type: str) -> dict[str, Any]:
    """What a default configuration lacks before a model can be built from it."""
    return {
        **{key: {"head_dim": 128} for key in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
        "glm4v_moe_text": {"head_dim": 128, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        **{
            key: {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
            for key in ("glm4v_text", "glm_image_text")
        },
        "glm4_moe": {"head_dim": 128},
        "nemotron": {"num_key_value_heads": 8},
        "deepseek_v2": {"num_experts_per_tok": 2, "topk_method": "greedy"},
        "gemma3n_text": {"num_kv_shared_layers": 2},
        "qwen3_omni_moe_text": {"head_dim": 128},
        "lfm2_moe": {"layer_types": ["full_attention", "conv"] * 4},
        "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 4},
        "bamba": {"attn_layer_indices": [1, 4]},
        "jamba": {"attn_layer_period": 4, "attn_layer_offset": 1},
        "deepseek_ocr2_text": {"mlp_layer_types": ["dense"] * LAYERS},
        "falcon": {"new_decoder_architecture": True},
    }.get(model_type, {})


def config_of(model_type: str, **changes: Any) -> Any:
    """A fresh configuration of eight layers."""
    return transformers.CONFIG_MAPPING[model_type](num_hidden_layers=LAYERS, **{**copy.deepcopy(needed(model_type)), **changes})


def model_class(config: Any) -> type[nn.Module]:
    """The barest model of a configuration class."""
    module = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, transformers.PreTrainedModel)
        and value.__module__ == module.__name__
        and getattr(value, "config_class", None) is type(config)
        and not value.__name__.endswith("PreTrainedModel")
    ]
    return min(found, key=lambda cls: ("For" in cls.__name__, not cls.__name__.endswith("Model"), len(cls.__name__)))


def build(config: Any) -> nn.Module:
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)  # grouped matrix products of experts take nothing else
        with torch.device("meta"):
            return model_class(config)(config).eval()
    finally:
        torch.set_default_dtype(before)


def observe(config: Any) -> dict[int, Seen]:
    """What every attention layer of a model does, by its number."""
    model = build(config)
    seen: dict[int, Seen] = defaultdict(Seen)
    within: list[int] = []

    def leave(module: nn.Module, args: Any, out: Any) -> None:
        within.pop()

    order = 0
    for module in model.modules():
        if re.search(r"Attention|Attn|Mixer|RecurrentBlock|MLA$", type(module).__name__):
            index = getattr(module, "layer_idx", None)
            if not isinstance(index, int):
                index, order = order, order + 1
            module.register_forward_pre_hook(lambda module, args, index=index: within.append(index))
            module.register_forward_hook(leave)
        if re.search(r"Experts$|LongcatFlashMoE$", type(module).__name__):  # experts choose by value, and there are none
            module.forward = lambda hidden, *rest, **more: hidden
    sources = [sys.modules[name] for name in {type(module).__module__ for module in model.modules()}]
    with watched([source for source in sources if source.__name__.startswith("transformers.models")], seen, within):
        parameters = inspect.signature(model.forward).parameters
        inputs = {"input_ids": torch.zeros(1, SEQ, dtype=torch.int64, device="meta")}
        if "use_cache" in parameters:
            inputs["use_cache"] = False
        with torch.no_grad():
            model(**inputs)
    return dict(seen)


@contextmanager
def watched(sources: list[ModuleType], seen: dict[int, Seen], within: list[int]) -> Iterator[None]:
    """The functions of modeling modules replaced by ones that write down how they are called."""
    masks: dict[int, int | None] = {}
    kept: list[Tensor] = []

    def turning(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            if within:
                layer = seen[within[-1]]
                if not layer.turns:
                    layer.turns = True
                    layer.planes, layer.backwards, layer.width, layer.table = planes(function, args, kwargs)
            return function(*args, **kwargs)

        return called

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        scaling: Any = None,
        **more: Any,
    ) -> Any:
        if within:
            layer = seen[within[-1]]
            layer.window = masks.get(id(attention_mask), more.get("sliding_window"))
            layer.scale = scaling * math.sqrt(query.shape[-1]) if isinstance(scaling, float) else None
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    def masking(name: str) -> Callable[..., Any]:
        def made(config: Any = None, *args: Any, **kwargs: Any) -> Tensor | None:
            if "recurrent" in name:
                return None
            mask = torch.empty(1, 1, SEQ, SEQ, device="meta")
            width = getattr(config, "sliding_window", None) if "sliding" in name else None
            both = "bidirectional" in name
            masks[id(mask)] = (
                (2 * width + 1 if both else 2 * width - 1 if kwargs.get("or_mask_function") else width) if width else None
            )
            kept.append(mask)  # an id is only good while its object lives
            return mask

        return made

    with pytest.MonkeyPatch.context() as patched:
        for source in sources:
            for name, value in list(vars(source).items()):
                if not inspect.isfunction(value):
                    continue
                if re.search(r"apply_\w*(rotary|rope)", name):
                    patched.setattr(source, name, turning(value))
                elif name == "eager_attention_forward":
                    patched.setattr(source, name, attend)
                elif re.match(r"create_\w*mask", name):
                    patched.setattr(source, name, masking(name))
        yield


def planes(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[frozenset[frozenset[int]] | None, bool, int, int]:
    """Which channels a function turns together, from what it does to 1, 2, 3 … at a quarter turn and at none."""
    call = inspect.signature(function).bind(*args, **kwargs)
    table = 0

    def at(angle: float) -> Tensor:
        nonlocal table
        cos, sin = math.cos(angle), math.sin(angle)
        given = {}
        for name, value in call.arguments.items():
            if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
                if "cos" in name or "sin" in name or value.is_complex() or "freq" in name:
                    table = table or id(value)
                    number = complex(cos, sin) if value.is_complex() else cos if "cos" in name else sin
                    value = torch.full(value.shape, number, dtype=torch.complex64 if value.is_complex() else torch.float32)
                else:
                    value = torch.arange(1.0, value.shape[-1] + 1).expand(value.shape).clone()
            elif isinstance(value, Tensor):
                value = torch.zeros(value.shape, dtype=value.dtype)
            given[name] = value
        call_again = inspect.BoundArguments(call.signature, given)
        out = function(*call_again.args, **call_again.kwargs)
        return (out[0] if isinstance(out, tuple) else out).flatten(0, -2)[0]

    still, turned = at(0.0), at(math.pi / 2)
    width = still.shape[0]
    here = still.round().long() - 1
    there = turned.abs().round().long() - 1
    pairs = frozenset(frozenset((a, b)) for a, b in zip(here.tolist(), there.tolist(), strict=True) if a != b)
    first = [i for i in range(width) if here[i] != there[i]]
    backwards = bool(first) and bool(here[first[0]] == 0 and turned[first[0]] > 0)
    return pairs, backwards, width, table


def expected_planes(pairing: str, first: int, rotary_dim: int, blocks: int = 1) -> frozenset[frozenset[int]]:
    size, found = rotary_dim // blocks, []
    for block in range(blocks):
        at = first + block * size
        if pairing == "half":
            found += [{at + i, at + i + size // 2} for i in range(size // 2)]
        else:
            found += [{at + 2 * i, at + 2 * i + 1} for i in range(size // 2)]
    return frozenset(map(frozenset, found))


def differences(config: Any, source: object | None = None) -> list[str]:
    """Where the plan and the model disagree."""
    found = plan(config if source is None else source)
    layers = found.layers
    seen = observe(config)
    assert seen, "no attention layer was seen"
    wrong, tables = [], {}
    for index, theirs in sorted(seen.items()):
        if index >= len(layers):
            wrong.append(f"layer {index}: the plan has {len(layers)} layers")
            continue
        ours = layers[index]
        rotation = ours.rotation
        if theirs.turns != (rotation is not None):
            wrong.append(f"layer {index} ({ours.kind}): turns {theirs.turns}, the plan says {rotation is not None}")
        elif rotation is not None:
            inside = theirs.width >= rotation.head_dim and theirs.width != rotation.rotary_dim
            first = rotation.start if inside else 0
            if theirs.planes != expected_planes(rotation.pairing, first, rotation.rotary_dim):
                wrong.append(
                    f"layer {index}: planes {sorted(map(sorted, theirs.planes or ()))[:2]}, the plan says {rotation.pairing}"
                )
            if tables.setdefault(theirs.table, rotation) != rotation:
                wrong.append(f"layer {index}: the same table as a layer with another rotation in the plan")
        if theirs.window != ours.window:
            wrong.append(f"layer {index} ({ours.kind}): window {theirs.window}, the plan says {ours.window}")
    return wrong


S, F = "sliding_attention", "full_attention"
SOME = [1e4, 0, 5e5, 0, 1e4, 1e4, 0, 7e3]
VARIED: list[tuple[str, dict[str, Any]]] = [
    # which layers turn
    ("smollm3", {"no_rope_layers": [0, 1, 1, 1, 1, 1, 1, 0]}),
    ("smollm3", {"no_rope_layer_interval": 3}),
    ("llama4_text", {"no_rope_layers": [0, 1, 1, 1, 1, 1, 1, 0]}),
    ("mistral_large4_text", {}),
    ("exaone4", {}),
    ("kolibri1", {"sliding_window": None, "layer_types": [F] * LAYERS}),
    ("cohere2", {"sliding_window_pattern": 3}),
    ("cohere2", {"sliding_window": None}),
    ("cohere2_moe", {"first_k_dense_replace": 2}),
    ("cohere2_moe", {"first_k_dense_replace": 2, "prefix_dense_sliding_window_pattern": 2}),
    ("granite_swa", {"layer_rope_theta": SOME}),
    ("granitemoehybrid", {"position_embedding_type": "rope"}),
    ("granitemoehybrid", {}),
    ("muse_spark_text", {}),
    ("lara_mini", {}),
    ("afmoe", {}),
    ("flint", {}),
    ("beam", {}),
    ("kimi_linear", {}),
    ("nemotron_h", {"layer_types": ["linear_attention", "full_attention"] * 4}),
    ("recurrent_gemma", {}),
    ("qwen3_next", {"full_attention_interval": 3}),
    ("minimax", {}),
    # windows
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 3, "sliding_window": 16}),
    ("qwen2", {"sliding_window": 16}),
    ("mistral", {"sliding_window": None}),
    ("gemma3_text", {"sliding_window_pattern": 3}),
    ("gemma3_text", {"use_bidirectional_attention": True}),
    ("modernbert", {"global_attn_every_n_layers": 2}),
    ("modernbert-decoder", {}),
    ("ultrabert", {}),
    ("openai_privacy_filter", {}),
    ("zaya", {"layer_types": ["hybrid", "hybrid_sliding"] * 4, "sliding_window": 16}),
    ("dory", {}),
    # tables, channels and pairings
    ("laguna", {"layer_types": [S, F] * 4}),
    ("gemma4_text", {}),
    ("mimo_v2_flash", {}),
    ("deepseek_v3", {}),
    ("deepseek_v3", {"rope_interleave": False}),
    ("deepseek_v4", {}),
    ("glm4", {}),
    ("phi", {}),
    ("nanochat", {}),
]
NO_BARE = {"zaya", "deepseek_v4"}
COMPRESSED = "deepseek_v4"
"""Its compressed layers see the last tokens as they are, and older ones compressed: they have no window in the plan."""


@pytest.mark.parametrize(("model_type", "changes"), VARIED, ids=lambda value: str(value)[:60])
def test_layers_do_what_the_plan_says(model_type: str, changes: dict[str, Any]) -> None:
    config = config_of(model_type, **copy.deepcopy(changes))
    wrong = differences(config)
    if model_type == COMPRESSED:
        wrong = [line for line in wrong if "window 128, the plan says None" not in line]
    assert not wrong
    if not needed(model_type) and model_type not in NO_BARE:  # the same from a file without what the class works out
        assert plan({"model_type": model_type, "num_hidden_layers": LAYERS, **changes}).runs == plan(config).runs


UNSEEN = {
    "chameleon": "its default configuration does not build",
    "dbrx": "its default configuration does not build",
    "diffusion_gemma_text": "its default configuration does not build",
    "dots1": "its default configuration does not build",
    "qwen3_omni_moe_talker_text": "its default configuration does not build",
    "qwen4_exp_text": "its default configuration does not build",
    "moonshine_streaming": "its default configuration does not build",
    "hunyuan_vl_text": "its default configuration does not build",
    "t5gemma2_text": "its default configuration does not build",
    "t5gemma2_decoder": "its default configuration does not build",
    "t5_gemma_module": "it is two towers with one configuration",
    "cohere_compass_text": "its default configuration does not run",
    "csm": "its default configuration does not run",
    "kyutai_speech_to_text": "its default configuration does not run",
    "zamba2": "its layers are listed",
    "dots3_note_vision_encoder": "its layers are listed",
    "longcat_flash": "it has two attention layers in each layer",
    "musicflamingo": "its own rotary keys are of the audio",
    "moshi": "its window bounds the cache and is in no mask",
    "unlimited_ocr_text": "its windows keep a prefix in sight",
    COMPRESSED: "see above",
}
"""Model types whose layers cannot be compared this way, and why."""
NOT_RUN = re.compile(
    r"missing \d+ required positional|meta tensor|data-independent|has no attribute 'shape'|has no attribute 'unsqueeze'|input_features|"
    r"pixel_values|input_ids|must be Tensor, not NoneType|too many values|not enough values|requires the \w+ library|No module named|"
    r"was not found in your environment|no attention layer was seen"
)
"""What a model says that wants pictures, sound or values."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_all_layers_do_what_the_plan_says() -> None:
    wrong, compared = {}, 0
    for model_type, entry in model_defaults().items():
        if "rope_parameters" not in entry or model_type in UNSEEN:
            continue
        try:
            found = differences(config_of(model_type))
        except Exception as error:
            if not NOT_RUN.search(str(error)):
                wrong[model_type] = [f"{type(error).__name__}: {error}"]
            continue
        compared += 1
        if found:
            wrong[model_type] = found
    assert not wrong
    assert compared >= 130


# the softmax scale


def scales(config: Any) -> set[float]:
    """The scale that each attention layer of a model holds."""
    found = {
        getattr(module, "scaling", None)
        for module in build(config).modules()
        if re.search("Attention|MLA", type(module).__name__)
    }
    return {scale for scale in found if isinstance(scale, float)}


@pytest.mark.parametrize(
    "model_type", [name for name, family in FAMILIES.items() if family.where == "separate"] + ["llama", "glm", "gpt_oss"]
)
def test_scaling_that_enters_the_softmax(model_type: str) -> None:
    """YaRN's ``mscale_all_dim`` counts in the softmax scale of DeepSeek and its kin, and nowhere else."""
    plain = config_of(model_type)
    if importlib.util.find_spec(type(plain).__module__.replace("configuration_", "modeling_")) is None:
        pytest.skip("a configuration without a model")
    nested = any(isinstance(block, dict) for block in (plain.rope_parameters or {}).values())
    if nested or plain.rope_parameters is None:
        pytest.skip("blocks of its own for each kind of layer, or none")
    base = {"rope_type": "default", "rope_theta": 1e4}
    yarn = {
        **base,
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    }
    kept = {key: value for key, value in plain.rope_parameters.items() if key in ("mrope_section", "partial_rotary_factor")}
    before, after = (config_of(model_type, rope_parameters={**block, **kept}) for block in (base, yarn))
    (one,), (other,) = scales(before), scales(after)
    ours = {layer.score_factor for layer, _ in plan(after).runs}
    assert {layer.score_factor for layer, _ in plan(before).runs} == {1.0}
    assert max(ours) == pytest.approx(other / one, rel=1e-12)


# temperatures


@pytest.mark.parametrize("model_type", ["ministral3", "mistral4"])
def test_temperature_of_mistral(model_type: str) -> None:
    module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    config = config_of(model_type)
    block = config.rope_parameters
    floor = block["original_max_position_embeddings"]
    positions = torch.tensor([0, 1, floor - 2, floor - 1, floor, floor + 1, 2 * floor - 1, 2 * floor, 10 * floor + 3])
    theirs = module.get_llama_4_attn_scale(positions[None], block["llama_4_scaling_beta"], floor)
    temperatures = {layer.temperature for layer, _ in plan(config).runs}
    (ours,) = temperatures
    assert isinstance(ours, LogTemperature)
    assert torch.allclose(theirs.flatten().double(), ours(positions), rtol=1e-6, atol=0)  # theirs is float32


@pytest.mark.filterwarnings("ignore")
def test_temperature_of_llama_4() -> None:
    """Queries of layers that do not turn, tuned and not: their ratio is the temperature."""
    module = importlib.import_module("transformers.models.llama4.modeling_llama4")
    at = torch.arange(17)[None]  # it counts for itself, past tokens included
    queries: dict[bool, Tensor] = {}

    def attend(layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **more: Any) -> tuple[Tensor, None]:
        queries[layer.attn_temperature_tuning] = query
        return query.transpose(1, 2), None

    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 4}
    for tuned in (True, False):
        config = transformers.CONFIG_MAPPING["llama4_text"](
            **sizes, floor_scale=7, attn_scale=0.3, attn_temperature_tuning=tuned
        )
        config._attn_implementation = "eager"
        torch.manual_seed(0)
        layer = module.Llama4TextAttention(config, layer_idx=3)
        hidden = torch.ones(1, at.shape[1], 32)
        table = torch.ones(1, at.shape[1], 8, dtype=torch.complex64)
        with pytest.MonkeyPatch.context() as patched, torch.no_grad():
            patched.setattr(module, "eager_attention_forward", attend)
            layer(hidden, position_embeddings=table, attention_mask=None, position_ids=at)
        found = plan(config)
        assert (found.layers[3].temperature is not None) == tuned
        assert found.layers[0].temperature is None
        if tuned:
            ours = found.layers[3].temperature
    assert ours is not None
    ratio = (queries[True] / queries[False])[0, 0, :, 0].double()
    assert torch.allclose(ratio, ours(at[0]), rtol=1e-6, atol=0)


def test_roformer_turns_by_a_base_of_its_own() -> None:
    """No key holds it: its table is the sinusoid of the paper, sines before cosines."""
    config = transformers.CONFIG_MAPPING["roformer"](
        hidden_size=64, num_attention_heads=4, num_hidden_layers=1, max_position_embeddings=32
    )
    module = importlib.import_module("transformers.models.roformer.modeling_roformer")
    embedding = module.RoFormerSinusoidalPositionalEmbedding(32, 16)
    embedding.weight = nn.Parameter(
        embedding.create_weight() if hasattr(embedding, "create_weight") else embedding.weight, False
    )
    sin, cos = embedding(torch.Size((1, 9))).chunk(2, dim=-1)
    ours = plan(config).rotary_table(torch.arange(9))
    assert torch.allclose(ours.cos, cos.reshape(9, 8), atol=1e-6)
    assert torch.allclose(ours.sin, sin.reshape(9, 8), atol=1e-6)


def test_unknown_architectures_say_that_nothing_is_known() -> None:
    found = plan({"model_type": "canine", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2})
    assert found.layers[0].rotation is None
    assert found.input is None
    assert any(note.startswith("nothing here says how positions enter canine") for note in found.notes)
    with pytest.raises(ConfigError, match="does not rotate"):
        found.rotary_table(torch.arange(3))


def test_the_one_that_turns_the_other_way() -> None:
    for model_type, backwards in (("nanochat", True), ("llama", False), ("glm", False)):
        config = config_of(model_type)
        assert {layer.backwards for layer in observe(config).values()} == {backwards}
        assert any("turns the other way" in note for note in plan(config).notes) == backwards
