"""Positional encodings, one file a method."""
