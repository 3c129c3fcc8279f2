"""Makes .venv and installs requirements.txt into it: what `make` runs first, and needs nothing installed.

Runs by its path with any Python from 3.6 on, so that one too old can say so. Standard library alone.

    python3 cuattn/setup_env.py            # WHEELS=folder installs offline from that folder
"""
import ctypes
import os
import re
import shutil
import subprocess
import sys

OLDEST = (3, 11)
NEWER = ["python3.%d" % minor for minor in (14, 13, 12, 11)]
COMPILERS = ("c++", "g++", "clang++")
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
READY = os.path.join(VENV, "ready")  # the Makefile compares its time with those of the files it depends on
CUDA_PACKAGE = re.compile(r"^(cupy-cuda|nvidia-cuda-)")


class Refused(Exception):
    """One sentence: what is missing and what to do."""


def newer_python():
    """Path of an interpreter that is new enough where this one is not; None if this one is."""
    if sys.version_info >= OLDEST:
        return None
    for name in NEWER:
        path = shutil.which(name)
        # A version manager may leave a stub that only says which versions it has.
        if path and subprocess.call([path, "-c", ""], stderr=subprocess.DEVNULL) == 0:
            return path
    raise Refused(
        "Python: expected 3.11 or newer, got %d.%d; install one and name it, "
        "as in `make PYTHON=python3.12 demo`" % sys.version_info[:2]
    )


def driver_cuda():
    """The CUDA version the NVIDIA driver speaks as (major, minor); None without a driver."""
    for name in ("libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1"):
        try:
            version = ctypes.c_int(0)
            if ctypes.CDLL(name).cuDriverGetVersion(ctypes.byref(version)) == 0 and version.value:
                return version.value // 1000, version.value % 1000 // 10
        except (OSError, AttributeError):
            continue
    try:
        text = subprocess.check_output(["nvidia-smi"], stderr=subprocess.DEVNULL).decode(errors="replace")
    except (OSError, subprocess.CalledProcessError):
        return None
    found = re.search(r"CUDA Version:\s*(\d+)\.(\d+)", text)
    return (int(found.group(1)), int(found.group(2))) if found else None


def requirements(cuda):
    """Lines to install: those of requirements.txt, with the CUDA 12 packages where the driver needs them."""
    with open(os.path.join(ROOT, "requirements.txt"), encoding="utf-8") as file:
        lines = [line.split(" #")[0].strip() for line in file]
    lines = [line for line in lines if line and not line.startswith("#")]
    if not sys.platform.startswith("linux") or cuda is None or cuda[0] >= 13:
        return lines
    if cuda[0] < 12:
        raise Refused(
            "NVIDIA driver: expected one that speaks CUDA 12 or later, got CUDA %d.%d; update it" % cuda
        )
    import tomllib  # Python 3.11 and later, which main() has made sure of

    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as file:
        twelve = tomllib.load(file)["project"]["optional-dependencies"]["cuda12"]
    return [line for line in lines if not CUDA_PACKAGE.match(line)] + twelve


def venv_python():
    return os.path.join(VENV, "bin", "python")


def works(python):
    """Whether that interpreter starts and has pip."""
    try:
        command = [python, "-m", "pip", "--version"]
        return subprocess.call(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0
    except OSError:
        return False


def make_venv():
    """A working .venv; one left half made is made again."""
    if works(venv_python()):
        return
    try:
        import ensurepip  # noqa: F401  (Debian packs it apart, and venv fails half way without it)
        import venv  # noqa: F401
        command = [sys.executable, "-m", "venv", "--clear", VENV]
    except ImportError:
        command = [sys.executable, "-m", "virtualenv", "--clear", VENV]
        if subprocess.call([sys.executable, "-c", "import virtualenv"], stderr=subprocess.DEVNULL):
            raise Refused(
                "Python at %s has no venv module; install it (Debian, Ubuntu: sudo apt install python3-venv; "
                "without root: python3 -m pip install --user virtualenv) and run this again" % sys.executable
            )
    print("Making .venv with Python %d.%d" % sys.version_info[:2], flush=True)
    if subprocess.call(command) or not works(venv_python()):
        raise Refused("could not make %s; the lines above say why (read-only folder, full disk?)" % VENV)


def install(lines):
    """pip install, from the folder WHEELS alone where it is given."""
    path = os.path.join(VENV, "requirements.txt")
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    command = [venv_python(), "-m", "pip", "install", "--disable-pip-version-check", "-r", path]
    wheels = os.environ.get("WHEELS")
    if wheels:
        if not os.path.isdir(wheels):
            raise Refused("WHEELS: expected a folder of wheels, got %r; fill it with `pip download`" % wheels)
        command += ["--no-index", "--find-links", os.path.abspath(wheels)]
    print("Installing requirements (several hundred MB the first time)", flush=True)
    # A person wants to see the downloads move; a log does not.
    if subprocess.call(command, stdout=None if sys.stdout.isatty() else subprocess.DEVNULL):
        raise Refused(
            "pip could not install the requirements, as said above; offline, run `pip download -r "
            "requirements.txt -d wheels` where there is a network, bring the folder here and say "
            "`make WHEELS=wheels demo`"
        )


def link_checkout():
    """Makes `import cuattn` work from any folder: a .pth file, because an editable install would need the network."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.check_output([venv_python(), "-c", code]).decode().strip()
    with open(os.path.join(packages, "cuattn-checkout.pth"), "w", encoding="utf-8") as file:
        file.write(ROOT + "\n")


def compiler_note():
    """Empty, or what to do about a missing C++ compiler; a GPU works without one."""
    names = (os.environ.get("CXX", "").split() or [""])[:1] + list(COMPILERS)
    if any(name and shutil.which(name) for name in names):
        return ""
    if subprocess.call([venv_python(), "-c", "import ziglang"], stderr=subprocess.DEVNULL) == 0:
        return ""
    return (
        "No C++ compiler: kernels will not run on the CPU machine; install one (Debian, Ubuntu: sudo apt "
        "install g++; without root: .venv/bin/pip install ziglang)"
    )


def main():
    try:
        python = newer_python()
        if python:
            return subprocess.call([python, os.path.abspath(__file__)])
        cuda = driver_cuda()
        lines = requirements(cuda)
        make_venv()
        install(lines)
        link_checkout()
    except Refused as refused:
        sys.stderr.write("%s\n" % refused)
        return 1
    driver = "no NVIDIA driver" if cuda is None else "driver with CUDA %d.%d" % cuda
    with open(READY, "w", encoding="utf-8") as file:
        file.write("Python %d.%d, %s\n" % (sys.version_info[:2] + (driver,)))
    print("Ready: .venv, Python %d.%d, %s" % (sys.version_info[:2] + (driver,)))
    note = compiler_note()
    if note:
        print(note)
    return 0


if __name__ == "__main__":
    sys.exit(main())
