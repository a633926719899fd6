"""The memory plan against what is loaded."""

from __future__ import annotations

import argparse

import memory
import pytest
import torch
from conftest import hf_config, tiny

import checkpoint
from errors import UserError
from linear import MODES
from model import Cache
from tp import Ranks
from writer import save_checkpoint


def plan_of(**changes):
    options = {"target": "llama-3.1-405b", "draft": "llama-3.1-8b", "nproc": 8, "quantize": "int8", "dtype": "bfloat16",
               "context": None, "draft_len": 25, "draft_tp": None}  # fmt: skip
    return memory.plan(argparse.Namespace(**{**options, **changes}))


@pytest.mark.parametrize("name", ["llama3", "qwen2", "llama-bias"])
@pytest.mark.parametrize("mode, size", [("none", 1), ("none", 2), *((mode, 1) for mode in MODES), ("int4-g32", 2)])
def test_what_is_planned_is_what_is_loaded(tmp_path, name, mode, size):
    shape = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 128}
    save_checkpoint(tmp_path, hf_config(name, **shape), tiny(name, **shape).state_dict())
    config = checkpoint.load_config(tmp_path)
    for dtype in (torch.bfloat16, torch.float32):
        model = checkpoint.load_model(tmp_path, dtype, ranks=Ranks(0, size), quantization=mode)
        held = sum({p.data_ptr(): p.nbytes for p in model.parameters()}.values())
        cache = model.new_cache(256)
        assert isinstance(cache, Cache)
        planned = memory.part(config, Ranks(0, size), mode, dtype, 256, 9, judge=False)
        assert planned.weights == held
        assert planned.cache == sum(t.nbytes for t in (cache.k, cache.v, cache.cos, cache.sin))


def test_the_405b_needs_what_its_numbers_say():
    rows = plan_of()
    D, F, V, L = 16384, 53248, 128256, 126
    layer = D * D * 2 + 2 * D * 8 * 128 + 3 * D * F
    linear = (L * layer + V * D) / 8
    scales = 4 * (L * (D + 2 * 8 * 128 + 2 * F + 8 * 2 * D) + V) / 8  # of wo and w2 every rank has all
    rest = 2 * (V * D / 8 + D * (2 * L + 1))
    judge = 8 * (D + 4)
    assert rows["target: weights"] == linear + scales + rest + judge
    assert rows["target: KV cache"] == pytest.approx(2 * L * 128 * 2 * 8320, rel=0.02)  # and the table of angles
    assert plan_of(draft=None)["target: weights"] == rows["target: weights"] - judge


def test_what_cant_be_planned_is_told(tmp_path):
    save_checkpoint(tmp_path, hf_config("llama3"), tiny().state_dict(), "int8")
    for changes, words in (
        ({"target": str(tmp_path), "draft": None, "nproc": 1, "quantize": "int4-g32"}, "is int8 already"),
        ({"context": 10**6}, "there is room for 131072"),
        ({"nproc": 7}, "can't be divided over 7 ranks"),
    ):
        with pytest.raises(UserError, match=words):
            plan_of(**changes)
