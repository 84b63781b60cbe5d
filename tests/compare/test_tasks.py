"""Tasks: what a sequence is, what is scored, and that streams are the same for everyone."""

from __future__ import annotations

import pytest
import torch

from posenc.compare.tasks.base import IGNORED
from posenc.compare.tasks.copying import BOS, EOS, PAD, SEP, SYMBOLS, CopyConstant, CopyRandom
from posenc.compare.tasks.recall import KEYS, SUFFIX, WORDS, RecallLM
from posenc.compare.tasks.registry import TASKS, find_task


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
    for task in TASKS.values():
        longest = max(task.train_batch(64, torch.Generator().manual_seed(s)).ids.shape[1] for s in range(4))
        assert longest <= task.trained_length
        in_range = [p.batch.ids.shape[1] for p in task.probes() if p.ratio <= 1 and p.measure != "recall"]
        assert max(in_range) <= task.trained_length, "in-range tests fit a table of trained_length rows"
        assert any(p.batch.ids.shape[1] > task.trained_length for p in task.probes())


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
