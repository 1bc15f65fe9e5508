"""Sparse gradients on fake tensors, with as many numbers as rows were looked up."""

from __future__ import annotations

from typing import Any

import torch

from vivace.torch_internals.tensors import FakeTensor, Operator, OperatorMode, dense_parts, schema_of

_COPIES = ("aten::clone", "aten::_coalesce", "aten::sparse_mask")


class SparseCopies(OperatorMode):  # type: ignore[no-untyped-call]
    """Inside, what is copied to sparse fake tensors has numbers; torch's has none (seen with 2.15).

    Autograd copies each gradient on fake tensors, and takes a real one as it is: so does this. In order it
    has as many numbers as there may be: rows that were looked up twice are one then. Entered after what
    counts.
    """

    def run_operator(self, function: Operator, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Run the operator; of those that copy sparse tensors, others in its place."""
        name = schema_of(function).name
        given = arguments[-1] if name in _COPIES else None
        if not isinstance(given, FakeTensor) or given.layout != torch.sparse_coo:
            return function(*arguments, **keywords)
        places, numbers = dense_parts(given)
        in_order = given.is_coalesced()
        if name == "aten::_coalesce":
            places, numbers, in_order = places.clone(), numbers.clone(), True
        elif name == "aten::sparse_mask":  # of the first argument, at the places of the second
            numbers = torch.empty_like(numbers)
        return torch.sparse_coo_tensor(
            places, numbers, given.shape, is_coalesced=in_order, check_invariants=False
        )
