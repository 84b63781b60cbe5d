"""`posenc compare`: the same small Transformer trained with each encoding, and what was measured."""
