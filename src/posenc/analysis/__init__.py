"""Numbers about positions: wavelengths, coverage, similarity, decay, precision, reach, order, lengths. No pictures."""

from posenc.analysis.codes import CodeDistances, code_distances, distinct_positions
from posenc.analysis.decay import ScoreSpread, random_scores, rotary_kernel
from posenc.analysis.equivariance import Shuffled, shuffle
from posenc.analysis.lengths import LengthGroup, LengthReport, PastTrained, length_report, past_trained
from posenc.analysis.precision import CHAINS, Chain, PrecisionLoss, precision_loss
from posenc.analysis.shift import shift_matrix
from posenc.analysis.similarity import similarity_kernel, similarity_matrix
from posenc.analysis.waves import AngleCoverage, angle_coverage, wavelengths
from posenc.analysis.window import AttentionReach, attention_reach

__all__ = [
    "CHAINS",
    "AngleCoverage",
    "AttentionReach",
    "Chain",
    "CodeDistances",
    "LengthGroup",
    "LengthReport",
    "PastTrained",
    "PrecisionLoss",
    "ScoreSpread",
    "Shuffled",
    "angle_coverage",
    "attention_reach",
    "code_distances",
    "distinct_positions",
    "length_report",
    "past_trained",
    "precision_loss",
    "random_scores",
    "rotary_kernel",
    "shift_matrix",
    "shuffle",
    "similarity_kernel",
    "similarity_matrix",
    "wavelengths",
]
