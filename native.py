"""The products of a few rows on a CPU in C++ (native.cpp), compiled with the system's compiler when first wanted.

torch.compile on a CPU needs a C++ compiler too. Where there is none, PyTorch's own products take the place of these.
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
    compiler = shlex.split(os.environ.get("CXX") or "g++")
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
        print(f"native.cpp wasn't compiled, so PyTorch's slower products are used: {said.decode()[:300]}", file=sys.stderr)
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    found.few_rows.argtypes = [pointer, ctypes.c_int, pointer, ctypes.c_int, *[pointer] * 3, *[number] * 3]
    found.few_rows.restype = None
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
    what = b"\n".join((SOURCE.read_bytes(), version, "\n".join((*compiler, *FLAGS, *features)).encode()))
    return folder / f"native-{hashlib.sha256(what).hexdigest()[:16]}.so"


def _compile(compiler: list[str], file: Path) -> None:
    with tempfile.TemporaryDirectory(dir=file.parent) as work:
        made, linked = Path(work) / "native.o", Path(work) / "native.so"
        subprocess.run([*compiler, *FLAGS, "-c", SOURCE, "-o", made], check=True, capture_output=True)
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
    (T, K), N = x.shape, weight.shape[0]
    x = x.contiguous()
    out = torch.empty((T, N), dtype=x.dtype)
    bias = bias if bias is None or bias.dtype == x.dtype else bias.to(x.dtype)
    found = library()
    assert found is not None
    found.few_rows(
        x.data_ptr(), KINDS[x.dtype], weight.data_ptr(), KINDS[weight.dtype],
        scale.data_ptr() if scale is not None else None, bias.data_ptr() if bias is not None else None, out.data_ptr(), T, N, K,
    )  # fmt: skip
    return out
