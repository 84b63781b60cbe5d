"""What may import what, and what importing costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import posenc

ROOT = Path(posenc.__file__).parent
FILES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))
FLOORS = [
    {"errors", "user_code"},
    {"kernels"},
    {"core"},
    {"schedules"},
    {"encodings", "attn"},
    {"transformer", "hf", "convert", "analysis"},
    {"audit"},
    {"testing"},
    {"catalog"},
    {"compare"},
    {"plots"},
    {"cli"},
    {"__main__"},
]
FLOOR_OF = {part: floor for floor, parts in enumerate(FLOORS) for part in parts}
HEAVY = ("torch.distributed.tensor", "torch.nn.attention.flex_attention", "torch._dynamo", "onnx", "matplotlib", "transformers")


def part_of(path: Path) -> str:
    return path.parts[0].removesuffix(".py")


def imported_by(path: Path) -> set[str]:
    """The posenc modules that a file imports, as dotted names, wherever in it the import stands."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module)
            if node.module == "posenc":
                found |= {posenc._MODULE_OF.get(name.name, f"posenc.{name.name}") for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            raise AssertionError(f"{path}:{node.lineno} is a relative import, which hides the floor")
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return {name for name in found if name.startswith("posenc.") and name != "posenc.__version__"}


def forbidden(path: Path, module: str) -> bool:
    own, other = part_of(path), module.split(".")[1]
    if own == other:
        return own == "encodings"
    return FLOOR_OF[other] >= FLOOR_OF[own]


@pytest.mark.parametrize("path", [path for path in FILES if path != Path("__init__.py")], ids=str)
def test_files_import_from_lower_floors_only(path):
    assert part_of(path) in FLOOR_OF, f"{part_of(path)} stands on no floor"
    wrong = sorted(module for module in imported_by(path) if forbidden(path, module))
    assert not wrong, f"{path} imports {wrong}, which are not below it"


def test_the_rule_forbids_what_it_should():
    assert forbidden(Path("attn/cache.py"), "posenc.encodings.rope")
    assert forbidden(Path("encodings/rope.py"), "posenc.encodings.alibi")
    assert forbidden(Path("core/bias.py"), "posenc.schedules")
    assert not forbidden(Path("encodings/rope.py"), "posenc.schedules.geometric")
    assert "posenc.schedules.geometric" in imported_by(Path("encodings/rope.py"))


def test_no_file_is_a_drawer():
    assert not [path for path in FILES if path.stem in ("utils", "util", "common", "helpers", "misc")]


def test_no_public_name_is_a_sub_package():
    packages = {path.name for path in ROOT.iterdir() if path.is_dir()}
    assert not packages & set(posenc.__all__)


def test_only_plots_import_matplotlib():
    users = [path for path in FILES if "matplotlib" in (ROOT / path).read_text(encoding="utf-8") and part_of(path) != "plots"]
    assert not [path for path in users if "import matplotlib" in (ROOT / path).read_text(encoding="utf-8")]


def in_a_new_process(script: str) -> str:
    result = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_importing_posenc_does_not_import_torch():
    assert in_a_new_process("import sys, posenc; print('torch' in sys.modules)") == "False"


def test_using_every_public_name_adds_nothing_heavy():
    script = f"""
import sys
import torch
before = set(sys.modules)
import posenc
for name in posenc.__all__:
    getattr(posenc, name)
added = set(sys.modules) - before
print([name for name in {HEAVY!r} if any(m == name or m.startswith(name + ".") for m in added)])
"""
    assert in_a_new_process(script) == "[]"


def test_shape_annotations_hold():
    """In a process of its own, since checked functions break graph capture."""
    script = """
import jaxtyping
jaxtyping.install_import_hook("posenc.core", "beartype.beartype")
import torch
from posenc import Frequencies, RoPE, RotaryTable, apply_rotary, inverse, rotary_table, rotary_table_nd

table = rotary_table(torch.arange(5), Frequencies(torch.ones(4, dtype=torch.float64)))
for dtype in (torch.float32, torch.float64, torch.bfloat16):
    x = torch.zeros(2, 3, 5, 8, dtype=dtype)
    assert apply_rotary(x, inverse(table), pairing="half").shape == x.shape
    assert apply_rotary(x.transpose(1, 2), table, pairing="interleaved", head_axis=-2).shape == (2, 5, 3, 8)
    assert RoPE(8)(x, x[:, :1], 0)[1].shape == (2, 1, 5, 8)
rotary_table_nd(torch.zeros(5, 2), Frequencies(torch.ones(2, 4, dtype=torch.float64)))
for wrong in (torch.zeros(2, 3, 5, 8, dtype=torch.int64), "x"):
    try:
        apply_rotary(wrong, table, pairing="half")
    except jaxtyping.TypeCheckError:
        print("caught")
"""
    assert in_a_new_process(script).split() == ["caught", "caught"]
