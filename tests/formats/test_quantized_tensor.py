"""`QuantizedTensor` as a tensor of a module: moved, saved, copied, sliced by expert."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle

import pytest
import torch
from torch import nn

from tmoe import dequantize, quantize
from tmoe.formats import FORMATS, QuantizedTensor

E, M, K = 4, 8, 64


def experts(format="nvfp4", dtype=torch.bfloat16):
    return quantize(torch.randn(E, M, K, dtype=dtype), format)


class Layer(nn.Module):
    """A quantised parameter and a quantised buffer beside an ordinary layer."""

    def __init__(self, format="nvfp4"):
        super().__init__()
        self.weight = nn.Parameter(experts(format), requires_grad=False)
        self.register_buffer("spare", experts("fp8_block"))
        self.linear = nn.Linear(2, 2)


@pytest.fixture(params=FORMATS)
def format(request):
    return request.param


@pytest.fixture
def q(format):
    return experts(format)


def same_bytes(a, b):
    parts = zip(a.parts(), b.parts(), strict=True)
    return all(x.dtype == y.dtype and _equal_bytes(x, y) for x, y in parts)


def _equal_bytes(x, y):
    as_bytes = [part.contiguous().reshape(-1).view(torch.uint8) for part in (x, y)]
    return x.shape == y.shape and torch.equal(*as_bytes)


def test_what_it_says_about_itself(q, format):
    assert q.format == format and FORMATS[q.format].name == format
    assert tuple(q.shape) == (E, M, K) and q.dtype == torch.bfloat16
    assert q.data is q.parts()[0] and q.scale is q.parts()[1]
    assert (q.global_scale is not None) == (format == "nvfp4")
    assert q.nbytes == sum(part.numel() * part.element_size() for part in q.parts())
    assert q.bits_per_value == pytest.approx(FORMATS[format].bits_per_value(q.shape))
    assert not q.requires_grad and q.is_leaf and q.grad is None


def test_its_repr_is_short_and_honest():
    assert repr(experts("mxfp4")) == (
        "QuantizedTensor(mxfp4, shape=(4, 8, 64), block_shape=(1, 32), dtype=torch.bfloat16, "
        "device='cpu', scale=e8m0 (4, 8, 2), 4.25 bits per value)"
    )
    assert repr(experts("fp8_token")) == (
        "QuantizedTensor(fp8_token, shape=(4, 8, 64), dtype=torch.bfloat16, device='cpu', "
        "scale=float32 (4, 8), 8.5 bits per value)"
    )
    assert "bits" not in repr(quantize(torch.randn(0, 64), "mxfp4"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_dequantize_computes_in_fp32(q, dtype):
    got = q.dequantize(dtype)
    assert type(got) is torch.Tensor and got.dtype == dtype and got.shape == q.shape
    assert torch.equal(got, q.dequantize().to(dtype))
    assert torch.equal(got, dequantize(q, dtype))


def test_a_parameter_and_a_buffer_like_others(format):
    layer = Layer(format)
    assert isinstance(layer.weight, nn.Parameter) and isinstance(layer.weight, QuantizedTensor)
    assert dict(layer.named_parameters()).keys() == {"weight", "linear.weight", "linear.bias"}
    assert dict(layer.named_buffers()).keys() == {"spare"}
    assert layer.state_dict().keys() == {"weight", "spare", "linear.weight", "linear.bias"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_module_s_dtype_never_reaches_the_codes(format, dtype):
    layer, before = Layer(format), copy.deepcopy(Layer(format))
    before.load_state_dict(layer.state_dict())
    assert layer.to(dtype).weight.dtype == dtype and layer.linear.weight.dtype == dtype
    assert isinstance(layer.weight, nn.Parameter)
    for name in ("weight", "spare"):
        assert same_bytes(getattr(layer, name), getattr(before, name))
    layer.bfloat16()
    assert layer.weight.dtype == layer.spare.dtype == torch.bfloat16


def test_a_module_moves_between_devices(format, monkeypatch):
    monkeypatch.undo()  # the poison of conftest.py would write NaN into codes
    layer = Layer(format)
    state = layer.state_dict()
    layer.to("meta")
    assert all(part.is_meta for part in layer.weight.parts() + layer.spare.parts())
    assert layer.weight.is_meta and isinstance(layer.weight, nn.Parameter)
    layer.to_empty(device="cpu")
    assert layer.weight.data.device.type == "cpu"
    layer.load_state_dict(state)
    assert same_bytes(layer.weight, state["weight"]) and same_bytes(layer.spare, state["spare"])


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("swap", [False, True])
def test_state_dicts_load(format, assign, swap):
    source, target = Layer(format), Layer(format)
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        target.load_state_dict(source.state_dict(), assign=assign)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert same_bytes(target.weight, source.weight) and same_bytes(target.spare, source.spare)
    assert isinstance(target.weight, nn.Parameter)
    shared = target.weight.data.data_ptr() == source.weight.data.data_ptr()
    assert shared == assign


def test_a_meta_module_takes_the_weights_of_a_state_dict():
    source, target = Layer(), Layer().to("meta")
    target.load_state_dict(source.state_dict(), assign=True)
    assert same_bytes(target.weight, source.weight) and not target.weight.is_meta


@pytest.mark.parametrize("weight", [torch.randn(E, M, K), "mxfp4"], ids=["plain", "other-format"])
def test_a_state_dict_of_something_else_is_refused(weight):
    layer = Layer("nvfp4")
    state = layer.state_dict()
    state["weight"] = experts(weight) if isinstance(weight, str) else weight
    with pytest.raises(RuntimeError, match='"weight".*can\'t write .* into QuantizedTensor'):
        layer.load_state_dict(state)


def test_copies(q):
    for copied in (copy.deepcopy(q), q.clone(), pickle.loads(pickle.dumps(q))):
        assert same_bytes(copied, q) and copied.dtype == q.dtype and copied.format == q.format
        assert not {p.data_ptr() for p in copied.parts()} & {p.data_ptr() for p in q.parts()}
    for alias in (copy.copy(q), q.detach(), q.view_as(q), q.contiguous(), q.cpu()):
        assert [p.data_ptr() for p in alias.parts()] == [p.data_ptr() for p in q.parts()]


def test_deepcopy_and_pickle_keep_parameters(format):
    layer = Layer(format)
    layer.tied = layer.weight
    layer.weight.note = "kept by deepcopy"
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert isinstance(copied.weight, nn.Parameter) and copied.tied is copied.weight
        assert same_bytes(copied.weight, layer.weight) and same_bytes(copied.spare, layer.spare)
    assert copy.deepcopy(layer).weight.note == "kept by deepcopy"


def test_torch_save_and_the_safe_torch_load(format):
    layer, file = Layer(format), io.BytesIO()
    torch.save(layer.state_dict(), file)
    for where in ("cpu", "meta"):
        file.seek(0)
        state = torch.load(file, weights_only=True, map_location=where)
        assert state["weight"].data.device.type == state["weight"].device.type == where
    file.seek(0)
    assert same_bytes(torch.load(file, weights_only=True)["weight"], layer.weight)


def _bytes_of(q):
    return [part.view(torch.uint8).sum().item() for part in q.parts()]


def test_other_processes():
    q = experts()
    shared = copy.deepcopy(q).share_memory_()
    assert all(part.is_shared() for part in shared.parts())
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.map(_bytes_of, [q, shared]) == [_bytes_of(q)] * 2


@pytest.mark.parametrize(
    "ask",
    [
        lambda q: q.requires_grad_(),
        lambda q: setattr(q, "requires_grad", True),
        nn.Parameter,
        lambda q: Layer().requires_grad_(True),
    ],
)
def test_gradients_are_refused(ask):
    with pytest.raises(ValueError, match="requires_grad must be False: quantised weights are"):
        ask(experts())


def test_codes_can_not_be_replaced_behind_its_back():
    with pytest.raises(AttributeError):
        experts().data = torch.zeros(1)


def test_an_optimizer_leaves_it_alone():
    layer = Layer()
    before = layer.weight.clone()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    layer.linear(torch.randn(3, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert torch.equal(layer.weight, before)


class _Product(Layer):
    def forward(self, x):
        codes, scale, *_ = self.weight[1:].parts()
        return x @ codes[0].float().T * scale.float().sum(), self.weight


@pytest.mark.parametrize("format", ["fp8_block", "nvfp4"])
def test_torch_compile_takes_it_apart_and_passes_it_through(format):
    layer = _Product(format)
    x = torch.randn(3, layer.weight.data.shape[-1])
    product, weight = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(product, layer(x)[0])
    assert same_bytes(weight, layer.weight)
