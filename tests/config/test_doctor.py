"""The doctor on machines that are broken in known ways."""

import os
import sys

import pytest

from ipu_lean.config.doctor import BROKEN, OK, WARN, Machine, examine, format_report, installed_version, run_python

pytestmark = pytest.mark.pod
SOUND = {
    "torch": "2.13.0+cpu",
    "numpy": "2.4.0",
    "pytorch-lightning": "2.6.0",
    "pydantic": "2.10.6",
    "PyYAML": "6.0",
    "safetensors": "0.5",
    "tqdm": "4.60",
    "matplotlib": "3.9",
}


def look(tmp_path, versions=None, environ=None, fails=(), python=(3, 11, 7), cache=None):
    """Findings by name, for a machine with these packages and variables on which imports of `fails` fail."""
    have = {**SOUND, **(versions or {})}

    def run(code):
        return (False, "ImportError: broken") if any(name in code for name in fails) else (True, "")

    machine = Machine(environ or {}, have.get, run, python)
    return {finding.name: finding for finding in examine(machine, cache or tmp_path)}


def test_a_sound_machine_without_ipus(tmp_path):
    found = look(tmp_path)
    assert not [finding for finding in found.values() if finding.status in (BROKEN, WARN)]
    assert "device: cpu" in found["poptorch"].text
    assert found["torch"].text == "2.13.0+cpu"


@pytest.mark.parametrize(
    "name, changes, advice",
    [
        ("python", {"python": (3, 7, 9)}, "3.8"),
        ("torch", {"versions": {"torch": None}}, "CPU build"),
        ("torch", {"versions": {"torch": "1.13.1"}}, "2.0.1"),
        ("pydantic", {"versions": {"pydantic": "1.10.2"}}, "pydantic>=2"),
        ("torch with numpy", {"versions": {"torch": "2.0.1"}, "fails": ("numpy",)}, "numpy<2"),
        ("torchvision", {"versions": {"torchvision": "0.15"}, "fails": ("torchvision",)}, "uninstall torchvision"),
        ("import Lightning", {"fails": ("pytorch_lightning",)}, "torch"),
        ("Poplar SDK", {"versions": {"poptorch": "3.4.0", "torch": "2.0.1"}}, "enable"),
        ("poptorch", {"environ": {"POPLAR_SDK_ENABLED": "/sdk"}}, "wheel"),
        ("poptorch", {"versions": {"poptorch": "3.4.0+1"}, "environ": {"POPLAR_SDK_ENABLED": "/sdk"}}, "torch==2.0.1"),
    ],
)
def test_what_is_broken_comes_with_its_remedy(tmp_path, name, changes, advice):
    found = look(tmp_path, **changes)
    assert found[name].status == BROKEN
    assert advice in found[name].advice
    assert f"-> {found[name].advice}" in format_report(list(found.values()))


def test_a_pod_and_its_partition(tmp_path):
    versions, environ = {"poptorch": "3.4.0", "torch": "2.0.1"}, {"POPLAR_SDK_ENABLED": "/sdk"}
    assert look(tmp_path, versions, environ)["IPU partition"].status == WARN
    environ.update(IPUOF_VIPU_API_HOST="10.1.3.1", IPUOF_VIPU_API_PARTITION_ID="p0")
    found = look(tmp_path, versions, environ)
    assert (found["IPU partition"].status, found["IPU partition"].text) == (OK, "p0")
    assert found["poptorch"].status == found["Poplar SDK"].status == OK


def test_the_empty_release_of_mup_is_told(tmp_path):
    assert look(tmp_path, {"mup": "0.0.0"})["mup"].status == WARN
    assert look(tmp_path, {"mup": "1.0.0"})["mup"].status == OK


def test_a_cache_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    assert look(tmp_path, cache=tmp_path / "file" / "cache")["cache"].status == BROKEN
    assert os.listdir(str(tmp_path)) == ["file"]


def test_probing_survives_a_process_that_dies():
    assert run_python("print('fine')") == (True, "fine")
    worked, said = run_python("import os; os.abort()")
    assert not worked and said
    assert run_python("import no_such_package_here")[1].startswith("ModuleNotFoundError")
    assert installed_version("no-such-package-here") is None
    assert installed_version("pydantic") == sys.modules["pydantic"].VERSION
