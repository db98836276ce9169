"""A file, a hub data set or objects in memory -> numbered records; every fault is named by its row."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kleash.data.gym import gym_rows, is_gym
from kleash.errors import UsageError

Record = dict[str, Any]
TAB = "\t"
SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".gz")
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")


@dataclass(frozen=True)
class Records:
    """Records with their 1-based numbers (the line in JSON Lines, else the data row), source and hash."""

    numbered: list[tuple[int, Record]]
    name: str
    sha256: str


def read_records(source: Any, *, split: str = "train") -> Records:
    """Records of a path, a hub name `owner/name[:config]`, `gym:TASK` (see kleash.data.gym), a
    `datasets.Dataset`, a dict of splits, or dicts.

    A file's hash is that of its bytes, anything else's that of its records as canonical JSON.
    Raises UsageError naming the file and row when something cannot be read.
    """
    if is_gym(source):
        return _from_memory(gym_rows(source), source)
    if isinstance(source, (str, Path)):
        path = Path(source).expanduser()
        if path.is_file():
            return _read_file(path)
        if path.is_dir():
            raise UsageError(f"{path} is a folder; give one file ({', '.join(SUFFIXES)}) or a hub name.")
        return _from_memory(_load_hub(_hub_name(source, path), split), str(source))
    if isinstance(source, Mapping):  # a datasets.DatasetDict, or any mapping of split name to records
        return _from_memory(_choose_split(source, split), f"<split {split}>")
    if isinstance(source, Iterable):
        return _from_memory(source, "<data in memory>")
    raise UsageError(
        "Data must be a path, a hub name, a datasets.Dataset or a list of dicts, not "
        f"{type(source).__name__}."
    )


def _from_memory(records: Iterable[Any], name: str) -> Records:
    numbered = []
    digest = hashlib.sha256()
    for number, record in enumerate(records, start=1):
        if not isinstance(record, Mapping):
            raise UsageError(
                f"{name}, row {number}: a row must be a dict of columns, not {type(record).__name__}."
            )
        numbered.append((number, dict(record)))
        digest.update(json.dumps(record, sort_keys=True, default=str).encode("utf-8"))
    return Records(numbered, name, digest.hexdigest())


# ---- the hub ----


def _hub_name(source: str | Path, path: Path) -> str:
    """The source as a hub name, or UsageError when it can only have been meant as a file."""
    name = str(source)
    if isinstance(source, Path) or path.suffix in SUFFIXES or not HUB_NAME.fullmatch(name):
        folder = path.parent if path.parent.is_dir() else None
        near = sorted(p.name for p in folder.iterdir() if p.suffix in SUFFIXES)[:8] if folder else []
        hint = f" Data files in {folder}: {', '.join(near)}." if near else ""
        raise UsageError(f"No file {name}, and it is not a hub name (owner/name or owner/name:config).{hint}")
    return name


def _load_hub(name: str, split: str) -> Any:
    """A hub data set's split, through `datasets` (which caches it); every failure becomes one paragraph."""
    import datasets

    repo, _, config = name.partition(":")
    try:
        return datasets.load_dataset(repo, config or None, split=split)
    except ConnectionError as error:
        raise UsageError(
            f"{name} is no file here, and the hub could not be reached to look it up there ({error}). Check "
            "the path, or the network; a data set fetched earlier is also found offline, with "
            "HF_HUB_OFFLINE=1."
        ) from error
    # no such set, split or configuration; a set with a loading script; a file of it that cannot be read
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise UsageError(
            f"{name} is no file here, and loading split '{split}' of it from the hub failed: {error} A "
            "configuration is chosen with owner/name:config."
        ) from error


def _choose_split(splits: Mapping[str, Any], split: str) -> Iterable[Any]:
    if split not in splits:
        raise UsageError(f"The data has no split '{split}'; it has {', '.join(map(repr, splits))}.")
    records: Iterable[Any] = splits[split]
    return records


# ---- files ----


def _read_file(path: Path) -> Records:
    """One file: gzip by its first bytes, the format by its suffix, JSON Lines by the first character."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error
    suffixes = [s.lower() for s in path.suffixes]
    kind = next((s for s in reversed(suffixes) if s != ".gz"), "")
    data = _gunzip(path, raw) if raw[:2] == b"\x1f\x8b" else raw
    if kind == ".parquet":
        numbered = list(enumerate(_parquet(path, data), start=1))
    elif kind in (".csv", ".tsv"):
        numbered = list(_csv(path, data, TAB if kind == ".tsv" else ","))
    elif kind in (".json", ".jsonl", ".ndjson"):
        numbered = list(_json(path, data))
    else:
        raise UsageError(f"{path}: unknown kind of file '{kind}'; expected {', '.join(SUFFIXES)}.")
    if not numbered:
        raise UsageError(f"{path} is empty: it holds no rows.")
    return Records(numbered, str(path), hashlib.sha256(raw).hexdigest())


def _gunzip(path: Path, raw: bytes) -> bytes:
    try:
        return gzip.decompress(raw)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UsageError(
            f"{path} is a broken or cut-off gzip file ({error}); fetch or write it again."
        ) from error


def _decode(path: Path, number: int, data: bytes) -> str:
    """UTF-8 text of one row (a byte-order mark is taken off), or UsageError that says which byte is wrong."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        utf16 = data[:2] in (b"\xff\xfe", b"\xfe\xff")
        raise _not_utf8(path, number, data[error.start], error.start, utf16) from error


