"""Frequency rules, one frozen dataclass a file: how fast each channel pair turns."""
