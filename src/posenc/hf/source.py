"""Reading a configuration from anywhere, and its keys with their types checked and their use remembered."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Any, Never

from posenc.errors import ConfigError

MAX_BYTES = 16 * 2**20
MAX_DEPTH = 32
MAX_LAYERS = 100_000
MAX_INTEGER = 2**53

POSITION_WORDS = (
    "rope", "rotary", "position", "alibi", "relative_attention", "mrope", "yarn", "ntk", "sliding", "layer_types", "theta",
    "nope", "window_pattern", "attn_temperature", "floor_scale", "attn_scale", "mscale", "use_rotary", "max_relative",
    "max_seq_len", "context_length", "log_scaling",
)  # fmt: skip
"""A key that holds one of these words and that nothing reads is reported, never dropped silently."""


def read_config(source: object) -> dict[str, Any]:
    """The configuration as plain dictionaries, from a file, a folder that holds ``config.json``, a mapping or a
    transformers configuration object.

    Raises:
        ConfigError: no such file, not JSON, not an object, over 16 MB, nested too deeply, duplicate keys, NaN.
    """
    if isinstance(source, (str, Path)):
        return _read_file(Path(source))
    if isinstance(source, Mapping):
        data: object = source
    elif callable(getattr(source, "to_dict", None)):
        data = source.to_dict()  # type: ignore[attr-defined]
        if isinstance(data, dict) and not data.get("model_type"):
            data = {**data, "model_type": getattr(source, "model_type", None)}
    else:
        raise ConfigError(
            f"plan: a configuration of type {type(source).__name__}. Expected a path to config.json, a dictionary or a "
            "transformers configuration. Pass model.config for a loaded model."
        )
    return _plain(data, "", 0)  # type: ignore[no-any-return]


def _read_file(path: Path) -> dict[str, Any]:
    try:
        if path.is_dir():
            path = path / "config.json"
        if not path.is_file():
            raise ConfigError(
                f"plan: {str(path)!r} is not a file. Expected config.json or a folder that holds it. Look at the path."
            )
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise ConfigError(
                f"plan: {str(path)!r} has {size} bytes. Expected at most {MAX_BYTES}. A model's config.json is a few kilobytes."
            )
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"plan: {str(path)!r} cannot be read ({error}). Expected a UTF-8 text file. Look at the path."
        ) from None
    try:
        data = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constants, parse_int=_short_integer)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"plan: {str(path)!r} is not JSON (line {error.lineno}: {error.msg}). Expected one JSON object. Look at that line."
        ) from None
    except RecursionError:
        raise ConfigError(
            f"plan: {str(path)!r} is nested too deeply. Expected at most {MAX_DEPTH} levels. Look at what wrote it."
        ) from None
    return _plain(data, "", 0)  # type: ignore[no-any-return]


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ConfigError(
            f"plan: the key {twice!r} stands twice in one object. Expected every key once. Remove one of the two."
        )
    return dict(pairs)


def _no_constants(name: str) -> Never:
    raise ConfigError(f"plan: the file holds {name}. Expected finite numbers. Look at what wrote it.")


def _short_integer(digits: str) -> int:
    if len(digits) > 20:  # Python refuses very long integers with a message of its own
        raise ConfigError(f"plan: an integer of {len(digits)} digits. Expected at most 20. Look at what wrote it.")
    return int(digits)


def _plain(value: Any, where: str, depth: int) -> Any:
    """A copy made of dictionaries, lists and scalars only, so that nothing of the caller's is shared or changed."""
    if depth > MAX_DEPTH:
        raise ConfigError(
            f"plan: {where} is nested deeper than {MAX_DEPTH} levels. Expected a model's configuration. Look at what wrote it."
        )
    if depth == 0 and not isinstance(value, Mapping):
        raise ConfigError(
            f"plan: the configuration is {short(value)}. Expected an object with keys. Pass the content of config.json."
        )
    if isinstance(value, Mapping):
        return {_key(k, where): _plain(v, f"{where}.{k}" if where else str(k), depth + 1) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v, where, depth + 1) for v in value]
    return value


def _key(key: object, where: str) -> str:
    if isinstance(key, (str, int)):
        return str(key)
    raise ConfigError(
        f"plan: a key of type {type(key).__name__} in {where or 'the configuration'}. Expected names. Look at what made it."
    )


