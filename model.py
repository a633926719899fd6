"""One Transformer for Llama, Mistral, Qwen2 and Qwen3: its configuration, its static KV cache, and the judge row.

The module has two ways through the same weights. ``forward`` reads whole sequences without a cache: it is what training
uses, and the reference that everything faster is tested against. ``step`` reads a few tokens at given positions against a
static KV cache, and is what the engine compiles and captures. Batch size is 1 in ``step``, so it carries no batch dimension.

Shapes: T tokens, D = dim, H query heads, K key/value heads, G = H // K, C = head_dim, F = ffn_dim, V = vocab_size,
S = positions of the cache that are read.
"""

from __future__ import annotations

import copy
import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import native
from attention import attend
from errors import UserError
from linear import SMALL, Int4Linear, Int8Linear, Linear, group_of, make_linear, ours
from tp import Ranks, check_divides, gather_last, local_config, sum_ranks

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_TYPES = ("default", "linear", "llama3")
# a configuration's sizes, and config.json's names for them
SIZES = {
    "dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads", "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim", "ffn_dim": "intermediate_size", "vocab_size": "vocab_size", "max_seq_len": "max_position_embeddings",
}  # fmt: skip
PREFILL_CHUNK = 256  # tokens read at once from a text that is given


@dataclass(frozen=True)
class Config:
    """The numbers that define a model, as its ``config.json`` gives them."""

    architecture: str
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    max_seq_len: int
    norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] = field(default_factory=dict)  # empty: none
    tie_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False

    @staticmethod
    def from_hf(raw: dict[str, Any]) -> Config:
        """Read a Hugging Face ``config.json`` (either generation of its RoPE keys).

        Raises:
            UserError: an unknown architecture, activation or RoPE type, a missing key, or sizes that don't fit together.
        """
        names = raw.get("architectures") or ["nothing"]
        if names[0] not in ARCHITECTURES:
            raise UserError(f"config.json names the architecture {names[0]}; known are {', '.join(ARCHITECTURES)}")
        arch: str = names[0]
        _refuse_unsupported(raw)

        def need(key: str) -> Any:
            if raw.get(key) is None:
                raise UserError(f"config.json lacks {key!r}, which {arch} needs")
            return raw[key]

        rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
        theta = float(rope.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0)
        kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
        if kind not in ROPE_TYPES:
            raise UserError(f"config.json asks for RoPE type {kind!r}; known are {', '.join(ROPE_TYPES)}")
        n_heads = need("num_attention_heads")
        config = Config(
            architecture=arch,
            dim=need("hidden_size"),
            n_layers=need("num_hidden_layers"),
            n_heads=n_heads,
            n_kv_heads=raw.get("num_key_value_heads") or n_heads,
            head_dim=raw.get("head_dim") or need("hidden_size") // n_heads,
            ffn_dim=need("intermediate_size"),
            vocab_size=need("vocab_size"),
            # within its window a sliding-window model is an ordinary one, so the window is where its context ends here
            max_seq_len=min(need("max_position_embeddings"), _window(raw)),
            norm_eps=float(need("rms_norm_eps")),
            rope_theta=theta,
            rope_scaling={} if kind == "default" else {"rope_type": kind, **rope},
            tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=arch == "Qwen2ForCausalLM" or bool(raw.get("attention_bias", False)),
            out_bias=arch != "Qwen2ForCausalLM" and bool(raw.get("attention_bias", False)),
            qk_norm=arch == "Qwen3ForCausalLM",
        )
        config.check()
        return config

    def check(self) -> None:
        """Raises UserError where the sizes contradict each other."""
        if not 0 < self.norm_eps < math.inf:
            raise UserError(f"config.json gives rms_norm_eps = {self.norm_eps!r}; it must be a number above 0")
        if not 1 <= self.rope_theta < 1e38:  # fp32 ends there
            raise UserError(f"config.json gives rope_theta = {self.rope_theta!r}; it must be a number from 1 to 1e38")
        for name, key in SIZES.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f"config.json gives {key} = {value!r}; it must be a whole number of at least 1")
        if self.n_heads % self.n_kv_heads:
            raise UserError(f"{self.n_heads} attention heads don't divide over {self.n_kv_heads} key/value heads")
        if self.head_dim % 2:
            raise UserError(f"head_dim is {self.head_dim}; RoPE needs an even number")
        if self.rope_scaling:
            keys = ["factor"]
            if self.rope_scaling["rope_type"] == "llama3":
                keys += ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
            missing = [k for k in keys if k not in self.rope_scaling]
            if missing:
                raise UserError(f"config.json's RoPE scaling lacks {', '.join(missing)}")
            for key in keys:
                value = self.rope_scaling[key]
                if not isinstance(value, float | int) or not 1e-6 <= value <= 1e9:  # so that fp32's frequencies stay finite
                    raise UserError(f"config.json's RoPE scaling gives {key} = {value!r}; it must be a number from 1e-6 to 1e9")
            if "low_freq_factor" in keys and self.rope_scaling["low_freq_factor"] >= self.rope_scaling["high_freq_factor"]:
                raise UserError("config.json's RoPE scaling gives a low_freq_factor that isn't below its high_freq_factor")


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    act = raw.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise UserError(f"config.json asks for the activation {act!r}; only silu is known")
    if raw.get("mlp_bias"):
        raise UserError("config.json asks for mlp_bias = true; biases in the feed-forward layers aren't supported")


