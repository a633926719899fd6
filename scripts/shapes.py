"""The sizes of well-known models, for what needs no weights: counting bytes and random-weight benchmarks."""

from __future__ import annotations

from pathlib import Path

import torch

import checkpoint
from errors import UserError
from linear import choose
from model import Config, Transformer
from tp import Ranks

LLAMA31 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 8192}  # fmt: skip
# architecture, dim, layers, heads, key/value heads, feed-forward, vocabulary, context, theta, tied; head_dim if not dim / heads
ROWS: dict[str, tuple] = {
    "llama-2-7b": ("Llama", 4096, 32, 32, 32, 11008, 32000, 4096, 1e4, False),
    "llama-2-13b": ("Llama", 5120, 40, 40, 40, 13824, 32000, 4096, 1e4, False),
    "llama-2-70b": ("Llama", 8192, 80, 64, 8, 28672, 32000, 4096, 1e4, False),
    "llama-3.2-1b": ("Llama", 2048, 16, 32, 8, 8192, 128256, 131072, 5e5, True, 64),
    "llama-3.2-3b": ("Llama", 3072, 28, 24, 8, 8192, 128256, 131072, 5e5, True, 128),
    "llama-3.1-8b": ("Llama", 4096, 32, 32, 8, 14336, 128256, 131072, 5e5, False),
    "llama-3.1-70b": ("Llama", 8192, 80, 64, 8, 28672, 128256, 131072, 5e5, False),
    "llama-3.1-405b": ("Llama", 16384, 126, 128, 8, 53248, 128256, 131072, 5e5, False),
    "mistral-7b": ("Mistral", 4096, 32, 32, 8, 14336, 32768, 32768, 1e6, False),
    "qwen2.5-0.5b": ("Qwen2", 896, 24, 14, 2, 4864, 151936, 32768, 1e6, True),
    "qwen2.5-1.5b": ("Qwen2", 1536, 28, 12, 2, 8960, 151936, 32768, 1e6, True),
    "qwen2.5-7b": ("Qwen2", 3584, 28, 28, 4, 18944, 152064, 32768, 1e6, False),
    "qwen2.5-14b": ("Qwen2", 5120, 48, 40, 8, 13824, 152064, 32768, 1e6, False),
    "qwen2.5-32b": ("Qwen2", 5120, 64, 40, 8, 27648, 152064, 32768, 1e6, False),
    "qwen2.5-72b": ("Qwen2", 8192, 80, 64, 8, 29568, 152064, 32768, 1e6, False),
    "qwen3-0.6b": ("Qwen3", 1024, 28, 16, 8, 3072, 151936, 40960, 1e6, True, 128),
    "qwen3-8b": ("Qwen3", 4096, 36, 32, 8, 12288, 151936, 40960, 1e6, False, 128),
    "qwen3-32b": ("Qwen3", 5120, 64, 64, 8, 25600, 151936, 40960, 1e6, False, 128),
    "smollm2-135m": ("Llama", 576, 30, 9, 3, 1536, 49152, 8192, 1e5, True),
}


def shape(name: str) -> Config:
    """A known model's configuration. Raises KeyError for a name that isn't in the table."""
    architecture, dim, layers, heads, kv_heads, ffn, vocabulary, context, theta, tied, *head_dim = ROWS[name]
    scaling = {**LLAMA31, "factor": 32.0 if "3.2" in name else 8.0} if name.startswith("llama-3") else {}
    return Config(
        f"{architecture}ForCausalLM", dim, layers, heads, kv_heads, head_dim[0] if head_dim else dim // heads, ffn, vocabulary,
        context, 1e-5, theta, scaling, tied, qkv_bias=architecture == "Qwen2", qk_norm=architecture == "Qwen3",
    )  # fmt: skip


def find_shape(name: str) -> tuple[Config, Path | None]:
    """A configuration by a name of the table, or a checkpoint's with its folder.

    Raises:
        UserError: it is neither.
    """
    if name.lower() in ROWS:
        return shape(name.lower()), None
    try:
        folder = checkpoint.find_checkpoint(name)
    except UserError as error:
        raise UserError(f"{error}; known shapes are {', '.join(ROWS)}") from None
    return checkpoint.load_config(folder), folder


def unloaded_model(config: Config, quantization: str, dtype: torch.dtype, ranks: Ranks = Ranks()) -> Transformer:
    """A model, or one rank's part of it, that has no memory: to count its bytes, or to fill it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            return Transformer(config, ranks, quantization)
    finally:
        torch.set_default_dtype(before)


def random_model(
    config: Config, quantization: str, dtype: torch.dtype, device: torch.device | str, ranks: Ranks = Ranks()
) -> Transformer:
    """A model of random weights, or one rank's part of it, made on its device; of a size at which states stay finite."""
    model = unloaded_model(config, quantization, dtype, ranks)
    model.to_empty(device=device).requires_grad_(False).eval()
    for name, p in model.named_parameters():
        if p.dtype == torch.int8:
            p.random_(-127, 128)
        elif p.dtype == torch.uint8:
            p.random_(0, 256)
        elif name.endswith(".scale"):  # of numbers about 73 (int8) or 5 (int4, whose zeros are small beside that) in size
            p.fill_(config.dim**-0.5 / (73 if p.dim() == 1 else 5))
        elif name.endswith("norm.weight"):
            p.fill_(1)
        elif p.dim() == 1:
            p.zero_()
        else:
            p.normal_(std=p.shape[1] ** -0.5)
    model.tie()
    model.pack()
    if model.norm.weight.device.type == "cpu":
        choose(dtype, quantization)
    return model
