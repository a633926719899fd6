"""The products of a few rows on a CPU in C++ (native.cpp), compiled with the system's compiler when first wanted.

torch.compile on a CPU needs a C++ compiler too. Where there is none, PyTorch's own products take the place of these.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("native.cpp")
# nothing is contracted but what native.cpp says: whether a compiler does may differ from place to place
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-std=c++17", "-fPIC", "-fopenmp")
MOST_ROWS = 64  # of x
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled products, from the user's cache if they were compiled on such a machine before; None without a compiler."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None or not _runs_here():
        return None
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "judge-decoding"
    file = folder / f"native-{hashlib.sha256(_what_decides(compiler)).hexdigest()[:16]}.so"
    try:
        if not file.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as work:
                made, linked = Path(work) / "native.o", Path(work) / "native.so"
                subprocess.run([compiler, *FLAGS, "-c", SOURCE, "-o", made], check=True, capture_output=True)
                # not linked with OpenMP: PyTorch's own copy, whose threads are awake already, is found at load time
                subprocess.run([compiler, "-shared", made, "-o", linked], check=True, capture_output=True)
                linked.replace(file)
        found = ctypes.CDLL(str(file))
    except (OSError, subprocess.CalledProcessError):
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    found.few_rows.argtypes = [pointer, ctypes.c_int, pointer, pointer, ctypes.c_int, *[pointer] * 3, *[number] * 3]
    found.few_rows.restype = None
    return found


def _runs_here() -> bool:
    return platform.system() == "Linux" and platform.machine() in ("x86_64", "aarch64")


def _what_decides(compiler: str) -> bytes:
    """Everything that the compiled file depends on: the source, the compiler and the processor's instructions."""
    version = subprocess.run([compiler, "--version"], capture_output=True).stdout
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    features = sorted({line for line in lines if line.startswith(("flags", "Features"))})
    return b"\n".join((SOURCE.read_bytes(), version, "\n".join((*FLAGS, *features)).encode()))


def can(x: Tensor, weight: Tensor) -> bool:
    """Whether there is a product for these."""
    kinds = x.dtype in (torch.float32, torch.bfloat16) and weight.dtype in KINDS
    return kinds and len(x) <= MOST_ROWS and weight.is_contiguous() and library() is not None


def few_rows(x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    """x [T, K] times weight [N, K], times scale [N], plus bias [N]; in x's dtype, summed in fp32. For what ``can`` allows.

    An output's sum is the same to the bit for every T, and for any number of threads.
    """
    (T, K), N = x.shape, weight.shape[0]
    x = x.contiguous()
    out = torch.empty((T, N), dtype=x.dtype)
    wide = out if x.dtype == torch.float32 else torch.empty(T * K)
    bias = bias if bias is None or bias.dtype == x.dtype else bias.to(x.dtype)
    found = library()
    assert found is not None
    found.few_rows(
        x.data_ptr(), KINDS[x.dtype], wide.data_ptr(), weight.data_ptr(), KINDS[weight.dtype],
        scale.data_ptr() if scale is not None else None, bias.data_ptr() if bias is not None else None, out.data_ptr(), T, N, K,
    )  # fmt: skip
    return out
