"""`tmoe.from_pretrained`: a transformers model whose experts stay as the checkpoint has them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tmoe.checkpoints import Checkpoint
from tmoe.checkpoints.json_files import some
from tmoe.checks import expect, expect_type

from .load_share import Divide
from .quantized import HeldScheme
from .register import import_experts_interface

OP = "from_pretrained"
_OURS = ("config", "state_dict", "quantization_config", "torch_dtype", "key_mapping", "gguf_file",
         "tp_plan", "tp_size", "distributed_config", "device_mesh", "use_kernels",
         "experts_implementation", "ignore_mismatched_sizes", "output_loading_info",
         "offload_folder", "trust_remote_code", "variant", "subfolder")  # fmt: skip
_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")


def from_pretrained(
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    device_map: Any = None,
    scheme: str | None = None,
    model_class: Any = None,
    **options: Any,
) -> Any:
    """Load a model of transformers, with its experts on tmoe and quantised as they are stored.

    The experts' codes and scales are read straight into the stacked tensors that tmoe's kernels
    take, in the scheme that the checkpoint says. They are never dequantised, and never held twice:
    beside the model there is at most one expert in memory. Every other quantised layer (attention,
    shared experts, dense MLPs) is dequantised to `dtype`, one at a time; the rest is loaded as
    transformers loads it. A checkpoint that isn't quantised loads too.

    It is named after what it does in transformers. It doesn't replace that method: transformers
    dequantises the experts of some kinds of checkpoints and can't load others.

    Args:
        path: a folder with config.json and safetensors files, or a name on the Hugging Face Hub.
        dtype: of everything that isn't quantised; None = as the config says, or bfloat16.
        device: where the whole model goes, tensor by tensor; None = the CPU.
        device_map: instead of `device`, as transformers takes it (needs accelerate); nothing can
            be offloaded.
        scheme: run all quantised experts in this scheme of `tmoe.formats.SCHEMES`, which has to
            take weights of their format; None = the one that the checkpoint says.
        model_class: a class of transformers; None = the one that the config names.
        options: other keywords of transformers' `from_pretrained`, "attn_implementation" for
            example.

    Returns:
        The model, in eval mode. ``print(tmoe.replace_moe(model))`` says what runs on tmoe.
        `save_pretrained` writes the experts as they are, and the rest in `dtype`; what it can't
        write, it refuses. The model can't be trained.

    Raises:
        FileNotFoundError, ValueError: files or tensors are missing, superfluous, cut off, of
            another dtype or shape: with the file, the tensor, what was wanted and what came. All
            names, dtypes and shapes are checked before the first tensor is read.
        ImportError: transformers is missing or too old.
    """
    return load_model(
        path, None, dtype=dtype, device=device, device_map=device_map, scheme=scheme,
        model_class=model_class, **options,
    )  # fmt: skip


def load_model(
    path: str | os.PathLike[str],
    divide: Divide | None,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    device_map: Any = None,
    scheme: str | None = None,
    model_class: Any = None,
    **options: Any,
) -> Any:
    """`from_pretrained`. `divide` is called with the model, still on the meta device, and divides
    its experts among ranks; it returns this rank's share of each layer (`tmoe.parallel`)."""
    import_experts_interface()
    import transformers

    from .checkpoint_loading import CheckpointLoading
    from .quantizer import LoadingConfig, register_method
    from .replace import replace_moe
    from .save import prepare_saving

    expect_type(path, (str, os.PathLike), OP, "path")
    for name in _OURS:
        expect(name not in options, OP, name, "left to tmoe", options.get(name))
    both = device is not None and device_map is not None
    expect(not both, OP, "device_map", "None where device is given", device_map)
    places = set(map(str, device_map.values() if isinstance(device_map, dict) else [device_map]))
    offloads = "disk" in places or ("cpu" in places and len(places) > 1)
    wanted = "all on GPUs or all on the CPU: tmoe can't offload quantised weights"
    expect(not offloads, OP, "device_map", wanted, device_map)
    folder = _folder(path)
    checkpoint = Checkpoint(folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    stated = take_description(config)
    dtype = dtype or _dtype_of(config)
    cls = model_class or class_of_config(config, transformers)

    register_method()
    loading = CheckpointLoading(checkpoint, scheme, dtype, device, divide)
    generation = (folder / "generation_config.json").exists()
    if generation and "generation_config" not in options:
        options["generation_config"] = transformers.GenerationConfig.from_pretrained(folder)
    model, info = cls.from_pretrained(
        None,
        config=config,
        state_dict=loading.state_dict,
        quantization_config=LoadingConfig(loading),
        dtype=dtype,
        device_map=device_map,
        output_loading_info=True,
        **options,
    )
    checkpoint.close()
    _check(model, loading, info)
    _put_back(model, stated)
    replace_moe(model)  # also what could not be replaced without its weights
    model._weight_conversions = loading.conversions
    prepare_saving(model)
    return model if device is None else model.to(device)  # buffers that no checkpoint has


def _folder(path: str | os.PathLike[str]) -> Path:
    folder = Path(path)
    if folder.is_dir():
        return folder
    name = str(path)
    if not isinstance(path, str) or name.count("/") != 1 or name.startswith((".", "/", "~")):
        wanted = "a folder with config.json and safetensors files, or a name on the Hub"
        raise FileNotFoundError(f"{OP}: path must be {wanted}, got {name!r}")
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, allow_patterns=list(_FILES)))


def take_description(config: Any) -> dict[bool, Any]:
    """Take what the config says about quantisation away from transformers."""
    stated: dict[bool, Any] = {}
    for part in (config, config.get_text_config()):
        if getattr(part, "quantization_config", None) is not None:
            stated[part is config] = part.quantization_config
            del part.quantization_config
    return stated


def _put_back(model: Any, stated: dict[bool, Any]) -> None:
    """Let the config say what the checkpoint's did, and a model without quantised weights be
    ordinary."""
    vars(model).pop("hf_quantizer", None)
    del model.config.quantization_config
    for is_whole, description in stated.items():
        part = model.config if is_whole else model.config.get_text_config()
        part.quantization_config = description
    if not any(isinstance(module, HeldScheme) for module in model.modules()):
        model.is_quantized = False
        for module in model.modules():
            if hasattr(module, "config"):
                vars(module.config).pop("_is_quantized", None)


def _dtype_of(config: Any) -> torch.dtype:
    dtype = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.bfloat16


def class_of_config(config: Any, transformers: Any) -> Any:
    names = getattr(config, "architectures", None) or []
    for name in names:
        if hasattr(transformers, name):
            return getattr(transformers, name)
    mapping = transformers.AutoModelForCausalLM._model_mapping
    known = type(config) in mapping
    wanted = "given: transformers has no class for this config"
    expect(known, OP, "model_class", wanted, f"None, and the config names {names}")
    return mapping[type(config)]


def _check(model: nn.Module, loading: Any, info: dict[str, Any]) -> None:
    """What the headers couldn't show: that transformers put every tensor where it belongs."""
    for key in ("missing_keys", "mismatched_keys", "error_msgs", "conversion_errors"):
        found = sorted(map(str, info.get(key) or ()))
        if key == "missing_keys":
            known = getattr(model, "_keys_to_ignore_on_load_missing", None) or []
            found = [name for name in found if name not in known]
        expect(not found, OP, "the model", "loaded whole", f"{key}: {some(found)}")
    for name, tensor in model.state_dict().items():
        shape = loading.shapes.get(name, tensor.shape)
        wanted = f"of shape {tuple(shape)}, as the config says"
        expect(tensor.shape == shape, OP, name, wanted, tuple(tensor.shape))
