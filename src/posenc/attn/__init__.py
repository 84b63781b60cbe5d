"""Attention: one call, several backends, masks and biases as values."""
