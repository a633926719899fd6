"""The engine as a library: prompts of every kind one after another, options by name, streams, and mistakes."""

from __future__ import annotations

import contextlib
import dataclasses
import threading

import pytest
import torch
from naive import is_greedy
from test_cli import write_checkpoint

import checkpoint
import llm
from engine import Engine
from errors import UserError
from judge import Head
from llm import LLM, Options


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("llm")
    write_checkpoint(root / "target")
    write_checkpoint(root / "draft", seed=1, num_hidden_layers=1)
    for name in ("target", "draft"):
        (root / name / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    mark = checkpoint.fingerprint(root / "target")
    weight = torch.randn(48, generator=torch.Generator().manual_seed(0)) * 3
    Head(weight, 0.0, "post_norm", "target", mark).save(root / "head.pt")
    return root


@pytest.fixture(scope="module")
def model(folder):
    return LLM(folder / "target", folder / "draft", folder / "head.pt", context=300, dtype="float32", compile=False)


MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "ho"}, {"role": "user", "content": "?"}]


def test_prompts_of_every_kind_and_length_one_after_another(model):
    for prompt in ("Hello", "Hello there " * 15, MESSAGES, [5, 6, 7], MESSAGES[:1], "Hello", list(range(1, 250))):
        run = model.generate(prompt, verify="standard", max_new_tokens=20)
        assert is_greedy(model.target, model.encode(prompt, max_new_tokens=20), run.tokens)
        assert run.text == model.tokenizer.decode(run.tokens) and run.finish_reason in ("stop", "length")
        assert run.tokens_per_s > 0 and 0 <= run.mean_accepted <= 8


def test_options_change_from_text_to_text_and_engines_are_kept(model):
    plain = model.generate("Hello", verify="standard", draft_len=3, max_new_tokens=30)
    for options in (
        {"threshold": 1.0}, {"draft_len": 5, "verify": "topk", "threshold": 1}, {"draft_len": 36, "verify": "standard"},
        {"threshold": 1.0, "draft_len": "auto"},
    ):  # fmt: skip
        assert model.generate("Hello", max_new_tokens=30, **options).tokens == plain.tokens
    judged = model.generate("Hello", threshold=0.3, max_new_tokens=30)
    assert judged.accepted("rule") > 0
    first, again, other = (model.generate("Hello", temperature=1.0, seed=seed, max_new_tokens=30) for seed in (1, 1, 2))
    assert first.tokens == again.tokens != other.tokens
    engine = model.engine(verify="standard", draft_len=3)
    assert model.engine(verify="standard", draft_len=3, max_new_tokens=9, seed=4, stop=["x"]) is engine
    assert len(model._engines) <= llm.ENGINES
    assert engine.target_cache is model.engine(temperature=0.5).target_cache  # nothing is allocated anew


def test_a_stream_is_the_text_in_pieces_and_may_be_left(model):
    whole = model.generate("Hello", max_new_tokens=40)
    stream = model.stream("Hello", max_new_tokens=40)
    pieces = [next(stream), *stream]
    assert "".join(piece.text for piece in pieces) == whole.text == stream.result.text and len(pieces) > 3
    assert {piece.accepted_by for piece in pieces} <= {"standard", "rule", "target"}
    left = model.stream("Hello", max_new_tokens=40)
    assert whole.text.startswith(next(iter(left)).text) and left.result.finish_reason == ""
    assert model.generate("Hello", max_new_tokens=40).tokens == whole.tokens
    stop = whole.text[3:5]
    cut = model.generate("Hello", max_new_tokens=40, stop=[stop])
    assert cut.text == whole.text[: whole.text.index(stop)] and cut.finish_reason == "stop"


def test_a_stream_cannot_go_on_after_another_text_was_begun(model):
    stream = iter(model.stream("Hello", max_new_tokens=60))
    next(stream)
    whole = model.generate("Other", max_new_tokens=20)
    with pytest.raises(UserError, match="another text was begun"):
        list(stream)
    assert model.generate("Other", max_new_tokens=20).tokens == whole.tokens