def _not_utf8(path: Path, number: int, byte: int, position: int, utf16: bool = False) -> UsageError:
    other = "UTF-16" if utf16 else "WINDOWS-1252"
    return UsageError(
        f"{path}, row {number}: not UTF-8 ({other}, perhaps): byte 0x{byte:02x} at position {position} of "
        f"the row. Convert the file first, e.g. iconv -f {other} -t UTF-8 {path.name}."
    )


def _json(path: Path, data: bytes) -> Iterator[tuple[int, Record]]:
    """JSON Lines (numbered by line, blank lines skipped), or one array of objects."""
    head = data[:64].removeprefix(b"\xef\xbb\xbf").lstrip()
    if head.startswith(b"["):
        lines: Iterable[tuple[int, Any]] = enumerate(_json_array(path, data), start=1)
    else:
        lines = (
            (number, _parse_json(path, number, _decode(path, number, line)))
            for number, line in enumerate(data.split(b"\n"), start=1)
            if line.strip()
        )
    for number, value in lines:
        if not isinstance(value, dict):
            raise UsageError(
                f"{path}, row {number}: expected a JSON object of columns, found {short(value)}."
            )
        yield number, value


def _json_array(path: Path, data: bytes) -> list[Any]:
    """Values of one array; a byte that is not UTF-8 is reported with the row it stands in."""
    try:
        values: list[Any] = _parse_json(path, 1, data.decode("utf-8-sig"))
        return values
    except UnicodeDecodeError as error:
        text = data.decode("utf-8-sig", errors="surrogateescape")  # a wrong byte 0xNN becomes U+DCNN
        for number, value in enumerate(_parse_json(path, 1, text), start=1):
            row = json.dumps(value, ensure_ascii=False)
            wrong = next((c for c in row if "\udc80" <= c <= "\udcff"), None)
            if wrong is not None:
                raise _not_utf8(path, number, ord(wrong) - 0xDC00, row.index(wrong)) from error
        raise


def _parse_json(path: Path, number: int, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(
            f"{path}, row {number}: not valid JSON ({error.msg}, line {error.lineno}, column {error.colno}): "
            f"{short(text)}. Write one JSON object a line, or one array of objects."
        ) from error


def _csv(path: Path, data: bytes, delimiter: str) -> Iterator[tuple[int, Record]]:
    """Records of a table with a header line; numbers count data rows. Values are text, a missing one None."""
    before = csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # the default refuses texts above 128 KiB
    try:
        reader = csv.DictReader(
            io.StringIO(_csv_text(path, data), newline=""), delimiter=delimiter, strict=True
        )
        _check_header(path, list(reader.fieldnames or []), delimiter)
        for number, record in enumerate(reader, start=1):
            if None in record:
                raise UsageError(
                    f"{path}, row {number}: more values than the {len(reader.fieldnames or [])} columns of "
                    f"the header; a text that holds {delimiter!r} or a line break must stand in double "
                    "quotes."
                )
            yield number, dict(record)
    except csv.Error as error:
        raise UsageError(f"{path}, near line {reader.line_num}: not a well-formed table: {error}.") from error
    finally:
        csv.field_size_limit(before)


def _check_header(path: Path, columns: list[str], delimiter: str) -> None:
    """UsageError where the header was not taken apart, or names a column twice."""
    signs = [sign for sign in (",", TAB, ";", "|") if sign != delimiter and sign in "".join(columns)]
    if len(columns) == 1 and signs:
        raise UsageError(
            f"{path}: the header is one column, {short(columns[0])}, because columns are separated by "
            f"{delimiter!r} here and not by {signs[0]!r} (',' in .csv, tab in .tsv)."
        )
    twice = next((column for column in columns if columns.count(column) > 1), None)
    if twice is not None:
        raise UsageError(f"{path}: the header names {twice!r} twice; give every column a name of its own.")


def _csv_text(path: Path, data: bytes) -> str:
    """The whole table as text; a wrong byte is reported with the line it stands on."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        start = data.rfind(b"\n", 0, error.start) + 1
        row = data.count(b"\n", 0, error.start)  # the header is line 0
        return _decode(path, row, data[start : data.find(b"\n", error.start) + 1 or None])


def _parquet(path: Path, data: bytes) -> list[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        records: list[Record] = pyarrow.parquet.read_table(io.BytesIO(data)).to_pylist()
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not a readable Parquet file of UTF-8 text: {error}.") from error
    return records


def short(value: Any, width: int = 80) -> str:
    """A value as it can stand in an error message."""
    text = repr(value)
    return text if len(text) <= width else text[: width - 1] + "…"
