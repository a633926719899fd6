"""The server, through OpenAI's own client and by hand: answers, streams, refusals, the queue, hanging up, shutting down."""

from __future__ import annotations

import http.client
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from types import SimpleNamespace

import openai
import pytest
import serve
from conftest import ROOT

from llm import LLM
from tp import Ranks

QUESTION = "Ada has 36 buttons. Ada buys 2 jars of 14 buttons each. How many buttons does Ada have now?"
CHAT = [{"role": "user", "content": QUESTION}]


def start(*argv):
    command = [sys.executable, ROOT / "scripts" / "serve.py", "--port", "0", "--no-compile", *argv]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    line = process.stdout.readline()
    found = re.match(r"serving (\S+) at http://127.0.0.1:(\d+)/v1", line)
    assert found, line + process.stderr.read()
    return process, int(found[2])


@pytest.fixture(scope="module")
def port():
    process, port = start("--queue", "1", "--max-bytes", "20000")
    yield port
    process.terminate()
    assert process.wait(60) == 0, process.stderr.read()


@pytest.fixture(scope="module")
def client(port):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def llm():
    return LLM(compile=False)


def post(port, body, path="/v1/chat/completions", content_type="application/json"):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, data, {"content-type": content_type})
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read()), dict(answer.getheaders())


