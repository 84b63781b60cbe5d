"""The kernel built again: with the address and undefined-behaviour sanitizers, and for this processor alone."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from tests.kernels.same_bits import BF16, DTYPES, F16, F32, F64, PAIRINGS, same, table_of

from posenc import apply_rotary

SOURCE = Path(__file__).parents[2] / "src/posenc/kernels/rotary.c"
BY_HAND = Path(__file__).with_name("rotary_by_hand.py")
GCC = shutil.which("gcc")

pytestmark = pytest.mark.skipif(GCC is None or sys.platform != "linux", reason="needs gcc on Linux")


def build(folder: Path, *flags: str) -> Path:
    library = folder / "_rotary.abi3.so"
    include = sysconfig.get_paths()["include"]
    # the flags of pyproject.toml, then those of the test
    fixed = ["-shared", "-fPIC", "-O3", "-ffp-contract=off", "-fno-trapping-math", "-DPy_LIMITED_API=0x030B0000"]
    subprocess.run([GCC, *fixed, f"-I{include}", *flags, str(SOURCE), "-o", str(library)], check=True, timeout=120)
    return library


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory):
    runtime = subprocess.run([GCC, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True).stdout.strip()
    if not os.path.isabs(runtime):
        pytest.skip("gcc has no address sanitizer here")
    flags = [
        "-O1",
        "-g",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=undefined",
        "-fno-wrapv",
        "-Wall",
        "-Wextra",
        "-Werror",
    ]
    library = build(tmp_path_factory.mktemp("sanitized"), *flags)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        # malloc for every Python object, so that each buffer has the sanitizer's zones around it
        more = {"LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"}
        command = [sys.executable, "-S", "-s", str(BY_HAND), str(library), *arguments]
        return subprocess.run(command, env=os.environ | more, capture_output=True, text=True, timeout=600)

    return run


@pytest.mark.parametrize("calls", ["150", pytest.param("3000", marks=pytest.mark.slow)])
def test_drawn_calls_touch_their_own_memory_alone(sanitized, calls):
    done = sanitized("fuzz", "1", calls)
    assert (done.returncode, done.stderr[-2000:]) == (0, "")
    assert done.stdout == f"{calls} calls, each right\n"


@pytest.mark.parametrize(
    ("broken", "found"),
    [
        ("a result that is a row short", "heap-buffer-overflow"),
        ("a table that is a number short", "heap-buffer-overflow"),
        ("sizes whose product is too large", "signed integer overflow"),
    ],
)
def test_the_sanitizers_do_find_mistakes(sanitized, broken, found):
    done = sanitized("broken", broken)
    assert done.returncode != 0
    assert found in done.stderr


@pytest.mark.parametrize("flags", [["-march=native"], ["-O2", "-DWITHOUT_HALF_HARDWARE"]])
def test_other_builds_have_the_same_bits(tmp_path, flags):
    # for a processor with fused multiply-add GCC 12 makes vfmaddsub of interleaved pairs, if it may
    if platform.machine() not in ("x86_64", "AMD64") and "-march=native" in flags:
        flags = [flag for flag in flags if flag != "-march=native"]
    loader = importlib.machinery.ExtensionFileLoader("_rotary", str(build(tmp_path, *flags)))
    built = importlib.util.module_from_spec(importlib.util.spec_from_loader("_rotary", loader))
    loader.exec_module(built)
    for dtype in DTYPES:
        narrow = dtype.itemsize == 2
        for pairs in (1, 2, 3, 7, 16, 33):
            tokens = 2**15 // pairs if narrow else 5
            x = torch.randn(2, 1, tokens, 2 * pairs).to(dtype)
            if narrow:  # every number
                every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
                x = every[torch.randperm(2**16)[: tokens * 2 * pairs]].view(1, 1, tokens, 2 * pairs)
            table = table_of(range(tokens), pairs, F64 if dtype == F64 else F32)
            for pairing in PAIRINGS:
                out = torch.empty_like(x)
                memory = x.data_ptr(), out.data_ptr(), x.shape, x.stride(), out.stride()
                parts = table.cos.data_ptr(), table.sin.data_ptr(), table.cos.shape, table.cos.stride()
                code = [F32, F64, BF16, F16].index(dtype)
                built.rotate(code, pairing == "interleaved", 0, -3, False, *memory, *parts)
                assert same(out, apply_rotary(x, table, pairing=pairing, backend="reference"))
