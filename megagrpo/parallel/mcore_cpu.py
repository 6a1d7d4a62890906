"""Make megatron-core load where CUDA is missing, and repair what it gets wrong without TE or apex.

megatron-core names CUDA outright in over 600 lines. `install` puts an import hook in front of
`megatron.core.*` that rewrites those names while a module loads: in memory, line numbers kept,
torch itself untouched, so that vLLM and transformers in the same process never notice. On a machine
with CUDA nothing is rewritten; the repairs below apply to both.

Every module of ours that imports megatron calls `install()` first; it may be called again. Names
reached by another road (`getattr(torch, "cuda")`) are not seen; none exist on our paths.

Repairs, each by upstream symbol, and when it may go:
- `transformer.moe.moe_utils.te_general_gemm` (0.16.x): undefined without TE, NameError in every MoE
  router. Gone when 0.16 is no longer supported.
- `transformer.multi_latent_attention.HAVE_TE` (0.16.1): true without TE, whose classes are then
  mocks, TypeError in every such layer. Gone when upstream asks whether TE itself was imported.
- `dist_checkpointing.strategies.filesystem_async` write queue (all): spawns a Python process per
  rank that re-imports the main script, 20 s per first save; CPU uses a forked manager. Gone when
  upstream takes a context argument that defaults to fork without CUDA.
- `models.common.embeddings.rope_utils._apply_rotary_pos_emb_thd` (all): right but slow where a pack
  has many short sequences, 8 % of a training pass of the toy. Gone when upstream gathers.
- `optimizer.distrib_optimizer.DistributedOptimizer` with torch's own AdamW (all): see
  `mcore_repairs.repair_distributed_optimizer`.
"""

import ast
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from megagrpo.parallel import mcore_repairs, platform

_STAND_IN = "megagrpo.parallel.cpu_cuda"
_NAME = "_megagrpo_cpu_cuda"
_STRINGS = {
    "cuda": "cpu",
    "torch.cuda.FloatTensor": "torch.FloatTensor",
    "torch.cuda.HalfTensor": "torch.HalfTensor",
    "torch.cuda.BFloat16Tensor": "torch.BFloat16Tensor",
}
# Said on every start, about a GPU that is not there.
_IDLE_WARNINGS = (
    ".*(Transformer Engine|Apex).*Falling back to",
    ".*set the environment variable CUDA_DEVICE_MAX_CONNECTIONS",
    "full scope is deprecated. Use empty cuda_graph_scope",
)
_REPAIRS: dict[str, Callable[[types.ModuleType], None]] = {
    "megatron.core.jit": mcore_repairs.disable_jit_fuser,
    "megatron.core.transformer.moe.moe_utils": mcore_repairs.define_te_general_gemm,
    "megatron.core.transformer.multi_latent_attention": mcore_repairs.deny_missing_te,
    "megatron.core.dist_checkpointing.strategies.filesystem_async": mcore_repairs.fork_write_queue,
    "megatron.core.models.common.embeddings.rope_utils": mcore_repairs.vectorise_packed_rope,
    "megatron.core.optimizer.distrib_optimizer": mcore_repairs.repair_distributed_optimizer,
}


class _Rewrite(ast.NodeTransformer):
    """The rewrite rules of the module docstring, one method per kind of syntax."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """`torch.cuda` becomes the stand-in, `x.is_cuda` a call of its `is_on_device`."""
        self.generic_visit(node)
        on_torch = isinstance(node.value, ast.Name) and node.value.id == "torch"
        if node.attr == "cuda" and on_torch:
            return ast.copy_location(ast.Name(_NAME, node.ctx), node)
        if node.attr == "is_cuda" and isinstance(node.ctx, ast.Load):
            return ast.copy_location(ast.Call(_stand_in("is_on_device"), [node.value], []), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """`x.cuda(...)` and `x.record_stream(...)` become calls of the stand-in."""
        self.generic_visit(node)
        new_name = {"cuda": "to_device", "record_stream": "record_stream"}
        if isinstance(node.func, ast.Attribute) and node.func.attr in new_name:
            callee = _stand_in(new_name[node.func.attr])
            arguments = [node.func.value, *node.args]
            return ast.copy_location(ast.Call(callee, arguments, node.keywords), node)
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        """`pin_memory=True` raises in torch without an accelerator."""
        self.generic_visit(node)
        if node.arg == "pin_memory" and isinstance(node.value, ast.Constant):
            node.value = ast.copy_location(ast.Constant(False), node.value)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        """Device names and tensor type names."""
        if isinstance(node.value, str) and node.value in _STRINGS:
            return ast.copy_location(ast.Constant(_STRINGS[node.value]), node)
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        """`from torch.cuda import ...` imports from the stand-in."""
        if node.module == "torch.cuda" and node.level == 0:
            node.module = _STAND_IN
        return node


def _stand_in(attribute: str) -> ast.Attribute:
    return ast.Attribute(ast.Name(_NAME, ast.Load()), attribute, ast.Load())


def rewrite(source: bytes | str, path: str) -> ast.Module:
    """The module's syntax tree with CUDA replaced; `path` is for messages only."""
    tree = _Rewrite().visit(ast.parse(source, path))
    at = 0
    while at < len(tree.body) and _stays_first(tree.body[at]):
        at += 1
    tree.body.insert(at, ast.Import([ast.alias(_STAND_IN, _NAME)]))
    return ast.fix_missing_locations(tree)


def _stays_first(statement: ast.stmt) -> bool:
    """Docstrings and `from __future__` must remain at the top."""
    if isinstance(statement, ast.ImportFrom):
        return statement.module == "__future__"
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads one module of megatron-core: rewritten without CUDA, then repaired."""

    def get_code(self, fullname: str) -> types.CodeType:
        """Rewritten code is compiled in memory and never cached as .pyc."""
        path = self.get_filename(fullname)
        data = self.get_data(path)
        if platform.is_cuda() or b"cuda" not in data:
            code = super().get_code(fullname)
            assert isinstance(code, types.CodeType), f"no code in {path}"
            return code
        return compile(rewrite(data, path), path, "exec", dont_inherit=True)

    def exec_module(self, module: types.ModuleType) -> None:
        """Run the module, then its repair if there is one."""
        super().exec_module(module)
        if module.__name__ in _REPAIRS:
            _REPAIRS[module.__name__](module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds megatron.core.* first and hands it to `_Loader`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The usual spec with our loader; None for every other package."""
        if fullname != "megatron.core" and not fullname.startswith("megatron.core."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def install() -> None:
    """Put the hook in place; does nothing the second time.

    Raises RuntimeError if megatron.core was imported before, because it then still names CUDA.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError(
            "megatron.core is imported already; call megagrpo.parallel.mcore_cpu.install() before"
        )
    if not platform.is_cuda():
        for message in _IDLE_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
    sys.meta_path.insert(0, _Finder())
