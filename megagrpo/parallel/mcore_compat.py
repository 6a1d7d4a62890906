"""One way to call megatron-core 0.16 to 0.19: by keyword, filtered by what the version knows.

Constructors and functions gain and lose arguments between those versions, some in the middle of the
list; only leading ones that never moved may be positional. `call` drops the keywords that the
installed version does not have, but only those that are declared here as version-dependent: a
misspelt keyword stays an error.
"""

import dataclasses
import importlib.metadata
import inspect
from collections.abc import Callable
from typing import Any

_SUPPORTED = ((0, 16), (0, 20))  # first, first that is too new
_OPTIONAL = {
    # gone in 0.19
    "create_all_gather_group",
    "async_tensor_model_parallel_allreduce",
    # gone in 0.17
    "moe_use_legacy_grouped_gemm",
    # new in one of 0.16 to 0.19
    "content_metadata",
    "async_strategy",
    "tp_group",
    "full_param_layout",
    "schedule_pg_collection",
}


def check_version() -> None:
    """Raise ValueError unless megatron-core >=0.16,<0.20 is installed."""
    version = importlib.metadata.version("megatron-core")
    major, minor = (int(part) for part in version.split(".")[:2])
    if not _SUPPORTED[0] <= (major, minor) < _SUPPORTED[1]:
        raise ValueError(
            f"megatron-core {version} is not supported; install 'megatron-core>=0.16,<0.20'"
        )


def call(function: Callable[..., Any], *leading: Any, **keywords: Any) -> Any:
    """`function(*leading, **keywords)` less the version-dependent keywords that it does not take.

    Raises TypeError for any other unknown keyword.
    """
    if dataclasses.is_dataclass(function):
        known = {field.name for field in dataclasses.fields(function) if field.init}
    else:
        parameters = inspect.signature(function).parameters
        if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
            return function(*leading, **keywords)
        known = set(parameters)
    kept = {
        name: value for name, value in keywords.items() if name in known or name not in _OPTIONAL
    }
    return function(*leading, **kept)
