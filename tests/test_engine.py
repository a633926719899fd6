"""The engine against a naive reference, its output's trimming, and that a round never asks the device for a value."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from conftest import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from naive import is_greedy, judged
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import native
from engine import Engine, Sampling, draw, match_vocabulary, warp
from errors import UserError
from judge import Head
from launch import Launcher
from tokenizer import Output

PROMPT = [5, 17, 99, 3, 64, 2, 2, 31]


def decode(engine, prompt, n, seed=None):
    """n tokens and who accepted each."""
    engine.prefill(prompt, seed)
    tokens, who = [], []
    for now in engine.rounds(len(prompt)):
        tokens += now.tokens
        who += now.accepted_by
        if len(tokens) >= n:
            break
    return tokens[:n], who[:n]


@pytest.mark.parametrize("name", ["llama3", "qwen2", "qwen3"])
def test_plain_standard_and_delta_one_are_one_text(name):
    target, draft, noise = tiny(name), tiny(name), torch.Generator().manual_seed(9)
    for weight in draft.parameters():  # so that some tokens of a block are accepted, and seldom all
        weight += torch.randn(weight.shape, generator=noise) / 200
    expected = decode(Engine(target, max_len=200), PROMPT, 140)[0]  # crosses a bucket's edge
    assert is_greedy(target, PROMPT, expected)
    target.fuse_judge(torch.randn(48) * 100, 0.0, "post_norm")
    for M, verify in itertools.product((1, 2, 5, 16, 32), ("standard", "judge")):
        engine = Engine(target, draft, draft_len=M, verify=verify, threshold=1.0, max_len=200)
        got, who = decode(engine, PROMPT, 140)
        assert got == expected and {"standard", "target"} <= set(who), (M, verify)


@pytest.mark.parametrize("M", [1, 4, 9])
@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:2], PROMPT[:1]])
@pytest.mark.parametrize(
    "kind, floor, log_p", [("post_norm", 0.0, 0.0), ("pre_norm", 0.0, 0.0), ("post_norm", 0.004, 0.0), ("post_norm", 0.0, 0.7)]
)
def test_judge_decoding_equals_the_naive_one(M, prompt, kind, floor, log_p):
    target, draft = tiny(), tiny(seed=3, num_hidden_layers=1)
    weight = torch.randn(48, generator=torch.Generator().manual_seed(5))
    head = Head(weight, 0.3 + 4 * log_p, kind, "t", "", floor=floor, log_p=log_p)  # log-probabilities here are about -4
    head.fuse(target)
    expected = judged(target, draft, prompt, 60, M, head, 0.5)
    got = decode(Engine(target, draft, draft_len=M, verify="judge", threshold=0.5, max_len=80), prompt, 60)
    assert (got[0], got[1]) == (expected[0][:60], expected[1][:60])
    assert {"rule", "target"} <= set(got[1])


def test_target_as_its_own_draft_accepts_everything_over_500_tokens():
    target = tiny(max_position_embeddings=1024)
    engine = Engine(target, tiny(max_position_embeddings=1024), draft_len=7, max_len=560)
    engine.prefill(PROMPT)
    lengths = [len(now.tokens) for now in itertools.islice(engine.rounds(len(PROMPT)), 64)]
    assert lengths == [8] * 64


def test_one_engine_decodes_one_text_after_another():
    target, draft = tiny(), tiny(seed=1)
    engine = Engine(target, draft, draft_len=3, max_len=120)
    # the caches' common start is kept: longer, shorter, equal and different prompts after one another
    for prompt in (PROMPT * 4, PROMPT[:3], PROMPT, PROMPT, [*PROMPT[:5], 1, 2, 3], PROMPT * 4, [9]):
        assert is_greedy(target, prompt, decode(engine, prompt, 40)[0])


@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 3)), min_size=1, max_size=5), st.sampled_from([0, 1, 4]))
def test_a_conversation_reads_only_what_is_new(turns, M):
    """Each prompt is the text so far, a part of the answer cut off, and something new; the answer's keys and values are kept."""
    target, draft = tiny(), tiny(seed=1) if M else None
    engine, text, read = Engine(target, draft, draft_len=max(1, M), max_len=240), list(PROMPT), []
    step = target.step
    target.step = lambda tokens, *rest, **options: read.append(len(tokens)) or step(tokens, *rest, **options)
    engine.complete(text, 1)
    for n, cut in turns:
        read.clear()
        engine.prefill(text)
        assert sum(read) <= 2 + cut + 1  # the last two tokens, what was cut, what was added
        answer = engine.complete(text, n)
        assert len(answer) == n and is_greedy(target, text, answer)
        whole = [*engine.target_cache.text, *engine.pending]
        text = [*whole[: len(whole) - cut], 7]


