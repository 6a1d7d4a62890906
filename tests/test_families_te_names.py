"""Names and shapes under Transformer Engine, read off megatron-core's own TE layer specs.

Transformer Engine needs a GPU, so its layers are stood in for by modules that have its parameters
and nothing else; which module sits where is megatron-core's code. The names of the parameters
inside are Transformer Engine's (weight, bias, layer_norm_weight, weight0, weight1, ...).
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from megagrpo.model.core_config import ModelSettings, transformer_config
from megagrpo.model.hf_config import read_shape
from megagrpo.parallel import mcore_compat
from megagrpo.parallel.context import init_parallel
from megagrpo.types import Coordinates, Layout
from megagrpo.weights.table import local_shapes
from tests.family_toys import TOYS, toy_config, write_config
from tests.pool import run_ranks
from tests.tiny_models import ARCHITECTURES, hf_config

from megatron.core.models.gpt import gpt_layer_specs  # isort: skip
from megatron.core.transformer import multi_latent_attention  # isort: skip
from megatron.core.models.gpt import moe_module_specs  # isort: skip
from megatron.core.transformer.mlp import MLPSubmodules  # isort: skip
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP  # isort: skip
from megatron.core.transformer.spec_utils import build_module  # isort: skip


def zeros(*sizes: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(*sizes))


class Linear(torch.nn.Module):
    def __init__(self, inputs: int, outputs: int, *, bias: bool, **_: Any) -> None:
        super().__init__()
        self.weight = zeros(outputs, inputs)
        self.bias = zeros(outputs) if bias else None


class ColumnLinear(Linear):
    pass


class NormLinear(Linear):
    def __init__(self, inputs: int, outputs: int, *, bias: bool, **_: Any) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.layer_norm_weight = zeros(inputs)


class GroupedLinear(torch.nn.Module):
    def __init__(self, count: int, inputs: int, outputs: int, **_: Any) -> None:
        super().__init__()
        for number in range(count):
            self.register_parameter(f"weight{number}", zeros(outputs, inputs))


class Norm(torch.nn.Module):
    def __init__(self, config: Any, hidden_size: int, **_: Any) -> None:
        super().__init__()
        self.weight = zeros(hidden_size)


class Nothing(torch.nn.Module):
    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


class Provider:
    """megatron-core's TESpecProvider with the stand-ins."""

    def linear(self) -> type:
        return Linear

    def column_parallel_linear(self) -> type:
        return ColumnLinear

    def row_parallel_linear(self) -> type:
        return ColumnLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return NormLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return Norm

    def core_attention(self) -> type:
        return Nothing

    def activation_func(self) -> type:
        return Nothing

    def grouped_mlp_modules(self, grouped: bool, legacy: bool) -> tuple[type, MLPSubmodules]:
        if grouped:
            parts = MLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear)
            return TEGroupedMLP, parts
        return SequentialMLP, MLPSubmodules(linear_fc1=ColumnLinear, linear_fc2=ColumnLinear)


def built(rank: int, folders: list[Path], grouped: bool) -> list[dict[str, tuple[int, ...]]]:
    """Names and shapes of the layers of every model, as megatron-core puts them together."""
    gpt_layer_specs.TESpecProvider = moe_module_specs.TESpecProvider = Provider
    multi_latent_attention.TELinear = Linear
    multi_latent_attention.TEColumnParallelLinear = ColumnLinear
    init_parallel(Layout(1), seed=1)
    found = []
    for folder in folders:
        shape = read_shape(folder, to_convert=True)
        config = transformer_config(shape, Layout(1), torch.float32, ModelSettings())
        dense = shape.num_layers if shape.experts is None else shape.experts.dense_layers
        names: dict[str, tuple[int, ...]] = {}
        for number in range(shape.num_layers):
            spec = mcore_compat.call(
                gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec,
                num_experts=None if number < dense else config.num_moe_experts,
                moe_grouped_gemm=grouped,
                qk_layernorm=config.qk_layernorm,
                multi_latent_attention=shape.latent is not None,
            )
            layer = build_module(spec, config=config, layer_number=number + 1)
            biases = {n: b for n, b in layer.named_buffers() if n.endswith("expert_bias")}
            for name, value in (dict(layer.named_parameters()) | biases).items():
                names[f"decoder.layers.{number}.{name}"] = tuple(value.shape)
        found.append(names)
    return found


@pytest.mark.parametrize("profile", ["te", "te_grouped"])
def test_table_names_every_parameter_of_megatron_core_s_te_specs(
    profile: str, tmp_path: Path
) -> None:
    """CONV-2, CONV-34 on the Megatron side, shapes included; Gemma's layers are Megatron-Bridge's
    and have no spec in megatron-core."""
    configs = {name: toy_config(name) for name in TOYS if "gemma" not in name}
    configs |= {family: hf_config(family) for family in ARCHITECTURES}
    folders = [write_config(tmp_path / name, config) for name, config in configs.items()]
    (found,) = run_ranks(1, built, folders, profile == "te_grouped")
    assert len(found) == len(configs) > 10
    for folder, names in zip(folders, found, strict=True):
        shape = read_shape(folder, to_convert=True)
        table = local_shapes(shape, Layout(1), Coordinates(0, 0, 0), profile)
        layers = {n: size for n, size in table.items() if n.startswith("decoder.layers.")}
        assert layers == names, folder.name
