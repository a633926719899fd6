"""The comparison of products on a CPU: what it prints adds up, and its mistakes are told."""

from __future__ import annotations

import json

import benchmark
import cpu_products
import pytest
import shapes

import native
from errors import UserError


def run(capsys, monkeypatch, command):
    monkeypatch.setitem(shapes.ROWS, "small", ("Llama", 128, 2, 8, 4, 256, 512, 512, 1e4, False))
    monkeypatch.setattr(benchmark, "READ_BYTES", 1 << 20)
    monkeypatch.setattr("sys.argv", ["cpu_products.py", *command.split(), "--json"])
    cpu_products.main()
    printed = capsys.readouterr()
    return json.loads(printed.out.splitlines()[-1]), printed.err


@pytest.mark.skipif(native.library() is None, reason="no C++ compiler")
def test_every_product_is_timed_and_a_layer_is_their_sum(capsys, monkeypatch):
    said, table = run(capsys, monkeypatch, "small --rows 1 5 --forms bfloat16 int8 float32 --repeat 1")
    assert len(said["products"]) == 3 * 2 * 4
    assert all(row["ours"] > 0 < row["pytorch"] for row in said["products"])
    layer = cpu_products.layer_rows(said["products"])
    assert [(row["form"], row["rows"]) for row in layer] == [(f, T) for f in ("bfloat16", "int8", "float32") for T in (1, 5)]
    weights = 128 * 16 * 16 + 128 * 128 + 512 * 128 + 128 * 256
    assert [row["bytes"] for row in layer] == [size * weights for size in (2, 2, 1, 1, 4, 4)]
    assert layer[1]["multiplied"] == 2 * 5 * weights
    assert table.count("\n") == 3 + 6


@pytest.mark.parametrize("command, said", [("huge", "huge is no known shape"), ("small --rows 65", "--rows must be from 1 to 64")])
def test_mistakes_are_told(capsys, monkeypatch, command, said):
    with pytest.raises(UserError, match=said):
        run(capsys, monkeypatch, command)


def test_without_a_compiler_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(native, "library", lambda: None)
    with pytest.raises(UserError, match="no C\\+\\+ compiler"):
        run(capsys, monkeypatch, "small")