def test_engines_that_share_caches_go_on_from_each_others_texts():
    target, draft = tiny(), tiny(seed=1)
    first = Engine(target, draft, draft_len=4, max_len=200)
    caches = first.target_cache, first.draft_cache
    engines = [first, Engine(target, max_len=200, caches=caches), Engine(target, draft, draft_len=2, max_len=200, caches=caches)]
    engines += [Engine(draft, max_len=200, caches=(first.draft_cache, None))]
    text, read = list(PROMPT), []
    for model in (target, draft):
        step = model.step
        model.step = lambda ids, *rest, step=step, **options: read.append(len(ids)) or step(ids, *rest, **options)
    for i in (0, 1, 0, 2, 3, 1, 2, 0, 3, 0):
        engine = engines[i]
        assert is_greedy(engine.target, text, engine.complete(text, 7))
        read.clear()
        engine.prefill(text)
        assert sum(read) == 0  # it is all there
        text = [*text, *engine.complete(text, 3), 5, 6]
    with pytest.raises(ValueError, match="shared caches have 256 positions; 300 tokens need"):
        Engine(target, draft, max_len=300, caches=caches)


def test_rounds_do_not_go_on_after_another_text_was_begun():
    target, draft = tiny(), tiny(seed=1)
    first = Engine(target, draft, draft_len=2, max_len=200)
    caches = first.target_cache, first.draft_cache
    for other in (first, Engine(target, max_len=200, caches=caches), Engine(draft, max_len=200, caches=(first.draft_cache, None))):
        for begin in (lambda other=other: other.prefill([7, 8]), other.forget):
            first.prefill(PROMPT)
            rounds = first.rounds(len(PROMPT))
            next(rounds)
            begin()
            with pytest.raises(UserError, match="another text was begun"):
                next(rounds)


def test_completion_ends_before_a_stop_token_or_at_the_cap():
    engine = Engine(tiny(), tiny(seed=1), draft_len=5, max_len=100)
    ids = decode(engine, PROMPT, 30)[0]
    assert engine.complete(PROMPT, 12) == ids[:12]
    assert engine.complete(PROMPT, 30, {ids[9]}) == ids[: ids.index(ids[9])]
    assert len(engine.complete(PROMPT, 1000)) >= 100 - len(PROMPT)


def test_prefill_in_chunks_equals_one_pass():
    target = tiny(max_position_embeddings=1024)
    prompt = torch.randint(0, 131, (600,), generator=torch.Generator().manual_seed(0)).tolist()
    assert is_greedy(target, prompt, decode(Engine(target, max_len=640), prompt, 10)[0])


def test_compiled_blocks_give_the_same_text():
    target, draft = tiny(), tiny(seed=1, num_hidden_layers=1)
    assert is_greedy(target, PROMPT, decode(Engine(target, draft, draft_len=4, max_len=200, compile=True), PROMPT, 150)[0])


@pytest.mark.parametrize("extra", [-5, 40])
def test_padded_vocabularies_of_one_tokenizer_work(extra):
    target, draft = tiny(), tiny(seed=2, vocab_size=131 + extra)
    engine = Engine(target, draft, draft_len=4, max_len=100)
    assert is_greedy(target, PROMPT, decode(engine, PROMPT, 60)[0])
    assert match_vocabulary(torch.zeros(2, 131 + extra), 131).shape == (2, 131)


