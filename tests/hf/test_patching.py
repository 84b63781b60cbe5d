"""`patch` on tiny transformers models: bit-equal with float32 angles, undone without a trace, true with float64."""

from __future__ import annotations

import copy
import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.hf.tiny_models import LEFT, MODELS, SEVERAL, Tiny, tiny
from torch import Tensor, nn

from posenc.errors import ConfigError
from posenc.hf import patch, unpatch
from posenc.hf import patching as code
from posenc.hf.patching import PatchedRotary, rotary_modules

DECODERS = [model for model in MODELS if model.kind == "decoder"]
NAMES = {"ids": lambda model: model.model_type}
LLAMA = tiny("llama")
F32 = torch.float32


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Any:
    """transformers' remarks on tiny configurations are not of interest."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(level)


def test_there_are_architectures_enough():
    assert len({model.model_type for model in MODELS}) == len(MODELS) >= 110
    assert len(DECODERS) >= 80


@pytest.mark.parametrize("model", MODELS, **NAMES)
def test_float32_angles_change_no_bit_and_undoing_leaves_no_trace(model: Tiny):
    net = model.build()
    keys, own = list(net.state_dict()), dict(rotary_modules(net))
    with _Called(net) as called:
        before = model.answer(net)
    assert called <= set(own)
    done = patch(net, angle_dtype=F32)
    assert set(done.replaced) == set(own)
    assert not done.left
    assert list(net.state_dict()) == keys
    with _Called(net) as called_now:
        assert torch.equal(model.answer(net), before)
    assert called_now == called != set()  # the patched ones, and none of the model's own under them
    with _Disturbed(net):  # the table is used, not only made
        assert not torch.equal(model.answer(net), before)
    unpatch(net)
    assert dict(rotary_modules(net)) == own
    assert torch.equal(model.answer(net), before)


class _Called:
    """Names of the rotary modules that are called."""

    def __init__(self, net: nn.Module) -> None:
        self._names: set[str] = set()
        modules = [*rotary_modules(net), *((name, m) for name, m in net.named_modules() if isinstance(m, PatchedRotary))]
        self._hooks = [m.register_forward_hook(lambda *_, name=name: self._names.add(name)) for name, m in modules]

    def __enter__(self) -> set[str]:
        return self._names

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()


class _Disturbed:
    """A patched model whose tables are those of a token three places on."""

    def __init__(self, net: nn.Module) -> None:
        self._hooks = [m.register_forward_hook(self._roll) for m in net.modules() if isinstance(m, PatchedRotary)]

    @staticmethod
    def _roll(module: nn.Module, args: Any, out: Any) -> Any:
        return out.roll(3, -2) if isinstance(out, Tensor) else tuple(table.roll(3, -2) for table in out)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()


def generated(net: nn.Module, prompt: Tensor, count: int = 6, **rest: Any) -> Tensor:
    return net.generate(  # type: ignore[operator, no-any-return]
        prompt,
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **rest,
    )


def generates_alike(model: Tiny) -> None:
    """Greedy tokens and their logits with a cache, whole and left-padded: equal before and after `patch`."""
    net = model.build()
    prompt = model.inputs(7)["input_ids"]
    mask = torch.ones_like(prompt)
    mask[0, :3] = 0
    calls: list[dict[str, Any]] = [{"attention_mask": torch.ones_like(prompt)}, {"attention_mask": mask}]
    before = [generated(net, prompt, **call) for call in calls]
    with patch(net, angle_dtype=F32), _Called(net) as called:
        after = [generated(net, prompt, **call) for call in calls]
    assert called
    assert not any(name.endswith(".original") for name in called)
    for a, b in zip(before, after, strict=True):
        assert a.sequences.shape == (2, 13)
        assert torch.equal(a.sequences, b.sequences)
        for x, y in zip(a.logits, b.logits, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("model", [tiny(name) for name in SEVERAL], **NAMES)
def test_generation_with_a_cache_is_equal(model: Tiny):
    generates_alike(model)


@pytest.mark.slow
@pytest.mark.parametrize("model", [model for model in DECODERS if model.model_type not in SEVERAL], **NAMES)
def test_generation_with_a_cache_is_equal_everywhere(model: Tiny):
    generates_alike(model)


@pytest.mark.parametrize("model", [tiny(name) for name in ("gemma3_text", "deepseek_v2", "gptj")], **NAMES)
def test_a_left_padded_batch_is_equal(model: Tiny):
    net = model.build()
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[0, :5] = 0
    call = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    before = model.answer(net, **call)
    assert not torch.equal(before, model.answer(net))
    with patch(net, angle_dtype=F32):
        assert torch.equal(model.answer(net, **call), before)


@pytest.mark.parametrize(("model", "reason"), LEFT, ids=lambda value: getattr(value, "model_type", ""))
def test_what_cannot_be_replaced_is_refused_with_the_reason(model: Tiny, reason: str):
    net = model.build()
    modules = list(net.modules())
    with pytest.raises(ConfigError) as caught:
        patch(net)
    message = str(caught.value)
    assert message.startswith(f"patch: nothing in {type(net).__name__} can be replaced (")
    assert reason in message
    assert message.endswith(
        "Expected a transformers model with a module that makes the rotary table. Print posenc.hf.plan(model.config) to see what it "
        "does with positions."
    )
    assert all(a is b for a, b in zip(net.modules(), modules, strict=True))


def test_what_is_left_is_named_beside_what_is_replaced():
    net = nn.ModuleDict({"one": LLAMA.build(), "two": LEFT_WITH_A_MODULE.build()})
    done = patch(net)
    assert done.replaced == ("one.model.rotary_emb",)
    assert done.left == {"two.rotary_emb": "MistralLarge4TextRotaryEmbedding learns its frequencies"}
    assert (
        repr(done)
        == "Patch(one.model.rotary_emb; left two.rotary_emb: MistralLarge4TextRotaryEmbedding learns its frequencies)"
    )


LEFT_WITH_A_MODULE = next(model for model, _ in LEFT if model.model_type == "mistral_large4_text")


def test_the_context_manager_undoes_it_on_an_exception_too():
    net = LLAMA.build()
    own = net.model.rotary_emb

    def fail_inside() -> None:
        with patch(net) as done:
            assert done.replaced == ("model.rotary_emb",)
            assert isinstance(net.model.rotary_emb, PatchedRotary)
            raise RuntimeError("from inside")

    with pytest.raises(RuntimeError, match="from inside"):
        fail_inside()
    assert net.model.rotary_emb is own
    unpatch(net)  # a model that is not patched stays as it is
    assert net.model.rotary_emb is own


def test_a_failure_half_way_leaves_the_model_alone(monkeypatch: pytest.MonkeyPatch):
    net = nn.ModuleList([LLAMA.build(), LLAMA.build()])
    own = dict(rotary_modules(net))
    made = []

    def second_fails(config: Any) -> Any:
        made.append(config)
        if len(made) == 2:
            raise MemoryError
        return code_plan(config)

    code_plan = code.plan
    monkeypatch.setattr(code, "plan", second_fails)
    with pytest.raises(MemoryError):
        patch(net)
    assert len(made) == len(own) == 2
    assert dict(rotary_modules(net)) == own


def test_patching_twice_is_refused():
    net = LLAMA.build()
    patch(net)
    with pytest.raises(
        ValueError, match=r"patch: the model is patched already\. Expected its own .* Call unpatch\(model\) first\."
    ):
        patch(net)
    with pytest.raises(ValueError, match="patched already"):
        patch(net.model)
    unpatch(net)
    patch(net.model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, "float64", None])
def test_other_angle_dtypes_are_refused(dtype: Any):
    with pytest.raises(TypeError, match=r"patch: angle_dtype = .*\. Expected torch\.float64 or torch\.float32\. Use float64\."):
        patch(LLAMA.build(), angle_dtype=dtype)


@pytest.mark.parametrize("thing", [None, "meta-llama", LLAMA.config(), nn.Linear], ids=["None", "name", "config", "class"])
def test_what_is_no_module_is_refused(thing: Any):
    with pytest.raises(TypeError, match=r"patch: a .*\. Expected a model of the transformers library\. Load it first\."):
        patch(thing)


def test_a_module_of_others_is_refused():
    with pytest.raises(
        ConfigError, match=r"patch: nothing in Linear can be replaced \(none of its modules makes a rotary table\)"
    ):
        patch(nn.Linear(2, 2))

    class RotaryEmbedding(nn.Module):
        """Somebody's own."""

    with pytest.raises(ConfigError, match=r"0: RotaryEmbedding keeps no configuration"):
        patch(nn.Sequential(RotaryEmbedding()))


