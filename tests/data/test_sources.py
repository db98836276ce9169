"""Files and objects to rows: every format, every shape of row, every fault with its row."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kleash.data import files
from kleash.data.files import read_records
from kleash.data.sources import Rows, pairs_from_ranked, read_rows, split_rows
from kleash.errors import UsageError

PAIR = {"prompt": "Say hi.", "chosen": "Hi!", "rejected": "No."}
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
ODD_TEXT = "naïve 🙂 漢字 \u202e"


def write(path: Path, *records: Any, encoding: str = "utf-8") -> Path:
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    path.write_bytes(text.encode(encoding))
    return path


def fails(source: Any, kind: Any, **options: Any) -> str:
    with pytest.raises(UsageError) as error:
        read_rows(source, kind, **options)
    message = str(error.value)
    assert "\n" not in message, "a message is one paragraph"
    return message


# ---- formats ----


def jsonl(path: Path, records: list[dict]) -> None:
    write(path, *records)


def json_array(path: Path, records: list[dict]) -> None:
    path.write_text(json.dumps(records, indent=1), encoding="utf-8")


def table(path: Path, records: list[dict]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, records[0], delimiter="\t" if ".tsv" in path.suffixes else ",")
        writer.writeheader()
        writer.writerows(records)


def columnar(path: Path, records: list[dict]) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pytest.importorskip("pyarrow").Table.from_pylist(records), path)


WRITERS = {".jsonl": jsonl, ".json": json_array, ".csv": table, ".tsv": table, ".parquet": columnar}
RECORDS = [PAIR, {"prompt": ODD_TEXT, "chosen": 'a, "b"\nc', "rejected": "x"}]


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("mark", [False, True])
def test_every_format_reads_the_same_rows(suffix: str, zipped: bool, mark: bool, tmp_path: Path) -> None:
    path = tmp_path / f"pairs{suffix}"
    WRITERS[suffix](path, RECORDS)
    if mark and suffix != ".parquet":  # a UTF-8 byte-order mark, as Windows programs write
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    if zipped:
        path = path.rename(tmp_path / f"pairs{suffix}.gz")
        path.write_bytes(gzip.compress(path.read_bytes()))
    rows = read_rows(path, "preferences")
    assert [(r.prompt, r.chosen, r.rejected) for r in rows.rows] == [tuple(r.values()) for r in RECORDS]
    assert [r.number for r in rows.rows] == [1, 2]
    assert rows.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert rows.source == str(path)


def test_objects_read_like_files(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_list(RECORDS)
    from_list = read_rows(RECORDS, "preferences")
    assert read_rows(write(tmp_path / "a.jsonl", *RECORDS), "preferences").rows == from_list.rows
    assert read_rows(dataset, "preferences").rows == from_list.rows
    splits = datasets.DatasetDict({"train": dataset.select([0]), "test": dataset})
    assert read_rows(splits, "preferences", split="test").rows == from_list.rows
    assert "no split 'dev'; it has 'train', 'test'" in fails(splits, "preferences", split="dev")
    assert read_rows(dataset, "preferences").sha256 == from_list.sha256


def test_json_lines_named_json_and_blank_lines_keep_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('\n{"prompt": "a"}\n\n{"prompt": "b"}\n', encoding="utf-8")
    assert [(r.number, r.prompt) for r in read_rows(path, "prompts").rows] == [(2, "a"), (4, "b")]


def test_limit_counts_the_rows_kept(tmp_path: Path) -> None:
    empty = {**PAIR, "chosen": " "}
    rows = read_rows([empty, PAIR, {**PAIR, "prompt": "b"}, PAIR], "preferences", limit=2)
    assert (len(rows), rows.dropped) == (2, {"empty answer": 1})


def test_a_table_takes_long_texts(tmp_path: Path) -> None:
    table(tmp_path / "a.csv", [{"prompt": "x" * 200_000}])
    assert len(read_rows(tmp_path / "a.csv", "prompts").rows[0].prompt) == 200_000
    assert csv.field_size_limit() == 131072  # left as it was


# ---- files that cannot be read ----


def test_report_72_empty_file_and_empty_list(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.json", "a.csv"):
        (tmp_path / name).write_bytes(b"")
        assert f"{name} is empty" in fails(tmp_path / name, "prompts")
    (tmp_path / "b.json").write_text("[]", encoding="utf-8")
    assert "b.json is empty" in fails(tmp_path / "b.json", "prompts")
    (tmp_path / "b.csv").write_text("prompt\n", encoding="utf-8")
    assert "b.csv is empty" in fails(tmp_path / "b.csv", "prompts")
    assert "no usable row (it is empty)" in fails([], "prompts")


def test_report_74_wrong_encoding_names_file_row_and_byte(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "ok"}\n{"prompt": "na\xefve"}\n')
    message = fails(path, "prompts")
    assert f"{path}, row 2: not UTF-8 (WINDOWS-1252, perhaps): byte 0xef at position 14" in message
    assert "iconv" in message
    write(path, {"prompt": "x"}, encoding="utf-16")
    assert "row 1: not UTF-8 (UTF-16, perhaps)" in fails(path, "prompts")


def test_report_74_wrong_encoding_in_an_array_and_a_table(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'[{"prompt": "ok"}, {"prompt": "na\xefve"}]')
    assert "a.json, row 2: not UTF-8" in fails(tmp_path / "a.json", "prompts")
    (tmp_path / "a.csv").write_bytes(b"prompt,x\nok,1\nfine,2\nna\xefve,3\n")
    assert "a.csv, row 3: not UTF-8" in fails(tmp_path / "a.csv", "prompts")


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_report_74_lone_surrogates_are_reported_by_row(name: str, tmp_path: Path) -> None:
    rows = ['{"prompt": "ok"}', '{"prompt": "half \\ud83d of one"}', '{"prompt": "\\ud83d\\ude42"}']
    text = "\n".join(rows) if name == "a.jsonl" else f"[{','.join(rows)}]"
    (tmp_path / name).write_text(text, encoding="utf-8")
    message = fails(tmp_path / name, "prompts")
    assert f"{name}, row 2: 'prompt' holds a lone surrogate \\ud83d at character 5" in message
    kept = read_rows(tmp_path / name, "prompts", bad_rows="drop")
    assert [r.prompt for r in kept.rows] == ["ok", "🙂"] and kept.dropped == {"lone surrogate": 1}


def test_report_74_a_surrogate_deep_in_a_row_is_found() -> None:
    row = {"messages": [CHAT[0], {"role": "assistant", "content": "x\udc00"}]}
    assert "'messages[1].content' holds a lone surrogate" in fails([row], "demonstrations")


def test_report_74_reading_does_not_depend_on_the_platform_encoding(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": ODD_TEXT})
    code = (  # the module alone: importing the package would load torch, which takes longer than the test
        "import importlib, sys, types\n"
        "for name, folder in zip(('kleash', 'kleash.data'), sys.argv[2:]):\n"
        "    sys.modules[name] = types.ModuleType(name)\n"
        "    sys.modules[name].__path__ = [folder]\n"
        "files = importlib.import_module('kleash.data.files')\n"
        "print(ascii(files.read_records(sys.argv[1]).numbered[0][1]['prompt']))"
    )
    folder = Path(files.__file__).parent
    environment = {
        **os.environ,
        "PYTHONIOENCODING": "ascii",
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), str(folder.parent), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == ascii(ODD_TEXT)


def test_broken_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "abcdefgh"}' * 50)[:-20])
    assert "broken or cut-off gzip" in fails(tmp_path / "a.jsonl.gz", "prompts")
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n', encoding="utf-8")
    assert "a.jsonl, row 2: not valid JSON" in fails(tmp_path / "a.jsonl", "prompts")
    (tmp_path / "b.jsonl").write_text('{"prompt": "a"}\n"text"\n', encoding="utf-8")
    assert "b.jsonl, row 2: expected a JSON object of columns, found 'text'" in fails(
        tmp_path / "b.jsonl", "prompts"
    )
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
    assert "not a readable Parquet file" in fails(tmp_path / "a.parquet", "prompts")
    (tmp_path / "a.csv").write_text("prompt\na,b\n", encoding="utf-8")
    assert "a.csv, row 1: more values than the 1 columns of the header" in fails(
        tmp_path / "a.csv", "prompts"
    )
    (tmp_path / "a.txt").write_text("hello", encoding="utf-8")
    assert "unknown kind of file '.txt'" in fails(tmp_path / "a.txt", "prompts")


@pytest.mark.parametrize(
    ("name", "header", "message"),
    [
        ("a.csv", "prompt;chosen;rejected", "separated by ',' here and not by ';'"),
        ("a.csv", "prompt\tchosen\trejected", r"separated by ',' here and not by '\t'"),
        ("a.tsv", "prompt,chosen,rejected", r"separated by '\t' here and not by ','"),
        ("a.csv", "prompt,prompt,chosen,rejected", "the header names 'prompt' twice"),
    ],
)
def test_a_header_that_cannot_be_meant_is_named(name: str, header: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(f"{header}\na,b;c\n", encoding="utf-8")
    found = fails(tmp_path / name, "preferences")
    assert found.startswith(f"{tmp_path / name}: ") and message in found


def test_missing_files_and_folders(tmp_path: Path) -> None:
    write(tmp_path / "pairs.jsonl", PAIR)
    assert "Data files in" in fails(tmp_path / "pears.jsonl", "preferences")
    assert "pairs.jsonl" in fails(str(tmp_path / "pears.jsonl"), "preferences")
    assert "is a folder" in fails(tmp_path, "preferences")
    assert "not int" in fails(3, "preferences")
    assert "row 1: a row must be a dict of columns, not str" in fails(["text"], "prompts")


def test_a_hub_name_without_network_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach 'nobody/none' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    message = fails("nobody/none", "prompts")
    assert "nobody/none is no file here, and the hub could not be reached" in message
    assert "Check the path, or the network" in message


def test_a_hub_name_takes_configuration_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked = []

    def load(repo: str, config: str | None, split: str) -> Any:
        asked.append((repo, config, split))
        if split == "dev":
            raise ValueError('Unknown split "dev". Should be one of [test].')
        return datasets.Dataset.from_list([{"prompt": "a"}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert read_rows("owner/name:main", "prompts", split="test").source == "owner/name:main"
    assert asked == [("owner/name", "main", "test")]
    assert "loading split 'dev' of it from the hub failed: Unknown split" in fails(
        "imdb", "prompts", split="dev"
    )


# ---- rows that cannot be used ----


def test_report_72_missing_column_names_everything(tmp_path: Path) -> None:
    path = write(tmp_path / "pairs.jsonl", PAIR, {"prompt": "a", "chosen": "b", "rejectd": "c"})
    message = fails(path, "preferences")
    assert f"{path}, row 2: no column 'rejected'; found 'prompt', 'chosen', 'rejectd'." in message
    assert "Is 'rejectd' meant? Rename it to 'rejected'." in message
    assert '{"prompt": "Say hi.", "chosen": "Hi!", "rejected": "No."}' in message
    assert "bad_rows=drop" in message
    assert "Is 'Prompt' meant?" in fails([{"Prompt": "a"}], "prompts")
    assert "meant" not in fails([{"xyz": "a"}], "prompts")


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (None, "'chosen' is missing (null or NaN)"),
        (float("nan"), "'chosen' is missing (null or NaN)"),
        ({"answer": "x"}, "'chosen' is a dict with keys ['answer'], where text"),
        (42, "'chosen' is int 42, where text"),
        ([], "'chosen' must be a non-empty list of messages"),
        (["x"], "'chosen'[0] must be"),
        ([{"from": "gpt", "value": "x"}], "found keys ['from', 'value']"),
        ([{"role": "assistant", "content": None}], "'chosen'[0] has content None, where text is expected"),
    ],
)
def test_report_72_none_nan_dict_where_text_is_expected(value: Any, found: str) -> None:
    message = fails([PAIR, {**PAIR, "chosen": value}], "preferences")
    assert "row 2: " in message and found in message


def test_report_72_nan_in_other_columns_becomes_none() -> None:
    rows = read_rows([{"prompt": "a", "extra": float("nan"), "answer": "4"}], "prompts")
    assert rows.rows[0].columns == {"extra": None, "answer": "4"}


def test_report_73_useless_pairs_are_dropped_with_a_count() -> None:
    bad = [{**PAIR, "rejected": ""}, {**PAIR, "chosen": " \n\t"}, {**PAIR, "rejected": " Hi! "}]
    rows = read_rows([PAIR, *bad], "preferences")
    assert rows.dropped == {"empty answer": 2, "chosen and rejected are the same": 1}
    assert len(rows) == 1
    assert "row 2: 'rejected' is empty" in fails([PAIR, *bad], "preferences", bad_rows="strict")
    assert "2 dropped: empty answer" in fails(bad, "preferences")


def test_report_73_malformed_rows_are_dropped_only_when_asked() -> None:
    records = [PAIR, {**PAIR, "chosen": None}, {"prompt": "a", "chosen": "b"}]
    rows = read_rows(records, "preferences", bad_rows="drop")
    assert rows.dropped == {"'chosen' is missing": 1, "no column 'rejected'": 1}
    fails(records, "preferences")
    assert "bad_rows='skip' must be" in fails(records, "preferences", bad_rows="skip")
    assert "Unknown kind of rows 'pairs'" in fails(records, "pairs")


# ---- shapes ----


def test_demonstrations_from_prompt_and_completion() -> None:
    row = read_rows([{"prompt": "a", "completion": " b", "id": 7}], "demonstrations").rows[0]
    assert (row.prompt, row.completion, row.columns) == ("a", " b", {"id": 7})
    mixed = read_rows([{"prompt": "a", "completion": [CHAT[1]]}], "demonstrations").rows[0]
    assert (mixed.prompt, mixed.completion) == ([{"role": "user", "content": "a"}], [CHAT[1]])
    other = read_rows([{"prompt": [CHAT[0]], "completion": "b"}], "demonstrations").rows[0]
    assert (other.prompt, other.completion) == ([CHAT[0]], [{"role": "assistant", "content": "b"}])


def test_demonstrations_from_messages() -> None:
    system = {"role": "system", "content": "be kind"}
    row = read_rows([{"messages": [system, *CHAT, *CHAT, CHAT[0]]}], "demonstrations").rows[0]
    assert row.prompt == [system, CHAT[0]]
    assert row.completion == [CHAT[1], *CHAT]  # the open user turn at the end is left off
    assert "roles: ['user']" in fails([{"messages": [CHAT[0]]}], "demonstrations")
    assert "roles: ['assistant', 'user']" in fails([{"messages": CHAT[::-1]}], "demonstrations")


@pytest.mark.parametrize(("role", "meant"), [("usr", "user"), ("User", "user"), ("asistant", "assistant")])
def test_a_misspelt_role_is_named(role: str, meant: str) -> None:
    """A template such as ChatML would print it as it is."""
    rows = [{"messages": CHAT}, {"messages": [*CHAT, {"role": role, "content": "x"}, CHAT[1]]}]
    said = fails(rows, "demonstrations")
    assert f"row 2: 'messages'[2] has the role '{role}': is '{meant}' meant?" in said


@pytest.mark.parametrize("role", ["tool", "developer", "tool_call", "ipython", "function"])
def test_roles_of_some_templates_are_left_to_them(role: str) -> None:
    turns = [CHAT[0], {"role": role, "content": "x"}, CHAT[1]]
    assert read_rows([{"messages": turns}], "demonstrations").rows[0].prompt == turns[:2]


def test_messages_may_hold_text_parts_and_null_keys() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = {"role": "user", "content": parts, "tool_calls": None}
    row = read_rows([{"messages": [message, CHAT[1]]}], "demonstrations").rows[0]
    assert row.prompt == [{"role": "user", "content": "ab"}]
    image = [{"role": "user", "content": [{"type": "image"}]}, CHAT[1]]
    assert "where text is expected" in fails([{"messages": image}], "demonstrations")


def test_a_table_of_mixed_rows_has_nulls(tmp_path: Path) -> None:
    mixed = [
        {"prompt": "a", "completion": "b", "messages": None},
        {"messages": CHAT, "prompt": None, "completion": None},
    ]
    columnar(tmp_path / "a.parquet", mixed)
    rows = read_rows(tmp_path / "a.parquet", "demonstrations").rows
    assert (rows[0].completion, rows[1].completion) == ("b", CHAT[1:])
    assert [r.prompt for r in read_rows(tmp_path / "a.parquet", "prompts").rows] == ["a", CHAT[:1]]


def test_messages_in_a_table_are_json(tmp_path: Path) -> None:
    table(tmp_path / "a.csv", [{"messages": json.dumps(CHAT)}])
    assert read_rows(tmp_path / "a.csv", "demonstrations").rows[0].completion == CHAT[1:]
    table(tmp_path / "a.csv", [{"messages": "[oops"}])
    assert "'messages' must be a non-empty list" in fails(tmp_path / "a.csv", "demonstrations")


def test_demonstrations_from_preferences_are_the_chosen_answers() -> None:
    rows = read_rows([PAIR], "demonstrations")
    assert (rows.rows[0].prompt, rows.rows[0].completion) == ("Say hi.", "Hi!")
    assert rows.notes == ["demonstrations are the 'chosen' answers of preference rows"]


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


USER = [{"role": "user", "content": "Say hi."}]


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": USER, "chosen": [answer("Hi!")], "rejected": [answer("No.")]},
        {"prompt": "Say hi.", "chosen": [answer("Hi!")], "rejected": [answer("No.")]},
        {"prompt": USER, "chosen": "Hi!", "rejected": "No."},
        {"chosen": [*USER, answer("Hi!")], "rejected": [*USER, answer("No.")]},
        {"prompt": "Say hi.", "chosen": [*USER, answer("Hi!")], "rejected": [*USER, answer("No.")]},
        {"prompt": USER, "chosen": [*USER, answer("Hi!")], "rejected": [*USER, answer("No.")]},
    ],
)
def test_preferences_of_messages(record: dict) -> None:
    row = read_rows([record], "preferences").rows[0]
    assert (row.prompt, row.chosen, row.rejected) == (USER, [answer("Hi!")], [answer("No.")])


def test_preferences_of_messages_that_do_not_fit() -> None:
    whole = [*USER, answer("Hi!")]
    other = [{"role": "user", "content": "Say bye."}, answer("No.")]
    assert "share 0 first messages" in fails([{"chosen": whole, "rejected": other}], "preferences")
    record = {"prompt": "Something else", "chosen": whole, "rejected": [*USER, answer("No.")]}
    assert "but the column says 'Something else'" in fails([record], "preferences")
    assert "no column 'prompt'" in fails(
        [{"chosen": [answer("a")], "rejected": [answer("b")]}], "preferences"
    )
    for mixed in ({**PAIR, "chosen": [answer("Hi!")]}, {**PAIR, "rejected": [answer("No.")]}):
        row = read_rows([mixed], "preferences").rows[0]
        assert (row.prompt, row.chosen, row.rejected) == (USER, [answer("Hi!")], [answer("No.")])
    long = {"chosen": [*USER, answer("a"), *USER, answer("b")], "rejected": [*USER, answer("c")]}
    assert read_rows([PAIR, long], "preferences").dropped == {"several turns in one answer": 1}
    ends = {"prompt": USER, "chosen": [answer("a"), *USER], "rejected": [answer("b")]}
    assert "'chosen' ends with a turn by 'user'" in fails([ends], "preferences")


def test_implicit_prompt_of_strings_is_cut_at_white_space() -> None:
    row = read_rows(
        [{"chosen": "Capital? I think so", "rejected": "Capital? I thank you"}], "preferences"
    ).rows[0]
    assert (row.prompt, row.chosen, row.rejected) == ("Capital? I", " think so", " thank you")
    shorter = read_rows([{"chosen": "a b", "rejected": "a b c"}], "preferences").rows[0]
    assert (shorter.prompt, shorter.chosen, shorter.rejected) == ("a", " b", " b c")
    assert "share no beginning" in fails([{"chosen": "Yes", "rejected": "No"}], "preferences")


def test_transcripts_are_cut_after_the_last_shared_assistant_turn() -> None:
    start = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"
    row = read_rows([{"chosen": start + " The end", "rejected": start + " The start"}], "preferences").rows[0]
    assert (row.prompt, row.chosen, row.rejected) == (start, " The end", " The start")
    given = read_rows(
        [{"prompt": start, "chosen": start + " x", "rejected": start + " y"}], "preferences"
    ).rows[0]
    assert (given.prompt, given.chosen, given.rejected) == (start, " x", " y")
    longer = {"chosen": start + " x\n\nHuman: d\n\nAssistant: e", "rejected": start + " y"}
    assert read_rows([PAIR, longer], "preferences").dropped == {"several turns in one answer": 1}


def test_prompts_with_columns_messages_and_transcripts() -> None:
    rows = read_rows([{"prompt": "2+2?", "answer": "4"}], "prompts").rows
    assert (rows[0].prompt, rows[0].columns) == ("2+2?", {"answer": "4"})
    assert read_rows([{"messages": CHAT}], "prompts").rows[0].prompt == CHAT[:1]
    text = "\n\nHuman: a\n\nAssistant: b"
    assert read_rows([{"prompt": text}], "prompts").rows[0].prompt == "\n\nHuman: a\n\nAssistant:"
    rows_of_pairs = read_rows([{"chosen": text, "rejected": text + "c"}], "prompts")
    assert rows_of_pairs.rows[0].prompt == "\n\nHuman: a\n\nAssistant:"
    assert rows_of_pairs.notes == ["prompts are what 'chosen' and 'rejected' share"]
    assert read_rows([{"prompt": "a"}, {"prompt": " "}], "prompts").dropped == {"empty prompt": 1}


@pytest.mark.parametrize("label", [True, 1, "true", "1", "True"])
def test_unpaired_labels(label: Any) -> None:
    row = read_rows([{"prompt": "a", "completion": "b", "label": label}], "unpaired").rows[0]
    assert row.label is True
    assert "expected true or false" in fails([{"prompt": "a", "completion": "b", "label": 0.5}], "unpaired")


def test_stepwise_rows() -> None:
    record = {"prompt": "a", "completions": ["b", "c"], "labels": [True, False]}
    row = read_rows([record], "stepwise").rows[0]
    assert (row.completions, row.labels) == (["b", "c"], [True, False])
    assert "2 completions but 1 labels" in fails([{**record, "labels": [True]}], "stepwise")
    assert "expected a non-empty list" in fails([{**record, "completions": "b"}], "stepwise")


def test_ranked_rows_become_pairs_of_every_two_ranks() -> None:
    record = {"prompt": "a", "responses": ["best", "worst", "middle", "also middle"], "ranks": [1, 4, 2, 2]}
    rows = read_rows([record], "ranked")
    pairs = pairs_from_ranked(rows)
    assert {(p.chosen, p.rejected) for p in pairs.rows} == {
        ("best", "worst"),
        ("best", "middle"),
        ("best", "also middle"),
        ("middle", "worst"),
        ("also middle", "worst"),
    }
    assert len(pairs) == 4 * 3 // 2 - 1 and pairs.dropped == {"tied ranks": 1} and pairs.kind == "preferences"
    assert "4 responses but 3 ranks" in fails([{**record, "ranks": [1, 2, 3]}], "ranked")
    assert "NaN" in fails([{**record, "ranks": [1, 2, 3, float("nan")]}], "ranked")
    with pytest.raises(UsageError, match="no pair"):
        pairs_from_ranked(read_rows([{**record, "ranks": [1, 1, 1, 1]}], "ranked"))


# ---- splitting ----


def prompts(count: int, copies: int = 1) -> Rows:
    return read_rows([{"prompt": f"p{i}", "n": c} for i in range(count) for c in range(copies)], "prompts")


def test_no_prompt_is_on_both_sides_of_a_split() -> None:
    rows = prompts(20, copies=3)
    train, held = split_rows(rows, eval_count=10, seed=0)
    assert not {r.prompt for r in train.rows} & {r.prompt for r in held.rows}
    assert len(train) + len(held) == 60 and len(held) == 12  # whole prompts until there are at least 10 rows
    assert [r.number for r in held.rows] == sorted(r.number for r in held.rows)


def test_a_split_is_deterministic_and_independent_of_file_order() -> None:
    rows = prompts(30)
    held = {r.prompt for r in split_rows(rows, eval_fraction=0.2, seed=5)[1].rows}
    rows.rows.reverse()
    assert {r.prompt for r in split_rows(rows, eval_fraction=0.2, seed=5)[1].rows} == held
    assert len(held) == 6
    assert {r.prompt for r in split_rows(rows, eval_fraction=0.2, seed=6)[1].rows} != held


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "one of the two"),
        ({"eval_fraction": 0.1, "eval_count": 3}, "one of the two"),
        ({"eval_fraction": 1.5}, "between 0 and 1"),
        ({"eval_count": 9}, "9 rows with 3 different prompts cannot be split"),
        ({"eval_count": 0}, "cannot be split"),
        ({"eval_fraction": 0.9}, r"\(eval_fraction=0.9\), because .* eval_fraction=0 holds out nothing"),
    ],
)
def test_a_split_that_cannot_be_is_refused(options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        split_rows(prompts(3, copies=3), **options)


def test_a_single_row_cannot_be_split() -> None:
    with pytest.raises(UsageError, match="1 row with 1 different prompt cannot be split"):
        split_rows(prompts(1), eval_fraction=0.1)


# ---- the data as they come ----


@pytest.mark.parametrize("kind", ["preferences", "demonstrations", "prompts"])
def test_hh_transcripts_as_they_come(kind: Any, hh: Path) -> None:
    assert len(read_records(hh).numbered) == 1500
    rows = read_rows(hh, kind)
    assert (len(rows), rows.dropped) == (1496, {"empty answer": 4})
    assert all(
        row.prompt.startswith("\n\nHuman:") and row.prompt.endswith("\n\nAssistant:") for row in rows.rows
    )


def test_hh_prompt_and_answers_rebuild_the_file(hh: Path) -> None:
    raw = dict(read_records(hh).numbered)
    for row in read_rows(hh, "preferences").rows:
        assert row.prompt + row.chosen == raw[row.number]["chosen"]
        assert row.prompt + row.rejected == raw[row.number]["rejected"]


def test_gsm8k_columns_reach_the_reward(gsm8k: Path) -> None:
    message = fails(gsm8k, "prompts")
    assert "row 1: no column 'prompt'; found 'question', 'answer'." in message
    records = [{"prompt": r["question"], **r} for _, r in read_records(gsm8k).numbered[:5]]
    assert set(read_rows(records, "prompts").rows[0].columns) == {"question", "answer"}
