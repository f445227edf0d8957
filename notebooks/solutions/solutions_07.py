"""Solutions of notebook 7."""

import torch


def token_scales(x):
    scale = x.abs().amax(dim=1) / 448
    return torch.where(scale == 0, 1.0, scale)


def round_to_step(x, step):
    magic = 1.5 * 2**23 * step  # 32-bit floats near it are `step` apart
    return (x + magic) - magic


def blockwise_product(a, a_scale, w, w_scale, block):
    y = torch.zeros(len(a), len(w))
    for b in range(a_scale.shape[1]):
        part = slice(b * block, (b + 1) * block)
        y += (a[:, part] @ w[:, part].T) * a_scale[:, b, None] * w_scale[None, :, b]
    return y