def _window(raw: dict[str, Any]) -> int:
    """Positions within a sliding window, or no limit. Qwen2 and Qwen3 name a window that ``use_sliding_window`` turns off."""
    window = raw.get("sliding_window")
    return window if window and raw.get("use_sliding_window", True) else 1 << 62


def rope_inverse_frequencies(config: Config) -> Tensor:
    """Inverse frequencies [C / 2] in fp32, Llama-3's or linear scaling applied (Llama 3.1 report, section 3.2)."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
    freqs = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if not scaling:
        return freqs
    factor = float(scaling["factor"])
    if scaling["rope_type"] == "linear":
        return freqs / factor
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = scaling["original_max_position_embeddings"] * freqs / (2 * math.pi)  # turns over the original context
    blend = ((turns - low) / (high - low)).clamp(0, 1)  # 0: slow waves, scaled in full; 1: fast waves, left alone
    return freqs * (blend + (1 - blend) / factor)


def rope_table(config: Config, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [T, C] in fp32 for positions [T], in Hugging Face's half-split order."""
    angles = positions.float()[:, None] * rope_inverse_frequencies(config).to(positions.device)
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to x [..., T, heads, C] with cos, sin [T, C]."""
    first, second = x.float().chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return (x.float() * cos[:, None] + turned * sin[:, None]).to(x.dtype)


class RMSNorm(nn.Module):
    """x / rms(x) * weight, the mean square taken in fp32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


class Cache:
    """Static keys and values of one model, and the RoPE table they were written with.

    ``k`` and ``v`` are [n_layers, K, length + SPARE, C]; nothing is ever reallocated. ``text`` holds the tokens whose keys and
    values surely lie at the first positions. Those past it may hold rejected tokens: they are hidden by the mask and overwritten
    when the text reaches them.
    """

    SPARE = 8  # positions never used: with them even the largest bucket is a slice like the others, so none is compiled apart

    def __init__(self, config: Config, length: int, dtype: torch.dtype, device: torch.device | str) -> None:
        shape = (config.n_layers, config.n_kv_heads, length + self.SPARE, config.head_dim)
        self.length, self.text = length, list[int]()
        self.owner: object = None  # the run that decodes the text
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.cos, self.sin = rope_table(config, torch.arange(length, device=device))


