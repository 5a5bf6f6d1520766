from __future__ import annotations

import csv
import json
from collections import Counter

import pytest
from conversations import Turn, encode_turns
from text_data import SHIPPED, Columns, load_text
from text_files import DataError
from tokenizer import Bytes


def write(folder, name, content):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def rows_of(splits):
    """Text and label of all rows, of both splits."""
    return Counter(
        (text, splits.classes[label])
        for side in (splits.train, splits.test)
        for text, label in zip(side.texts, side.labels, strict=True)
    )


# --- what is read ---


def test_shipped_set_is_read_completely():
    splits = load_text(task="classify")
    # Lines counted without the reader under test: one header, no quoting, no line feeds in texts.
    lines = SHIPPED.read_text(encoding="utf-8").rstrip("\n").split("\n")[1:]
    expected = Counter(
        (text, int(float(score) > 0))
        for _, score, text in map(str.split, lines, ["\t"] * len(lines))
    )
    assert sum(expected.values()) > 10_000
    assert rows_of(splits) == expected
    assert splits.classes == [0, 1]


ROWS = [(f'say "{i}", then\tgo', i % 2) for i in range(40)]


def as_jsonl(rows):
    return "\n".join(json.dumps({"text": text, "label": label}) for text, label in rows)


def as_csv(tmp_path, rows):
    path = tmp_path / "made.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("label", "text"), *((label, text) for text, label in rows)])
    return path


def test_formats_give_the_same_rows(tmp_path):
    from_json = load_text(write(tmp_path, "a.jsonl", as_jsonl(ROWS)), task="classify")
    from_csv = load_text(as_csv(tmp_path, ROWS), task="classify")
    assert rows_of(from_json) == Counter(ROWS)
    assert from_json == from_csv


def test_csv_fields_may_span_lines(tmp_path):
    rows = [(f"one\ntwo {i}", i % 2) for i in range(40)]
    assert rows_of(load_text(as_csv(tmp_path, rows), task="classify")) == Counter(rows)


def test_tsv_keeps_quotes(tmp_path):
    lines = [f'"half quoted {i}\t{i % 2}' for i in range(40)]
    path = write(tmp_path, "a.tsv", "\n".join(["text\tlabel", *lines]))
    assert rows_of(load_text(path, task="classify")) == Counter(
        (f'"half quoted {i}', i % 2) for i in range(40)
    )


def test_label_wins_over_score_and_classes_are_numbered_from_zero(tmp_path):
    rows = [{"text": f"t{i}", "label": (7, -2)[i % 2], "score": 1} for i in range(40)]
    splits = load_text(
        write(tmp_path, "a.jsonl", "\n".join(map(json.dumps, rows))), task="classify"
    )
    assert splits.classes == [-2, 7]
    assert rows_of(splits) == Counter((f"t{i}", (7, -2)[i % 2]) for i in range(40))


def test_text_file_has_one_document_a_line(tmp_path):
    path = write(tmp_path, "a.txt", "\r\n".join(["", *(f"line {i}" for i in range(40)), "  "]))
    splits = load_text(path, task="lm")
    assert sorted(splits.train.texts + splits.test.texts) == sorted(f"line {i}" for i in range(40))


def test_a_byte_order_mark_is_no_part_of_the_header(tmp_path):
    path = write(tmp_path, "a.jsonl", b"\xef\xbb\xbf" + as_jsonl(ROWS).encode())
    assert rows_of(load_text(path, task="classify")) == Counter(ROWS)


def test_labels_may_be_texts_and_columns_have_other_names(tmp_path):
    rows = [{"t": f"t{i}", "y": ("pos", "neg")[i % 2]} for i in range(40)]
    path = write(tmp_path, "a.json", json.dumps(rows))
    splits = load_text(path, task="classify", columns=Columns("t", "y"))
    assert splits.classes == ["neg", "pos"]
    assert rows_of(splits) == Counter((row["t"], row["y"]) for row in rows)


def test_test_rows_may_come_from_another_file(tmp_path):
    path = write(tmp_path, "a.jsonl", as_jsonl(ROWS))
    other = write(tmp_path, "b.jsonl", as_jsonl(ROWS[:3]))
    splits = load_text(path, task="classify", test_path=other)
    assert splits.train.texts == [text for text, _ in ROWS]
    assert splits.test.texts == [text for text, _ in ROWS[:3]]
    unknown = write(tmp_path, "c.jsonl", as_jsonl([("a", 7)]))
    with pytest.raises(DataError, match="labels 7, but"):
        load_text(path, task="classify", test_path=unknown)


ASK, SAY = Turn("user", "1+1"), Turn("assistant", "2")


