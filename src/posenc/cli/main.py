"""The ``posenc`` command: finds subcommands without importing them, and turns mistakes into one line.

``posenc --help`` must be quick, and torch takes seconds to import, so a subcommand's module is imported only when that
subcommand runs; its line in the help stands here.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple, final

import click
from click.shell_completion import CompletionItem

from posenc import __version__
from posenc.errors import BackendRefused


class Subcommand(NamedTuple):
    """Where a subcommand lives, ``"module:attribute"``, and its line in the help."""

    where: str
    help: str


COMMANDS = {
    "audit": Subcommand("posenc.cli.audit:audit_model", "Find silent position bugs in a model."),
    "compare": Subcommand("posenc.cli.compare:compare", "Train a small Transformer per encoding; report what was measured."),
    "lengths": Subcommand("posenc.cli.lengths:lengths", "Say how many sequences are longer than a model was trained for."),
    "lint": Subcommand("posenc.cli.lint:lint_config", "Find position keys of a config.json that are unread or in conflict."),
    "list": Subcommand("posenc.cli.list:list_encodings", "List the encodings: where they act, what they claim, their papers."),
    "plan": Subcommand("posenc.cli.plan:plan_config", "Say what a model's config.json does with positions, layer by layer."),
    "plot": Subcommand("posenc.cli.plot:plot", "Draw what positions do: codes, wavelengths, biases, precision."),
}


@final
class Mistake(click.ClickException):
    """What the user can mend: one message on stderr, exit code 2, as for a wrong option."""

    exit_code = 2


@final
class LazyGroup(click.Group):
    """A group whose subcommands are imported when they run, not when they are listed."""

    def __init__(self, *args: Any, subcommands: Mapping[str, Subcommand], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.subcommands = subcommands

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self.subcommands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.subcommands:
            return None
        _expect_no_numpy()
        module, _, attribute = self.subcommands[cmd_name].where.partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.subcommands[name].help) for name in self.list_commands(ctx)])

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] in self.subcommands or args[0].startswith("-"):
            return super().resolve_command(ctx, args)
        close = get_close_matches(args[0], self.subcommands)
        advice = f"Did you mean {' or '.join(close)}?" if close else f"Expected one of {', '.join(self.list_commands(ctx))}."
        raise click.UsageError(f"There is no command {args[0]!r}. {advice}", ctx)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        items = [CompletionItem(name, help=self.subcommands[name].help) for name in names]
        return [*items, *click.Command.shell_complete(self, ctx, incomplete)]

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("\nInterrupted.", err=True)
            ctx.exit(130)
        except Exception as error:
            message = mistake(error)
            if message is None or ctx.params.get("traceback"):
                raise
            raise Mistake(printable(message)) from error


def _expect_no_numpy() -> None:
    """Importing torch warns when numpy is missing; posenc needs none, so its users should not have to wonder."""
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    option = "ignore:Failed to initialize NumPy"
    if option not in sys.warnoptions:  # these are what worker processes inherit
        sys.warnoptions.append(option)


def mistake(error: Exception) -> str | None:
    """The line to show for an error that the user can mend; ``None`` for everything else.

    posenc's own messages already say what was expected and what to do. A failed ``import`` inside the package is a bug,
    so only `posenc.errors.require`, whose error names no module, counts.
    """
    if isinstance(error, (ValueError, TypeError, BackendRefused)):
        return str(error) or type(error).__name__
    if isinstance(error, ImportError) and error.name is None:
        return str(error)
    if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):  # click ends quietly on a closed pipe
        if error.strerror is None:  # posenc's own
            return str(error)
        where = "" if error.filename is None else f"{error.filename}: "
        return f"{where}{error.strerror}. Expected a place that can be read and written. Choose another, or make room."
    return None


def printable(text: str) -> str:
    """Text with control characters spelled out, so that names from outside cannot steer the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


@click.group(
    cls=LazyGroup,
    subcommands=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="posenc")
@click.option("--traceback", is_flag=True, help="Show where an error came from instead of its message alone.")
def main(traceback: bool) -> None:
    """Positional encodings for Transformers, compared by measurement."""
