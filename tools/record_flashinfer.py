"""Record FlashInfer's MoE entry points and enums, release by release, from its wheels.

    python tools/record_flashinfer.py WHEEL... [--output FILE]

Wheels are read as text and nothing is imported, so neither CUDA nor their dependencies are needed.
Name all releases in one call: the file is written anew. It holds

    releases    every release that was read, oldest first
    signatures  {entry point: {release: [[name, kind, default], ...]}}
    enums       {enum: {release: {member: value}}}

An entry stands at the first release that has it, and again only where it changed; null stands at
the release that took it away. A kind is one of `inspect.Parameter`'s in lower case, with "any" for
positional or keyword. A default is source text: ``None``, ``'auto'``, ``ActivationType.Swiglu``, a
sentinel's name; a required parameter has none.
"""

from __future__ import annotations

import argparse
import ast
import json
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.utils import parse_wheel_filename
from packaging.version import Version

OUTPUT = Path(__file__).parents[1] / "tmoe" / "backends" / "flashinfer" / "signatures.json"

# Where a caller imports each name from; where it is defined moves between releases.
ENTRY_POINTS = {
    "flashinfer.fused_moe": (
        "convert_to_block_layout",
        "cutlass_fused_moe",
        "cutlass_fused_moe_workspace_size",
        "deinterleave_gated_rows",
        "fused_topk_deepseek",
        "interleave_moe_scales_for_sm90_mixed_gemm",
        "interleave_moe_weights_for_sm90_mixed_gemm",
        "pad_trtllm_moe_weights",
        "preprocess_moe_weights_for_sm90_mixed_gemm_humming",
        "reorder_rows_for_gated_act_gemm",
        "trtllm_bf16_moe",
        "trtllm_bf16_routed_moe",
        "trtllm_fp4_block_scale_moe",
        "trtllm_fp4_block_scale_routed_moe",
        "trtllm_fp8_block_scale_moe",
        "trtllm_fp8_block_scale_routed_moe",
        "trtllm_fp8_per_tensor_scale_moe",
        "trtllm_fp8_per_tensor_scale_routed_moe",
        "trtllm_fused_moe_workspace_size",
        "trtllm_gen_routing",
    ),
    "flashinfer.fused_moe.core": (
        "_maybe_get_cached_w3_w1_permute_indices",
        "get_w2_permute_indices_with_cache",
    ),
    "flashinfer.fused_moe.prepare": (
        "prepare_cutlass_bf16_weights",
        "prepare_cutlass_fp8_block_weights",
        "prepare_cutlass_fp8_per_tensor_weights",
        "prepare_cutlass_humming_weights",
        "prepare_cutlass_mxfp8_activations",
        "prepare_cutlass_mxfp8_mxfp4_weights",
        "prepare_cutlass_mxfp8_weights",
        "prepare_cutlass_nvfp4_weights",
        "prepare_cutlass_w4a16_weights",
        "prepare_cutlass_w4a8_weights",
        "prepare_trtllm_bf16_weights",
        "prepare_trtllm_fp4_activations",
        "prepare_trtllm_fp4_weights",
        "prepare_trtllm_fp8_block_activations",
        "prepare_trtllm_fp8_block_weights",
        "prepare_trtllm_fp8_per_tensor_activations",
        "prepare_trtllm_fp8_per_tensor_weights",
    ),
    "flashinfer.gemm": (
        "group_gemm_fp8_nt_groupwise",
        "group_gemm_mxfp8_mxfp4_nt_groupwise",
        "group_gemm_nvfp4_nt_groupwise",
    ),
    "flashinfer": (
        "autotune",
        "block_scale_interleave",
        "e2m1_and_ufp8sf_scale_to_float",
        "fp4_quantize",
        "mxfp4_dequantize",
        "mxfp4_dequantize_host",
        "mxfp4_quantize",
        "mxfp8_dequantize_host",
        "mxfp8_quantize",
        "nvfp4_block_scale_interleave",
        "nvfp4_quantize",
        "shuffle_matrix_a",
        "shuffle_matrix_sf_a",
    ),
}

ENUMS = (
    "ActivationType",
    "Fp8QuantizationType",
    "GatedActType",
    "RoutingInputMode",
    "RoutingMethodType",
    "SfLayout",
    "WeightLayout",
)
ENUM_MODULES = ("flashinfer.tllm_enums", "flashinfer.fused_moe.core")  # old releases: the second


class Modules:
    """The modules of an open wheel as syntax trees."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._files = set(archive.namelist())
        self._modules: dict[str, tuple[ast.Module, str] | None] = {}

    def find(self, module: str, name: str) -> ast.stmt | None:
        """The function or class that ``module.name`` is, through re-exports and aliases."""
        if (source := self._module(module)) is None:
            return None
        tree, package = source
        for node in reversed(list(_statements(tree.body))):  # the last binding of a name counts
            found: ast.stmt | None = None
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found = node if node.name == name else None
            elif isinstance(node, ast.ImportFrom):
                originals = {alias.asname or alias.name: alias.name for alias in node.names}
                if name in originals:
                    found = self.find(_absolute(node, package), originals[name])
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
                if name in map(ast.unparse, node.targets):
                    found = self.find(module, node.value.id)
            if found is not None:
                return found
        return None

    def _module(self, module: str) -> tuple[ast.Module, str] | None:
        """A module's tree and the package that its relative imports start from."""
        if module not in self._modules:
            self._modules[module] = None
            file = module.replace(".", "/")
            places = {f"{file}/__init__.py": module, f"{file}.py": module.rpartition(".")[0]}
            place = next((place for place in places if place in self._files), None)
            if place is not None:
                tree = ast.parse(self._archive.read(place), place)
                self._modules[module] = tree, places[place]
        return self._modules[module]


