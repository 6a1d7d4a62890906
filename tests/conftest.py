"""Environment of the whole suite, set before torch is imported anywhere."""

import os

os.environ.update(
    OMP_NUM_THREADS="1",
    TORCH_COMPILE_DISABLE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
    CUDA_DEVICE_MAX_CONNECTIONS="1",
)

from megagrpo.parallel import platform  # noqa: E402

platform.mask_broken_media_packages()  # before any test imports transformers' models
