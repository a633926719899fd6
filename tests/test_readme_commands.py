"""Every command of the README is run as it stands there, in its order, in a folder that has what its reader has by then.

A command may need what those before it wrote, so it is the whole file that is run. SMALLER is all that differs from the README.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import benchmark
import gguf
import pytest
import shapes
import soak
import tokenizers
import torch
import train_judge
from conftest import ROOT, hf_config, run_command
from fake_hub import FakeHub
from safetensors.torch import save_file
from test_benchmark import SMALL
from test_benchmark import SMALLER as SMALLER_SHAPE
from test_cli import CHARS, V, typed, write_tokenizer
from test_convert_gguf import bpe_metadata, gguf_tensors, metadata, tiny_model, train_bpe, write_gguf
from test_readme import lines_of
from test_serve import start
from test_tp import torchrun
from test_train_demo import cut_down

import checkpoint
from convert_hf_checkpoint import convert
from errors import UserError
from judge import Head

SMALLER = {  # a program: options that are put behind the README's, of which the last one counts
    "generate.py under torchrun": "--no-compile --json",
    "scripts/evaluate.py": "--limit 2",
    "scripts/check_lossless.py": "--prompts 1 --draft-lens 1,25 --new-tokens 12 --self-tokens 16",
    "scripts/soak.py": "--minutes 0.05",
    "scripts/benchmark.py": "--limit 1 --repeat 1 --new-tokens 16 --prompt-tokens 16",
    "scripts/compare_peers.py": "--no-compile --limit 1 --repeat 1 --new-tokens 4",
    "scripts/serve.py": "--no-compile --port 0",
}
NOT_RUN = {  # how a line begins, and why it is left out
    "git clone ADDRESS ": "the tests run in a clone",
    "scripts/demo.sh": "it installs what test.sh does, and shows what tests/test_demo.py runs",
    "scripts/test.sh": "it is what runs the tests: .ci/run",
    "source .venv/bin/activate": "of the environment that test.sh made",
    "pip install -r requirements-": "a test below looks into the files",
}
TYPED = {"--interactive": ["Why?", "And at dusk?"], "manual": ["2-3", "", "q"]}  # by what asks for it
REFUSED = {"scripts/gpu_check.py": "error: there is no CUDA device"}  # what is said where a machine can't do it
SIZES = {"hidden_size": V, "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32,
         "intermediate_size": 64, "vocab_size": V, "max_position_embeddings": 1024}  # fmt: skip
EOS, HASHES, SPACE = 0, len(CHARS) + 1, "Ġ"
# what a model says after a token: the likeliest, and another. After the first the draft's is right too, after #### it matters
TARGET = {":": SPACE, SPACE: "i", "i": "st", "s": "#", "t": "#", "#": "56"}
DRAFT = {**TARGET, "i": "ts", "#": "65"}


def said_here():
    """The command lines, in the README's order."""
    programs = r"(python|torchrun|pip|curl|git|source|(scripts/)?\w+\.(py|sh)) \S"
    for line, in_block in lines_of("README.md"):
        if (in_block and line and "  " not in line) or re.match(programs, line):  # two columns are a name, and what it is
            yield line


LINES = list(said_here())


