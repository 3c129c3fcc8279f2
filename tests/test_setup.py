"""The set-up runs with any Python, says what is missing in one sentence, and chooses the CUDA packages."""
import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from cuattn import paths, setup_env

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_it_parses_as_python_3_6():
    ast.parse((ROOT / "cuattn/setup_env.py").read_text(encoding="utf-8"), feature_version=(3, 6))


def test_it_uses_the_standard_library_alone():
    tree = ast.parse((ROOT / "cuattn/setup_env.py").read_text(encoding="utf-8"))
    modules = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    assert modules <= sys.stdlib_module_names
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]


def names(lines):
    return {re.match(r"[A-Za-z0-9_-]+", line).group() for line in lines}


def test_no_driver_and_a_new_one_take_cuda_13():
    for cuda in (None, (13, 0), (14, 1)):
        assert {"cupy-cuda13x", "nvidia-cuda-nvrtc", "numpy"} <= names(setup_env.requirements(cuda))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="CUDA packages are for Linux")
def test_an_older_driver_takes_cuda_12_and_nothing_of_13():
    got = names(setup_env.requirements((12, 4)))
    assert {"cupy-cuda12x", "nvidia-cuda-nvrtc-cu12", "numpy"} <= got
    assert not got & {"cupy-cuda13x", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cuda-cccl"}
    with pytest.raises(setup_env.Refused, match="got CUDA 11.8; update"):
        setup_env.requirements((11, 8))


def test_requirements_have_upper_bounds_and_reasons():
    reason = ""
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            requirement, _, reason = line.partition("#")
            assert re.search(r">=[\d.]+,<[\d.]+", requirement) and reason.strip(), line


def test_the_extra_equals_the_requirements_file():
    wanted = {line.split(";")[0].strip() for line in setup_env.requirements(None) if "cuda" in line}
    assert wanted == set(PROJECT["project"]["optional-dependencies"]["cuda13"])


def test_an_old_python_looks_for_a_newer_one_and_else_says_so(monkeypatch):
    assert setup_env.newer_python() is None
    monkeypatch.setattr(setup_env, "OLDEST", (99, 0))
    found = {"python3.12": sys.executable}
    monkeypatch.setattr(setup_env.shutil, "which", found.get)
    assert setup_env.newer_python() == sys.executable
    monkeypatch.setattr(setup_env.shutil, "which", lambda name: None)
    with pytest.raises(setup_env.Refused, match=r"expected 3.11 or newer, got \d+\.\d+; install one"):
        setup_env.newer_python()


def test_a_missing_compiler_is_one_sentence(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(setup_env.shutil, "which", lambda name: None)
    monkeypatch.setattr(setup_env, "venv_python", lambda: sys.executable)
    monkeypatch.setattr(setup_env.subprocess, "call", lambda *a, **k: 1)
    assert setup_env.compiler_note().startswith("No C++ compiler") and "ziglang" in setup_env.compiler_note()
    monkeypatch.setattr(setup_env.shutil, "which", lambda name: name == "g++")
    assert setup_env.compiler_note() == ""


def test_a_wrong_wheel_folder_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("WHEELS", str(tmp_path / "none"))
    monkeypatch.setattr(setup_env, "VENV", str(tmp_path))
    with pytest.raises(setup_env.Refused, match="WHEELS: expected a folder of wheels"):
        setup_env.install(["numpy"])


def test_no_venv_module_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(setup_env, "VENV", str(tmp_path / "none"))
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    monkeypatch.setattr(setup_env.subprocess, "call", lambda *a, **k: 1)
    with pytest.raises(setup_env.Refused, match="no venv module; install it .*python3-venv"):
        setup_env.make_venv()


def test_offline_the_venv_is_made_and_pip_says_what_to_do(tmp_path):
    for name in ("cuattn/setup_env.py", "requirements.txt", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "wheels").mkdir()
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    environment = {**clean, "WHEELS": str(tmp_path / "wheels"), "PIP_CONFIG_FILE": os.devnull}
    command = [sys.executable, tmp_path / "cuattn/setup_env.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "make WHEELS=wheels demo" in done.stderr
    assert (tmp_path / ".venv/bin/python").exists() and not (tmp_path / ".venv/ready").exists()


def test_the_kernels_are_found_in_a_checkout():
    assert paths.KERNELS == ROOT / "kernels_cu" and list(paths.KERNELS.rglob("*.h*"))


def test_the_wheel_holds_the_library_and_every_kernel_source(tmp_path):
    pytest.importorskip("setuptools", minversion="70.1")
    source = tmp_path / "source"
    for name in ("cuattn", "kernels_cu", "pyproject.toml", "README.md"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        source.mkdir(exist_ok=True)
        copy(ROOT / name, source / name)
    options = ["--no-deps", "--no-build-isolation", "-w", tmp_path]
    command = [sys.executable, "-m", "pip", "wheel", *options, source]
    subprocess.run(command, check=True, capture_output=True)
    held = set(zipfile.ZipFile(next(tmp_path.glob("cuattn-*.whl"))).namelist())
    for path in (ROOT / "kernels_cu").rglob("*.cu*"):
        assert f"cuattn/_kernels/{path.relative_to(ROOT / 'kernels_cu').as_posix()}" in held
    for path in (ROOT / "cuattn").rglob("*.py"):
        assert path.relative_to(ROOT).as_posix() in held
