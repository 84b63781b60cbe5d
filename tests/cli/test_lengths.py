"""``posenc lengths``: a data set against a trained length, mistakes in one line."""

from __future__ import annotations

import json

import jsonschema
import pytest
from click.testing import CliRunner

from posenc import CATALOG
from posenc.cli.main import main

GROUP = {
    "type": "object",
    "required": ["name", "count", "tokens", "shortest", "longest", "quantiles", "beyond", "tokens_beyond", "share_beyond"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string"},
        "quantiles": {"type": "object", "required": ["0.5", "0.9", "0.95", "0.99"]},
        "share_beyond": {"type": "number", "minimum": 0, "maximum": 1},
        **{
            key: {"type": "integer", "minimum": 0}
            for key in ("count", "tokens", "shortest", "longest", "beyond", "tokens_beyond")
        },
    },
}
SCHEMA = {
    "type": "object",
    "required": ["schema", "trained", "unit", "total", "groups", "encodings"],
    "properties": {
        "schema": {"const": "posenc.lengths/1"},
        "unit": {"enum": ["tokens", "words", "bytes", "lines"]},
        "total": GROUP,
        "groups": {"type": "array", "items": GROUP},
        "encodings": {
            "type": "array",
            "items": {
                "required": ["name", "defined", "words"],
                "properties": {"defined": {"type": "boolean"}},
            },
        },
    },
}


def run(*arguments: object):
    return CliRunner().invoke(main, ["lengths", *map(str, arguments)])


def data(*arguments: object):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    jsonschema.validate(found, SCHEMA)
    return found


