"""What a bias on the scores is, asked of the function that makes it."""

from posenc.audit.biases.checking import check_bias as check_bias
from posenc.audit.biases.checking import check_scores as check_scores
