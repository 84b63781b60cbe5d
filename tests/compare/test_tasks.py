"""Tasks: what a sequence is, what is scored, and that streams are the same for everyone."""

from __future__ import annotations

import hashlib
import os
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pytest
import torch

from posenc.compare.tasks.base import IGNORED
from posenc.compare.tasks.copying import BOS, EOS, PAD, SEP, SYMBOLS, CopyConstant, CopyRandom
from posenc.compare.tasks.lookup import BACK, FirstToken, LastK
from posenc.compare.tasks.lookup import BOS as BEGIN
from posenc.compare.tasks.recall import KEYS, SUFFIX, WORDS, RecallLM
from posenc.compare.tasks.registry import TASKS, find_task
from posenc.compare.tasks.text import BOS as START
from posenc.compare.tasks.text import LEAST_BYTES, Text


def read_copy(ids: torch.Tensor, targets: torch.Tensor) -> tuple[list[int], list[int]]:
    """The words and the scored answer of one copying sequence, read as a person would."""
    tokens = ids.tolist()
    assert tokens[0] == BOS
    words = tokens[1 : tokens.index(SEP)]
    answer = [t for t in targets.tolist() if t != IGNORED]
    return words, answer


@pytest.mark.parametrize("task", [CopyConstant(), CopyRandom()], ids=lambda t: t.name)
def test_the_answer_is_the_words_and_the_end(task):
    batch = task.train_batch(64, torch.Generator().manual_seed(0))
    sizes = set()
    for ids, targets in zip(batch.ids, batch.targets, strict=True):
        words, answer = read_copy(ids, targets)
        assert answer == [*words, EOS]
        assert 1 <= len(words) <= task.trained_size
        sizes.add(len(words))
        first = targets.tolist().index(words[0])
        assert ids.tolist()[first] == SEP, "the first scored token follows SEP"
        full = [*ids.tolist(), targets.tolist()[-1]]
        assert all(t in (PAD, EOS, IGNORED) for t in full[2 * len(words) + 3 :])
    assert len(sizes) > 8, "sizes vary"


def test_every_constant_is_tested_and_random_words_repeat_exactly():
    for probe in CopyConstant().probes():
        words = [read_copy(i, t)[0] for i, t in zip(*probe.batch, strict=True)]
        assert sorted(w[0] for w in words) == list(range(SYMBOLS))
        assert all(len(set(w)) == 1 and len(w) == probe.size for w in words)
    first, again = (CopyRandom().probes()[20].batch.ids for _ in range(2))
    assert torch.equal(first, again)
    assert first.shape[0] >= 256


def test_the_longest_training_sequence_is_what_the_task_says():
    for task in [*TASKS.values(), find_task("text")]:
        longest = max(task.train_batch(64, torch.Generator().manual_seed(s)).ids.shape[1] for s in range(4))
        assert longest <= task.trained_length
        in_range = [p.batch.ids.shape[1] for p in task.probes() if p.ratio <= 1 and p.measure != "recall"]
        assert max(in_range) <= task.trained_length, "in-range tests fit a table of trained_length rows"
        assert any(p.batch.ids.shape[1] > task.trained_length for p in task.probes())


def share_of_pairs(ids: list[int], answer: int) -> float:
    """Of the pairs shown before the last token, those that have this value."""
    values: dict[int, int] = {}
    for token, after in pairwise(ids):
        if WORDS <= token < WORDS + KEYS:
            values.setdefault(token, after)
    return fmean(value == answer for value in values.values())


def test_recall_probes_can_only_be_answered_by_the_key():
    for probe in RecallLM().probes():
        if probe.measure != "recall":
            continue
        ids, answer = probe.batch.ids, probe.batch.targets[:, -1]
        key = ids[:, -1:]
        seen = ids == key
        assert bool((seen.sum(1) == 2).all()), "the key is shown once and asked once"
        shown = seen.float().argmax(1, keepdim=True)
        assert torch.equal(ids.gather(1, shown + 1)[:, 0], answer)
        assert bool((ids.shape[1] - 1 - shown == probe.size).all()), "the lag is what the probe says"
        values = (ids >= WORDS + KEYS) & (ids < WORDS + 2 * KEYS)
        assert bool((values.sum(1) >= 5).all()), "other values stand in the way"
        shares = torch.tensor([share_of_pairs(*one) for one in zip(ids.tolist(), answer.tolist(), strict=True)])
        error = 5 * float(shares.std()) / len(shares) ** 0.5
        assert float(shares.mean()) == pytest.approx(probe.guess, abs=error), "a pair picked at random"


def test_suffix_loss_scores_the_same_tokens_under_every_context():
    probes = [p for p in RecallLM().probes() if p.measure == "suffix loss"]
    suffixes = [p.batch.targets[:, -SUFFIX:] for p in probes]
    assert all(torch.equal(suffixes[0], s) for s in suffixes)
    assert all(bool((p.batch.targets[:, :-SUFFIX] == IGNORED).all()) for p in probes)
    scored = suffixes[0][suffixes[0] != IGNORED]
    assert scored.numel() > 1000
    assert int(scored.max()) < WORDS, "planted tokens are not scored: their pair may be cut off"


def test_unknown_task():
    with pytest.raises(ValueError, match="no task 'copy'.*copy-constant"):
        find_task("copy")


