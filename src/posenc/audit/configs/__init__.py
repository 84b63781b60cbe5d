"""Lint of a model's configuration, and what different readers make of it."""

from posenc.audit.configs.linting import lint

__all__ = ["lint"]
