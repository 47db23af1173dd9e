"""What a newcomer reads and installs fits together: README, docs, requirements, set-up and version."""

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ipu_lean
from ipu_lean.cli import COMMANDS

pytestmark = pytest.mark.pod
ROOT = Path(__file__).parents[1]


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.fixture
def packaging(monkeypatch):
    """The arguments that setup.py gives to setuptools."""
    setuptools = pytest.importorskip("setuptools", reason="setup.py is read by setuptools")
    caught = {}
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: caught.update(arguments))
    before = set(sys.modules)
    runpy.run_path(str(ROOT / "setup.py"))
    assert "torch" not in set(sys.modules) - before
    return caught


def test_version_python_and_command(packaging):
    assert packaging["version"] == ipu_lean.__version__
    assert packaging["python_requires"] == ">=3.8"
    assert packaging["entry_points"]["console_scripts"] == ["ipu-lean=ipu_lean.cli:main"]


def test_every_room_is_packaged(packaging):
    rooms = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "ipu_lean").rglob("__init__.py")}
    assert {"ipu_lean.config", "ipu_lean.train", "ipu_lean.nn.attention"} <= rooms
    assert set(packaging["packages"]) == rooms


def test_extras(packaging):
    extras = packaging["extras_require"]
    assert {"test", "bench", "hf", "ray", "tensorboard", "wandb", "corpora", "tokenizers"} <= set(extras)
    wanted = [name for names in [*extras.values(), packaging["install_requires"]] for name in names]
    assert not [name for name in wanted if name.startswith(("torchvision", "poptorch"))]


def test_readme_marks_its_two_commands_and_their_scripts_exist():
    blocks = dict(re.findall(r"<!-- (run|test) -->\n```bash\n(.*?)```", read("README.md"), re.S))
    assert set(blocks) == {"run", "test"}
    for block in blocks.values():
        script = re.fullmatch(r"bash (scripts/\w+\.sh)\n", block).group(1)
        assert (ROOT / script).is_file()


@pytest.mark.parametrize("name", ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))])
def test_links_lead_somewhere(name):
    for target in re.findall(r"\]\(([^)#:]+)\)", read(name)):
        assert (ROOT / name).parent.joinpath(target).exists(), target


def test_every_command_has_a_page():
    for command in COMMANDS:
        assert f"    ipu-lean {command}" in read(f"docs/{command}.md")


@pytest.mark.parametrize("name", ["scripts/setup.sh", "scripts/quickstart.sh", "scripts/test.sh", ".ci/run"])
def test_scripts_are_sound_shell(name):
    assert "set -euo pipefail" in read(name)
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash on this machine")
    assert subprocess.run([bash, "-n", str(ROOT / name)], capture_output=True).returncode == 0


def pins(name):
    return dict(re.findall(r"^([\w.-]+)==([\w.]+)", read(name), re.M))


def test_pod_requirements_pin_everything_but_torch():
    pod, ci = pins("requirements/pod.txt"), pins("requirements/py38-ci.txt")
    assert "torch" not in pod and ci["torch"] == "2.0.1"
    assert "-r pod.txt" in read("requirements/py38-ci.txt")
    assert not set(pod) & set(ci)
    known = {"pytorch-lightning": "2.3.3", "torchmetrics": "1.5.2", "lightning-utilities": "0.11.9", "pydantic": "2.10.6"}
    known.update({"safetensors": "0.5.3", "mup": "1.0.0", "tokenizers": "0.20.3", "sentencepiece": "0.2.0"})
    assert {name: pod[name] for name in known} == known
    assert int(pod["numpy"].split(".")[0]) < 2
    assert "--no-binary mup" in read("requirements/pod.txt")


def test_the_set_up_and_the_container_install_the_same_torch():
    newest = re.search(r'\[:2\], "([\d.]+)"\)', read("scripts/setup.sh")).group(1)
    assert f"torch=={newest}" in read("docker/cpu.Dockerfile")
