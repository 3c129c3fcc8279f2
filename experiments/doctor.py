"""What works here, what does not, and what to do about it."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from experiments import environment

Check = tuple[str, bool | None, str, str]
REQUIRED = ("numpy", "ml_dtypes", "pandas", "pyarrow", "typer", "rich")
OPTIONAL = (
    ("streamlit", "the dashboard"),
    ("altair", "the dashboard"),
    ("nvidia-ml-py", "clocks, power and temperature of a GPU"),
    ("torch", "PyTorch's attention as a peer"),
    ("flash-attn-3", "FlashAttention-3 as a peer"),
    ("flashinfer-python", "FlashInfer as a peer"),
    ("ray", "one run over several machines"),
    ("cuda-bench", "a second opinion on times: run --timer nvbench"),
)
INSTALL = "pip install -r requirements.txt"


def checks() -> list[Check]:
    """(what, works, detail, remedy) each; works is None for an absent thing that one can do without."""
    return [_python(), *_packages(), _vllm(), _compiler(), *_gpu(), _cache(), *_tuned(), _disk()]


def _python() -> Check:
    fine = sys.version_info >= (3, 11)
    return "Python", fine, platform.python_version(), "" if fine else "install Python 3.11 or later"


def _packages():
    have = environment.package_versions()
    for name in REQUIRED:
        yield name, name in have, have.get(name, "missing"), "" if name in have else INSTALL
    for name, use in OPTIONAL:
        present = name in have
        yield name, present or None, have.get(name, "absent"), "" if present else f"only needed for {use}"


def _vllm() -> Check:
    """The library of a peer that need not be a package."""
    from experiments.peers import vllm

    found = vllm.libraries()
    if not found:
        return "vLLM's library", None, "absent", f"only needed for PagedAttention as a peer: {vllm.REMEDY}"
    missing = [str(path) for path in found if not path.is_file()]
    if missing:
        return "vLLM's library", None, f"{missing[0]} is not a file", vllm.REMEDY
    return "vLLM's library", True, ", ".join(map(str, found)), ""


def _compiler() -> Check:
    from cuattn.compile import CompilerMissing, host_compiler

    try:
        host_compiler()
    except CompilerMissing as error:
        return "C++ compiler", False, "none", str(error)
    version = environment.compiler()
    return (
        "C++ compiler",
        bool(version),
        version,
        "" if version else "it does not run: name another one in $CXX",
    )


def _gpu():
    cards = environment.gpus()
    if not cards:
        yield (
            "GPU",
            None,
            environment.no_gpu_reason(),
            "kernels run on the CPU machine, which counts and does not time",
        )
    for number, card in enumerate(cards):
        detail = f"{card['name']}, driver {card['driver']}, CUDA {card['cuda']}, {card['uuid']}"
        yield f"GPU {number}", True, detail, ""
    if find_spec("cupy") is None:
        remedy = "for a GPU: pip install cupy-cuda13x nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-cccl"
        yield "CuPy", False if cards else None, "absent", remedy
        return
    code = "from cupy_backends.cuda.libs import nvrtc; print('NVRTC %d.%d' % nvrtc.getVersion())"
    version = environment.ask([sys.executable, "-c", code])  # another process: this one never loads CUDA
    yield (
        "NVRTC",
        bool(version),
        version or "does not load",
        "" if version else "pip install nvidia-cuda-nvrtc",
    )


def _cache() -> Check:
    from cuattn.compile import CompileError, cache_folder

    try:
        folder = cache_folder()
    except CompileError as error:
        return "kernel cache", False, "none", str(error)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fine = os.access(folder, os.W_OK)
    except OSError:
        fine = False
    return "kernel cache", fine, str(folder), "" if fine else "set CUATTN_CACHE_DIR to a writable folder"


def _tuned():
    """Every file of tuned constants, and why one or a kernel in it is left aside."""
    from cuattn import tuned
    from cuattn.compile import CompileError
    from cuattn.kernels import ROWS
    from experiments.words import several

    try:
        paths = sorted(tuned.folder().glob("*.json"))
    except CompileError:
        return  # the kernel cache's own line says it
    for path in paths:
        found = tuned.read(path)
        old = [problem for name, kernel in found.kernels.items() if name in ROWS
               and (problem := tuned.outdated(path, ROWS[name], kernel))]
        for problem in [found.problem] * bool(found.problem) + old:
            yield "tuned constants", None, problem, "until then plans choose for themselves"
        if not found.problem:
            classes = f"{found.classes} {'class' if found.classes == 1 else 'classes'}"
            kernels = several(len(found.kernels), "kernel")
            yield "tuned constants", True, f"{found.device}: {classes} of {kernels}, {path}", ""


def _disk() -> Check:
    if not os.access(Path.cwd(), os.W_OK):
        return "disk", False, f"{Path.cwd()} cannot be written", "use --out DIR, or go to a writable folder"
    free = shutil.disk_usage(Path.cwd()).free
    fine = free > 1 << 30
    return (
        "disk",
        fine,
        f"{free / 1e9:.1f} GB free here",
        "" if fine else "free at least 1 GB, or use --out DIR",
    )
