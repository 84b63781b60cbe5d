"""A trial: the same start and data for every encoding, a record that is plain JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from math import pi
from statistics import fmean
from typing import Any

import pytest
import torch

from posenc.catalog import CATALOG
from posenc.compare import rows
from posenc.compare.rates import committed
from posenc.compare.rows import DECLARED, find_row, known_rows
from posenc.compare.statistics import band_mean
from posenc.compare.tasks.base import IGNORED
from posenc.compare.tasks.registry import find_task
from posenc.compare.tasks.text import open_text
from posenc.compare.trial import FIT_ACCURACY, Cell, Trial, _score, build_model, model_shape, run_trial
from posenc.core.sites import InputEncoding
from posenc.encodings.randomized import Randomized
from posenc.encodings.rope import RoPE


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
    changes = {
        "row": "t5", "task": "copy-random", "seed": 2, "learning_rate": 3e-3, "steps": 11, "kind": "encoder", "corpus": "ab",
        "protocol": 99,
    }  # fmt: skip
    assert changes.keys() == asdict(trial).keys()
    keys = {trial.key, *(replace(trial, **{name: value}).key for name, value in changes.items())}
    assert len(keys) == 1 + len(changes)
    assert trial.key == Trial("nope", "copy-constant", 1, 1e-3, 10).key
    assert Trial("nope", "text:/a", 1, 1e-3, 10, corpus="ab").key == Trial("nope", "text:/b", 1, 1e-3, 10, corpus="ab").key


def test_a_text_that_changed_is_refused_and_its_results_are_not_mixed(tmp_path):
    path = tmp_path / "x.txt"
    path.write_text("one line\n" * 5_000)
    cell = Cell("nope", f"text:{path}")
    trial = cell.trial(1, 1e-3, 1)
    assert cell.asked == "text"
    record = run_trial(trial)
    assert (record["task"], record["corpus"]) == ("text", trial.corpus)
    open_text.cache_clear()  # as a worker that starts later
    path.write_text("two line\n" * 5_000)
    assert cell.trial(1, 1e-3, 1).key != trial.key
    with pytest.raises(ValueError, match="has changed since the run began"):
        run_trial(trial)


def test_the_kind_of_model_reaches_the_model_and_its_encodings(monkeypatch):
    seen = []

    def own(shape):
        seen.append(shape.causal)
        return []

    monkeypatch.setattr(sys.modules[__name__], "own", own, raising=False)
    models = [build_model(f"{__name__}:own", find_task("last-k"), 1, kind)[0] for kind in ("decoder", "encoder")]
    assert [model.kind for model in models] == ["decoder", "encoder"]
    assert seen == [True, False]
    with torch.no_grad():
        ids = torch.arange(1, 10)[None]
        swapped = ids[:, [1, 0, *range(2, 9)]]
        last = [(model.eval()(ids, 0) - model(swapped, 0))[0, -1].abs().max() for model in models]
    assert last[1] < 1e-5, "an encoder without positions cannot tell the order"


def test_the_spread_is_that_of_the_items():
    """Of a ratio of two sums, by loops: sequences differ in how many tokens are scored."""
    task = find_task("recall-lm")
    model, _ = build_model("nope", task, 1)
    batch = task.train_batch(6, torch.Generator().manual_seed(2))
    with torch.no_grad():
        logits = model.eval()(batch.ids, 0).double()
    losses = [
        [-row[at].log_softmax(-1)[target].item() for at, target in enumerate(targets.tolist()) if target != IGNORED]
        for row, targets in zip(logits, batch.targets, strict=True)
    ]
    tokens = [len(row) for row in losses]
    assert len(set(tokens)) > 1
    mean = sum(map(sum, losses)) / sum(tokens)
    off = [(sum(row) - mean * n) / fmean(tokens) for row, n in zip(losses, tokens, strict=True)]
    value, spread = _score(model, batch, "suffix loss")
    assert value == pytest.approx(mean, rel=1e-5)  # float32 logits
    assert spread == pytest.approx(fmean(o * o for o in off) ** 0.5, rel=1e-4)


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


def test_all_of_the_catalogue_is_a_row_or_cannot_stand_alone():
    assert {*known_rows(), *rows._NOT_ALONE} >= set(CATALOG)
    assert not set(known_rows()) & rows._NOT_ALONE


def test_variants_are_what_their_names_say():
    shape = model_shape(find_task("recall-lm"))
    spread, rope = find_row("rope-randomized").build(shape)
    assert (type(spread), spread.limit, type(rope)) == (Randomized, 8 * 65, RoPE)
    clamped = find_row("learned-clamp").build(shape)[0]
    assert (clamped.past_end, clamped.num_positions) == ("clamp", 65)
    slowest = find_row("rope-short-base").build(shape)[0].schedule.frequencies(16).inv_freq[-1]
    assert float(slowest) * 65 == pytest.approx(2 * pi), "one turn within the trained length"
    still = find_row("p-rope").build(shape)[0].schedule.frequencies(16).inv_freq
    assert (still == 0).tolist() == [False] * 6 + [True] * 2


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
