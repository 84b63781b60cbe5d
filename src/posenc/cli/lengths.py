"""``posenc lengths``: how long a data set's sequences are, against a trained length."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from posenc.analysis.lengths import LengthGroup, LengthReport

SCHEMA = "posenc.lengths/1"
_GROUPS_SHOWN = 20
_MOST = 10**15


@click.command("lengths")
@click.argument("files", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option("--trained", type=int, required=True, help="The length the model was trained on, in tokens.")
@click.option("--group-by", type=click.Choice(["file", "folder", "suffix"]), help="Report each of these as well.")
@click.option("--tokens", type=click.Choice(["words", "bytes", "lines"]), help="Measure texts in these, in place of tokens.")
@click.option("--key", help="The field of .jsonl files that holds the sequence.")
@click.option("--json", "as_json", is_flag=True, help=f"Print JSON (schema {SCHEMA}).")
def lengths(
    files: tuple[Path, ...], trained: int, group_by: str | None, tokens: str | None, key: str | None, as_json: bool
) -> None:
    """Say how many sequences are longer than a model was trained for, and what encodings do there.

    \b
    What a FILE holds:
      numbers    the default: one length in tokens per line
      .jsonl     one sequence per line, in the field --key: its length or a list
                 of tokens; with --tokens a text, measured in these
      a text     with --tokens: one sequence, measured in these

    Words, bytes and lines are not tokens: a tokenizer usually makes more tokens than there are words, and fewer than
    there are bytes.
    """
    from posenc.analysis.lengths import length_report
    from posenc.catalog import CATALOG, load_encoding

    measured: list[int] = []
    groups: list[str] = []
    for file in files:
        found = list(_lengths(file, tokens, key))
        measured += found
        groups += [_group(file, group_by)] * len(found)
    report = length_report(
        measured,
        trained,
        groups=groups if group_by else None,
        encodings=[load_encoding(name) for name in CATALOG],
    )
    unit = tokens or "tokens"
    click.echo(json.dumps(as_data(report, unit), indent=2, ensure_ascii=False) if as_json else _as_text(report, unit))


def as_data(report: LengthReport, unit: str) -> dict[str, Any]:
    """The report as plain data."""
    from posenc.analysis.lengths import QUANTILES

    def plain(group: LengthGroup) -> dict[str, Any]:
        quantiles = dict(zip(map(str, QUANTILES), group.quantiles, strict=True))
        return {**asdict(group), "quantiles": quantiles, "share_beyond": group.share_beyond}

    return {
        "schema": SCHEMA,
        "trained": report.trained,
        "unit": unit,
        "total": plain(report.total),
        "groups": [plain(group) for group in report.groups],
        "encodings": [asdict(encoding) for encoding in report.encodings],
    }


def _as_text(report: LengthReport, unit: str) -> str:
    from posenc.analysis.lengths import QUANTILES
    from posenc.cli.main import printable

    total = report.total
    head = ("", "sequences", *(f"{share:.0%}" for share in QUANTILES), "longest", "past it")
    shown = [total, *report.groups[:_GROUPS_SHOWN]]
    rows = [head, *(_row(group) for group in shown)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    widths[0] = min(widths[0], 24)
    measured = unit if unit == "tokens" else f"{unit}, which are not tokens"
    lines = [f"Lengths in {measured}; trained length {report.trained:,}.", ""]
    for row in rows:
        name = row[0] if len(row[0]) <= widths[0] else "…" + row[0][1 - widths[0] :]
        cells = [name.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    if len(report.groups) > _GROUPS_SHOWN:
        lines.append(f"… and {len(report.groups) - _GROUPS_SHOWN} groups with no greater share past it; --json has all.")
    past = f"{total.beyond:,} of {total.count:,} sequences are longer than {report.trained:,}"
    share = total.tokens_beyond / total.tokens if total.tokens else 0.0
    lines += ["", f"{past}; {share:.1%} of all {unit} stand past it."]
    if total.beyond:
        lines += ["", "Past it, by what each encoding claims, which says nothing of a trained model:"]
        names: dict[str, list[str]] = {}
        for encoding in report.encodings:
            names.setdefault(encoding.words, []).append(encoding.name)
        for words, named in names.items():
            lines += [f"  {words}:", *wrap(", ".join(named), 76, initial_indent="    ", subsequent_indent="    ")]
    return printable("\n".join(lines))


def _row(group: LengthGroup) -> tuple[str, ...]:
    quantiles = (f"{length:,}" for length in group.quantiles)
    return group.name, f"{group.count:,}", *quantiles, f"{group.longest:,}", f"{group.share_beyond:.1%}"


def _group(file: Path, group_by: str | None) -> str:
    if group_by == "folder":
        return str(file.parent)
    return (file.suffix or "no suffix") if group_by == "suffix" else str(file)


def _lengths(file: Path, tokens: str | None, key: str | None) -> Iterator[int]:
    """The length of each sequence in a file."""
    if file.is_dir():
        raise ValueError(f"lengths: {file} is a folder. Expected files. Name those inside, {file / '*'}.")
    content = file.read_bytes()
    if file.suffix == ".jsonl":
        yield from _of_records(file, content, tokens, key)
    elif tokens is not None:
        yield len(content) if tokens == "bytes" else _measure(_decoded(file, content), tokens)
    else:
        yield from _of_numbers(file, content)


def _of_numbers(file: Path, content: bytes) -> Iterator[int]:
    for number, line in enumerate(_decoded(file, content).splitlines(), 1):
        text = line.strip()
        if not text:
            continue
        if not (text.isascii() and text.isdigit() and len(text) < 19 and int(text) < _MOST):
            raise ValueError(
                f"lengths: {file}, line {number}: {text[:40]!r}. Expected a whole number, one length per line. "
                "For texts pass --tokens words."
            )
        yield int(text)


def _of_records(file: Path, content: bytes, tokens: str | None, key: str | None) -> Iterator[int]:
    if key is None:
        raise ValueError(f"lengths: {file} without --key. Expected the field that holds the sequence or its length. Name it.")
    for number, line in enumerate(_decoded(file, content).split("\n"), 1):  # a text may hold other line breaks
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"lengths: {file}, line {number} is not JSON. Expected an object per line. Mend the line."
            ) from error
        if not isinstance(record, dict) or key not in record:
            has = ", ".join(list(record)[:8]) if isinstance(record, dict) else f"a {type(record).__name__}"
            raise ValueError(f"lengths: {file}, line {number} has no field {key!r}. Expected one in every line. It has: {has}.")
        value = record[key]
        if tokens is not None and isinstance(value, str):
            yield _measure(value, tokens)
        elif tokens is None and isinstance(value, list):
            yield len(value)
        elif tokens is None and isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST:
            yield value
        else:
            rule = "a length of 0 or more, or a list of tokens" if tokens is None else "a text"
            mend = "For texts pass --tokens words." if tokens is None else "For lengths and lists leave --tokens away."
            raise ValueError(f"lengths: {file}, line {number}: {key} = {json.dumps(value)[:40]}. Expected {rule}. {mend}")


def _measure(text: str, tokens: str) -> int:
    if tokens == "bytes":
        return len(text.encode("utf-8", "surrogatepass"))
    return len(text.split()) if tokens == "words" else len(text.splitlines())


def _decoded(file: Path, content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"lengths: {file} is not UTF-8 at byte {error.start}. Expected text. Convert it first.") from error
