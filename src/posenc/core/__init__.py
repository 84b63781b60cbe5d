"""Tokens, frequencies, tables, biases and masks: the values that encodings and attention exchange."""