def test_a_module_that_two_share_is_put_back_in_both_places():
    net = LLAMA.build()
    own = net.model.rotary_emb
    net.model.layers[0].self_attn.rotary_emb = own
    assert patch(net).replaced == ("model.rotary_emb", "model.layers.0.self_attn.rotary_emb")
    unpatch(net)
    assert net.model.rotary_emb is own is net.model.layers[0].self_attn.rotary_emb


# files and copies


@pytest.mark.parametrize("model", [tiny(name) for name in ("llama", "gemma3_text", "esm")], **NAMES)
def test_a_patched_model_saves_files_that_transformers_loads_alone(model: Tiny, tmp_path: Any):
    net = model.build()
    before, state = model.answer(net), {key: value.clone() for key, value in net.state_dict().items()}
    patch(net, angle_dtype=F32)
    assert list(net.state_dict()) == list(state)
    net.save_pretrained(tmp_path)
    loaded, report = type(net).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert not any(isinstance(module, PatchedRotary) for module in loaded.modules())
    assert torch.equal(model.answer(loaded.eval()), before)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    assert str(net.load_state_dict(state)) == "<All keys matched successfully>"  # a patched model loads them too
    assert torch.equal(model.answer(net), before)
    with pytest.raises(RuntimeError, match="Missing key"):
        net.load_state_dict({})