def test_threads_that_share_the_models_wait_for_each_other(model):
    prompts = ["Hello", "Other", "a third one", "Hello there"]
    options = {"max_new_tokens": 40, "verify": "standard"}
    expected = [model.generate(prompt, **options).tokens for prompt in prompts]
    found = [[] for _ in prompts]

    def ask(i):
        for _ in range(3):
            found[i].append(model.generate(prompts[i], **options).tokens)

    half_read = model.stream("left", **options)
    next(half_read)  # and never again: it must be in nobody's way
    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert found == [[tokens] * 3 for tokens in expected]


def test_a_stream_of_another_thread_waits_for_a_text(model):
    whole = model.generate("Hello", max_new_tokens=40).text
    stream, said = model.stream("Hello", max_new_tokens=40), []

    def read():
        with contextlib.suppress(UserError):
            said.extend(piece.text for piece in stream)

    with model._lock:  # as while a generate runs
        thread = threading.Thread(target=read)
        thread.start()
        thread.join(0.2)
        assert thread.is_alive() and said == []
        tokens = model.generate("Other", max_new_tokens=20).tokens
    thread.join(300)
    assert "".join(said) == whole and model.generate("Other", max_new_tokens=20).tokens == tokens


def test_what_compiling_takes_counts_as_no_texts_time(folder, monkeypatch):
    order = []
    for name in ("warm_up", "prefill"):
        original = getattr(Engine, name)
        monkeypatch.setattr(Engine, name, lambda self, *a, o=original, n=name: order.append(n) or o(self, *a))
    llm = LLM(folder / "target", folder / "draft", dtype="float32", compile=False)
    for options in ({}, {}, {"temperature": 1.0}, {"draft_len": 3}, {}, {"draft_len": "auto"}):
        llm.generate("Hello", max_new_tokens=5, **options)
    # another temperature needs nothing more, and what is in the caches stays
    assert order == ["warm_up", "prefill", "prefill", "prefill", "warm_up", "prefill", "prefill", "warm_up", "prefill"]


def test_a_stream_does_not_count_the_time_of_who_watches_it(model, monkeypatch):
    clock = iter(range(10**6))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    stream = model.stream("Hello", verify="standard", max_new_tokens=40)
    for _ in stream:
        for _ in range(1000):
            next(clock)
    assert stream.result.decode_s < 1000


@pytest.mark.parametrize("prompt, options, words", [
    ("", {}, "the prompt is empty"), ([], {}, "the prompt is empty"),
    ("a" * 301, {}, "the prompt has 307 tokens; the context is 300"),
    ("a", {"max_new_tokens": 300}, "the context is 300"), ("a", {"max_new_tokens": 0}, "`max_new_tokens` is 0"),
    ("a", {"verify": "guess"}, "`verify` is 'guess'"), ("a", {"draft_len": 37}, "there is room for 36"),
    ("a", {"draft_len": 0}, "`draft_len` is 0"), ("a", {"draft_len": "few"}, "`draft_len` is few"),
    ("a", {"threshold": 2.0}, "`threshold` is 2"), ("a", {"temperature": -1.0}, "`temperature` is -1"),
    ("a", {"stop": "ab"}, "`stop` is 'ab'; give a list"), ("a", {"stop": [1]}, "`stop` is .1.; give a list"),
    ("a", {"stop": ["b", ""]}, "`stop` holds an empty text"),
    ("a", {"top_p": 0.5}, "no effect at `temperature` 0"), ([7, 9999], {}, "token 9999 is beyond"),
    ("a", {"temperature": "hot"}, "`temperature` is 'hot'; it must be a number"),
    ("a", {"temperature": None}, "`temperature` is None; it must be a number"),
    ("a", {"max_new_tokens": 2.5}, "`max_new_tokens` is 2.5; it must be a whole number"),
    ("a", {"seed": True}, "`seed` is True; it must be a whole number"), ("a", {"threshold": "0.5"}, "`threshold` is '0.5'"),
    ("a", {"verify": 1}, "`verify` is 1; it must be a rule's name"), ("a", {"draft_len": 2.0}, "`draft_len` is 2.0; it must be"),
    (["a", "b"], {}, "the prompt must be one text.*give several texts one by one"), (5, {}, "the prompt must be one text"),
    (None, {}, "the prompt must be"), ({"role": "user", "content": "a"}, {}, "the prompt must be"), ([1, "a"], {}, "must be one"),
    ([True], {}, "must be one text, a list of token ids"), ([5, False], {}, "must be one"),
    ("a", {"maxtokens": 3}, "no option 'maxtokens'; is `max_new_tokens` meant"), ("a", {"topk": 3}, "is `top_k` meant"),
    ("a", {"frobnicate": 1}, "no option 'frobnicate'; there are max_new_tokens, stop, verify"),
    ([{}], {}, "message 1 has the role None; there are system, user"),
    (MESSAGES[:1] + [{"role": "bot", "content": "a"}], {}, "'bot'"),
    ([{"role": "user"}], {}, "message 1 has the content None; a content must be text"),
    ([{"role": "user", "content": ["a"]}], {}, "message 1 has the content .'a'."),
])  # fmt: skip
def test_mistakes_are_told_before_anything_is_decoded(model, prompt, options, words):
    with pytest.raises(UserError, match=words):
        list(model.stream(prompt, **options))