def write_model(folder, says, seed):
    """A model in Hugging Face's form that goes by the last token, and its tokenizer; #### is a token of its own."""
    folder.mkdir(parents=True)
    ids = {**{char: i for i, char in enumerate(CHARS, 1)}, "#": HASHES}
    generator = torch.Generator().manual_seed(seed)
    H, D, F = 8, 32, SIZES["intermediate_size"]
    shapes = {"self_attn.q_proj": (H * D, V), "self_attn.k_proj": (H * D, V), "self_attn.v_proj": (H * D, V),
              "self_attn.o_proj": (V, H * D), "mlp.gate_proj": (F, V), "mlp.up_proj": (F, V), "mlp.down_proj": (V, F)}  # fmt: skip
    weights = {f"model.layers.0.{name}.weight": torch.randn(s, generator=generator) / 100 for name, s in shapes.items()}
    for name in ("model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm", "model.norm"):
        weights[f"{name}.weight"] = torch.ones(V)
    output = torch.randn(V, V, generator=generator) / 100
    output[EOS] += 0.5
    for char, then in says.items():
        for place, other in enumerate(then):
            output[ids[other], ids[char]] = 1 - 0.2 * place
    save_file({**weights, "model.embed_tokens.weight": torch.eye(V), "lm_head.weight": output}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**hf_config("llama3", **SIZES), "model_type": "llama"}))
    write_tokenizer(folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.add_tokens(["####"]) == 1 and tokenizer.token_to_id("####") == HASHES
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}Answer:")
    return folder


class Reader:
    """The folder that all is run in, and the server that was started there."""

    def __init__(self, folder):
        self.folder, self.server, self.port = folder, None, None

    def prepare(self):
        """What the README takes for granted: the clone's demo, its reader's data, and models that it doesn't say how to get."""
        (self.folder / "demo").mkdir()
        for path in (ROOT / "demo").iterdir():
            (self.folder / "demo" / path.name).symlink_to(path)
        tuples = self.folder / "demo" / "judge_tuples.jsonl"  # all 500 take a minute
        tuples.unlink()
        tuples.write_text("".join((ROOT / "demo" / tuples.name).open().readlines()[:20]))
        rows = [json.dumps({"question": f"What is {n} + {5 - n}?", "answer": " is #### 5"}) + "\n" for n in range(16)]
        for name, many in (("train", 16), ("test", 7), ("gsm8k_test", 5), ("questions", 12), ("others", 3), ("answers", 2)):
            (self.folder / f"{name}.jsonl").write_text("".join(rows[:many]))
        for name, says in (("Llama-3.1-405B-Instruct", TARGET), ("qwen2.5-coder-1.5b-instruct", TARGET),
                           ("qwen2.5-coder-0.5b-instruct", DRAFT)):  # fmt: skip
            source = write_model(self.folder / "source" / name, says, len(name))
            convert(source, self.folder / "checkpoints" / name, None, "int8" if "405B" in name else "none")
        model = tiny_model("llama", max_position_embeddings=1024, head_dim=16)
        write_gguf(
            self.folder / "model.gguf", "llama", metadata("llama", model), bpe_metadata(train_bpe(), "llama-bpe"),
            gguf_tensors(model, "llama"), gguf.GGMLQuantizationType.F32,
        )  # fmt: skip
        shutil.copy(self.folder / "model.gguf", self.folder / "8B.gguf")


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    reader = Reader(tmp_path_factory.mktemp("reader"))
    reader.prepare()
    yield reader
    if reader.server is not None:
        reader.server.terminate()
        assert reader.server.wait(60) == 0


def value_of(argv, option):
    return argv[argv.index(option) + 1] if option in argv else None


