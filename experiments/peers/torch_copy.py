"""PyTorch's copy of pages: gathered, and scattered to where they go."""

from __future__ import annotations

from experiments.peers.torch_peer import WritingPeer, refuse_dtype

refuse = refuse_dtype


class Copy(WritingPeer):
    """`index_copy_` of an `index_select`, for K and for V."""

    def prepare(self) -> None:
        self._caches = [self.tensor(name) for name in ("k_cache", "v_cache")]
        self._src, self._dst = (self.tensor(name).long() for name in ("src", "dst"))

    def launch(self) -> None:
        for cache in self._caches:
            cache.index_copy_(0, self._dst, cache.index_select(0, self._src))


SUBJECTS = {"torch_copy": Copy}
