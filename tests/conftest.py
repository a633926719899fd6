"""Tiny random models of every architecture, and the CPU settings that make fp32 results repeatable."""

from __future__ import annotations

import copy
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which torch.compile may do first

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import checkpoint
from errors import run_cli
from model import Config, Transformer

LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
BASE = {
    "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 80,
    "vocab_size": 131, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
# name -> Hugging Face configuration, between them every feature that a supported model has
ARCHITECTURES = {
    "llama2": {"architectures": ["LlamaForCausalLM"], "num_key_value_heads": 6},
    "llama3": {"architectures": ["LlamaForCausalLM"], "rope_scaling": LLAMA3_ROPE, "rope_theta": 500000.0},
    "llama3.2": {"architectures": ["LlamaForCausalLM"], "rope_scaling": LLAMA3_ROPE, "tie_word_embeddings": True, "head_dim": 16},
    "llama-bias": {"architectures": ["LlamaForCausalLM"], "attention_bias": True},
    "llama-linear": {"architectures": ["LlamaForCausalLM"], "rope_scaling": {"type": "linear", "factor": 4.0}},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": None},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True, "rope_theta": 1000000.0},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 12},
    "smollm2": {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True, "num_attention_heads": 3,
                "num_key_value_heads": 3},
}  # fmt: skip


def hf_config(name: str, **changes: object) -> dict:
    return copy.deepcopy({**BASE, **ARCHITECTURES[name], **changes})  # transformers writes into what it is given


def tiny(name: str = "llama3", seed: int = 0, scale: float = 0.25, **changes: object) -> Transformer:
    """A random model whose logits are of order 1 and far from uniform."""
    torch.manual_seed(seed)
    model = Transformer(Config.from_hf(hf_config(name, **changes)))
    for parameter_name, parameter in model.named_parameters():
        if not parameter_name.endswith("norm.weight"):
            torch.nn.init.normal_(parameter, std=scale)
        else:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model.requires_grad_(False).eval()


def run_command(main: Callable[[], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *argv: str):
    """(status, stdout, stderr) of a command's ``main`` with these arguments, run in this process as from the command line."""
    monkeypatch.setattr(sys, "argv", [main.__module__ + ".py", *argv])
    try:
        run_cli(main)
        status = 0
    except SystemExit as end:
        status = end.code
    out, err = capsys.readouterr()
    return status, out, err


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., subprocess.CompletedProcess]:
    """Runs a program of the project's in its folder, but in this process: to start one takes seconds."""

    def run(program: str, *argv: str) -> subprocess.CompletedProcess:
        monkeypatch.chdir(ROOT)
        main = importlib.import_module(Path(program).stem).main
        return subprocess.CompletedProcess([program, *argv], *run_command(main, monkeypatch, capsys, *argv))

    return run


def heed_interrupts() -> None:
    """What a child does before it starts: shells let those that they start in the background ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def no_checkpoints_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies beside the scripts here is no test's business."""
    monkeypatch.setattr(checkpoint, "BESIDE", Path("absent"))


torch.set_num_threads(1)  # tiny products: a second thread costs more than it brings