def make_head(target, path):
    """A head for a target, as the README's part on judges makes them, where there is none yet; this lets nothing pass."""
    folder = checkpoint.find_checkpoint(target)
    try:
        checkpoint.head_for(folder, path)
    except UserError:
        Head(torch.zeros(V), -9.0, "post_norm", folder.name, checkpoint.fingerprint(folder)).save(path)


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.split(" --")[0])
def test_a_command_of_the_readme_runs(line, reader, monkeypatch, capsys, request):
    if any(line.startswith(start) for start in NOT_RUN):
        return
    monkeypatch.chdir(reader.folder)
    if line.startswith("curl "):
        said = subprocess.run(line.replace(":8000/", f":{reader.port}/"), shell=True, capture_output=True, text=True, check=True)
        assert json.loads(said.stdout)["choices"][0]["message"]["content"] == " is####5"
        return
    found = re.fullmatch(r"(?:(?:python|torchrun --nproc_per_node=(\d+)) )?((?:scripts/)?\w+\.py)\b(.*)", line)
    assert found, f"no test knows how to run {line!r}"
    ranks, program, rest = found.groups()
    argv = [*shlex.split(rest), *SMALLER.get(f"{program} under torchrun" if ranks else program, "").split()]
    if "--judge" in argv:
        make_head(value_of(argv, "--target"), Path(value_of(argv, "--judge")))
    if ranks:
        out = torchrun(ranks, ROOT / program, *argv, cwd=reader.folder).communicate(timeout=300)[0]
        (result,) = [json.loads(said) for said in out.splitlines() if said.startswith('{"')]  # only rank 0 speaks
        assert result["config"]["ranks"] == int(ranks) and result["text"] == " is####5", out
    elif program == "scripts/serve.py":
        reader.server, reader.port = start(*argv)
    else:
        within_reach(program, argv, reader, monkeypatch, request)
        typed(monkeypatch, *next((lines for word, lines in TYPED.items() if word in argv), []))
        main = importlib.import_module(Path(program).stem).main
        status, out, err = run_command(main, monkeypatch, capsys, *argv)
        if program in REFUSED:
            assert status == 2 and err.startswith(REFUSED[program]), err
            return
        assert status == 0, out + err
    for option in ("--out", "--html", "--plot", "--work"):
        assert option not in argv or Path(value_of(argv, option)).exists(), option


def within_reach(program, argv, reader, monkeypatch, request):
    """What no option makes small enough, and a Hub without a network."""
    if program == "scripts/download.py":
        _, name = argv[0].split("/")
        source = write_model(reader.folder / "hub" / name, DRAFT if "1B" in name else TARGET, len(name))
        hub = FakeHub({path.name: path.read_bytes() for path in source.iterdir()}, argv[0])
        request.addfinalizer(hub.close)
        hub.is_the_hub(monkeypatch, reader.folder / "no-home")
    elif program == "scripts/benchmark.py":
        monkeypatch.setattr(benchmark, "READ_BYTES", 1 << 20)
        monkeypatch.setitem(shapes.ROWS, "llama-3.1-405b", (*SMALL[:3], 8, 8, *SMALL[5:]))
        monkeypatch.setitem(shapes.ROWS, "llama-3.1-8b", (*SMALLER_SHAPE[:3], 8, 8, *SMALLER_SHAPE[5:]))
    elif program == "scripts/train_judge.py":
        monkeypatch.setattr(train_judge, "train_head", functools.partial(train_judge.train_head, max_epochs=20))
    elif program == "scripts/soak.py":
        monkeypatch.setattr(soak, "LEAK", float("inf"))  # it takes minutes until memory in use is steady
    elif program == "scripts/train_demo.py":
        cut_down(monkeypatch)
    elif program == "scripts/gpu_check.py":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_the_example_of_a_client_runs(reader, capsys):
    """Last: it asks the server that the README's command has started."""
    openai = pytest.importorskip("openai")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (client,) = re.findall(r"^```py\n(.*?)^```", text, re.M | re.S)
    names = {"OpenAI": openai.OpenAI}
    exec(compile(client.replace(":8000/", f":{reader.port}/"), "README.md", "exec"), names)
    assert names["answer"].choices[0].message.content == " is####5"


def test_what_isnt_run_is_there():
    for start_of_line in NOT_RUN:
        assert any(line.startswith(start_of_line) for line in LINES), start_of_line
    tested = (ROOT / "requirements-test.txt").read_text()
    for line in LINES:
        if line.startswith("pip install"):
            assert f"-r {line.split()[-1]}\n" in tested and (ROOT / line.split()[-1]).is_file(), line
    assert "scripts/test.sh" in (ROOT / ".ci" / "run").read_text()


def test_the_tables_above_are_of_commands_that_are_there():
    assert len(LINES) > 40
    assert all(any(program.split(" under ")[0] in line for line in LINES) for program in (*SMALLER, *REFUSED, *TYPED))
