"""What a run ran on: interpreter, packages, compiler, GPU and its sensors. NVML is asked, never CUDA."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGES = (
    "numpy",
    "ml_dtypes",
    "pandas",
    "pyarrow",
    "streamlit",
    "altair",
    "typer",
    "rich",
    "nvidia-ml-py",
    "cupy-cuda13x",
    "cupy-cuda12x",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-nvrtc-cu12",
    "torch",
    "flash-attn-3",
    "flashinfer-python",
    "cuda-bench",
    "vllm",
    "ray",
)
SLOWDOWNS = {"hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake"}
# Bits of NVML's clock event reasons; power_cap is normal operation of a busy card, not a fault.
REASONS = {
    0x2: "applications_clocks",
    0x4: "power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
    0x100: "display_clocks",
}
ROOT = Path(__file__).resolve().parent.parent


def package_versions() -> dict[str, str]:
    """Versions of the packages that matter, those installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def ask(command: list[str]) -> str:
    """First line a command prints; empty when it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True, cwd=ROOT)
    except (OSError, subprocess.SubprocessError):
        return ""
    return (done.stdout.strip().splitlines() or [""])[0]


def revision() -> str:
    """The project's git commit, with "+changes" where files differ from it; empty outside a checkout."""
    commit = ask(["git", "rev-parse", "HEAD"])
    if not commit:
        return ""
    return commit + ("+changes" if ask(["git", "status", "--porcelain", "--untracked-files=no"]) else "")


def cpu_name() -> str:
    """The processor's name, as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def capture() -> dict[str, Any]:
    """The environment that a run's manifest keeps."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cpu": cpu_name(),
        "cpus": os.cpu_count(),
        "packages": package_versions(),
        "revision": revision(),
        "compiler": compiler(),
        "gpus": gpus(),
    }


def compiler() -> str:
    """The host C++ compiler's first line of version, empty where there is none."""
    from cuattn.compile import CompilerMissing, host_compiler

    try:
        return ask([*host_compiler(), "--version"])
    except CompilerMissing:
        return ""


class _Nvml:
    """NVML where it is installed and a driver answers; every question may come back None."""

    def __init__(self):
        self.lib = None
        self.reason = "nvidia-ml-py is not installed"
        if find_spec("pynvml") is None:
            return
        import pynvml

        try:
            pynvml.nvmlInit()
            self.lib = pynvml
        except pynvml.NVMLError as error:
            self.reason = f"NVML does not start ({error})"

    def ask(self, name: str, *arguments) -> Any:
        if self.lib is None:
            return None
        try:
            value = getattr(self.lib, name)(*arguments)
        except (self.lib.NVMLError, AttributeError, TypeError):
            return None
        return value.decode() if isinstance(value, bytes) else value


_nvml: list[_Nvml] = []


def nvml() -> _Nvml:
    """NVML, started once a process."""
    if not _nvml:
        _nvml.append(_Nvml())
    return _nvml[0]


def _handles() -> list[Any]:
    """Handles of the GPUs that CUDA would show, in its order (by PCI bus)."""
    lib = nvml()
    every = [lib.ask("nvmlDeviceGetHandleByIndex", i) for i in range(lib.ask("nvmlDeviceGetCount") or 0)]
    every = [handle for handle in every if handle is not None]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return every
    chosen = []
    for word in filter(None, (part.strip() for part in visible.split(","))):
        if word.isdigit() and int(word) < len(every):
            chosen.append(every[int(word)])
        else:
            chosen += [h for h in every if str(lib.ask("nvmlDeviceGetUUID", h)).startswith(word)]
    return chosen


def gpus() -> list[dict[str, Any]]:
    """Each visible GPU: name, uuid, driver, memory, power limit, ECC, persistence, MIG; None if unknown."""
    lib, found = nvml(), []
    for handle in _handles():
        memory, limit = (
            lib.ask("nvmlDeviceGetMemoryInfo", handle),
            lib.ask("nvmlDeviceGetPowerManagementLimit", handle),
        )
        ecc, mig = lib.ask("nvmlDeviceGetEccMode", handle), lib.ask("nvmlDeviceGetMigMode", handle)
        persistence = lib.ask("nvmlDeviceGetPersistenceMode", handle)
        running = lib.ask("nvmlDeviceGetComputeRunningProcesses", handle)
        found.append(
            {
                "name": lib.ask("nvmlDeviceGetName", handle),
                "uuid": lib.ask("nvmlDeviceGetUUID", handle),
                "driver": lib.ask("nvmlSystemGetDriverVersion"),
                "cuda": lib.ask("nvmlSystemGetCudaDriverVersion_v2"),
                "memory_bytes": memory.total if memory else None,
                "power_limit_w": limit / 1000 if limit else None,
                "ecc": bool(ecc[0]) if ecc else None,
                "mig": bool(mig[0]) if mig else None,
                "persistence": bool(persistence) if persistence is not None else None,
                "other_processes": len(running) if running is not None else None,
            }
        )
    return found


def no_gpu_reason() -> str:
    """Why `gpus` finds none."""
    return nvml().reason if nvml().lib is None else "no visible GPU"


def gpu_expected() -> bool:
    """Whether a GPU run looks possible: a visible GPU and CuPy. The worker finds out for certain."""
    return bool(_handles()) and find_spec("cupy") is not None


def sensors() -> dict[str, Any]:
    """Power, temperature and clock event reasons of the first visible GPU; None where NVML is silent."""
    handles, lib = _handles(), nvml()
    if not handles:
        return {}
    power = lib.ask("nvmlDeviceGetPowerUsage", handles[0])
    celsius = lib.ask("nvmlDeviceGetTemperature", handles[0], 0)
    mask = lib.ask("nvmlDeviceGetCurrentClocksEventReasons", handles[0])
    if mask is None:
        mask = lib.ask("nvmlDeviceGetCurrentClocksThrottleReasons", handles[0])
    reasons = None if mask is None else ",".join(word for bit, word in REASONS.items() if mask & bit)
    return {
        "measured_power_w": None if power is None else power / 1000,
        "measured_temperature_c": None if celsius is None else float(celsius),
        "measured_throttle_reasons": reasons,
    }


def slowed(reasons: str | None) -> bool:
    """Whether the clock event reasons name a thermal or hardware slowdown."""
    return bool(SLOWDOWNS & set((reasons or "").split(",")))
