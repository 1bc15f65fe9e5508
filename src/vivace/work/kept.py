"""What autograd keeps for the backward pass: how many bytes at most at one time."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator

import torch

from vivace.tensors.trees import bytes_of
from vivace.torch_internals.tensors import base_of, dense_parts, storage_id

Piece = tuple[int, int]  # of a storage: where it begins, and its bytes


class Kept:
    """Follows what autograd keeps while it is `watched`, until it lets it go: several backward passes in one
    step need not hold their memory at one time.

    Parameters and views of them do not count; of what needs no gradient, as a batch that is a slice of all
    data, only the part that is kept.
    """

    def __init__(self) -> None:
        self.most_bytes = 0
        self._bytes = 0
        self._pieces: dict[int, Counter[Piece]] = defaultdict(Counter)  # kept, by storage

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Follow what autograd keeps inside."""

        def pack(tensor: torch.Tensor) -> _Held:
            return _Held(self, tensor)

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
            yield

    def change(self, storage: torch.UntypedStorage, piece: Piece, by: int) -> None:
        """So many more keep this piece of a storage; fewer, where it is below 0."""
        pieces, whole = self._pieces[storage_id(storage)], storage.nbytes()
        self._bytes -= min(whole, sum(num_bytes for _, num_bytes in pieces))
        pieces[piece] += by
        if not pieces[piece]:
            del pieces[piece]
        self._bytes += min(whole, sum(num_bytes for _, num_bytes in pieces))
        self.most_bytes = max(self.most_bytes, self._bytes)
        if not pieces:  # another storage may have its number later
            del self._pieces[storage_id(storage)]


class _Held:
    """A tensor in autograd's hands, which is let go together with this."""

    def __init__(self, kept: Kept, tensor: torch.Tensor) -> None:
        self.tensor, self._kept = tensor, kept
        base = base_of(tensor)
        counts = not isinstance(tensor if base is None else base, torch.nn.Parameter)
        self._pieces = [(part.untyped_storage(), _piece(part)) for part in dense_parts(tensor) if counts]
        for storage, piece in self._pieces:
            kept.change(storage, piece, 1)

    def __del__(self) -> None:
        for storage, piece in self._pieces:
            self._kept.change(storage, piece, -1)


def _piece(part: torch.Tensor) -> Piece:
    if part.requires_grad:
        return 0, part.untyped_storage().nbytes()
    return int(part.storage_offset()), bytes_of([part])