@pytest.mark.parametrize("verify", ["standard", "judge", "topk", "typical", "kl"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_round_never_asks_the_device_for_a_value(verify, temperature):
    with FakeTensorMode():  # .item(), .nonzero(), bool() and shapes that depend on data raise here
        target, draft = tiny(), tiny(seed=1)
        target.fuse_judge(torch.randn(48), 0.0, "post_norm")
        sampling = Sampling(temperature, top_k=20, top_p=0.9)
        engine = Engine(target, draft, draft_len=5, verify=verify, threshold=0.5, sampling=sampling, max_len=100)
        with torch.inference_mode():
            engine.round(5, 128)


class OneDevice(TorchDispatchMode):
    """Refuses every operation that touches a device other than meta, where there are no values to read or copy."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, out)):
            assert not isinstance(x, torch.Tensor) or x.device.type == "meta", f"{func} touches {x.device}"
        return out


@pytest.mark.parametrize("verify", ["standard", "judge", "topk", "typical", "kl"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("M", [0, 5])
def test_a_round_copies_nothing_between_devices(verify, temperature, M, monkeypatch):
    drawn = torch.rand

    def rand(*size, generator, device):  # generators exist for real devices only
        return drawn(*size, device=device)

    target, draft = tiny(), tiny(seed=1)
    target.fuse_judge(torch.randn(48), 0.0, "post_norm")
    target, draft = target.to("meta"), draft.to("meta")
    monkeypatch.setattr(torch, "Generator", lambda device: None)
    engine = Engine(target, draft if M else None, draft_len=M, verify=verify, sampling=Sampling(temperature), max_len=100)
    monkeypatch.setattr(torch, "rand", rand)
    with torch.inference_mode(), OneDevice():
        engine.round(M, 128)


def test_what_the_two_modes_refuse():
    x = torch.ones(3)
    with FakeTensorMode() as fake, pytest.raises(torch._subclasses.fake_tensor.DataDependentOutputException):
        fake.from_tensor(x).sum().item()
    with OneDevice(), pytest.raises(AssertionError, match="touches cpu"):
        x.to("meta")


class Replayed(Launcher):
    """A launcher that captures, but whose graphs are the calls themselves."""

    def _captured(self, run):
        self.captures = getattr(self, "captures", 0) + 1
        marks = []
        return SimpleNamespace(replay=lambda: (run(), marks.__setitem__(slice(None), self.watch.taken()))), marks


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize(
    "M, verify, temperature", [(0, "standard", 0.0), (4, "standard", 0.0), (7, "judge", 0.0), (4, "judge", 0.9)]
)
def test_rounds_launched_ahead_are_the_same_rounds(ahead, capture, M, verify, temperature):
    target, draft = tiny(), tiny(seed=0, num_hidden_layers=2)
    target.fuse_judge(torch.randn(48), 0.0, "post_norm")
    options = {"draft_len": M, "verify": verify, "sampling": Sampling(temperature), "max_len": 150}
    engine = Engine(target, draft if M else None, **options)
    ahead_engine = Engine(target, draft if M else None, **options, run_ahead=ahead)
    if capture:
        old = ahead_engine.launcher
        ahead_engine.launcher = Replayed(old.result, old.trace, old.watch, ahead + 1, old.generator, False)
        ahead_engine.launcher.capture = True
    for prompt, n in ((PROMPT, 300), (PROMPT[:3], 20), (PROMPT * 3, 300)):  # to the end, left early, to the end
        expected, got = decode(engine, prompt, n, 5), decode(ahead_engine, prompt, n, 5)
        assert got == expected
    if capture:  # a graph for each bucket and slot
        assert ahead_engine.launcher.captures == 2 * (ahead + 1)


@pytest.mark.parametrize("verify", ["standard", "judge"])
def test_an_adaptive_length_gives_the_same_text(verify):
    target, draft = tiny(), tiny(seed=0, num_hidden_layers=2)
    target.fuse_judge(torch.randn(48) * 100, 0.0, "post_norm")
    engine = Engine(target, draft, draft_len=12, adapt=True, verify=verify, threshold=1.0, max_len=200)
    engine.warm_up()
    assert sorted(engine.pace.round_ms) == [2, 5, 8, 12]
    engine.prefill(PROMPT)
    rounds = list(engine.rounds(len(PROMPT)))
    tokens = [token for now in rounds for token in now.tokens][:140]
    assert is_greedy(target, PROMPT, tokens)
    assert {now.drafted for now in rounds} <= {2, 5, 8, 12}


@pytest.mark.parametrize("own", [False, True])  # native.cpp's layers, of which nothing is compiled at all
def test_500_rounds_compile_nothing_after_the_warm_up(monkeypatch, own):
    torch._dynamo.reset()
    if not own:
        monkeypatch.setattr(native, "library", lambda: None)
    elif native.library() is None:
        pytest.skip("no C++ compiler")
    target, draft = tiny(max_position_embeddings=4096), tiny(seed=1, num_hidden_layers=1, max_position_embeddings=4096)
    engine = Engine(target, draft, draft_len=3, max_len=1000, compile=True)
    engine.warm_up()
    engine.prefill(PROMPT)
    compiled = dict(torch._dynamo.utils.counters["stats"])
    assert own or compiled["unique_graphs"] >= 2
    assert sum(1 for _ in itertools.islice(engine.rounds(len(PROMPT)), 500)) == 500
    assert torch._dynamo.utils.counters["stats"] == compiled


def test_a_round_keeps_its_buffers():
    engine = Engine(tiny(), tiny(seed=1), draft_len=3, sampling=Sampling(0.7), max_len=90)

    def addresses():
        buffers = {**vars(engine), **vars(engine.target_cache), **vars(engine.draft_cache)}
        return {k: v.data_ptr() for k, v in buffers.items() if isinstance(v, torch.Tensor)}

    engine.prefill(PROMPT)
    before = addresses()
    for _ in engine.rounds(len(PROMPT)):
        assert addresses() == before


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(1.0, top_k=5, top_p=0.9)])
@pytest.mark.parametrize("verify", [None, "standard", "judge", "topk"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_target_whose_logits_are_no_numbers_is_told(sampling, verify, bad):
    target = tiny()
    target.fuse_judge(torch.ones(48), 50.0, "post_norm")
    target.norm.weight[3] = bad
    draft = None if verify is None else tiny(seed=1)
    engine = Engine(target, draft, draft_len=4, verify=verify or "standard", threshold=2 if verify == "topk" else 0.5,
                    sampling=sampling, max_len=60)  # fmt: skip
    with pytest.raises(UserError, match="behind token 8 are no numbers"):
        engine.complete(PROMPT, 10)
    target.norm.weight[3] = 1.0
    assert len(engine.complete(PROMPT, 10)) == 10  # nothing was spoilt


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=3)])
def test_a_draft_whose_logits_are_no_numbers_changes_no_text(sampling):
    target, draft = tiny(), tiny(seed=1)
    draft.norm.weight[3] = float("nan")
    tokens, who = decode(Engine(target, draft, draft_len=4, sampling=sampling, max_len=60), PROMPT, 30)
    assert len(tokens) == 30
    if sampling.temperature == 0:
        assert is_greedy(target, PROMPT, tokens)
    else:
        assert set(who) == {"target"}


def test_no_top_p_keeps_every_token_of_a_large_vocabulary():
    logits = torch.randn(1, 128256, generator=torch.Generator().manual_seed(0))
    assert warp(logits, Sampling(1.0, top_k=128000)).isfinite().sum() == 128000


def test_sampling_is_repeatable_and_follows_the_seed():
    engine = Engine(tiny(), tiny(seed=1), draft_len=4, sampling=Sampling(1.0, seed=3), max_len=90)
    first, again, other = (decode(engine, PROMPT, 60, seed)[0] for seed in (None, 3, 4))
    assert first == again != other


@pytest.mark.parametrize("sampling", [
    Sampling(0.1), Sampling(0.7), Sampling(1.5), Sampling(1.0, top_k=4), Sampling(1.0, top_p=0.7),
])  # fmt: skip
def test_standard_sampling_keeps_the_targets_distribution(sampling):
    assert chi_squared(sampling) > 0.01


def test_a_planted_bias_is_caught(monkeypatch):
    import engine

    monkeypatch.setattr(engine, "next_distribution", lambda logits, q, n: logits.index_select(0, n.view(1))[0].softmax(-1))
    assert chi_squared(Sampling(1.0)) < 0.001


def markov(V, seed):
    """A model whose next-token logits depend on the last token alone: rounds cheap enough for 20,000 draws."""
    table = torch.randn(V, V, generator=torch.Generator().manual_seed(seed))
    model = tiny(vocab_size=V, num_hidden_layers=1, max_position_embeddings=1 << 16)
    model.step = lambda tokens, *_, **__: table.index_select(0, tokens)
    model.logits = model.local_logits = lambda hidden: (hidden, None)
    return model


def chi_squared(sampling, draws=20_000, V=6):
    """p-value that a text drawn by standard speculative decoding makes each step as the target would after that token."""
    target, draft = markov(V, 0), markov(V, 1)
    engine = Engine(target, draft, draft_len=2, sampling=sampling, max_len=draws + 1)
    text = [2, *decode(engine, [2], draws)[0]]
    counts = torch.zeros(V, V)
    counts.index_put_((torch.tensor(text[:-1]), torch.tensor(text[1:])), torch.ones(draws), accumulate=True)
    p = warp(target.step(torch.arange(V)), sampling).softmax(-1)
    assert counts[p == 0].sum() == 0
    statistic, degrees = 0.0, 0
    for seen, wanted in zip(counts, p * counts.sum(-1, keepdim=True)):
        big = wanted >= 5  # chi-squared wants at least 5 in a cell: the rest go into one
        seen, wanted = torch.cat((seen[big], seen[~big].sum()[None])), torch.cat((wanted[big], wanted[~big].sum()[None]))
        statistic += float(((seen - wanted).square() / wanted)[wanted >= 1].sum())
        degrees += max(0, int((wanted >= 1).sum()) - 1)
    if degrees == 0:
        return 1.0
    return float(torch.special.gammaincc(torch.tensor(degrees / 2), torch.tensor(statistic / 2)))


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**31), st.floats(0.05, 5), st.integers(0, 12), st.floats(0.01, 1))
def test_warp_keeps_what_it_says(seed, temperature, top_k, top_p):
    logits = torch.randn(3, 10, generator=torch.Generator().manual_seed(seed)) * 3
    got = warp(logits, Sampling(temperature, top_k, top_p)).softmax(-1)
    for row, out in zip(logits, got):
        order = row.argsort(descending=True)[: top_k or None].tolist()
        p = (row[order] / temperature).softmax(-1)
        must, may, total = {order[0]}, {order[0]}, 0.0  # rounding decides where the sum is as good as top_p
        for token, share in zip(order, p.tolist()):
            must |= {token} if total < top_p - 1e-6 else set()
            may |= {token} if total < top_p + 1e-6 else set()
            total += share
        chosen = out.nonzero()[:, 0].tolist()
        assert must <= set(chosen) <= may
        torch.testing.assert_close(out[chosen], (row[chosen] / temperature).softmax(-1))


@settings(deadline=None, max_examples=100)
@given(st.lists(st.sampled_from([0.0, 1e-30, 0.1, 1.0, 3e7]), min_size=1, max_size=20), st.floats(0, 1, exclude_max=True, width=32))
def test_draw_never_takes_a_token_of_weight_zero(weights, u):
    weights = torch.tensor(weights)
    if weights.sum() == 0:
        return
    for uniform in (u, 0.0, 1 - 2**-24):
        token = int(draw(weights, torch.tensor([uniform])))
        assert weights[token] > 0


class Letters:
    """A tokenizer of two letters a token: id 0 ends the text, id 26 a + b is two letters."""

    eos_ids = frozenset({0})

    @staticmethod
    def decode(ids):
        return "".join(chr(97 + i // 26 % 26) + chr(97 + i % 26) for i in ids)

    def stream(self):
        return self

    def push(self, ids):
        return self.decode(ids)

    def flush(self):
        return ""


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 80), min_size=1, max_size=40), st.lists(st.integers(1, 9), min_size=40, max_size=40),
    st.lists(st.text("abcd", min_size=1, max_size=4), max_size=3), st.integers(1, 30),
)  # fmt: skip
def test_output_trims_text_ids_counters_and_stream_alike(ids, sizes, stops, cap):
    streamed = []
    output = Output(Letters(), cap, stops, lambda piece, who: streamed.append((piece, who)))
    at, ended = 0, False
    for size in sizes:
        chunk = ids[at : at + size]
        at += size
        ended = output.add(chunk, [str(i) for i in chunk])
        assert ended or "".join(p for p, _ in streamed) == output.text[: output.streamed]
        if ended or at >= len(ids):
            break
    expected = ids[: ids.index(0)] if 0 in ids else ids
    reason = "stop" if 0 in ids and len(expected) < cap else "length"
    expected = expected[:cap]
    text = Letters.decode(expected)
    found = [text.find(s) for s in stops if s in text]
    if found:
        text, reason = text[: min(found)], "stop"
        expected = expected[: (len(text) + 1) // 2]
    if not ended:
        assert not found and len(expected) < cap
        return
    assert (output.text, output.tokens, output.finish_reason) == (text, expected, reason)
    assert output.accepted_by == [str(i) for i in expected]
    assert "".join(piece for piece, _ in streamed) == text
    assert all(Letters.decode([int(who)]).find(piece) >= 0 for piece, who in streamed)


def test_the_cache_is_read_in_buckets_and_never_beyond_its_end():
    engine = Engine(tiny(max_position_embeddings=4096), max_len=700)
    assert engine.target_cache.length == 768
    for length, bucket in ((1, 128), (128, 128), (129, 256), (257, 512), (513, 768), (768, 768)):
        assert engine._bucket(length) == bucket
    engine.prefill([1] * 699)
    assert len(list(engine.rounds(699))) == 1


def test_engine_refuses_what_does_not_fit():
    target, draft = tiny(), tiny(max_position_embeddings=100)
    with pytest.raises(UserError, match="draft's context of 100"):
        Engine(target, draft, max_len=120)
    with pytest.raises(UserError, match="`draft_len` is 0"):
        Engine(target, draft, draft_len=0, max_len=50)
    engine = Engine(target, max_len=20)
    with pytest.raises(UserError, match="empty"):
        engine.prefill([])
    with pytest.raises(UserError, match="21 tokens; there is room for 20"):
        engine.prefill([1] * 21)


@pytest.mark.parametrize("M, new", [(64, 1), (300, 8), (1, 1), (25, 200)])
def test_any_block_is_warmed_up_in_any_room(M, new):
    engine = Engine(tiny(), tiny(seed=1), draft_len=M, max_len=2 + new)
    engine.warm_up()
    assert engine.complete([5, 6], new) == Engine(tiny(), max_len=2 + new).complete([5, 6], new)


def test_what_no_model_has_room_for_is_refused():
    for M in (0, -1, 512, 10**12):
        with pytest.raises(UserError, match="`draft_len`"):
            Engine(tiny(), tiny(), draft_len=M, max_len=20)
    engine = Engine(tiny(), max_len=20)
    for prompt in ([3, 131], [3, -1], [10**9]):
        with pytest.raises(UserError, match="vocabulary of 131"):
            engine.prefill(prompt)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.001), Sampling(0.1), Sampling(0.1, top_k=2), Sampling(2.0, top_p=0.3)])
@pytest.mark.parametrize("floor", [0.0, 1e-30, 1e-2])
def test_the_judges_floor_is_on_the_models_own_probabilities(sampling, floor):
    target, draft = tiny(), tiny(seed=1)
    target.fuse_judge(torch.zeros(48), 50.0, "post_norm", floor)  # the head would take everything
    engine = Engine(target, draft, draft_len=4, verify="judge", sampling=sampling, max_len=120)
    engine.prefill(PROMPT)
    text = list(PROMPT)
    for now in engine.rounds(len(PROMPT)):
        p = target(torch.tensor([text + now.tokens]))[0].softmax(-1)[len(text) - 1 :]
        for i, (token, who) in enumerate(zip(now.tokens, now.accepted_by)):
            if who == "rule":
                assert p[i, token] >= floor * 0.999
        if floor < 1e-2:
            assert len(now.tokens) == 5
        text += now.tokens


@pytest.mark.parametrize("bad", [
    Sampling(seed=-1), Sampling(seed=1 << 64), Sampling(1e-40), Sampling(-1.0), Sampling(float("nan")), Sampling(float("inf")),
    Sampling(1.0, top_k=-1), Sampling(1.0, top_p=0.0), Sampling(1.0, top_p=1.5),
])  # fmt: skip
def test_sampling_that_cant_be_is_refused(bad):
    with pytest.raises(UserError, match="`(seed|temperature|top_k|top_p)` is .*; it must be"):
        Engine(tiny(), sampling=bad, max_len=20)


def test_weights_that_have_been_tied_are_read_once():
    tied, untied = tiny("smollm2"), tiny("smollm2", tie_word_embeddings=False)
    assert tied.weight_bytes() == untied.weight_bytes()