def test_copies_of_a_patched_model_are_patched_models():
    net = tiny("gemma3_text").build()
    own = net.model.rotary_emb
    patch(net)
    expected = tiny("gemma3_text").answer(net)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(tiny("gemma3_text").answer(other), expected)
        assert isinstance(other.model.rotary_emb, PatchedRotary)
        unpatch(other)
        assert type(other.model.rotary_emb) is type(own) is not PatchedRotary
        assert other.model.rotary_emb is not own
    assert isinstance(net.model.rotary_emb, PatchedRotary)


def test_a_patched_module_answers_like_the_original():
    net = LLAMA.build()
    own = net.model.rotary_emb
    patch(net)
    assert net.model.rotary_emb.inv_freq is own.inv_freq
    assert net.model.rotary_emb.config is net.config
    assert net.model.rotary_emb.attention_scaling == 1.0
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = net.model.rotary_emb.nothing


# dtypes


def test_half_precision_models_keep_their_frequencies(tmp_path: Any):
    """``.to(bfloat16)`` rounds transformers' frequencies as well; loading in bfloat16 does not. Here nothing does."""
    net = LLAMA.build()
    net.save_pretrained(tmp_path)
    loaded = type(net).from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    assert loaded.model.rotary_emb.inv_freq.dtype == F32
    expected = LLAMA.answer(loaded)
    assert expected.dtype == torch.bfloat16
    with patch(loaded, angle_dtype=F32):
        assert torch.equal(LLAMA.answer(loaded), expected)
    moved_after, moved_before = copy.deepcopy(net), copy.deepcopy(net).to(torch.bfloat16)
    patch(moved_after, angle_dtype=F32)
    patch(moved_before, angle_dtype=F32)
    assert torch.equal(LLAMA.answer(moved_after.to(torch.bfloat16)), expected)
    assert torch.equal(LLAMA.answer(moved_before), expected)
    unpatch(moved_after)
    rounded = LLAMA.answer(net.to(torch.bfloat16))
    assert torch.equal(LLAMA.answer(moved_after), rounded)
    assert not torch.equal(rounded, expected)


@pytest.mark.parametrize("name", ["llama", "gptj", "deepseek_v2"])
def test_autocast_does_not_reach_the_table(name: str):
    model = tiny(name)
    net = model.build()
    with torch.autocast("cpu", torch.bfloat16):
        expected = model.answer(net)
        assert expected.dtype == torch.bfloat16
        with patch(net, angle_dtype=F32):
            assert torch.equal(model.answer(net), expected)
        tables = []
        with patch(net) as done:
            rotary = net.get_submodule(done.replaced[0])
            rotary.register_forward_hook(lambda module, args, out: tables.append(out))
            model.answer(net)
    with patch(net) as done:
        rotary = net.get_submodule(done.replaced[0])
        outside = rotary(torch.zeros(1), torch.arange(12)[None])
    for inside in tables:
        for a, b in zip(*(out if isinstance(out, tuple) else (out,) for out in (inside, outside)), strict=True):
            assert torch.equal(a.expand_as(b), b.to(a.dtype))


# truth


