"""LoRA on experts: `add`, `merge`, `unmerge`, `remove`, and files that PEFT reads: `save`, `load`.

    tmoe.lora.add(model, rank=16, alpha=32)   # model: of tmoe.MoE layers, or after replace_moe
    ...                                       # train
    tmoe.lora.save(model, "adapter")          # PeftModel.from_pretrained(model, "adapter") reads it

The adapters of all experts of a projection are two stacked parameters, ``lora.down_proj.lora_A``
(E, rank, I) and ``lora_B`` (E, H, rank), inside the module of experts. On frozen weights, plain or
quantised, they join the products of the layer's own pass: no sum with the weights is made.
"""

from .change import add, merge, remove, unmerge
from .files import load, save

__all__ = ["add", "load", "merge", "remove", "save", "unmerge"]