def read(path: Path) -> tuple[Version, dict[str, dict]]:
    """A wheel's release, and what it has of `ENTRY_POINTS` and `ENUMS`.

    Raises ``ValueError`` with the file and the reason if it can't be read.
    """
    broken = (OSError, EOFError, RuntimeError, SyntaxError, zipfile.BadZipFile, zlib.error)
    try:
        project, release, _, _ = parse_wheel_filename(path.name)
        if project != "flashinfer-python":
            raise ValueError(f"is a wheel of {project}, not of flashinfer-python")
        with zipfile.ZipFile(path) as archive:
            modules = Modules(archive)
            signatures, enums = _signatures(modules), _enums(modules)
    except (ValueError, *broken) as error:
        raise ValueError(f"{path}: {error}") from error
    if not signatures:
        raise ValueError(f"{path}: has none of the entry points")
    return release, {"signatures": signatures, "enums": enums}


def record(paths: Sequence[Path]) -> dict[str, object]:
    """What the file holds for these wheels; see the top.

    Raises ``ValueError`` if a wheel can't be read or two are of the same release.
    """
    wheels = sorted((read(path) for path in paths), key=lambda wheel: wheel[0])
    releases = [str(release) for release, _ in wheels]
    if len(set(releases)) < len(releases):
        raise ValueError(f"two wheels of the same release among {', '.join(releases)}")
    tables = {
        section: {
            name: _changes([(str(release), found[section].get(name)) for release, found in wheels])
            for name in sorted({name for _, found in wheels for name in found[section]})
        }
        for section in ("signatures", "enums")
    }
    return {"releases": releases, **tables}


def to_json(record: dict[str, object]) -> str:
    """The record as JSON with one entry of one release a line."""
    return _json(record, 3) + "\n"


def _json(value: object, levels: int, indent: str = "") -> str:
    if levels == 0 or not isinstance(value, dict):
        return json.dumps(value)
    rows = [
        f"{indent} {json.dumps(key)}: {_json(item, levels - 1, indent + ' ')}"
        for key, item in value.items()
    ]
    return "{\n" + ",\n".join(rows) + f"\n{indent}}}"


def _changes(history: Sequence[tuple[str, object]]) -> dict[str, object]:
    """The releases whose value differs from the one before; before the first there is nothing."""
    before = [None, *(value for _, value in history)]
    return {
        release: value
        for (release, value), previous in zip(history, before, strict=False)
        if value != previous
    }


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """A module's statements, those under ``if``, ``try`` and ``with`` too."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            # the body last, so that its names win over those of a fallback
            for handler in getattr(node, "handlers", ()):
                yield from _statements(handler.body)
            yield from _statements(getattr(node, "orelse", ()))
            yield from _statements(node.body)


def _absolute(node: ast.ImportFrom, package: str) -> str:
    """The full name of the module that an import in `package` takes names from."""
    parts = package.split(".")[: 1 - node.level or None] if node.level else []
    return ".".join([*parts, *([node.module] if node.module else [])])


def _signatures(modules: Modules) -> dict[str, list[list[str]]]:
    return {
        name: _parameters(found.args)
        for module, names in ENTRY_POINTS.items()
        for name in names
        if isinstance(found := modules.find(module, name), ast.FunctionDef)
    }


def _parameters(spec: ast.arguments) -> list[list[str]]:
    named = [(argument, "positional_only") for argument in spec.posonlyargs]
    named += [(argument, "any") for argument in spec.args]
    required: list[ast.expr | None] = [None] * (len(named) - len(spec.defaults))
    rows = list(zip(named, [*required, *spec.defaults], strict=True))
    if spec.vararg:
        rows.append(((spec.vararg, "var_positional"), None))
    keywords = [(argument, "keyword_only") for argument in spec.kwonlyargs]
    rows += zip(keywords, spec.kw_defaults, strict=True)
    if spec.kwarg:
        rows.append(((spec.kwarg, "var_keyword"), None))
    return [
        [argument.arg, kind, *([] if default is None else [ast.unparse(default)])]
        for (argument, kind), default in rows
    ]


def _enums(modules: Modules) -> dict[str, dict[str, int]]:
    found = {}
    for name in ENUMS:
        definitions = (modules.find(module, name) for module in ENUM_MODULES)
        definition = next(filter(None, definitions), None)
        if isinstance(definition, ast.ClassDef):
            found[name] = _members(definition)
    return found


def _members(enum: ast.ClassDef) -> dict[str, int]:
    members = {}
    for node in enum.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value = ast.literal_eval(node.value)
            # an IntEnum's ``Member = (3,)`` is 3
            members[node.targets[0].id] = value[0] if isinstance(value, tuple) else value
    return members


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    try:
        arguments.output.write_text(to_json(record(arguments.wheels)))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