class Block(nn.Module):
    """One layer: grouped-query attention with RoPE, then SwiGLU. q, k and v come from one product, gate and up from another.

    ``config`` is that of one rank's part. ``step`` is the unit that is compiled: once for all layers, since only its inputs differ.
    """

    def __init__(self, config: Config, quantization: str = "none", divided: bool = False) -> None:
        super().__init__()
        c, kept = config, quantization
        self.n_heads, self.n_kv_heads, self.head_dim = c.n_heads, c.n_kv_heads, c.head_dim
        self.attn_norm = RMSNorm(c.dim, c.norm_eps)
        self.wqkv = make_linear(c.dim, (c.n_heads + 2 * c.n_kv_heads) * c.head_dim, c.qkv_bias, kept)
        self.q_norm = RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else nn.Identity()
        self.wo = make_linear(c.n_heads * c.head_dim, c.dim, c.out_bias, kept)
        self.ffn_norm = RMSNorm(c.dim, c.norm_eps)
        self.w13 = make_linear(c.dim, 2 * c.ffn_dim, False, kept)
        self.w2 = make_linear(c.ffn_dim, c.dim, False, kept)
        self.divided = divided  # over ranks: what wo and w2 give are parts of sums

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [..., T, H, C], keys and values [..., T, K, C] of x [..., T, D], positions applied."""
        heads = self.wqkv(self.attn_norm(x)).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split((self.n_heads, self.n_kv_heads, self.n_kv_heads), -2)
        return rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin), v

    def feed_forward(self, x: Tensor) -> Tensor:
        gate, up = self.w13(self.ffn_norm(x)).chunk(2, -1)
        return self.whole(self.w2(F.silu(gate) * up))

    def whole(self, x: Tensor) -> Tensor:
        """The sum of every rank's part."""
        return sum_ranks(x) if self.divided else x

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Read x [B, T, D] causally, no cache."""
        q, k, v = (t.transpose(1, 2) for t in self.project(x, cos, sin))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.whole(self.wo(attended.transpose(1, 2).flatten(-2)))
        return x + self.feed_forward(x)

    def step(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, positions: Tensor, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        """Read x [T, D] at ``positions`` [T] over k_cache, v_cache [K, S, C], into which its own keys are written first.

        mask is [G * T, S], 0 or -inf: it hides the keys behind each token's position.
        """
        q, k, v = self.project(x, cos, sin)
        k_cache.index_copy_(1, positions, k.transpose(0, 1))
        v_cache.index_copy_(1, positions, v.transpose(0, 1))
        x = x + self.whole(self.wo(attend(q, k_cache, v_cache, mask, positions)))
        return x + self.feed_forward(x)

    def native_step(self) -> native.LayerStep | None:
        """``step`` by native.cpp, without its mask; None where that doesn't know this layer's form."""
        products = (self.wqkv, self.wo, self.w13, self.w2)
        if self.divided or self.w2.weight.device.type != "cpu" or not self._is_as_made():
            return None
        weights = [(product.weight, getattr(product, "scale", None), product.bias) for product in products]
        norms = [getattr(norm, "weight", None) for norm in (self.attn_norm, self.ffn_norm, self.q_norm, self.k_norm)]
        if not native.LayerStep.can(weights, norms):
            return None
        return native.LayerStep(weights, norms, (self.n_heads, self.n_kv_heads, self.head_dim), self.attn_norm.eps)

    def _is_as_made(self) -> bool:
        """Whether nobody gave this very layer modules of classes, methods or hooks that native.cpp knows nothing of."""
        known = (Block, RMSNorm, nn.Identity, Linear, Int8Linear)
        norms = [module.eps for module in self.modules() if isinstance(module, RMSNorm)]
        return len(set(norms)) == 1 and all(
            type(module) in known
            and not (module._forward_hooks or module._forward_pre_hooks)
            and not any(hasattr(type(module), name) for name in vars(module))
            for module in self.modules()
        )

    def fast_step(self, dynamic: bool, own: native.LayerStep | None) -> Callable[..., Tensor]:
        """``own``, for as many tokens as its products suit, and else ``step`` compiled."""

        @functools.cache
        def compiled() -> Callable[..., Tensor]:
            # each bucket and each number of rows may be a graph of its own: beyond the default limit they would run uncompiled
            torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
            return torch.compile(self.step, dynamic=dynamic)

        if own is None:
            return compiled()
        tables = [module._parameters for module in self.modules()]

        def addresses() -> list[int]:
            return [weight.data_ptr() for table in tables for weight in table.values() if weight is not None]

        where = addresses()

        def step(x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> Tensor:
            nonlocal own, where
            if (now := addresses()) != where:  # weights were replaced, and the old ones' memory may be somebody else's
                own, where = self.native_step(), now
            weight = self.w2.weight
            fits = len(x) <= native.MOST_ROWS and (weight.nbytes < SMALL or ours(x.dtype, weight.dtype, len(x)))
            if own is not None and fits:
                return own(x, cos, sin, positions, k, v)
            return compiled()(x, cos, sin, mask, positions, k, v)

        return step


@torch.inference_mode()
def native_agrees(config: Config) -> bool:
    """Whether native.cpp's layer does what ``Block.step`` does, on a small layer of a structure like ``config``'s, in fp32.

    It doesn't once somebody has changed ``Block``.
    """
    T, C, source = 3, 16, torch.Generator("cpu").manual_seed(0)
    form: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # whatever a program's defaults are
    block = Block(replace(config, dim=48, n_heads=4, n_kv_heads=2, head_dim=C, ffn_dim=40)).to_empty(device="cpu").float()
    for weight in block.parameters():
        weight.normal_(std=0.3, generator=source)
    own = block.native_step()
    x, cos, sin = (torch.randn((T, n), generator=source, **form) for n in (48, C, C))
    positions, mask = torch.arange(T, device="cpu"), torch.full((T, T), -math.inf, **form).triu(1).repeat(2, 1)
    caches = torch.zeros((2, 2, 2, T, C), **form)
    wanted = block.step(x, cos, sin, mask, positions, *caches[0])
    return own is not None and torch.allclose(own(x, cos, sin, positions, *caches[1]), wanted, rtol=1e-4, atol=1e-4)


@functools.cache
def tell_of_change() -> None:
    """Say once that ``Block`` isn't what native.cpp knows."""
    said = "native.cpp's layer doesn't do what Block.step does, which is compiled instead (--no-compile starts sooner)"
    print(said, file=sys.stderr)


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts have in common at their start."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


