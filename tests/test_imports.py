"""What importing costs: `--help` and the configuration load nothing heavy, measured in fresh processes."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.pod
HEAVY = ("torch", "pytorch_lightning", "lightning", "matplotlib", "transformers", "tensorboard", "wandb", "poptorch", "datasets")


def loaded_by(code):
    """The heavy packages in sys.modules after `code` ran in a fresh process."""
    probe = f"import sys, json\n{code}\nprint(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "code",
    [
        "import ipu_lean",
        "import ipu_lean.errors, ipu_lean.config, ipu_lean.config.doctor, ipu_lean.config.schema",
        "import ipu_lean.cli",
        "import ipu_lean.data",
        "from ipu_lean.cli import main\nassert main(['config', 'schema']) == 0",
        "from ipu_lean.cli import main\nassert main(['config', 'show', 'mup: {base_width: 64}', '--changed']) == 0",
        "from ipu_lean.cli import main\nassert main(['train', 'model: {widht: 3}']) == 2",
        "from ipu_lean.cli import main\nassert main(['plan', 'mup: {base_width: 64}', '--pod', '4']) == 0",
    ],
)
def test_nothing_heavy_is_loaded(code):
    assert loaded_by(code) == []


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["config", "show", "--help"], ["--version"]])
def test_help_loads_nothing_heavy(arguments):
    code = f"from ipu_lean.cli import main\ntry:\n    main({arguments!r})\nexcept SystemExit as end:\n    assert not end.code"
    assert loaded_by(code) == []


def test_the_probe_can_fail():
    assert loaded_by("import torch") == ["torch"]


def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "ipu_lean", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout[:9]) == (0, "ipu_lean ")