def write(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_length_per_line(tmp_path):
    file = write(tmp_path / "lengths.txt", "100\r\n200\n\n 5000 \n")
    found = data(file, "--trained", 4096)
    assert found["unit"] == "tokens"
    assert found["total"]["count"] == 3
    assert found["total"]["quantiles"] == {"0.5": 200, "0.9": 5000, "0.95": 5000, "0.99": 5000}
    assert found["total"]["tokens_beyond"] == 904
    assert found["groups"] == []
    assert [encoding["name"] for encoding in found["encodings"]] == list(CATALOG)


def test_in_words(tmp_path):
    result = run(write(tmp_path / "lengths.txt", "100\n200\n5000\n"), "--trained", 4096)
    assert result.exit_code == 0
    assert "1 of 3 sequences are longer than 4,096; 17.1% of all tokens stand past it." in result.stdout
    assert "    rope" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_nothing_is_said_of_encodings_where_nothing_is_past(tmp_path):
    result = run(write(tmp_path / "lengths.txt", "1\n"), "--trained", 4096)
    assert "0 of 1 sequences are longer" in result.stdout
    assert "rope" not in result.stdout


@pytest.mark.parametrize(("unit", "length"), [("words", 4), ("bytes", 19), ("lines", 2)])
def test_a_text_is_one_sequence(tmp_path, unit, length):
    file = write(tmp_path / "text.md", "one two\nthree vié\n")  # é is two bytes
    assert data(file, "--trained", 3, "--tokens", unit)["total"]["longest"] == length


def test_bytes_need_no_encoding(tmp_path):
    assert data(write(tmp_path / "a.bin", b"\xff\x00\xfe"), "--trained", 3, "--tokens", "bytes")["total"]["longest"] == 3


def test_other_units_are_not_passed_off_as_tokens(tmp_path):
    result = run(write(tmp_path / "text.md", "one two"), "--trained", 1, "--tokens", "words")
    assert "Lengths in words, which are not tokens" in result.stdout
    assert "50.0% of all words" in result.stdout


def test_records(tmp_path):
    lines = [{"n": 5, "ids": [1, 2, 3], "text": "a b\u2028c"}, {"n": 0, "ids": [], "text": ""}]
    file = write(tmp_path / "a.jsonl", "\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n\n")
    assert data(file, "--trained", 3, "--key", "n")["total"]["tokens"] == 5
    assert data(file, "--trained", 3, "--key", "ids")["total"]["tokens"] == 3
    assert data(file, "--trained", 3, "--key", "text", "--tokens", "words")["total"]["tokens"] == 3
    assert data(file, "--trained", 3, "--key", "text", "--tokens", "bytes")["total"]["tokens"] == 7


def test_groups(tmp_path):
    files = (
        write(tmp_path / "x" / "a.txt", "1\n9\n"),
        write(tmp_path / "y" / "b.txt", "9\n"),
        write(tmp_path / "y" / "c", "2\n"),
    )

    def names(by):
        return {g["name"]: (g["count"], g["beyond"]) for g in data(*files, "--trained", 5, "--group-by", by)["groups"]}

    assert names("folder") == {str(tmp_path / "x"): (2, 1), str(tmp_path / "y"): (2, 1)}
    assert names("suffix") == {".txt": (3, 2), "no suffix": (1, 0)}
    assert names("file")[str(files[1])] == (1, 1)
    assert "no suffix" in run(*files, "--trained", 5, "--group-by", "suffix").stdout


def test_many_groups_are_cut_and_that_is_said(tmp_path):
    files = [write(tmp_path / f"{index}.txt", "1\n") for index in range(25)]
    out = run(*files, "--trained", 5, "--group-by", "file").stdout
    assert "… and 5 groups" in out
    assert max(map(len, out.splitlines())) <= 100


def test_names_cannot_steer_the_terminal(tmp_path):
    file = write(tmp_path / "a\x1b[31m.txt", "1\n")
    assert "\x1b" not in run(file, "--trained", 5, "--group-by", "file").stdout
    assert "\x1b" not in run(write(tmp_path / "b\x1b.txt", "x\n"), "--trained", 5).stderr


MISTAKES = {
    "a word": (
        "a.txt",
        "1\ntwo\n",
        [],
        "line 2: 'two'. Expected a whole number, one length per line. For texts pass --tokens words.",
    ),
    "a fraction": ("a.txt", "1.5\n", [], "line 1: '1.5'. Expected a whole number"),
    "negative": ("a.txt", "-1\n", [], "line 1: '-1'. Expected a whole number"),
    "huge": ("a.txt", "9" * 5000, [], "Expected a whole number"),
    "empty": ("a.txt", "", [], "length_report: no lengths. Expected one or more."),
    "not text": ("a.txt", b"1\n\xff\n", [], "is not UTF-8 at byte 2. Expected text."),
    "no key": ("a.jsonl", '{"n": 1}\n', [], "without --key. Expected the field"),
    "another key": ("a.jsonl", '{"n": 1}\n', ["--key", "m"], "line 1 has no field 'm'. Expected one in every line. It has: n."),
    "no object": ("a.jsonl", "[1]\n", ["--key", "m"], "line 1 has no field 'm'. Expected one in every line. It has: a list."),
    "no JSON": ("a.jsonl", "{\n", ["--key", "m"], "line 1 is not JSON. Expected an object per line."),
    "a text": ("a.jsonl", '{"m": "a b"}\n', ["--key", "m"], 'm = "a b". Expected a length of 0 or more, or a list of tokens.'),
    "no text": (
        "a.jsonl",
        '{"m": 3}\n',
        ["--key", "m", "--tokens", "words"],
        "m = 3. Expected a text. For lengths and lists leave",
    ),
    "a truth": ("a.jsonl", '{"m": true}\n', ["--key", "m"], "m = true. Expected a length of 0 or more"),
    "below": ("a.jsonl", '{"m": -1}\n', ["--key", "m"], "m = -1. Expected a length of 0 or more"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_line_and_exit_2(tmp_path, name):
    file, content, options, message = MISTAKES[name]
    result = run(write(tmp_path / file, content), "--trained", 10, *options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_places_that_hold_no_lengths(tmp_path):
    assert "is a folder. Expected files." in run(tmp_path, "--trained", 5).stderr
    assert "No such file or directory" in run(tmp_path / "none", "--trained", 5).stderr
    assert "trained = 0. Expected an integer of 1 or more" in run(write(tmp_path / "a", "1"), "--trained", 0).stderr
