"""A kernel cache for one test."""
from __future__ import annotations

import shutil
from pathlib import Path

from cuattn import compile as compiler
from cuattn import sources


def own_cache(folder: Path) -> Path:
    """Makes `folder` a cache that holds the CPU machine itself, which takes seconds to build, and no kernel."""
    options, host = compiler.compiler_of("cpu")
    for file in sources.LINKED.values():
        entry = compiler.linked_object(compiler.cache_folder(), file, options, host).parent
        shutil.copytree(entry, folder / entry.name)
    return folder


def kernels_in(cache: Path) -> list[str]:
    """The names of its entries but for those."""
    return sorted(path.name for path in cache.iterdir() if not path.name.startswith("simt-"))