class Transformer(nn.Module):
    """The model, or one rank's part of it. Built on the meta device by ``checkpoint.load_model``, which assigns the weights.

    Args:
        config: the whole model's.
        ranks: which part of how many this is.
        quantization: ``none`` or one of ``linear.MODES``.
    """

    def __init__(self, config: Config, ranks: Ranks = Ranks(), quantization: str = "none") -> None:
        super().__init__()
        group = group_of(quantization) if quantization.startswith("int4") else 1
        check_divides(config, ranks.size, f"this {config.architecture}", group)
        self.config, self.ranks, self.quantization = config, ranks, quantization
        self.local = local = local_config(config, ranks.size)
        self.embed = nn.Embedding(local.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(local, quantization, ranks.size > 1) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        # never in fewer than 8 bits: that costs quality where it is least affordable
        self.output = make_linear(config.dim, local.vocab_size, False, "none" if quantization == "none" else "int8")
        self.judge_kind: str | None = None
        self.judge_bias = self.judge_floor = self.judge_log_p = 0.0
        self.block_steps: list[Callable[..., Tensor]] = [layer.step for layer in self._blocks()]
        self.compiled_steps = self.block_steps
        self.tie()

    def _blocks(self) -> Iterator[Block]:
        return (cast(Block, layer) for layer in self.layers)

    def tie(self) -> None:
        """Where the model ties them, let the embedding and the output projection be the same memory; a quantized one can't."""
        if self.config.tie_embeddings and isinstance(self.output, Linear):
            V, weight = self.local.vocab_size, self.output.weight
            self.embed.weight = weight if len(weight) == V else nn.Parameter(weight[:V], requires_grad=False)

    def new_cache(self, length: int) -> Cache:
        """A static cache of ``length`` positions for this model, or this rank's part of it."""
        return Cache(self.local, length, self.norm.weight.dtype, self.norm.weight.device)

    def known(self, tokens: Tensor) -> Tensor:
        """Tokens with those beyond this model's vocabulary replaced: a partner's may be padded further, with ids no text has."""
        return tokens.clamp(max=self.config.vocab_size - 1)

    def embedded(self, tokens: Tensor) -> Tensor:
        """Embeddings [..., D] of tokens [...]; a rank looks up its own part of the vocabulary, and the ranks' results add up."""
        if self.ranks.size == 1:
            return self.embed(tokens)
        own = tokens - self.ranks.rank * self.local.vocab_size
        x = self.embed(own.clamp(0, self.local.vocab_size - 1))
        return sum_ranks(torch.where(((own >= 0) & (own < self.local.vocab_size))[..., None], x, 0.0))

    def hidden(self, tokens: Tensor) -> Tensor:
        """Last-layer states [B, T, D] before the final norm, for tokens [B, T]; no cache."""
        cos, sin = rope_table(self.config, torch.arange(tokens.shape[1], device=tokens.device))
        x = self.embedded(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, T, V] of tokens [B, T]; no cache."""
        return self.logits(self.hidden(tokens))[0]

    def step(self, tokens: Tensor, positions: Tensor, cache: Cache, bucket: int, compiled: bool = True) -> Tensor:
        """Read tokens [T] at positions [T] and return states [T, D] before the final norm.

        Reads and writes only the first ``bucket`` positions of the cache; every position must lie below it. Where the blocks
        were compiled, ``compiled`` says whether to use that: shapes that come once (prefill) aren't worth a compilation.
        """
        groups = self.local.n_heads // self.local.n_kv_heads
        cos, sin = cache.cos.index_select(0, positions), cache.sin.index_select(0, positions)
        x = self.embedded(tokens)
        hidden_from_query = torch.arange(bucket, device=tokens.device) > positions[:, None]  # [T, S]
        mask = torch.zeros((), dtype=x.dtype, device=x.device).masked_fill(hidden_from_query, float("-inf"))
        mask = mask.repeat(groups, 1)
        steps = self.compiled_steps if compiled else self.block_steps
        for block_step, k, v in zip(steps, cache.k[:, :, :bucket].unbind(), cache.v[:, :, :bucket].unbind()):
            x = block_step(x, cos, sin, mask, positions, k, v)
        return x

    def read(self, text: Sequence[int], cache: Cache, states: Tensor | None = None) -> None:
        """Bring the keys and values of a text into ``cache``; what it has in common with the start of ``cache.text`` is there.

        Uncompiled, in chunks of at most PREFILL_CHUNK tokens, which bound the memory.

        Args:
            states: [at least T, D], where the states before the final norm of what is newly read go, at their positions.
        """
        known = common_length(cache.text, text)
        del cache.text[known:]
        ids = self.known(torch.tensor(text[known:], device=cache.k.device))
        for start in range(known, len(text), PREFILL_CHUNK):
            end = min(start + PREFILL_CHUNK, len(text))
            positions = torch.arange(start, end, device=ids.device)
            read = self.step(ids[start - known : end - known], positions, cache, end, compiled=False)
            if states is not None:
                states[start:end] = read
            cache.text += text[start:end]

    def logits(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """fp32 logits [..., V] and judge logits [...] (None without a head) of states [..., D] before the final norm."""
        logits, judge = self.local_logits(hidden)
        return logits if self.ranks.size == 1 else gather_last(logits), judge

    def local_logits(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """``logits``, of this rank's part of the vocabulary only. Every rank has the judge's row."""
        out, V = self.output(self.norm(hidden)).float(), self.local.vocab_size
        if self.judge_kind is None:
            return out, None
        judge = out[..., V:].sum(-1)
        if self.judge_kind == "pre_norm":  # w·h = rms(h) · (w / g)·norm(h)
            judge = judge * (hidden.float().square().mean(-1) + self.config.norm_eps).sqrt()
        return out[..., :V], judge + self.judge_bias

    def twin(self) -> Transformer:
        """A model of the same layers, compiled ones included, that may carry another head."""
        other = copy.copy(self)
        other.__dict__["_modules"] = dict(self._modules)
        return other

    def fuse_judge(self, weight: Tensor, bias: float, kind: str, floor: float = 0.0, log_p: float = 0.0) -> None:
        """Append a judge head, weight [D], to the output projection as row V; it takes the place of any that was there.

        Args:
            weight: fp32 row of the head f(h) = weight·h + bias.
            kind: ``pre_norm`` when h is the state before the final RMSNorm, ``post_norm`` when it is the state after it.
            floor: the judge takes no token that the model gives less probability than this.
            log_p: what a token's log-probability counts. Both are kept for who applies the rule.

        Raises:
            UserError: the final norm has a zero weight where a ``pre_norm`` head needs to look.
        """
        row = weight.to(self.norm.weight.device, torch.float32)
        if kind == "pre_norm":
            gain = self.norm.weight.detach().float()
            if bool(((gain == 0) & (row != 0)).any()):
                raise UserError("a pre_norm head can't be fused: the model's final norm has a weight of 0")
            row = torch.where(gain == 0, 0.0, row / gain)
        self.output = cast(Linear | Int8Linear, self.output).with_judge(row, self.local.vocab_size)
        self.judge_kind, self.judge_bias, self.judge_floor, self.judge_log_p = kind, float(bias), floor, log_p
        self.tie()

    def pack(self) -> None:
        """Bring int4 weights, once they are loaded, into the layout of the device's kernel."""
        for module in self.modules():
            if isinstance(module, Int4Linear):
                module.pack(self.norm.weight.dtype)

    def weight_bytes(self) -> int:
        """Bytes of weights that one pass reads: all but the embedding table, of which a token reads one row."""
        return sum(p.nbytes for name, p in self.named_parameters(remove_duplicate=False) if name != "embed.weight")

    def position_bytes(self) -> int:
        """Bytes of keys and values for each position of a text."""
        local = self.local
        return 2 * local.n_layers * local.n_kv_heads * local.head_dim * self.norm.weight.element_size()

    def compile_blocks(self, dynamic: bool) -> None:
        """Bring the layers' steps into their fast form: on a CPU native.cpp's layer where it can be had, else compiled.

        All layers share one compilation. With ``dynamic``, one graph serves every T > 1 and every bucket.
        """
        blocks = list(self._blocks())
        own = [layer.native_step() for layer in blocks]
        if any(own) and not native_agrees(self.local):
            tell_of_change()
            own = [None] * len(own)
        self.compiled_steps = [layer.fast_step(dynamic, step) for layer, step in zip(blocks, own)]


class Reader:
    """Reads one text after another with a model; what a text has in common with the start of the last one is read once."""

    def __init__(self, model: Transformer, max_len: int) -> None:
        weight = model.norm.weight
        self.model, self.cache = model, model.new_cache(max_len)
        self.hidden = torch.empty((max_len, model.config.dim), dtype=weight.dtype, device=weight.device)

    @torch.inference_mode()
    def read(self, text: Sequence[int]) -> Tensor:
        """States [T, D] before the final norm of a text of T tokens, at most ``max_len``; good until the next call."""
        self.model.read(text, self.cache, self.hidden)
        return self.hidden[: len(text)]