def test_conversations_are_read_in_both_forms(tmp_path):
    messages = {"messages": [{"role": role, "content": text} for role, text in (ASK, SAY)]}
    pair = {"prompt": "1+1", "completion": "2"}
    for row, expected in (
        (messages, (ASK, SAY)),
        (pair, (Turn("prompt", "1+1"), Turn("completion", "2"))),
    ):
        path = write(tmp_path, "a.jsonl", "\n".join([json.dumps(row)] * 40))
        assert load_text(path, task="lm").train.texts[0] == expected


@pytest.mark.parametrize("turns", [(ASK, SAY), (Turn("prompt", "1+1="), Turn("completion", "2"))])
def test_only_answers_are_learned(turns):
    tokens, learned = encode_turns(Bytes(), turns)
    answer = [t for t, learn in zip(tokens, learned, strict=True) if learn]
    assert Bytes().decode(answer).strip() == "2"
    assert learned[-1] and not any(
        learned[: tokens.index(ord("=") + 3) if "=" in turns[0].text else 5]
    )
    before, _ = encode_turns(Bytes(), turns[:1], answer_next=True)
    assert tokens[: len(before)] == before


# --- the split ---


def test_split_is_fixed_by_the_seed_and_has_the_asked_size(tmp_path):
    path = write(tmp_path, "a.txt", "\n".join(f"line {i}" for i in range(4000)))
    first, again, other = (load_text(path, task="lm", seed=seed) for seed in (3, 3, 4))
    assert first == again
    assert set(first.test.texts) != set(other.test.texts)
    # 10% of 4000, five standard deviations.
    assert abs(len(first.test) - 400) < 5 * (4000 * 0.1 * 0.9) ** 0.5
    assert not set(first.test.texts) & set(first.train.texts)


def test_adding_rows_moves_no_other_row(tmp_path):
    lines = [f"line {i}" for i in range(200)]
    short = load_text(write(tmp_path, "a.txt", "\n".join(lines[:150])), task="lm")
    long = load_text(write(tmp_path, "b.txt", "\n".join(lines)), task="lm")
    assert [text for text in long.test.texts if text in lines[:150]] == short.test.texts


# --- what is refused ---

GOOD = "text\tlabel\na\t0\nb\t1\n"


@pytest.mark.parametrize(
    ("name", "content", "line", "says"),
    [
        ("a.tsv", "id\tlabel\n1\t0\n", 1, "'text'"),
        ("a.tsv", "text\tid\na\t1\n", 2, "'label' or 'score'; there are .* with --label-column"),
        ("a.tsv", GOOD + "c\n", 4, "columns"),
        ("a.tsv", GOOD + "c\tgood\n", 4, "integer"),
        ("a.tsv", GOOD + "c\t1.5\n", 4, "integer"),
        ("a.tsv", "text\tscore\na\tnan\n", 2, "number"),
        ("a.tsv", GOOD + "  \t1\n", 4, "blank"),
        ("a.tsv", GOOD.encode() + b"caf\xe9\t1\n", 4, "0xe9"),
        ("a.csv", 'text,label\na,0\n"b,1\n', 3, ""),
        ("a.jsonl", '{"text": "a", "label": 0}\n{"text": \n', 2, "JSON"),
        ("a.jsonl", '{"text": "a", "label": 0}\n[1]\n', 2, "object"),
        ("a.jsonl", '{"text": "a", "label": 0}\n{"label": 0}\n', 2, "'text'"),
        ("a.jsonl", '{"text": "a", "label": true}\n', 1, "integer"),
        ("a.jsonl", '{"text": null, "label": 1}\n', 1, "null, not a text"),
        ("a.jsonl", '{"messages": [], "label": 1}\n', 1, "'messages' is not a list"),
        ("a.jsonl", '{"messages": [{"role": "user", "content": "a"}]}\n', 1, "no answer"),
        ("a.jsonl", '{"prompt": "a", "completion": 3}\n', 1, "the completion is 3"),
    ],
)
def test_a_bad_row_is_named(tmp_path, name, content, line, says):
    path = write(tmp_path, name, content)
    with pytest.raises(DataError, match=f"{name}, line {line}: .*{says}"):
        load_text(path, task="classify")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.tsv", "", "no rows"),
        ("a.tsv", "text\tlabel\n", "no rows"),
        ("a.jsonl", "\n\n", "no rows"),
        ("a.tsv", "text\tlabel\na\t1\nb\t1\n", "label 1"),
        ("a.txt", "a\n", "--task lm"),
        ("a.parquet", "a\n", "must end in"),
        ("a", "a\n", "must end in"),
    ],
)
def test_a_bad_file_is_named(tmp_path, name, content, says):
    with pytest.raises(DataError, match=f"/{name}: .*{says}"):
        load_text(write(tmp_path, name, content), task="classify")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"gone\.csv: .*No such file"):
        load_text(tmp_path / "gone.csv", task="classify")


@pytest.mark.parametrize("bad", [{"task": "rank"}, {"task": "lm", "test_fraction": 1.0}])
def test_bad_arguments_are_named(bad):
    with pytest.raises(ValueError, match=list(bad)[-1]):
        load_text(**bad)
