"""Downloads from a Hub of our own (fake_hub.py): what is fetched, resumed, refused, and where the token goes."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import download
import fake_checkpoint
import pytest
from conftest import ROOT, heed_interrupts, hf_config, run_command
from fake_hub import BIG, COMMIT, FIRST, NEEDED, OTHERS, REPO, SHARDS, TOKEN, FakeHub
from huggingface_hub import constants
from tqdm import tqdm

import checkpoint
import files
from convert_hf_checkpoint import convert
from model import Config
from writer import SIDE_FILES


@pytest.fixture
def hub(tmp_path, monkeypatch):
    fake = FakeHub({**OTHERS, **NEEDED})
    fake.is_the_hub(monkeypatch, tmp_path / "no-home")
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    yield fake
    fake.close()


@pytest.fixture
def run(hub, monkeypatch, capsys):
    """Runs ``download.py argv`` as on a terminal, with its progress bar: status, stdout, stderr and the lines of errors in it."""

    class OnTerminal(tqdm):
        def __init__(self, **options):
            super().__init__(**{**options, "disable": False})

    monkeypatch.setattr(download, "tqdm", OnTerminal)

    def call(*argv, repository=REPO):
        end_workers()
        status, out, err = run_command(download.main, monkeypatch, capsys, repository, *argv)
        assert TOKEN not in out + err and "hidden" not in out + err
        return SimpleNamespace(status=status, out=out, err=err, error="".join(re.findall("^error: .*\n", err, re.MULTILINE)))

    return call


def end_workers():
    """Where a command ends, so do those that still fetch; here they are waited for."""
    for thread in threading.enumerate():
        if "(worker)" in thread.name:
            thread.join(60)


FOLDER = Path("downloads/Tiny-8B-Chat")


def fetched():
    return {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.name != "download.json"}


def partials():
    return sorted(path.name for path in FOLDER.glob("*.partial"))


def partial_of(name):
    return FOLDER / f"{name}.{hashlib.sha256(NEEDED[name]).hexdigest()[:12]}.partial"


def begin(run, hub, name=FIRST, size=1000):
    """A run that ended with the first ``size`` bytes of a file; those are a number of chunks."""
    hub.faults[f"cdn {name}"] = [size] + [0] * 20
    result = run()
    end_workers()
    assert result.status == 1 and partial_of(name).read_bytes() == NEEDED[name][:size]
    hub.faults.clear()
    hub.log.clear()
    return result


def test_what_a_conversion_needs_and_nothing_else_from_one_commit(hub, run):
    result = run("--revision", "refs/pr/1")
    assert result.status == 0 and fetched() == NEEDED
    assert result.out == "next: python convert_hf_checkpoint.py downloads/Tiny-8B-Chat\n"
    assert f"{REPO} at commit {COMMIT[:12]}: 8 files, 0.00 GB, 8 to fetch" in result.err and "100%" in result.err
    record = json.loads((FOLDER / "download.json").read_text())
    assert (record["repository"], record["revision"], record["commit"]) == (REPO, "refs/pr/1", COMMIT)
    assert set(record["files"]) == set(NEEDED)
    assert hub.log[-1][1] == "config.json"  # last: a folder without it can't be converted


def test_a_second_run_fetches_nothing(hub, run):
    assert run().status == 0
    hub.log.clear()
    result = run()
    assert result.status == 0 and "0 to fetch" in result.err and "next: " in result.out
    assert {entry[1] for entry in hub.log} == {"revision"}


def test_without_an_index_the_weights_are_those_named_model(hub, run):
    hub.files = {"model.safetensors": BIG, "adapter.safetensors": b"x", "config.json": b"{}", "tokenizer.model": b"sp"}
    assert run("--out", "here").status == 0
    assert {p.name for p in Path("here").iterdir()} == {"model.safetensors", "config.json", "tokenizer.model", "download.json"}


def test_what_was_fetched_can_be_converted(hub, run, tmp_path):
    config = Config.from_hf(hf_config("llama3"))
    fake_checkpoint.write(config, tmp_path / "made", 20_000)
    hub.files = {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()}
    assert len(hub.files) > 4 and run().status == 0
    convert(FOLDER, Path("converted"), None)
    assert checkpoint.load_config(Path("converted")) == config and checkpoint.weight_files(Path("converted"))


def test_the_side_files_are_those_that_a_conversion_takes_along():
    assert download.SIDE_FILES == SIDE_FILES


def test_several_files_are_fetched_at_a_time(hub, run):
    hub.files = {name: data for name, data in NEEDED.items() if name in SHARDS or name == "config.json"}
    hub.files |= {"model.safetensors": hub.files.pop("model-00001-of-00002.safetensors")}
    hub.barrier = threading.Barrier(2, action=lambda: setattr(hub, "barrier", None), timeout=60)
    assert run("--connections", "2").status == 0  # the barrier opens only to two requests that are there together


# resume


def test_a_download_cut_off_again_and_again_goes_on_where_it_was(hub, run):
    hub.faults[f"cdn {FIRST}"] = [300_000] * 6  # more cuts than tries, but each gets further
    assert run().status == 0 and fetched() == NEEDED
    asked = [request[2] for request in hub.requests("cdn", FIRST)]
    assert asked == [None, *(f"bytes={300_000 * i}-" for i in range(1, 7))]


def test_a_run_that_failed_leaves_partials_and_the_next_goes_on_from_them(hub, run):
    result = begin(run, hub)
    assert re.fullmatch(r"error: http://\S+ can't be reached: .*closed.* \(what has come is kept; run it again.*\)\n", result.error)
    assert "Traceback" not in result.err and not (FOLDER / FIRST).exists() and not (FOLDER / "config.json").exists()
    assert run().status == 0 and fetched() == NEEDED
    assert hub.requests("cdn", FIRST) == [(FIRST, None, "bytes=1000-")]


@pytest.mark.parametrize("fault", ["whole", "shifted"])
def test_a_server_that_sends_no_such_range_spoils_nothing(hub, run, fault):
    begin(run, hub)
    hub.faults[f"cdn {FIRST}"] = [fault]
    result = run()
    assert result.status == 0 and fetched() == NEEDED and "100%" in result.err
    asked = [request[2] for request in hub.requests("cdn", FIRST)]
    assert asked == (["bytes=1000-"] if fault == "whole" else ["bytes=1000-", None])


def test_a_partial_of_another_version_is_not_gone_on_with(hub, run):
    begin(run, hub)
    hub.files[FIRST] = BIG[:-1] + b"!"
    assert run().status == 0 and fetched() == {**NEEDED, FIRST: hub.files[FIRST]}
    assert hub.requests("cdn", FIRST) == [(FIRST, None, None)] and not partials()


@pytest.mark.parametrize("left", [b"?" * 1000, BIG + b"more"])
def test_a_partial_that_is_damaged_is_fetched_from_the_start(hub, run, left):
    begin(run, hub)
    partial_of(FIRST).write_bytes(left)
    assert run().status == 0 and fetched() == NEEDED
    assert [request[2] for request in hub.requests("cdn", FIRST)] == ["bytes=1000-", None][len(left) > 1000 :]


def test_a_partial_that_lacks_only_its_name_needs_no_request(hub, run):
    begin(run, hub)
    partial_of(FIRST).write_bytes(BIG)
    assert run().status == 0 and fetched() == NEEDED and not hub.requests("cdn", FIRST)


def test_ctrl_c_leaves_partials(hub):
    hub.files[FIRST] = BIG * 6
    partial = FOLDER / f"{FIRST}.{hashlib.sha256(BIG * 6).hexdigest()[:12]}.partial"
    hub.faults[f"cdn {FIRST}"] = ["slow"]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, str(ROOT / "scripts" / "download.py"), REPO]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, preexec_fn=heed_interrupts
    )
    end = time.monotonic() + 60
    while not (partial.is_file() and partial.stat().st_size == 10 * 2**20) and time.monotonic() < end:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    start = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err and time.monotonic() - start < 5
    assert partial.stat().st_size == 10 * 2**20 and not (FOLDER / "config.json").exists()
    assert subprocess.run(command, capture_output=True, env=environment, timeout=60).returncode == 0
    assert fetched() == {**NEEDED, FIRST: BIG * 6} and hub.requests("cdn", FIRST)[-1] == (FIRST, None, "bytes=10485760-")


# checksums


@pytest.mark.parametrize("name", [FIRST, "tokenizer_config.json"])
def test_wrong_bytes_are_refused_and_not_kept(hub, run, name):
    hub.listed[name] = NEEDED[name]
    hub.files[name] = NEEDED[name][:-1] + b"?"
    result = run()
    assert result.status == 1 and result.error.startswith(f"error: {name}: the bytes that came don't have the checksum")
    assert name not in fetched() and not any(partial.startswith(name) for partial in partials())
    assert len(hub.requests("cdn" if name == FIRST else "hub", name)) == 2


@pytest.mark.parametrize("sent", [BIG + b"more", BIG[:-5]])
def test_another_size_than_listed_is_refused(hub, run, sent):
    hub.listed[FIRST], hub.files[FIRST] = BIG, sent
    result = run()
    assert result.status == 1 and "checksum" in result.error and FIRST not in fetched() and not partials()


def test_verify_mends_what_is_damaged_and_without_it_the_size_is_believed(hub, run):
    assert run().status == 0
    (FOLDER / FIRST).write_bytes(b"?" * len(BIG))
    (FOLDER / "tokenizer.json").write_bytes(b"short")
    assert run().status == 0
    assert fetched() == {**NEEDED, FIRST: b"?" * len(BIG)}
    result = run("--verify")
    assert result.status == 0 and fetched() == NEEDED
    assert f"{FOLDER / FIRST} doesn't have the checksum that the Hub lists" in result.err and "2 to fetch" in result.err


def test_a_file_that_the_record_lacks_is_hashed_and_not_fetched_again(hub, run):
    assert run().status == 0
    record = json.loads((FOLDER / "download.json").read_text())
    del record["files"][FIRST]
    (FOLDER / "download.json").write_text(json.dumps(record))
    assert run().status == 0 and len(hub.requests("cdn", FIRST)) == 1


def test_another_commit_replaces_files_of_the_same_size_and_removes_those_that_are_gone(hub, run):
    assert run().status == 0
    hub.commit, hub.files[FIRST] = "d" * 40, BIG[:-1] + b"!"
    del hub.files["special.tiktoken"]
    hub.faults[f"cdn {FIRST}"] = [10] + [0] * 20
    assert run().status == 1
    assert not (FOLDER / "config.json").exists()  # so that nobody converts a mixture of two commits
    hub.faults.clear()
    assert run().status == 0
    assert fetched() == {name: hub.files[name] for name in NEEDED if name != "special.tiktoken"}
    assert json.loads((FOLDER / "download.json").read_text())["commit"] == "d" * 40


# faults that pass, and those that don't


@pytest.mark.parametrize("kind", ["revision", "config.json", FIRST, f"cdn {FIRST}"])
@pytest.mark.parametrize("status", [500, 503])
def test_passing_faults_are_waited_out(hub, run, kind, status):
    hub.faults[kind] = [(status, {})] * 4
    result = run()
    assert result.status == 0 and fetched() == NEEDED and result.err.count("; again in 0 s") == 4


def test_a_connection_that_is_reset_is_gone_on_with(hub, run):
    hub.faults[f"cdn {FIRST}"] = ["reset"]
    result = run()
    assert result.status == 0 and fetched() == NEEDED and "reset by peer; again in 0 s" in result.err
    assert [request[2] for request in hub.requests("cdn", FIRST)] == [None, "bytes=1000-"]


@pytest.mark.parametrize("kind", ["revision", f"cdn {FIRST}"])
def test_faults_that_stay_end_in_one_line(hub, run, kind):
    hub.faults[kind] = [(502, {})] * 99
    result = run()
    assert result.status == 1 and "Traceback" not in result.err and not result.out
    assert result.error.startswith("error: 127.0.0.1 answers 502 Bad Gateway (what has come is kept")
    assert len(hub.faults[kind]) == 94


def test_a_server_that_has_had_too_many_requests_is_waited_for(hub, run):
    hub.faults[FIRST] = [(429, {"Retry-After": "7"})] * 2
    assert run().status == 0 and fetched() == NEEDED


def test_an_address_that_expired_is_one_line_and_a_new_one_is_asked_for(hub, run):
    hub.faults[f"cdn {FIRST}"] = [(403, {})]
    result = run()
    assert result.status == 1 and result.error.startswith("error: 127.0.0.1 answers 403 Forbidden (what has come is kept")
    assert run().status == 0 and len(hub.requests("hub", FIRST)) == 2


def test_no_server(hub, run):
    hub.close()
    result = run()
    assert result.status == 1 and "can't be reached: [Errno 111] Connection refused (what" in result.error
    assert "Traceback" not in result.err and not FOLDER.exists()


def test_offline(hub, run, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    result = run()
    assert result.status == 2 and "HF_HUB_OFFLINE is set" in result.error


@pytest.mark.parametrize("body", [
    b"<html>",
    b"[]",
    b'{"id": "a/b"}',
    b'{"id": "a/b", "sha": "../../x", "siblings": []}',
    b'{"id": "a/b", "sha": "' + b"c" * 40 + b'", "siblings": [{"rfilename": "config.json", "size": 1, "blobId": "x"}]}',
    b'{"id": "a/b", "sha": "' + b"c" * 40 + b'", "siblings": [{"rfilename": "config.json", "size": 1}]}',
    b'{"id": "a/b", "sha": "' + b"c" * 40 + b'", "siblings": [{"size": 1}]}',
])  # fmt: skip
def test_an_answer_in_another_form_is_one_line(hub, run, body):
    hub.faults["revision"] = [body]
    result = run()
    assert result.status == 1 and "answers in a form that isn't understood" in result.error and "Traceback" not in result.err


# refusals: the user can mend these


@pytest.mark.parametrize("kind, status, headers, token, words", [
    (FIRST, 401, {"X-Error-Code": "GatedRepo"}, None, "is gated: accept its licence at http://.*/maker/Tiny-8B-Chat .*then set HF"),
    (FIRST, 403, {"X-Error-Code": "GatedRepo"}, TOKEN, "is gated: accept its licence .*see that HF_TOKEN is of an account"),
    ("model.safetensors.index.json", 403, {}, TOKEN, "is gated: accept its licence .*see that HF_TOKEN is of an account"),
    ("revision", 403, {}, None, "is gated: accept its licence at .*then set HF_TOKEN"),
    ("revision", 401, {"X-Error-Message": "Invalid credentials in Authorization header"}, TOKEN, "doesn't know the token"),
    ("revision", 401, {"X-Error-Code": "RepoNotFound"}, None, "no repository maker/Tiny-8B-Chat: check the name.*HF_TOKEN"),
    ("revision", 404, {"X-Error-Code": "RepoNotFound"}, TOKEN, "no repository maker/Tiny-8B-Chat: .*the token may not see it"),
    ("revision", 404, {"X-Error-Code": "RevisionNotFound"}, None, "maker/Tiny-8B-Chat has no revision 'main'"),
])  # fmt: skip
def test_refusals_say_what_they_mean(hub, run, monkeypatch, kind, status, headers, token, words):
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    hub.faults[kind] = [(status, headers)]
    result = run()
    assert result.status == 2 and re.search(words, result.error) and result.err.count("error: ") == 1


def test_a_file_that_is_listed_and_not_there_is_the_hubs_fault(hub, run):
    hub.faults["config.json"] = [(404, {"X-Error-Code": "EntryNotFound"})]
    result = run()
    assert result.status == 1 and "127.0.0.1 answers 404 Not Found" in result.error


@pytest.mark.parametrize("files, words", [
    ({"pytorch_model.bin": b"x", "config.json": b"{}"}, "no model*.safetensors, and nothing else is read. It has pytorch_model"),
    ({"a.gguf": b"x"}, "It has a.gguf. scripts/convert_gguf.py reads a GGUF file."),
    ({"README.md": b"x"}, "and nothing else is read.\n"),
    ({"model.safetensors": b"x"}, "has no config.json"),
])  # fmt: skip
def test_a_repository_without_what_is_needed(hub, run, files, words):
    hub.files = files
    result = run()
    assert result.status == 2 and words in result.error and not FOLDER.exists()


def test_a_file_too_large_for_http_is_told_before_the_start(hub, run, monkeypatch):
    monkeypatch.setattr(constants, "MAX_HTTP_DOWNLOAD_SIZE", 1 << 20)
    result = run()
    assert result.status == 2 and f"{FIRST} of {REPO} at revision 'main' has 0 GB, too much for HTTP; take `hf" in result.error


def test_a_disk_without_room_is_told_before_the_start(hub, run, monkeypatch):
    begin(run, hub, size=2_000_000)
    need = sum(path.stat().st_size for path in FOLDER.iterdir() if path.name in NEEDED)
    left = sum(map(len, NEEDED.values())) - need - sum((FOLDER / name).stat().st_size for name in partials())
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: SimpleNamespace(free=left - 1))
    result = run()
    assert result.status == 2 and re.search(r"downloads/Tiny-8B-Chat needs 0.0 GB more, and its disk has 0.0 GB", result.error)
    assert not hub.requests("cdn", FIRST)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: SimpleNamespace(free=left))
    assert run().status == 0


def test_a_disk_that_fills_up_is_one_line(hub, run, monkeypatch):
    def full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(download, "http_get", full)
    result = run()
    assert result.status == 2 and re.search(r"\.partial can't be written: No space left on device; run it again", result.error)


def test_a_folder_of_something_else_is_not_touched(hub, run):
    assert run("--out", "taken").status == 0
    Path("taken/download.json").write_text(json.dumps({"repository": "maker/Other"}))
    assert "taken holds files of maker/Other; choose another --out" in run("--out", "taken").error
    Path("foreign").mkdir()
    Path("foreign/config.json").write_text("{}")
    assert "foreign holds files that were not fetched by this command" in run("--out", "foreign").error
    assert "foreign/config.json is a file" in run("--out", "foreign/config.json").error
    assert Path("foreign/config.json").read_text() == "{}"


def test_two_runs_do_not_write_to_one_folder(hub, run):
    FOLDER.mkdir(parents=True)
    handle = os.open(FOLDER, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    assert "another process writes to downloads/Tiny-8B-Chat" in run().error
    os.close(handle)
    assert run().status == 0


@pytest.mark.parametrize("repository, argv, words", [
    ("https://huggingface.co/maker/Tiny", (), "is no model's name; give owner/name"),
    ("../Tiny", (), "is no model's name; give owner/name"),
    ("maker/..", (), "is no model's name; give owner/name"),
    ("Tiny", (), "'Tiny' is no model's name; give owner/name"),
    ("a--b/c", (), "is no model's name; give owner/name"),
    ("a/b/c", (), "is no model's name; give owner/name"),
    (REPO, ("--connections", "0"), "it must be 1 to 64"),
    (REPO, ("--revision", ""), "--revision is empty"),
    (REPO, ("--wrong",), "unrecognized arguments"),
])  # fmt: skip
def test_mistakes_in_the_command(hub, run, repository, argv, words):
    result = run(*argv, repository=repository)
    assert result.status == 2 and words in result.error and not hub.log


# the token


def test_the_token_goes_to_the_hub_alone(hub, run, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", f" {TOKEN}\n")
    assert run().status == 0 and fetched() == NEEDED
    sent = {role: {entry[2] for entry in hub.log if entry[0] == role} for role in ("hub", "cdn")}
    assert sent == {"hub": {f"Bearer {TOKEN}"}, "cdn": {None}}
    assert hub.requests("cdn", FIRST)


def test_the_token_stays_with_a_redirect_within_the_hub(hub, run, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert run("--out", "new-name", repository="maker/Old-Name").status == 0
    assert [entry[1:3] for entry in hub.log[:2]] == [("main", f"Bearer {TOKEN}"), ("revision", f"Bearer {TOKEN}")]


def test_the_saved_token_is_used_where_there_is_no_other(hub, run, tmp_path, monkeypatch):
    (tmp_path / "no-home").mkdir()
    (tmp_path / "no-home" / "token").write_text(TOKEN + "\n")
    assert run().status == 0 and hub.log[0][2] == f"Bearer {TOKEN}"
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    hub.log.clear()
    assert run().status == 0 and hub.log[0][2] == "Bearer hf_other"


def test_a_token_that_cannot_be_one_is_not_shown(hub, run, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", f"{TOKEN} {TOKEN}")
    result = run()  # which checks that the token is nowhere in the output
    assert result.status == 2 and "HF_TOKEN (or the token that was saved) holds a space" in result.error and not hub.log


@pytest.mark.parametrize("endpoint", ["huggingface.co", "ftp://huggingface.co", "https://", "http://[x"])
def test_an_endpoint_that_is_no_address(hub, run, monkeypatch, endpoint):
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    result = run()
    assert result.status == 2 and f"HF_ENDPOINT is {endpoint!r}; it must be an address" in result.error


def test_a_redirect_to_something_that_is_not_the_web_is_not_followed(hub, run):
    hub.faults["config.json"] = [(302, {"Location": "ftp://127.0.0.1/config.json"})]
    result = run()
    assert result.status == 1 and "unsupported protocol 'ftp://'" in result.error


# names


def test_names_that_lead_out_of_the_folder_are_not_written(hub, run, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    row = {"size": 4, "blobId": "0" * 40}
    names = [
        "../evil.safetensors",
        "../../tokenizer.json",
        "/tmp/evil.tiktoken",
        "..",
        "a/../../evil.tiktoken",
        "..\\evil.tiktoken",
    ]
    hub.extra_rows = [{**row, "rfilename": name} for name in names]
    assert run().status == 0 and fetched() == NEEDED
    assert {path.parent for path in set(tmp_path.rglob("*")) - set(before) if path.is_file()} == {Path.cwd() / FOLDER}
