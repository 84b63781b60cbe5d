"""Whatever a configuration holds, `plan` answers with a plan or a `ConfigError`, and so does all that a plan offers."""

from __future__ import annotations

import contextlib
import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from posenc.errors import ConfigError
from posenc.hf import PositionPlan, plan
from posenc.hf.defaults import model_defaults
from posenc.hf.families import FAMILIES

CONFIGS: list[dict[str, Any]] = [
    json.loads(path.read_text(encoding="utf-8")) for path in sorted((Path(__file__).parent / "configs").glob("*.json"))
]
KEYS = sorted(
    {key for config in CONFIGS for key in config}
    | {key for entry in model_defaults().values() for key in entry}
    | {
        "rope_parameters", "rope_scaling", "rope_type", "type", "factor", "mrope_section", "xdrope_section", "alpha", "truncate",
        "attention_factor", "short_factor", "long_factor", "mscale", "per_layer_config", "layer_rope_theta", "no_rope_layers",
        "text_config", "vision_config", "decoder", "mlp_layer_types", "global_head_dim", "projection_dim", "block_types",
        "attn_layer_indices", "use_dynamic_ntk", "rotary_pct", "rotary_emb_base", "window_size", "low_freq_factor", "high_freq_factor",
        "llama_4_scaling_beta", "first_k_dense_replace", "attn_config", "position_embeddings_type", "beta_fast", "beta_slow",
    }
)  # fmt: skip
WORDS = sorted(
    {"default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional", "axial", "su", "mrope", "xdrope", "full_attention",
     "sliding_attention", "linear_attention", "chunked_attention", "hybrid", "main", "compress", "rope", "rotary", "relative_key", "all",
     "", "0", "7", "é\ud800"} | set(FAMILIES) | set(list(model_defaults())[::7])
)  # fmt: skip
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(
        [0, 1, 2, 3, 4, 7, 8, 16, 64, 128, 4096, 131072, -1, 10**9, 2**53 + 1, 10**400, 0.5, 1.0, 8.0, 1e4, 1e-320, 1e308]
    ),
    st.sampled_from([float("nan"), float("inf"), -float("inf"), -0.0, 0.1 + 0.2j, b"8", frozenset({1}), object()]),
    st.sampled_from(WORDS),
    st.integers(),
    st.floats(),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5), st.dictionaries(st.sampled_from(KEYS + WORDS[:20]), inner, max_size=5)
    ),
    max_leaves=12,
)


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    """A real configuration with a few of its values changed, dropped, moved or copied to other keys."""
    config = copy.deepcopy(draw(st.sampled_from(CONFIGS)))
    for _ in range(draw(st.integers(1, 4))):
        places = [config, *(value for value in config.values() if isinstance(value, dict))]
        place = draw(st.sampled_from(places))
        known = sorted(place)
        match draw(st.sampled_from(["change", "change", "drop", "add", "copy", "nest", "type"])):
            case "change" if known:
                place[draw(st.sampled_from(known))] = draw(VALUES)
            case "drop" if known:
                del place[draw(st.sampled_from(known))]
            case "copy" if known:
                place[draw(st.sampled_from(KEYS))] = copy.deepcopy(place[draw(st.sampled_from(known))])
            case "nest":
                config = {draw(st.sampled_from(["text_config", "vision_config", "decoder", "rope_parameters"])): config}
            case "type":
                config["model_type"] = draw(st.sampled_from(WORDS))
            case _:
                place[draw(st.sampled_from(KEYS))] = draw(VALUES)
    return config


RANDOM = st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=12)


def use(found: PositionPlan) -> None:
    """All that a plan offers, on small positions."""
    assert max((len(line) for line in str(found).splitlines()), default=0) <= 200
    for version in (4, 5):
        with contextlib.suppress(ConfigError):
            found.to_config(version)
    total = len(found.layers)
    for index in {0, total // 2, total - 1} & set(range(total)):
        rotation = found.layers[index].rotation
        axes = rotation.axes if rotation is not None else None
        if rotation is not None and rotation.rotary_dim > 4096:
            continue  # legal, and only slow
        shape = (3,) if axes is None or axes.text else (3, len(axes.names))
        try:
            table = found.rotary_table(torch.arange(3).reshape(3, *[1] * (len(shape) - 1)).expand(shape), layer=index)
        except ConfigError:
            continue
        assert table.cos.isfinite().all()
        assert table.sin.isfinite().all()


def answers(config: object) -> None:
    try:
        found = plan(config)
    except ConfigError as refusal:
        said = str(refusal)
    else:
        use(found)
        for part in found.parts.values():
            use(part)
        return
    assert said.startswith("plan: ")
    assert "Expected" in said
    assert len(said) < 2000


quick = settings(max_examples=200, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


@quick
@given(mutated())
def test_mutated_configurations(config: dict[str, Any]) -> None:
    answers(config)


@quick
@given(RANDOM)
def test_random_configurations(config: dict[str, Any]) -> None:
    answers(config)


@pytest.mark.slow
@seed(0)
@settings(max_examples=6_000, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(st.one_of(mutated(), RANDOM, VALUES))
def test_many_configurations(config: object) -> None:
    answers(config)
