"""The model against transformers, its two ways through the weights against each other, and the judge row."""

from __future__ import annotations

import pytest
import torch
from conftest import ARCHITECTURES, hf_config, tiny
from hypothesis import given
from hypothesis import strategies as st

from errors import UserError
from model import Config, rope_inverse_frequencies


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_step_against_cache_equals_whole_pass(name):
    model = tiny(name)
    tokens = torch.randint(0, 131, (150,), generator=torch.Generator().manual_seed(1))
    reference = model(tokens[None])[0]
    cache = model.new_cache(256)
    states, at = [], 0
    for length in (100, 1, 2, 27, 1, 19):  # crosses a bucket's edge
        positions = torch.arange(at, at + length)
        at += length
        states.append(model.step(tokens[positions], positions, cache, 128 if at <= 128 else 256))
    logits, judge = model.logits(torch.cat(states))
    assert judge is None
    torch.testing.assert_close(logits, reference, atol=2e-5, rtol=0)


def test_rejected_positions_are_hidden_and_overwritten():
    model = tiny()
    tokens = torch.randint(0, 131, (20,), generator=torch.Generator().manual_seed(2))
    cache = model.new_cache(128)
    model.step(tokens[:10], torch.arange(10), cache, 128)
    model.step(torch.randint(0, 131, (9,)), torch.arange(10, 19), cache, 128)  # all rejected
    states = [model.step(tokens[i : i + 1], torch.tensor([i]), cache, 128) for i in range(10, 20)]
    torch.testing.assert_close(model.logits(torch.cat(states))[0], model(tokens[None])[0, 10:], atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", ["llama3", "llama3.2"])
@pytest.mark.parametrize("kind", ["pre_norm", "post_norm"])
def test_fused_verdict_equals_head_computed_apart(name, kind):
    model = tiny(name)
    hidden = torch.randn(40, 48) * 3
    before, _ = model.logits(hidden)
    weight = torch.randn(48)
    model.fuse_judge(weight, -0.7, kind)
    logits, judge = model.logits(hidden)
    state = hidden if kind == "pre_norm" else model.norm(hidden)
    torch.testing.assert_close(judge, state @ weight - 0.7, atol=1e-4, rtol=0)
    torch.testing.assert_close(logits, before, atol=1e-6, rtol=0)  # the row is not a token
    if model.config.tie_embeddings:
        assert model.embed.weight.data_ptr() == model.output.weight.data_ptr()
        assert model.embed.weight.shape == (131, 48)


def test_pre_norm_head_needs_a_norm_without_zeros():
    model = tiny()
    model.norm.weight[3] = 0
    with pytest.raises(UserError, match="weight of 0"):
        model.fuse_judge(torch.ones(48), 0.0, "pre_norm")
    weight = torch.ones(48)
    weight[3] = 0
    model.fuse_judge(weight, 0.0, "pre_norm")
    assert model.output.weight.isfinite().all()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": None}, "nothing"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"num_key_value_heads": 4}, "6 attention heads don't divide over 4"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"vocab_size": None}, "'vocab_size'"),
        ({"head_dim": 7}, "even"),
    ],
)
def test_configurations_that_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        Config.from_hf(hf_config("llama3", **changes))


def test_both_generations_of_rope_keys_and_windows():
    old = Config.from_hf(hf_config("llama3"))
    rope = {"rope_theta": 500000.0, **ARCHITECTURES["llama3"]["rope_scaling"]}
    new = Config.from_hf(hf_config("llama3", rope_scaling=None, rope_theta=None, rope_parameters=rope))
    assert old == new
    assert Config.from_hf(hf_config("mistral", sliding_window=256)).max_seq_len == 256
    assert Config.from_hf(hf_config("qwen2", sliding_window=256, use_sliding_window=False)).max_seq_len == 512


SIZES = st.one_of(st.floats(), st.floats(-50, 50).map(lambda power: 10.0**power))  # numbers of every order of magnitude


@given(theta=SIZES, factor=SIZES, low=SIZES, high=SIZES, context=st.integers(0, 2**31), kind=st.sampled_from(["linear", "llama3"]))
def test_a_configuration_that_is_taken_has_frequencies(theta, factor, low, high, context, kind):
    scaling = {"rope_type": kind, "factor": factor, "low_freq_factor": low, "high_freq_factor": high}
    scaling["original_max_position_embeddings"] = context
    try:
        config = Config.from_hf(hf_config("llama3", rope_theta=theta, rope_scaling=scaling))
    except UserError:
        return
    frequencies = rope_inverse_frequencies(config)
    assert frequencies.isfinite().all() and frequencies.min() >= 0


def test_a_twin_shares_the_layers_and_carries_a_head_of_its_own():
    for name in ("llama3", "smollm2"):  # tied and not
        model = tiny(name)
        tokens = torch.tensor([[3, 1, 4, 1, 5]])
        heads = [torch.randn(48, generator=torch.Generator().manual_seed(i)) for i in range(2)]
        model.fuse_judge(heads[0], 0.0, "post_norm")
        twin = model.twin()
        twin.fuse_judge(heads[1], 0.0, "post_norm", 0.1)
        for m, head, floor in ((model, heads[0], 0.0), (twin, heads[1], 0.1)):
            logits, judge = m.logits(m.hidden(tokens))
            torch.testing.assert_close(judge, m.norm(m.hidden(tokens)) @ head)
            assert m.judge_floor == floor and torch.equal(logits, model.logits(model.hidden(tokens))[0])
        assert twin.layers is model.layers and twin.embed is model.embed