def short(value: object) -> str:
    """A value in at most 80 characters."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write integers of thousands of digits
        text = "a number of thousands of digits"
    return text if len(text) <= 80 else text[:77] + "…"


class Keys:
    """Typed access to one object of a configuration, with memory of what was read.

    Every getter takes alternative names, newest first; two that are given and differ are a `ConfigError`. ``None`` in
    a file means "none", and no default stands in for it, as in transformers.
    """

    def __init__(
        self,
        data: Mapping[str, Any],
        where: str = "",
        defaults: Mapping[str, Any] | None = None,
        notes: list[str] | None = None,
        model_type: str = "",
    ) -> None:
        self.data, self.where, self.defaults, self.model_type = data, where, defaults or {}, model_type
        self.notes: list[str] = [] if notes is None else notes
        self.read: set[str] = set()
        self.assumed: dict[str, Any] = {}

    def note(self, text: str) -> None:
        """Keep a remark for the reader of the plan, once."""
        if text not in self.notes:
            self.notes.append(text)

    def path(self, name: str) -> str:
        return f"{self.where}.{name}" if self.where else name

    def __contains__(self, name: str) -> bool:
        return self.data.get(name) is not None

    def get(self, *names: str) -> Any:
        """The value of the first name that is given, else of the first that has a default."""
        self.read.update(names)
        given = [name for name in names if self.data.get(name) is not None]
        for name in given[1:]:
            if self.data[name] != self.data[given[0]]:
                raise ConfigError(
                    f"plan: {self.path(given[0])} = {short(self.data[given[0]])} but {self.path(name)} = {short(self.data[name])}. "
                    "Expected the same value under both names. Remove the wrong one."
                )
        if given:
            return self.data[given[0]]
        if any(name in self.data for name in names):
            return None  # null in a file is an answer: it takes the place of the class's default
        for name in names:
            if self.defaults.get(name) is not None:
                self.assumed[name] = self.defaults[name]
                return self.defaults[name]
        return None

    def integer(self, *names: str, least: int = 1, most: int = MAX_INTEGER) -> int | None:
        value = self.get(*names)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer() and abs(value) < MAX_INTEGER:
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            self.fail(names, value, f"a whole number from {least} to {most}")
        return value

    def number(self, *names: str, above: float | None = 0.0, least: float | None = None) -> float | None:
        value = self.get(*names)
        if value is None:
            return None
        rule = (
            "a finite number"
            if least is None and above is None
            else f"a number above {above}"
            if least is None
            else f"a number of {least} or more"
        )
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not -1e300 < value < 1e300 or not isfinite(value):
            self.fail(names, value, rule)
        if (least is not None and value < least) or (least is None and above is not None and value <= above):
            self.fail(names, value, rule)
        return value

    def flag(self, *names: str) -> bool | None:
        value = self.get(*names)
        if value is None or isinstance(value, bool):
            return value
        if value in (0, 1):
            return bool(value)
        self.fail(names, value, "true or false")

    def text(self, *names: str) -> str | None:
        value = self.get(*names)
        if value is None or (isinstance(value, str) and len(value) <= 200):
            return value
        self.fail(names, value, "a short text")

    def items(self, *names: str, of: type | tuple[type, ...], most: int = MAX_LAYERS) -> list[Any] | None:
        """A list whose entries are all of a kind; booleans are not numbers."""
        value = self.get(*names)
        if value is None:
            return None
        kinds = of if isinstance(of, tuple) else (of,)
        good = isinstance(value, list) and len(value) <= most
        if not good or any(not isinstance(v, kinds) or (isinstance(v, bool) and bool not in kinds) for v in value):
            self.fail(names, value, f"a list of {' or '.join(kind.__name__ for kind in kinds)}, at most {most} long")
        if float in kinds and any(not isfinite(v) for v in value):
            self.fail(names, value, "finite numbers")
        return list(value)

    def mapping(self, *names: str) -> Keys | None:
        value = self.get(*names)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.fail(names, value, "an object with keys")
        given = next((name for name in names if name in self), names[0])
        return Keys(value, self.path(given), notes=self.notes, model_type=self.model_type)

    def fail(self, names: tuple[str, ...] | str, value: object, rule: str, mend: str = "Look at what wrote the file.") -> Never:
        names = (names,) if isinstance(names, str) else names
        name = next((n for n in names if n in self), names[0])
        raise ConfigError(f"plan: {self.path(name)} = {short(value)}. Expected {rule}. {mend}")

    def unread(self) -> Iterator[tuple[str, Any]]:
        """Keys that hold a position word, have a value and were never looked at."""
        for key, value in self.data.items():
            if key not in self.read and value is not None and any(word in key.lower() for word in POSITION_WORDS):
                yield self.path(key), value
