"""The contract as package data: signatures, enums and handlers, read without torch."""
from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from ipu_lean.ipu import contract

pytestmark = pytest.mark.pod


def test_handlers_name_the_ops_that_poptorch_lowers() -> None:
    table = contract.handlers()
    assert {"aten::addmm", "aten::native_layer_norm", "aten::sort"} <= set(table)
    assert "aten::scaled_dot_product_attention" not in table and "aten::nonzero" not in table
    assert all(":" in where for where in table.values())


def test_a_signature_binds_what_poptorch_accepts_and_refuses_the_rest() -> None:
    contract.signature("poptorch.trainingModel").bind("model", options=None, optimizer=None)
    contract.signature("poptorch.Options.Training.gradientAccumulation").bind(8)
    contract.signature("poptorch.optim.AdamW").bind([], lr=1.0, accum_type=None, bias_correction=True)
    with pytest.raises(TypeError):
        contract.signature("poptorch.Options.deviceIterations").bind()
    with pytest.raises(TypeError):
        contract.signature("poptorch.optim.RMSprop").bind([], max_grad_norm=1.0)
    with pytest.raises(KeyError):
        contract.signature("poptorch.Options.numIpus")


def test_enum_members_have_poptorchs_values() -> None:
    assert contract.enum_members("poptorch.OutputMode") == {"Final": 0, "EveryN": 1, "All": 2, "Sum": 3, "Default": 4}
    assert contract.enum_members("poptorch.VariableRetrievalMode")["AllReplicas"] == 2


def test_positional_only_and_variadic_kinds_survive() -> None:
    kinds = [p.kind for p in contract.signature("poptorch.recomputationCheckpoint").parameters.values()]
    assert kinds == [inspect.Parameter.VAR_POSITIONAL]
    assert contract.where("poptorch.recomputationCheckpoint").startswith("python/ops.py")


def test_the_contract_needs_no_torch() -> None:
    code = "import sys, ipu_lean.ipu.contract as c; c.handlers(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
