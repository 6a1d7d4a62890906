# GPU image: torch, vLLM, megatron-core, Transformer Engine and NVIDIA's apex, the last two from
# source. NOT BUILT AND NOT RUN YET: written from the projects' own instructions, no GPU machine has
# seen it. Build with
#
#   docker build -t megagrpo --build-arg ARCHS=9.0 .
#
# The base must have the CUDA major version of the torch wheel that vLLM pins; a step below checks.
ARG BASE=nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04
FROM ${BASE}

# Compute capabilities to compile for: 8.0 A100, 9.0 H100 and H200, 10.0 B200.
ARG ARCHS="8.0;9.0;10.0"
ARG TE_REF=v2.14
ARG APEX_REF=25.09
ARG MAX_JOBS=8

RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        build-essential cmake git ninja-build python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3.12 -m venv /opt/venv
ENV PATH=/opt/venv/bin:${PATH} CUDA_HOME=/usr/local/cuda TORCH_CUDA_ARCH_LIST=${ARCHS} \
    MAX_JOBS=${MAX_JOBS} PIP_NO_CACHE_DIR=1

# vLLM first: it pins torch, and everything below is compiled against that torch.
RUN pip install --upgrade pip setuptools wheel packaging pybind11 ninja && pip install vllm==0.32.0
RUN python -c "import re, subprocess, torch; \
nvcc = re.search(r'release (\d+)', subprocess.check_output(['nvcc', '-V'], text=True)).group(1); \
torch_cuda = torch.version.cuda.split('.')[0]; \
assert nvcc == torch_cuda, f'BASE has CUDA {nvcc}, torch was built for {torch_cuda}'"

RUN NVTE_FRAMEWORK=pytorch NVTE_CUDA_ARCHS="$(echo "${ARCHS}" | tr -d .)" \
    pip install --no-build-isolation \
    "git+https://github.com/NVIDIA/TransformerEngine.git@${TE_REF}"

# The registry's `apex` is an unrelated web toolkit: only this repository is meant.
RUN git clone --depth 1 --branch "${APEX_REF}" https://github.com/NVIDIA/apex /opt/apex \
    && cd /opt/apex \
    && APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation . \
    && rm -rf /opt/apex

WORKDIR /workspace/megagrpo
COPY . .
# vLLM and Transformer Engine are in place already, so not the `gpu` extra, which would fetch the
# registry's build of the latter.
RUN pip install --editable ".[math,test]"
CMD ["megagrpo", "--help"]
