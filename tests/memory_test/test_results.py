"""Every committed result file has the one layout and a name that says what it is."""

from __future__ import annotations

import copy
import json

import pytest

from memory_test.common import schema

FILES = sorted(schema.RESULTS.rglob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_has_the_layout_and_a_name(path):
    assert schema.check_file(json.loads(path.read_text())) == []
    assert schema.NAME.fullmatch(path.name)
    assert path.parent in (schema.RESULTS, schema.RESULTS / "archive")


def test_no_two_files_have_one_name():
    names = [path.name for path in FILES]
    assert len(names) == len(set(names)) > 30


@pytest.mark.parametrize("part", schema.PARTS)
def test_rows_of_each_part_are_checked(part):
    with_part = [f for _, f in schema.all_files() if f[part]]
    if not with_part:
        assert part in ("failures", "accuracy")  # none is committed now
        return
    good = {k: v for k, v in with_part[0].items() if k not in schema.PARTS or v}
    assert schema.check_file(good) == []
    for key in schema.PARTS[part]:
        bad = copy.deepcopy(good)
        del bad[part][0][key]
        assert any(f"lacks {key}" in line for line in schema.check_file(bad)), key
        bad[part][0][key] = object()
        assert any(f"{key} is a object" in line for line in schema.check_file(bad)), key


def test_a_file_without_a_part_or_a_head_is_refused():
    head = schema.head("a try", "", {})
    assert schema.check_file(head) == [f"has none of {', '.join(schema.PARTS)}"]
    assert schema.check_file({**head, "noise": []}) == []
    assert "file: noise 0 is no JSON object" in schema.check_file({**head, "noise": [1]})
    for key in schema.HEAD:
        assert schema.check_file({k: v for k, v in head.items() if k != key} | {"noise": []})
    for other in ([], {}, {"layout": "steps/1", "cells": []}):
        assert schema.check_file(other) == [f"is not of the layout {schema.LAYOUT}"]