def test_float64_angles_are_within_an_ulp_of_the_truth_far_out():
    """transformers' float32 angle at 131,071 is off by up to half a unit in its last place, 2⁻⁸, and by its frequency's error."""
    net = LLAMA.build()
    at = torch.tensor([[0, 1, 4095, 131_071]])
    theirs = net.model.rotary_emb(torch.zeros(1), at)
    patch(net)
    ours = net.model.rotary_emb(torch.zeros(1), at)
    worst = [0.0, 0.0]
    for j, position in enumerate(at[0].tolist()):
        for i in range(8):
            angle = position * 10_000.0 ** (-(i % 4) / 4)
            for function, *tables in zip((math.cos, math.sin), ours, theirs, strict=True):
                for k, table in enumerate(tables):
                    worst[k] = max(worst[k], abs(float(table[0, j, i]) - function(angle)))
    assert worst[0] <= 2.0**-24  # half an ulp of 1: rounded once
    assert worst[1] > 1e-4


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "deepseek_v2", "qwen2_vl_text", "phi3"])
def test_a_model_without_memory_for_its_buffers_gets_the_right_tables(name: str):
    """``to_empty`` leaves what stood there: the frequencies of a model from the meta device are anything."""
    model = tiny(name)
    net = model.build()
    expected = model.answer(net)
    config = model.config()
    with torch.device("meta"):
        bare = type(net)(config)
    bare = bare.to_empty(device="cpu").eval()
    bare.load_state_dict(net.state_dict())
    for module in bare.modules():
        for buffer_name, buffer in module.named_buffers(recurse=False):
            if "inv_freq" in buffer_name:
                buffer.fill_(torch.nan)
            elif buffer_name == "embed_scale":
                buffer.copy_(net.get_submodule(_name_of(bare, module)).get_buffer(buffer_name))
    assert model.answer(bare).isnan().all()
    patch(bare, angle_dtype=F32)
    assert torch.equal(model.answer(bare), expected)


def _name_of(net: nn.Module, module: nn.Module) -> str:
    return next(name for name, candidate in net.named_modules() if candidate is module)


def test_a_model_on_the_meta_device_can_be_patched_first():
    with torch.device("meta"):
        bare = type(LLAMA.build())(LLAMA.config())
        patch(bare, angle_dtype=F32)
    net = LLAMA.build()
    bare = bare.to_empty(device="cpu").eval()
    bare.load_state_dict(net.state_dict())
    assert torch.equal(LLAMA.answer(bare), LLAMA.answer(net))