def answer(task, words: list[int], at: int) -> int:
    """What a lookup task asks for at a place, read from its description."""
    if isinstance(task, LastK):
        return words[at - BACK] if at >= BACK else IGNORED
    return words[0] if at >= 1 else IGNORED


@pytest.mark.parametrize("task", [LastK(), FirstToken()], ids=lambda t: t.name)
def test_lookups_name_the_right_token(task):
    lengths = set()
    for seed in range(12):
        batch = task.train_batch(3, torch.Generator().manual_seed(seed))
        lengths.add(batch.ids.shape[1])
        for ids, targets in zip(batch.ids.tolist(), batch.targets.tolist(), strict=True):
            assert (ids[0], targets[0]) == (BEGIN, IGNORED)
            assert targets[1:] == [answer(task, ids[1:], at) for at in range(len(ids) - 1)]
    assert len(lengths) > 4
    assert max(lengths) <= task.trained_length
    assert [p.size for p in task.probes()][-1] == 256
    for probe in task.probes():
        assert probe.batch.ids.shape[1] == probe.size + 1
        scored = (probe.batch.targets != IGNORED).sum(1)
        assert bool((scored == 1).all()), "one question a sequence"
        words = probe.batch.ids[:, 1:].tolist()
        assert probe.batch.targets[:, -1].tolist() == [answer(task, row, len(row) - 1) for row in words]


def test_only_lookups_can_be_asked_of_an_encoder():
    assert [name for name, task in TASKS.items() if "encoder" in task.kinds] == ["last-k", "first-token"]


@pytest.fixture
def text(tmp_path) -> Path:
    """Distinct numbered lines, so that a window tells where it was cut."""
    path = tmp_path / "lines.txt"
    path.write_text("".join(f"{n:07d}\n" for n in range(6_000)))
    return path


def test_the_text_task_predicts_the_next_byte_of_disjoint_parts(text):
    task, content = find_task(f"text:{text}"), text.read_bytes()
    assert isinstance(task, Text)
    assert task.corpus == ("lines.txt", len(content), hashlib.sha256(content).hexdigest())
    tested = len(content) * 95 // 100
    parts = {
        "training": (task.train_batch(8, torch.Generator().manual_seed(1)), 0, len(content) * 90 // 100),
        "choosing": (task.validation(), len(content) * 90 // 100, tested),
        "testing": (task.probes()[-1].batch, tested, len(content)),
    }
    for name, (batch, first, end) in parts.items():
        for ids, targets in zip(batch.ids.tolist(), batch.targets.tolist(), strict=True):
            assert ids[0] == START
            window = bytes(ids[1:])
            at = content.index(window[: 2 * 8])
            assert content[at : at + len(window)] == window
            assert first <= at < at + len(window) < end + 1, name
            scored = [(place, target) for place, target in enumerate(targets) if target != IGNORED]
            assert all(content[at + place] == target for place, target in scored)
            assert len(scored) == (32 if name == "testing" else 128)


def test_a_text_is_scored_on_the_same_suffixes_under_every_context(text):
    probes = find_task(f"text:{text}").probes()
    assert [probe.size for probe in probes] == [64, 128, 160, 192, 256, 512]
    suffixes = [probe.batch.targets[:, -32:] for probe in probes]
    assert all(torch.equal(suffixes[0], s) for s in suffixes)
    assert all(probe.batch.ids.shape[1] == probe.size for probe in probes)
    assert probes[0].items == suffixes[0].shape[0]
    assert len({bytes(row.tolist()) for row in suffixes[0]}) == probes[0].items, "no two overlap"


def test_without_a_file_the_standard_library_is_read_and_always_the_same():
    task = find_task("text")
    assert task.corpus is not None
    assert task.corpus.bytes > LEAST_BYTES
    assert find_task("text") is task, "read once"


def test_texts_that_are_none(tmp_path):
    def refusal(path: Path) -> str:
        with pytest.raises((OSError, ValueError)) as caught:
            find_task(f"text:{path}")
        return str(caught.value)

    path = tmp_path / "x.txt"
    assert "x.txt' cannot be read (No such file or directory). Expected a text file" in refusal(path)
    assert "is a folder. Expected a text file" in refusal(tmp_path)
    assert "'/dev/zero' is no regular file" in refusal(Path("/dev/zero"))
    path.write_bytes(b"")
    assert f"is empty. Expected {LEAST_BYTES} to" in refusal(path)
    path.write_bytes(b"a" * (LEAST_BYTES - 1))
    assert f"has {LEAST_BYTES - 1} bytes. Expected {LEAST_BYTES}" in refusal(path)
    path.write_bytes(b"a" * LEAST_BYTES + b"\0" + b"a")
    assert f"has a NUL at byte {LEAST_BYTES}. Expected text, not a binary file" in refusal(path)
    path.write_bytes(b"a" * LEAST_BYTES + b"\xff")
    assert f"is not UTF-8 at byte {LEAST_BYTES}. Expected text in UTF-8" in refusal(path)
    path.write_bytes(b"a" * LEAST_BYTES)
    assert find_task(f"text:{path}").probes()[0].items >= 32, "the least that is taken can be tested"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="nothing is unreadable to root")
def test_a_text_that_may_not_be_read(text):
    text.chmod(0)
    with pytest.raises(OSError, match="cannot be read"):
        find_task(f"text:{text}")
