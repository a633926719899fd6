"""Products of a few rows, and whole layers of a few tokens, on a CPU in C++ (native.cpp), compiled when first wanted.

torch.compile on a CPU needs a C++ compiler too. Where there is none, PyTorch's own operations take the place of these.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

SOURCES = tuple(Path(__file__).with_name(name) for name in ("native.cpp", "products.h"))
# nothing is contracted but what native.cpp says: whether a compiler does may differ from place to place
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-std=c++17", "-fPIC", "-fopenmp")
MOST_ROWS = 64  # of x
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


POINTER, NUMBER = ctypes.c_void_p, ctypes.c_int64


class Matrix(ctypes.Structure):
    """A weight, as products.h has it."""

    _fields_ = (("weight", POINTER), ("bias", POINTER), ("scale", POINTER), ("outputs", NUMBER), ("inputs", NUMBER))


class Layer(ctypes.Structure):
    """A layer, as native.cpp has it."""

    _fields_ = (
        *((name, Matrix) for name in ("wqkv", "wo", "w13", "w2")),
        *((name, POINTER) for name in ("attn_norm", "ffn_norm", "q_norm", "k_norm")),
        *((name, NUMBER) for name in ("heads", "kv_heads", "head_dim")),
        ("eps", ctypes.c_float),
    )


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled products, from the user's cache if they were compiled on such a machine before; None without a compiler."""
    try:
        compiler = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    except ValueError:  # quotes that don't end
        compiler = ["g++"]
    if platform.system() != "Linux" or shutil.which(compiler[0]) is None:
        return None
    try:
        file = _file(compiler)
        if not file.exists():
            _compile(compiler, file)
        try:
            found = ctypes.CDLL(str(file))
        except OSError:  # cut short
            _compile(compiler, file)
            found = ctypes.CDLL(str(file))
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error).encode()
        print(
            f"native.cpp wasn't compiled, so PyTorch's slower products are used: {said.decode(errors='replace')[:300]}",
            file=sys.stderr,
        )
        return None
    kinds = [ctypes.c_int, ctypes.c_int]
    found.few_rows.argtypes = [*kinds, ctypes.POINTER(Matrix), POINTER, POINTER, NUMBER]
    found.layer_step.argtypes = [*kinds, ctypes.POINTER(Layer), *[POINTER] * 7, *[NUMBER] * 3]
    found.few_rows.restype, found.layer_step.restype = None, ctypes.c_int
    return found


def _file(compiler: list[str]) -> Path:
    """Where the compiled products are kept: in a folder of the user's own, by a name that holds all they depend on.

    Raises:
        OSError: the folder can't be had or is somebody else's; RuntimeError: there is no home.
    """
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    folder = (given if given.is_absolute() else Path.home() / ".cache") / "judge-decoding"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise OSError(f"{folder} belongs to another user")
    version = subprocess.run([*compiler, "--version"], capture_output=True).stdout
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    features = sorted({line for line in lines if line.startswith(("flags", "Features"))})
    what = b"\n".join((*(source.read_bytes() for source in SOURCES), version, "\n".join((*compiler, *FLAGS, *features)).encode()))
    return folder / f"native-{hashlib.sha256(what).hexdigest()[:16]}.so"


def _compile(compiler: list[str], file: Path) -> None:
    with tempfile.TemporaryDirectory(dir=file.parent) as work:
        made, linked = Path(work) / "native.o", Path(work) / "native.so"
        subprocess.run([*compiler, *FLAGS, "-c", SOURCES[0], "-o", made], check=True, capture_output=True)
        # not linked with OpenMP: PyTorch's own copy, whose threads are awake already, is found at load time
        subprocess.run([*compiler, "-shared", made, "-o", linked], check=True, capture_output=True)
        linked.replace(file)


