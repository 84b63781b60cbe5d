"""The command itself: quick help, subcommands found without importing them, mistakes as one line."""

from __future__ import annotations

import subprocess
import sys
import time

import click
import pytest
from click.testing import CliRunner

from posenc import BackendRefused, ShapeError, __version__
from posenc.cli.main import COMMANDS, Subcommand, main
from posenc.errors import require

HELP = "import sys; from posenc.cli.main import main; main({arguments}, standalone_mode=False)"
THEN_LOADED = "; print('loaded:', *sorted({'torch', 'rich', 'matplotlib', 'numpy'} & set(sys.modules)))"


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["--version"]])
def test_help_and_version_import_nothing_heavy(arguments):
    done = run_python(HELP.format(arguments=arguments) + THEN_LOADED)
    assert done.stdout.rstrip().endswith("loaded:"), done.stdout + done.stderr


@pytest.mark.parametrize("arguments", [["lst"], ["--hepl"], []])
def test_usage_errors_import_nothing_heavy(arguments):
    code = "try: main({0})\nexcept SystemExit as error: assert error.code == 2, error.code"
    done = run_python(f"import sys; from posenc.cli.main import main\n{code.format(arguments)}\n{THEN_LOADED[2:]}")
    assert done.stdout.rstrip().endswith("loaded:"), done.stdout + done.stderr


def test_help_is_quick():
    # 0.1 s where this was written; the bound is for busy machines, and importing torch alone would break it
    def once() -> float:
        started = time.perf_counter()
        run_python(HELP.format(arguments=["--help"]))
        return time.perf_counter() - started

    assert min(once() for _ in range(3)) < 1.0


def test_help_lists_every_subcommand_on_one_line_each():
    result = CliRunner().invoke(main, ["--help"], terminal_width=80)
    assert result.exit_code == 0
    for name, subcommand in COMMANDS.items():
        assert f"  {name.ljust(len(max(COMMANDS, key=len)))}  {subcommand.help}\n" in result.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_subcommand_is_where_the_mapping_says(name):
    command = main.get_command(click.Context(main), name)
    assert command is not None
    assert command.name == name
    assert CliRunner().invoke(main, [name, "-h"]).exit_code == 0


def test_a_missing_numpy_is_no_news_here_nor_in_workers():
    code = """
import multiprocessing, os, sys
sys.modules["numpy"] = None  # as if it were not installed
from posenc.cli.main import main
main(["list"], standalone_mode=False)
with multiprocessing.get_context("spawn").Pool(1) as pool:
    print(pool.apply(eval, ("__import__('sys').warnoptions",)))
"""
    done = run_python(code)
    assert done.stderr == ""
    assert "ignore:Failed to initialize NumPy" in done.stdout.splitlines()[-1]


def test_completion_imports_nothing_heavy():
    code = "import sys, click; from posenc.cli.main import main; print([i.value for i in main.shell_complete(click.Context(main), 'li')])"
    done = run_python(code + THEN_LOADED)
    assert done.stdout == "['lint', 'list']\nloaded:\n", done.stderr


def test_version():
    assert CliRunner().invoke(main, ["--version"]).stdout == f"posenc, version {__version__}\n"


def test_unknown_command_suggests_a_close_one():
    result = CliRunner().invoke(main, ["comapre"])
    assert result.exit_code == 2
    assert "There is no command 'comapre'. Did you mean compare?" in result.stderr


def test_unknown_command_without_a_close_one_lists_all():
    result = CliRunner().invoke(main, ["zzz\x1b[31m"])
    assert result.exit_code == 2
    assert f"Expected one of {', '.join(sorted(COMMANDS))}." in result.stderr
    assert "\x1b" not in result.stderr


ERRORS = {
    "value": (ValueError("f: x = 3. Expected 4. Pass 4."), "Error: f: x = 3. Expected 4. Pass 4.\n"),
    "type": (TypeError("f: a str. Expected an int. Pass one."), "Error: f: a str. Expected an int. Pass one.\n"),
    "shape": (ShapeError("f: (2,). Expected (3,). Look."), "Error: f: (2,). Expected (3,). Look.\n"),
    "refused": (
        BackendRefused("attention: no. Expected yes. Use auto.", {}),
        "Error: attention: no. Expected yes. Use auto.\n",
    ),
    "read-only": (
        PermissionError(13, "Permission denied", "results/run.json"),
        "Error: results/run.json: Permission denied. Expected a place that can be read and written. Choose another, or make room.\n",
    ),
    "full": (
        OSError(28, "No space left on device"),
        "Error: No space left on device. Expected a place that can be read and written. Choose another, or make room.\n",
    ),
    "own": (OSError("f: no room. Expected room. Make some."), "Error: f: no room. Expected room. Make some.\n"),
    "control characters": (ValueError("f: 'a\x1b[31m[bold]é'."), "Error: f: 'a\\x1b[31m[bold]é'.\n"),
    "silent": (ValueError(), "Error: ValueError\n"),
}


@pytest.fixture
def fail_with(monkeypatch):
    """Runs a subcommand whose body raises the given error."""

    def run(error: BaseException, *options: str):
        @click.command("fail")
        def fail() -> None:
            raise error

        monkeypatch.setattr(sys.modules[__name__], "fail", fail, raising=False)
        monkeypatch.setitem(COMMANDS, "fail", Subcommand(f"{__name__}:fail", "Fails."))
        return CliRunner().invoke(main, [*options, "fail"])

    return run


@pytest.mark.parametrize("name", ERRORS)
def test_mistakes_are_one_message_and_exit_code_2(fail_with, name):
    error, message = ERRORS[name]
    result = fail_with(error)
    assert result.exit_code == 2
    assert result.stderr == message
    assert result.stdout == ""


def test_a_missing_optional_package_says_what_to_install(fail_with):
    with pytest.raises(ImportError) as caught:
        require("no_such_package_at_all", "plot")
    result = fail_with(caught.value)
    assert result.exit_code == 2
    assert "Run: pip install 'posenc[plot]'." in result.stderr


@pytest.mark.parametrize("error", [RuntimeError("a bug"), ModuleNotFoundError("No module named 'x'", name="x"), KeyError("k")])
def test_bugs_keep_their_traceback(fail_with, error):
    assert fail_with(error).exception is error


def test_traceback_on_request(fail_with):
    error = ValueError("f: x = 3.")
    assert fail_with(error, "--traceback").exception is error


def test_interruption_is_a_line_and_exit_code_130(fail_with):
    result = fail_with(KeyboardInterrupt())
    assert result.exit_code == 130
    assert result.stderr == "\nInterrupted.\n"


def test_an_import_that_fails_inside_a_subcommand_is_not_hidden(monkeypatch):
    monkeypatch.setitem(COMMANDS, "gone", Subcommand("posenc.cli.gone:gone", "Is not there."))
    assert isinstance(CliRunner().invoke(main, ["gone"]).exception, ModuleNotFoundError)
