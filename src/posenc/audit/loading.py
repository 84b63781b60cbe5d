"""A model to audit, from a checkpoint's folder or from the user's own code; nothing is ever unpickled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from posenc.errors import require
from posenc.hf.patching import rotary_modules
from posenc.user_code import UnknownName, import_name, in_one_line

PICKLED = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"}
MOST_READ = 300_000_000
"""Numbers in a checkpoint up to which it is read whole, so that the model can run; of larger ones only positions are."""

_OF_POSITIONS = ("inv_freq", "position", "pos_emb", "pos_bias", "relative_attention", "rel_pos", "rotary", "slopes", "wpe.")


@final
@dataclass(frozen=True)
class Loaded:
    """A model and where it comes from.

    Args:
        runs: whether its weights are there, so that it can be called.
        notes: what the reader should know of how it was made.
    """

    model: nn.Module
    subject: str
    runs: bool = True
    notes: tuple[str, ...] = ()


def load_model(target: str) -> Loaded:
    """The model that ``PATH`` or ``MODULE:NAME`` stands for.

    A path is a folder with ``config.json`` and safetensors files, or one of those files; the model is that of the
    installed transformers, and no code from the folder runs. Without weights it is built from the configuration. A name
    imports and runs the user's module; it names a model, or a callable without arguments that returns one.

    Raises:
        ValueError: no such path or name, pickled weights, an architecture that transformers does not know.
        ImportError: transformers is not installed, for a path.
    """
    path = Path(target)
    if path.exists():
        return _from_folder(path)
    if ":" in target:
        return _from_name(target)
    raise ValueError(
        f"audit: {target!r} does not exist. Expected a model's folder, its config.json, or module:NAME. Look at the path."
    )


def _from_name(target: str) -> Loaded:
    try:
        found = import_name("audit", target, what="model", example="mine:build_model for build_model in mine.py")
        made = found if isinstance(found, nn.Module) or not callable(found) else found()
    except UnknownName:
        raise
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"audit: {target!r} raised {in_one_line(error)}. Expected a module that can be imported and a callable that needs no "
            "arguments. Run posenc --traceback audit ... to see where."
        ) from error
    if not isinstance(made, nn.Module):
        raise ValueError(
            f"audit: {target!r} gave a {type(made).__name__}. Expected a torch.nn.Module, or a callable that returns one. "
            "Write a function without arguments that builds your model."
        )
    return Loaded(made, target)


def _from_folder(path: Path) -> Loaded:
    if path.is_file():
        if path.suffix.lower() in PICKLED:
            raise _pickled([path])
        path = path.parent
    if not (path / "config.json").is_file():
        raise ValueError(
            f"audit: {str(path)!r} holds no config.json. Expected a model's folder as save_pretrained writes it. Look at the path."
        )
    files = sorted(path.glob("*.safetensors"))
    if not files and (pickled := sorted(p for p in path.iterdir() if p.suffix.lower() in PICKLED)):
        raise _pickled(pickled)
    transformers = require("transformers", "hf")
    with _quiet(transformers):
        try:
            config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            cls = _class_of(transformers, config)
            if not files:
                note = "no weights in the folder: built from the configuration, with random weights"
                return Loaded(_built(cls, config), str(path), notes=(note,))
            numbers = sum(_numbers(file) for file in files)
            if numbers > MOST_READ:
                note = f"{numbers:,} numbers: only the parts that hold positions were read, and the model was not run"
                return Loaded(_positions_only(cls, config, files), str(path), runs=False, notes=(note,))
            model = cls.from_pretrained(
                path, local_files_only=True, use_safetensors=True, trust_remote_code=False, dtype=torch.float32
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            said = " ".join(str(error).split())
            raise ValueError(
                f"audit: {str(path)!r} cannot be loaded ({said}). Expected a model that the installed transformers "
                f"{transformers.__version__} loads without code of its own. posenc plan and posenc lint read its config.json alone."
            ) from error
    return Loaded(model, str(path), notes=("weights read in float32",))


def _pickled(files: list[Path]) -> ValueError:
    return ValueError(
        f"audit: {files[0].name!r} is a pickle. Expected safetensors files: a pickle can run any code when it is opened, so "
        "posenc never opens one. Save the model again with save_pretrained."
    )


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without transformers' remarks and bars, which would stand between the lines of the report."""
    level = transformers.logging.get_verbosity()
    bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
        if bars:
            transformers.logging.enable_progress_bar()


def _class_of(transformers: Any, config: Any) -> Any:
    """The class that the checkpoint was saved from, else the one with a language model's head, else the bare one."""
    for name in config.architectures or ():
        if isinstance(name, str) and isinstance(cls := getattr(transformers, name, None), type):
            return cls
    autos = (transformers.AutoModelForCausalLM, transformers.AutoModel)
    for auto in autos:
        if type(config) in auto._model_mapping:
            return auto._model_mapping[type(config)]
    raise ValueError(f"transformers has no model for {config.model_type!r}")


def _built(cls: Any, config: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return cls(config).eval()  # type: ignore[no-any-return]


def _numbers(file: Path) -> int:
    """How many numbers a safetensors file holds, from its header."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        if not 0 < size <= file.stat().st_size:
            raise ValueError(f"{file.name} is no safetensors file")
        header = json.loads(stream.read(size))
    total = 0
    for name, entry in header.items():
        if name != "__metadata__":
            count = 1
            for axis in entry["shape"]:
                count *= axis
            total += count
    return total


def _positions_only(cls: Any, config: Any, files: list[Path]) -> nn.Module:
    """The model without storage, but for rotary modules, built anew, and the tensors of positions in its files."""
    with torch.device("meta"):
        model: nn.Module = cls(config).eval()
    for name, module in list(rotary_modules(model)):
        own = getattr(module, "config", config)
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, type(module)(config=own))
    safetensors = require("safetensors", "hf")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        with safetensors.safe_open(file, framework="pt") as opened:
            tensors |= {key: opened.get_tensor(key) for key in opened.keys() if _about_positions(key)}  # noqa: SIM118
    prefix = getattr(model, "base_model_prefix", "")
    known = dict(model.state_dict())
    renamed = {key if key in known else f"{prefix}.{key}": tensor for key, tensor in tensors.items()}
    model.load_state_dict({key: value for key, value in renamed.items() if key in known}, strict=False, assign=True)
    return model


def _about_positions(key: str) -> bool:
    return any(word in key for word in _OF_POSITIONS)
