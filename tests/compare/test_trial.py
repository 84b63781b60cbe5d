"""A trial: the same start and data for every encoding, a record that is plain JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest
import torch

from posenc.compare.rates import committed
from posenc.compare.rows import DECLARED, find_row, known_rows
from posenc.compare.statistics import band_mean
from posenc.compare.tasks.registry import find_task
from posenc.compare.trial import FIT_ACCURACY, Trial, build_model, model_shape, run_trial
from posenc.core.sites import InputEncoding


def test_every_row_starts_from_the_same_weights():
    task = find_task("copy-constant")
    models = {row: build_model(row, task, seed=3)[0] for row in DECLARED}
    base = dict(models["nope"].state_dict().items())
    for row, model in models.items():
        own = {k: v for k, v in model.state_dict().items() if not k.startswith("encodings.")}
        assert own.keys() == base.keys(), row
        assert all(torch.equal(own[k], base[k]) for k in base), row
    other = build_model("nope", task, seed=4)[0].state_dict()
    assert not torch.equal(other["embed.weight"], base["embed.weight"])


def test_building_leaves_the_global_generator_alone():
    before = torch.random.get_rng_state()
    build_model("t5", find_task("copy-constant"), seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_key_is_made_of_every_setting():
    trial = Trial("nope", "copy-constant", 1, 1e-3, 10)
    changes = {"row": "t5", "task": "copy-random", "seed": 2, "learning_rate": 3e-3, "steps": 11, "protocol": 99}
    keys = {trial.key, *(replace(trial, **{name: value}).key for name, value in changes.items())}
    assert len(keys) == 1 + len(changes)
    assert trial.key == Trial("nope", "copy-constant", 1, 1e-3, 10).key


@pytest.mark.parametrize("row", ["learned", "sinusoidal-randomized"])
def test_a_record_is_plain_json_and_repeats_exactly(row):
    steps: list[int] = []
    trial = Trial(row, "copy-constant", 1, 1e-3, 4)
    record, again = run_trial(trial, steps.append), run_trial(trial)
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert steps == [1, 2, 3, 4]
    assert record["probes"] == again["probes"]
    assert record["validation_loss"] == again["validation_loss"]
    past = [p for p in record["probes"] if p["ratio"] > 1]
    if row == "learned":
        assert all(p["value"] is None and "no rows elsewhere" in p["error"] for p in past)
        assert record["encoding_parameters"] == 64 * find_task("copy-constant").trained_length
    else:
        assert all(p["value"] is not None for p in past)
        assert record["encoding_parameters"] == 0


def test_rows_build_for_any_model():
    for key in known_rows():
        row = find_row(key)
        assert row.label
        assert row.build(model_shape(find_task("recall-lm")))
    quarter = find_row("rope-25").build(model_shape(find_task("recall-lm")))[0]
    assert quarter.rotary_dim == 4


def bare(shape):
    return []


def test_a_callable_is_a_row():
    row = find_row(f"{__name__}:bare")
    assert row.label == "bare"
    assert list(row.build(model_shape(find_task("recall-lm")))) == []


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("ropee", "no encoding 'ropee'.*nope"),
        ("no_such_module:Name", "cannot be imported.*no_such_module"),
        ("math:nothing", "cannot be imported"),
        ("math:pi", "is a float.*ModelShape"),
        ("randomized", "no encoding 'randomized'"),
    ],
)
def test_bad_rows(key, message):
    with pytest.raises(ValueError, match=message):
        find_row(key)


class Failing(InputEncoding):
    """Raises, or adds, a thing within a range of lengths, from its n-th call on."""

    def __init__(self, thing: Exception | float, first: int = 1, shortest: int = 0):
        super().__init__()
        self.thing, self.first, self.shortest, self.calls = thing, first, shortest, 0

    def forward(self, x, positions):
        self.calls += 1
        if self.calls < self.first or x.shape[1] < self.shortest:
            return x
        if isinstance(self.thing, Exception):
            raise self.thing
        return x + self.thing


def failing(monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> Trial:
    """A trial of three steps of a row that fails."""
    monkeypatch.setattr(sys.modules[__name__], "own", lambda shape: [Failing(*arguments)], raising=False)
    return Trial(f"{__name__}:own", "copy-constant", 7, 1e-3, 3)


@pytest.mark.parametrize("error", [KeyError("x"), RuntimeError("x"), TypeError("x"), ValueError("x"), AssertionError()])
def test_code_that_fails_in_training_is_blamed_by_name(monkeypatch, error):
    said = rf"own' raised {type(error).__name__}.* while training on copy-constant, seed 7\. Expected .*--traceback"
    with pytest.raises(ValueError, match=said):
        run_trial(failing(monkeypatch, error))


PAST = 2 * 17 + 2
"""The tokens of the first copying test past the trained size."""


def test_only_a_value_error_past_the_trained_length_means_undefined(monkeypatch):
    record = run_trial(failing(monkeypatch, ValueError("no code"), 1, PAST))
    assert {p["error"] for p in record["probes"] if p["ratio"] > 1} == {"no code"}
    assert {p["error"] for p in record["probes"] if p["ratio"] <= 1} == {None}
    with pytest.raises(ValueError, match="raised ValueError: no code while training"):
        run_trial(failing(monkeypatch, ValueError("no code"), 5))  # after three steps and the validation
    with pytest.raises(ValueError, match="raised KeyError: 'bug' while training"):
        run_trial(failing(monkeypatch, KeyError("bug"), 1, PAST))


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_loss_that_is_not_finite_is_an_error(monkeypatch, value):
    with pytest.raises(ValueError, match="own' on copy-constant, seed 7, rate 0.001: the loss became nan at step 3. Expected"):
        run_trial(failing(monkeypatch, float(value), 3))


def test_a_test_that_is_not_finite_is_an_error_too(monkeypatch):
    with pytest.raises(ValueError, match=f"FloatingPointError: the logits over {PAST} tokens are not finite"):
        run_trial(failing(monkeypatch, float("nan"), 1, PAST))


@pytest.mark.slow
def test_copy_constant_past_the_trained_length():
    """NoPE > ALiBi > RoPE in (1, 1.25] of the trained length, in the mean of three seeds.

    The committed result is docs/results/copy-constant-three-seeds.json, with its command inside.
    """
    means = {}
    for row in ("nope", "alibi", "rope"):
        rate = committed()["rates"]["copy-constant"][row]["rate"]
        records = [run_trial(Trial(row, "copy-constant", seed, rate, 1500)) for seed in (1, 2, 3)]
        for record in records:
            points = [(p["ratio"], p["value"]) for p in record["probes"]]
            assert band_mean(points, (0, 1)) >= FIT_ACCURACY, row
        means[row] = fmean(band_mean([(p["ratio"], p["value"]) for p in r["probes"]], (1, 1.25)) for r in records)
    assert means["nope"] > means["alibi"] > means["rope"], means