def under_way(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
        return json.loads(answer.read())["under_way"]


def test_the_openai_client_gets_what_the_library_gives(client, llm):
    assert [model.id for model in client.models.list()] == ["target"]
    expected = llm.generate(QUESTION, max_new_tokens=60)
    answer = client.chat.completions.create(model="target", messages=CHAT, max_tokens=60)
    assert answer.choices[0].message.content == expected.text and answer.choices[0].finish_reason == expected.finish_reason
    assert answer.usage.completion_tokens == len(expected.tokens) and answer.usage.prompt_tokens == len(llm.encode(QUESTION))
    assert answer.judge_decoding["mean_accepted"] == expected.mean_accepted
    in_parts = [{"role": "user", "content": [{"type": "text", "text": QUESTION[:9]}, {"type": "text", "text": QUESTION[9:]}]}]
    assert client.chat.completions.create(model="target", messages=in_parts, max_completion_tokens=60).choices == answer.choices


def test_a_stream_is_the_same_answer(client, llm):
    expected = llm.generate(QUESTION, max_new_tokens=60)
    options = {"model": "target", "messages": CHAT, "max_tokens": 60, "stream": True}
    parts = list(client.chat.completions.create(**options, stream_options={"include_usage": True}))
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == expected.text
    assert parts[0].choices[0].delta.role == "assistant" and len({part.id for part in parts}) == 1
    reasons = [part.choices[0].finish_reason for part in parts if part.choices]
    assert reasons[-1] == expected.finish_reason and set(reasons[:-1]) == {None}
    assert parts[-1].usage.completion_tokens == len(expected.tokens)
    assert all(part.usage is None for part in client.chat.completions.create(**options))


def test_raw_completions_options_and_stop_texts(client, llm):
    expected = llm.generate("Ada has", raw=True, max_new_tokens=30, verify="standard")
    answer = client.completions.create(model="target", prompt="Ada has", max_tokens=30, extra_body={"verify": "standard"})
    assert answer.choices[0].text == expected.text
    ids = llm.encode("Ada has", raw=True)
    assert (
        client.completions.create(model="target", prompt=ids, max_tokens=30, extra_body={"verify": "standard"}).choices[0]
        == (answer.choices[0])
    )
    stop = expected.text[5:8]
    cut = client.completions.create(model="target", prompt="Ada has", max_tokens=30, stop=stop, extra_body={"verify": "standard"})
    assert cut.choices[0].text == expected.text[: expected.text.index(stop)] and cut.choices[0].finish_reason == "stop"
    drawn = [
        client.chat.completions.create(
            model="target", messages=CHAT, max_tokens=40, temperature=2.0, seed=seed, extra_body={"verify": "standard"}
        ).choices[0]
        for seed in (3, 3, 4)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    at_length = client.chat.completions.create(model="target", messages=CHAT, max_tokens=3)
    assert at_length.choices[0].finish_reason == "length" and at_length.usage.completion_tokens == 3


@pytest.mark.parametrize("change, status, words", [
    ({"model": "gpt-4o"}, 404, "the model here is 'target'"), ({"messages": []}, 400, "messages must be a list"),
    ({"messages": [{"role": "user"}]}, 400, "content must be text"), ({"messages": ["hi"]}, 400, "must be an object"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "content must be text"),
    ({"n": 2}, 400, "n isn't supported"), ({"logprobs": True}, 400, "logprobs isn't supported"),
    ({"tools": [{"type": "function"}]}, 400, "tools isn't supported"), ({"presence_penalty": 0.5}, 400, "presence_penalty"),
    ({"response_format": {"type": "json_object"}}, 400, "response_format"), ({"frobnicate": 1}, 400, "no field 'frobnicate'"),
    ({"temperature": "hot"}, 400, "`temperature` is 'hot'"), ({"temperature": -1}, 400, "`temperature` is -1"),
    ({"max_tokens": 0}, 400, "`max_tokens` is 0; "),
    ({"max_tokens": True}, 400, "`max_tokens` is True; it must be a whole number"),
    ({"max_tokens": 10**6}, 400, "the context is"), ({"stop": [1]}, 400, "stop must be"),
    ({"verify": "guess"}, 400, "`verify` is 'guess'"),
    ({"draft_len": 1000}, 400, "there is room for 36"), ({"seed": -1}, 400, "`seed` is -1"),
    ({"messages": [{"role": "robot", "content": "hi"}]}, 400, "message 1 has the role 'robot'"),
    ({"stop": ""}, 400, "`stop` holds"),
    ({"seed": 1.5}, 400, "`seed` is 1.5; it must be a whole number"),
    ({"messages": [{"role": "user", "content": "word " * 3000}]}, 400, "the context is"),
    ({"messages": [{"role": "user", "content": "x" * 30000}]}, 413, "larger than 20000 bytes"),
])  # fmt: skip
def test_what_cannot_be_honoured_is_refused_in_a_line(port, change, status, words):
    got, answer, _ = post(port, {"model": "target", "messages": CHAT, "max_tokens": 5, **change})
    assert got == status and words in answer["error"]["message"], answer
    for path in ("/v1/completions",):
        assert post(port, {"model": "target", "prompt": [99999]}, path)[0] == 400


def test_what_is_no_request(port):
    assert post(port, b"{", "/v1/chat/completions")[0] == 400
    assert post(port, b"[]", "/v1/chat/completions")[0] == 400
    assert post(port, b"[" * 19000, "/v1/chat/completions")[0] == 400
    assert post(port, {"messages": CHAT}, content_type="text/plain")[0] == 415  # a web page may send that unasked
    assert post(port, {"prompt": {"a": 1}}, "/v1/completions")[0] == 400
    for fine in ({"user": "me"}, {"n": 1}, {"top_p": 0.9, "temperature": 0}, {"logit_bias": None}):
        assert post(port, {"messages": CHAT, "max_tokens": 2, **fine})[0] == 200


@pytest.mark.parametrize("path, status", [("/v1/embeddings", 404), ("/v1/models", 405)])
def test_what_isnt_served_is_told_as_the_rest_is(port, path, status):
    got, answer, _ = post(port, {"input": "x"}, path)
    assert got == status and answer["error"]["message"].startswith(f"POST {path} isn't served")


def test_one_at_a_time_a_few_wait_and_the_rest_are_sent_away(port, client):
    long = {"model": "target", "messages": CHAT, "max_tokens": 250, "stream": True, "temperature": 2.0, "stop": ["\0"]}
    streams = [client.chat.completions.create(**long, seed=seed, extra_body={"verify": "standard"}) for seed in (1, 2)]
    status, answer, headers = post(port, {"messages": CHAT})
    assert status == 429 and "2 requests are under way" in answer["error"]["message"] and headers["retry-after"] == "1"
    next(iter(streams[0]))
    for stream in streams:
        stream.close()  # both listeners hang up: their texts are given up
    limit = time.monotonic() + 60
    while under_way(port):
        assert time.monotonic() < limit
        time.sleep(0.05)
    results = []
    threads = [threading.Thread(target=lambda: results.append(post(port, {"messages": CHAT, "max_tokens": 20}))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [status for status, *_ in results] == [200, 200] and results[0][1]["choices"] == results[1][1]["choices"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_even_in_the_middle_of_an_answer(number):
    process, port = start()
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    stream = client.chat.completions.create(
        model="target", messages=CHAT, stream=True, temperature=2.0, extra_body={"verify": "standard"}
    )  # fmt: skip
    next(iter(stream))
    process.send_signal(number)
    assert process.wait(60) == 0
    assert "Traceback" not in process.stderr.read()


def test_mistakes_at_the_start_take_one_line(port, command):
    for argv, words in (
        (("--port", str(port)), f"--port {port} can't be had"), (("--port", "99999"), "--port is 99999"),
        (("--queue", "-1"), "--queue is -1"), (("--draft-len", "few", "--port", "0"), "--draft-len is few"),
    ):  # fmt: skip
        done = command("scripts/serve.py", *argv)
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_who_may_be_reached():
    assert all(serve.is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "127.8.8.8"))
    assert not any(serve.is_loopback(host) for host in ("0.0.0.0", "192.168.1.2", "::", "example.org"))


def test_who_hung_up_while_they_waited_costs_nothing():
    told, jobs = [], queue.Queue()
    left = SimpleNamespace(left=threading.Event(), send=told.append, ids=[1], options={})
    left.left.set()
    for job in (left, left, None):
        jobs.put(job)
    serve.work(None, Ranks(), jobs)  # no model is asked
    assert [str(item) for item in told] == ["the client hung up"] * 2
