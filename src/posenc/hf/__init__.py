"""Hugging Face models: read a configuration's positions, put posenc's tables and biases into a model, extend a context."""

from posenc.core.temperature import LogTemperature
from posenc.hf.biasing import Bias, add_bias, remove_bias
from posenc.hf.extension import extend
from posenc.hf.parameters import parameters_of, schedule_from
from posenc.hf.patching import Patch, patch, unpatch
from posenc.hf.position_plan import LayerPlan, PositionPlan, plan
from posenc.hf.rotation import Axes, Rotation
from posenc.hf.rules import BiasRule, InputTable

__all__ = [
    "Axes",
    "Bias",
    "BiasRule",
    "InputTable",
    "LayerPlan",
    "LogTemperature",
    "Patch",
    "PositionPlan",
    "Rotation",
    "add_bias",
    "extend",
    "parameters_of",
    "patch",
    "plan",
    "remove_bias",
    "schedule_from",
    "unpatch",
]
