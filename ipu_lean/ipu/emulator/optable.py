"""Which ATen ops PopTorch 3.4 lowers, and how torch's names for them map to its handlers.

The list of handlers is the contract's (`poptorch_contract.json`, one folder up): `aten_handlers_registered`.
"""
from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import FrozenSet

# Names under which torch's dispatcher shows what PopTorch takes whole or builds from constants.
_SAME = {
    "_to_copy": "to", "_native_batch_norm_legit": "native_batch_norm", "_native_batch_norm_legit_functional": "native_batch_norm",
    "_batch_norm_with_update": "native_batch_norm", "unsafe_split": "split", "unsafe_split_with_sizes": "split_with_sizes",
    "_unsafe_index": "index", "special_expm1": "expm1", "absolute": "abs", "native_dropout": "dropout",
    "randn_like": "randn", "rand_like": "rand", "randint_like": "randint", "_index_put_impl": "index_put",
}
# Not handlers, but PopTorch's dispatcher deals with them itself (RegisterAtenOverloads.cpp: empty, alias, lift; tensor.fill is
# documented, supported_ops.rst:36).
_FREE = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "alias", "lift", "lift_fresh",
                   "lift_fresh_copy", "fill", "zero", "scalar_tensor", "set", "view_as", "is_same_size"})
# Read values back to the host (`_local_scalar_dense`) or have a result whose shape depends on the values.
HOST_READS = frozenset({"_local_scalar_dense", "item", "equal", "is_nonzero"})
DYNAMIC = frozenset({"nonzero", "nonzero_static", "masked_select", "unique", "unique_consecutive", "_unique", "_unique2",
                     "unique_dim", "repeat_interleave", "argwhere"})


@lru_cache(maxsize=1)
def handlers() -> FrozenSet[str]:
    """Op names (without `aten::`) that have a handler."""
    path = Path(__file__).resolve().parents[1] / "poptorch_contract.json"
    with open(path, encoding="utf-8") as file:
        return frozenset(name.split("::")[1] for name in json.load(file)["aten_handlers_registered"])


def base_name(qualified: str) -> str:
    """`aten::add_` -> `add`: in-place and out variants share their op's handler."""
    name = qualified.split("::")[-1]
    if name in handlers() or name.startswith("__"):
        return name
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def has_handler(qualified: str) -> bool:
    """Whether an op of torch's dispatcher has a handler of its own, `aten::…`."""
    name = base_name(qualified)
    return name in handlers() or _SAME.get(name, "") in handlers()


def is_supported(qualified: str) -> bool:
    """Whether PopTorch lowers an op of torch's dispatcher, `aten::…`."""
    return has_handler(qualified) or base_name(qualified) in _FREE