def can(x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> bool:
    """Whether ``few_rows`` takes these: two-dimensional, of its kinds and sizes, in one piece."""
    N, K = weight.shape
    return (
        x.dtype in (torch.float32, torch.bfloat16)
        and weight.dtype in (x.dtype, torch.int8)
        and 1 <= len(x) <= MOST_ROWS
        and x.shape[1] == K
        and weight.is_contiguous()
        and (scale is None or (scale.dtype == torch.float32 and scale.shape == (N,) and scale.is_contiguous()))
        and (bias is None or (bias.shape == (N,) and bias.is_contiguous()))
        and library() is not None
    )


def few_rows(x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    """x [T, K] times weight [N, K], times scale [N], plus bias [N]; in x's dtype. For what ``can`` allows.

    Summed in fp32; but a bfloat16 x times an int8 weight as whole numbers, x in 16-bit steps. An output's
    sum is the same to the bit for every T, and for any number of threads.
    """
    T, N = len(x), len(weight)
    x, bias = x.contiguous(), bias if bias is None else bias.to(x.dtype)
    out = torch.empty((T, N), dtype=x.dtype, device="cpu")
    found = library()
    assert found is not None
    found.few_rows(KINDS[x.dtype], KINDS[weight.dtype], matrix_of((weight, scale, bias)), x.data_ptr(), out.data_ptr(), T)
    return out


Weight = tuple[Tensor, Tensor | None, Tensor | None]  # of a product: weight, scale, bias


def matrix_of(parts: Weight) -> Matrix:
    """Where a weight lies."""
    weight, scale, bias = (part if part is None else part.data_ptr() for part in parts)
    return Matrix(weight, bias, scale, *parts[0].shape)


class LayerStep:
    """A layer as one call. A token's result is the same to the bit whichever tokens are read together, by any number of threads.

    Args:
        weights: of the products wqkv, wo, w13 and w2.
        norms: weights of attn_norm, ffn_norm and, where there are, q_norm and k_norm.
        heads: query heads H, key/value heads K, and the numbers C in each.
        eps: of all norms.
    """

    def __init__(self, weights: Sequence[Weight], norms: Sequence[Tensor | None], heads: tuple[int, int, int], eps: float) -> None:
        self.held = weights, norms  # so that they live as long as their addresses are used
        self.dtype, self.D, (_, self.K, self.C) = cast(Tensor, norms[0]).dtype, weights[0][0].shape[1], heads
        pointers = (None if norm is None else norm.data_ptr() for norm in norms)
        self.kinds = KINDS[self.dtype], KINDS[weights[0][0].dtype]
        self.layer = Layer(*map(matrix_of, weights), *pointers, *heads, eps)

    @staticmethod
    def can(weights: Sequence[Weight], norms: Sequence[Tensor | None]) -> bool:
        """Whether native.cpp knows a layer of these forms."""
        first = cast(Tensor, norms[0])
        rows = [torch.empty((1, weight.shape[1]), dtype=first.dtype, device="meta") for weight, _, _ in weights]
        biases = (bias for _, _, bias in weights if bias is not None)
        return (
            all(norm is None or (norm.dtype == first.dtype and norm.is_contiguous()) for norm in norms)
            and all(weight.dtype == weights[0][0].dtype for weight, _, _ in weights)
            and all(bias.dtype == first.dtype for bias in biases)
            and all(can(x, *parts) for x, parts in zip(rows, weights))
        )

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Read x [T, D] at positions int64 [T], with their cos and sin fp32 [T, C], over caches [K, S, C] that it writes to.

        T is at most MOST_ROWS. Returns x [T, D].

        Raises:
            ValueError: other shapes or dtypes.
            IndexError: a position beyond the caches.
        """
        T, S, strides = len(x), k_cache.shape[1], k_cache.stride()
        alike = x.dtype == k_cache.dtype == v_cache.dtype == self.dtype and cos.dtype == sin.dtype == torch.float32
        fits = x.shape == (T, self.D) and T <= MOST_ROWS and cos.shape == sin.shape == (T, self.C) and positions.shape == (T,)
        fits = fits and k_cache.shape == v_cache.shape == (self.K, S, self.C) and strides == v_cache.stride()
        if not alike or not fits or strides[1:] != (self.C, 1) or positions.dtype != torch.int64:
            raise ValueError(f"{x.dtype} {tuple(x.shape)} over {k_cache.dtype} {tuple(k_cache.shape)} isn't what the layer reads")
        x, cos, sin, positions = (part.contiguous() for part in (x, cos, sin, positions))
        out, found = torch.empty_like(x), library()
        assert found is not None
        where = (part.data_ptr() for part in (x, out, cos, sin, positions, k_cache, v_cache))
        if not found.layer_step(*self.kinds, self.layer, *where, strides[0], S, T):
            raise IndexError(f"positions {positions.tolist()} don't lie in caches of {S}")
        return out