# rules that depend on the length

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 1.5, 3.0, 6.0],
    "original_max_position_embeddings": 16, "factor": 2.0,
}  # fmt: skip
RULES = {
    "dynamic": ("llama", {"max_position_embeddings": 16, "rope_parameters": DYNAMIC}),
    "longrope": ("llama", {"max_position_embeddings": 32, "rope_parameters": LONGROPE}),
    "phi3": ("phi3", {}),
    "gemma3, full layers": ("gemma3_text", {"max_position_embeddings": 16, "rope_parameters": {
        "full_attention": DYNAMIC, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}),
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_rules_of_the_length_switch_where_the_model_does(rule: str):
    name, changes = RULES[rule]
    model = tiny(name)
    answers = {}
    for length in (15, 16, 17, 30):
        net = model.build(model.config(**changes))  # a fresh one: transformers remembers the longest call
        call = model.inputs(length)
        answers[length] = model.answer(net, **call)
        with patch(net, angle_dtype=F32):
            assert torch.equal(model.answer(net, **call), answers[length])
        late = {**call, "position_ids": torch.arange(30 - length, 30)[None].expand(2, -1)}
        net = model.build(model.config(**changes))
        expected = model.answer(net, **late)
        with patch(net, angle_dtype=F32):
            assert torch.equal(model.answer(net, **late), expected)
    plain = model.build(model.config(**changes))
    with patch(plain, angle_dtype=F32):  # in any order: a table depends on the call alone
        for length in (30, 15, 17, 16):
            assert torch.equal(model.answer(plain, **model.inputs(length)), answers[length])


@pytest.mark.parametrize("rule", RULES)
def test_generation_grows_over_the_original_length_as_in_the_model(rule: str):
    name, changes = RULES[rule]
    model = tiny(name)
    prompt = model.inputs(12)["input_ids"]
    mask = torch.ones_like(prompt)
    mask[0, :5] = 0
    before = generated(model.build(model.config(**changes)), prompt, 9, attention_mask=mask)
    net = model.build(model.config(**changes))
    patch(net, angle_dtype=F32)
    after = generated(net, prompt, 9, attention_mask=mask)
    assert torch.equal(before.sequences, after.sequences)
    for a, b in zip(before.logits, after.logits, strict=True):
        assert torch.equal(a, b)


def test_a_table_that_is_not_the_configurations_is_left_alone():
    """PhiMoE as of transformers 5.24 never reads its long factors; replacing its table would change more than the precision."""
    model = tiny("phimoe")
    long = {**LONGROPE, "short_mscale": 1.25, "long_mscale": 1.5}
    beyond = {**long, "original_max_position_embeddings": 4096}  # the table differs far out only
    net = model.build(model.config(max_position_embeddings=8192, rope_parameters=beyond))
    with pytest.raises(
        ConfigError, match="the table of PhimoeRotaryEmbedding is not the one that its configuration stands for"
    ):
        patch(net)
    net = model.build(
        model.config(max_position_embeddings=32, rope_parameters={**long, "long_factor": LONGROPE["short_factor"]})
    )
    call = model.inputs(20)
    expected = model.answer(net, **call)
    with patch(net, angle_dtype=F32):
        assert torch.equal(model.answer(net, **call), expected)


def test_each_of_several_modules_keeps_its_own_base():
    model = tiny("granite_swa")
    net = model.build(model.config(layer_rope_theta=[1e4, 5e5]))
    expected = model.answer(net)
    with patch(net, angle_dtype=F32) as done:
        assert done.replaced == ("model.rotary_emb", "model.rotary_embs.0", "model.rotary_embs.1")
        assert torch.equal(model.answer(net), expected)
        at = torch.tensor([[1]])
        for index, base in enumerate((1e4, 5e5)):
            assert float(net.model.rotary_embs[index](torch.zeros(1), at)[1][0, 0, 3]) == pytest.approx(base**-0.75, rel=1e-6)


# compilation


@pytest.mark.parametrize("changes", [{}, {"max_position_embeddings": 16, "rope_parameters": DYNAMIC}], ids=["plain", "dynamic"])
def test_a_patched_model_compiles_without_a_break(changes: dict[str, Any]):
    net = LLAMA.build(LLAMA.config(num_hidden_layers=1, **changes))
    call = {**LLAMA.inputs(20), "use_cache": False}
    patch(net)
    expected = LLAMA.answer(net, **call)
    compiled = torch.compile(net.model.rotary_emb, backend="aot_eager", fullgraph=True)
    at = torch.arange(20)[None]
    for a, b in zip(compiled(torch.zeros(1), at), net.model.rotary_emb(torch.zeros(1), at), strict=True):
        assert torch.equal(a, b)
    if not changes:
        whole = torch.compile(net, backend="aot_eager")
        with torch.no_grad():
            assert torch.equal(whole(**call).logits, expected)


# what was measured


def test_the_committed_result_is_of_these_models():
    """Made by ``python -m benchmarks.hf_patch``."""
    result = json.loads((Path(__file__).parents[2] / "docs" / "results" / "hf-patch.json").read_text())
    assert list(result["float32_angles"]) == [model.model_type for model in MODELS]
    assert {what for outcome in result["float32_angles"].values() for what in outcome.values()} == {"bit-equal"}
    assert [entry["model_type"] for entry in result["left"]] == [model.model_type for model, _ in LEFT]
    assert all(reason in entry["reason"] for entry, (_, reason) in zip(result["left"], LEFT, strict=True))
    windows = result["float64_angles"]["windows"]
    grown = [window["root_mean_square"] for window in windows]
    assert grown == sorted(grown)
    assert windows[0]["largest_difference"] < 1e-4 < 1e-2 < windows[-1]["largest_difference"]


# text and pictures in one model


def test_both_towers_of_a_model_that_sees_are_patched():
    text = tiny("qwen2_5_vl_text").config().to_dict()
    vision = tiny("qwen2_5_vl_vision").config().to_dict()
    config = transformers.Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=60,
        video_token_id=61,
        vision_start_token_id=62,
        vision_end_token_id=63,
    )
    torch.manual_seed(0)
    net = transformers.Qwen2_5_VLForConditionalGeneration(config).eval()
    picture = tiny("qwen2_5_vl_vision").inputs()
    ids = torch.tensor([[5, 6, 62, 60, 60, 60, 60, 63, 7, 8]])
    kinds = (ids == 60).int()
    call = {
        "input_ids": ids,
        "pixel_values": picture["hidden_states"],
        "image_grid_thw": picture["grid_thw"],
        "mm_token_type_ids": kinds,
    }
    with torch.no_grad():
        before = net(**call).logits
        with patch(net, angle_dtype=F32) as done, _Called(net) as called:
            assert torch.equal(net(**call).logits, before)
    assert set(done.replaced) == called == {"model.visual.rotary_pos_emb", "model.language_model.rotary_emb"}
    assert not done.left