def test_what_was_asked_of_the_models_at_hand(folder):
    alone = LLM(folder / "target", context=100, dtype="float32", compile=False)
    assert is_greedy(alone.target, alone.encode("Hello", max_new_tokens=20), alone.generate("Hello", max_new_tokens=20).tokens)
    assert alone.draft is None and alone.caches[1] is None
    for options, words in (({"verify": "judge"}, "needs a `draft`"), ({"verify": "topk"}, "needs a `draft`")):
        with pytest.raises(UserError, match=words):
            alone.engine(**options)
    unjudged = LLM(folder / "target", folder / "draft", dtype="float32", compile=False)
    assert unjudged.engine().verify == "standard" and unjudged.context == 512
    with pytest.raises(UserError, match="needs a head"):
        unjudged.engine(verify="judge")
    for context in (1, 513):
        with pytest.raises(UserError, match=f"a context of {context} tokens"):
            LLM(folder / "target", context=context)
    with pytest.raises(UserError, match="draft` .*draft needs a `target`"):
        LLM(draft=folder / "draft")


@pytest.mark.parametrize("options, words", [
    ({"device": "gpu"}, "`device` is 'gpu'; there are cuda, cpu"),
    ({"quantize": "int3"}, "`quantize` is 'int3'; there are none, int8"),
    ({"dtype": torch.float32}, "`dtype` is torch.float32; there are bfloat16, float16, float32"),
    ({"context": "long"}, "a context of 'long' tokens"), ({"max_draft_len": 0}, "room for 0 drafted tokens"),
    ({"max_draft_len": "x"}, "room for 'x' drafted tokens"),
])  # fmt: skip
def test_models_are_asked_for_by_words_that_there_are(folder, options, words):
    with pytest.raises(UserError, match=words):
        LLM(folder / "target", **options)
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="`device` is cuda; this machine has no CUDA device"):
            LLM(folder / "target", device="cuda")


def test_options_are_the_engines_own(folder):
    names = {field.name for field in dataclasses.fields(Options)}
    assert {"max_new_tokens", "stop", "verify", "threshold", "draft_len", "temperature", "top_k", "top_p", "seed", "raw"} == names
    adapting = LLM(folder / "target", folder / "draft", dtype="float32", compile=False, max_draft_len=600)
    run = adapting.generate("Hello", draft_len="auto", max_new_tokens=60)
    assert isinstance(adapting.engine(draft_len="auto"), Engine) and adapting.engine(draft_len="auto").pace is not None
    assert is_greedy(adapting.target, adapting.encode("Hello"), run.tokens)
