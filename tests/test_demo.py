"""The demo's parts: text and its split, training, the shipped model, pictures, verdicts, timing."""

import json
from types import SimpleNamespace

import pytest
import torch
from matplotlib.image import imread
from rich.console import Console
from safetensors.torch import load_file
from torch import nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import tmoe
from tmoe.demo import heatmap, layer_table, text, train
from tmoe.demo.checkpoint import MODEL_DIR, load
from tmoe.demo.observe import Observation, generate, moe_inputs, routing_weights
from tmoe.demo.run import check_outputs, held_out_prompt, show_model_shapes
from tmoe.demo.timing import median_ms
from tmoe.demo.verdict import error_and_bound, experts_fp64
from tmoe.shapes import MODEL_SHAPES, MoEShape

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model():
    return load(CPU, torch.float32)


@pytest.fixture
def library(tmp_path):
    """A small standard library: what is skipped, what is always learnt from, what is held out."""
    files = {f"module{i}.py": f"def f{i}():\n    return {i}\n" * 40 for i in range(60)}
    files |= {f"test/module{i}.py": "assert True\n" for i in range(60)}
    files |= {"encodings/cp1250.py": "table\n", "site-packages/other.py": "other\n"}
    files |= {"_sysconfigdata__linux.py": "settings\n", "data.txt": "data\n"}
    for name, content in files.items():
        path = tmp_path / "lib" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return tmp_path / "lib"


def dtypes(file):
    return {tensor.dtype for tensor in load_file(file).values()}


def test_a_file_keeps_its_side_of_the_split_forever():
    assert all(map(text.is_held_out, ("ast.py", "enum.py", "http/client.py", "types.py")))
    assert not any(map(text.is_held_out, ("argparse.py", "json/decoder.py", "typing.py")))


def test_tests_never_decide_a_score():
    names = [f"test/test_{i}.py" for i in range(200)]
    assert not any(map(text.is_held_out, names))
    assert any(text.is_held_out(name.removeprefix("test/")) for name in names)


def test_split_is_disjoint_and_complete(library):
    learnt = text.read_text(library, held_out=False).decode()
    held_out = text.read_text(library, held_out=True).decode()
    functions = [f"def f{i}()" for i in range(60)]
    assert all((name in learnt) != (name in held_out) for name in functions)
    assert any(name in held_out for name in functions)
    for skipped in ("table", "other", "settings", "data"):
        assert skipped not in learnt + held_out


def test_order_of_files_is_that_of_their_hash(library):
    files = text.source_files(library)
    assert files == sorted(files, key=text._digest) and len(files) == 120


def test_windows_of_this_machines_library():
    windows = text.held_out_windows(text.stdlib_dir(), 5000)
    assert windows.shape == (9, 512) and windows.dtype == torch.uint8
    start = text.read_text(text.stdlib_dir(), held_out=True)[:512]
    assert bytes(windows[0].tolist()) == start


def test_bits_per_byte_of_a_model_that_knows_nothing_is_eight():
    class Uniform(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, input_ids, use_cache):
            return SimpleNamespace(logits=torch.zeros(*input_ids.shape, 256))

    windows = torch.randint(256, (5, 512), dtype=torch.uint8)
    assert text.bits_per_byte(Uniform(), windows, batch=2) == pytest.approx(8.0, abs=1e-6)


def test_balance_loss_is_one_when_even_and_sees_each_layer():
    even = torch.eye(4).repeat(8, 1) * 20
    skewed = torch.zeros(32, 4)
    skewed[:, 0] = 20
    assert train.balance_loss((even,), 1).item() == pytest.approx(1.0, abs=1e-4)
    assert train.balance_loss((skewed,), 1).item() == pytest.approx(4.0, abs=1e-4)
    # Evenly used over the two layers together, but not in either of them.
    other = skewed.flip(1)
    assert train.balance_loss((skewed, other), 1).item() == pytest.approx(4.0, abs=1e-4)


def test_learning_rate_warms_up_and_ends_at_zero():
    assert train.learning_rate(0.0, 1.0) == 0.0
    assert train.learning_rate(train.WARMUP, 1.0) == pytest.approx(1.0, abs=0.01)
    assert train.learning_rate(1.0, 1.0) == pytest.approx(0.0, abs=1e-12)
    assert train.learning_rate(1.5, 1.0) == pytest.approx(0.0, abs=1e-12)


def test_training_lowers_the_loss_and_writes_what_it_says(library, tmp_path):
    out = tmp_path / "model"
    train.main(out, steps=4, batch=1, device="cpu", eval_bytes=1024, stdlib=library)
    record = json.loads((out / "training.json").read_text())
    assert record["steps"] == 4 and record["held_out_bytes"] == 1024
    first, *_, last = (point["bits_per_byte"] for point in record["held_out_curve"])
    assert last < first < 8.0
    assert dtypes(out / "model.safetensors") == {torch.bfloat16}
    files = sorted(path.name for path in out.iterdir())
    assert files == ["config.json", "model.safetensors", "training.json"]


def test_shipped_model_is_small_and_has_learnt(model):
    file = MODEL_DIR / "model.safetensors"
    assert file.stat().st_size <= 16_000_000 and dtypes(file) == {torch.bfloat16}
    assert model.config.moe_intermediate_size % 128 == 0 and model.config.hidden_size % 128 == 0
    windows = text.held_out_windows(text.stdlib_dir(), 32 * 1024)
    assert text.bits_per_byte(model, windows) < 1.5  # bytes by frequency alone need about 4.7


def test_shipped_model_is_what_the_training_script_makes(model):
    shipped = model.config.to_dict()
    wanted = train.model_config().to_dict()
    written_on_saving = ("dtype", "architectures", "transformers_version", "_name_or_path")
    for key in wanted.keys() - set(written_on_saving):
        assert shipped[key] == wanted[key], key


def test_generation_is_greedy_and_keeps_the_prompt(model):
    prompt = text.as_bytes(held_out_prompt()).long()[:32]
    ids = generate(model, prompt, 3)
    assert ids.shape == (35,) and torch.equal(ids[:32], prompt)
    assert ids[32] == model(input_ids=prompt[None]).logits[0, -1].argmax()


def test_routing_weights_sum_to_one_over_the_chosen(model):
    prompt = text.as_bytes(b"import os\n").long()
    weights = routing_weights(model, prompt)
    assert weights.shape == (4, 10, 8)
    assert ((weights > 0).sum(-1) == 2).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(4, 10))


def test_inputs_of_moe_blocks_leave_no_hook_behind(model):
    inputs = moe_inputs(model, torch.arange(5))
    assert [x.shape for x in inputs] == [(1, 5, 256)] * 4
    assert not any(layer.mlp._forward_pre_hooks for layer in model.model.layers)


def test_picture_is_drawn_and_not_blank(tmp_path):
    weights = torch.rand(2, 12, 8)
    path = tmp_path / "new" / "experts.png"
    heatmap.save_png(weights, b"def f(x):\n\t\xff", path)
    pixels = imread(path)
    assert pixels.ndim == 3 and pixels[..., :3].std() > 0.05


def test_terminal_map_reads_without_colours():
    weights = torch.zeros(1, 4, 8)
    weights[0, range(4), [0, 3, 3, 7]] = 1.0
    lines = heatmap.terminal_map(weights, b"a b\n", width=80).plain.splitlines()
    assert lines[0].split() == ["a·b↵", "share", "of", "slots"]
    assert lines[1].split() == ["layer", "0", "0337", "▅▁▁█▁▁▁▅"]


@pytest.mark.parametrize("width", [20, 40, 200])
def test_terminal_map_fits_its_width(width):
    rendered = heatmap.terminal_map(torch.rand(3, 144, 8), b"x" * 144, width).plain
    assert max(map(len, rendered.splitlines())) <= max(width, 40)


def test_experts_fp64_is_what_transformers_computes(model):
    experts = model.model.layers[0].mlp.experts
    assert isinstance(experts, Qwen3MoeExperts)
    x, logits = torch.randn(6, 256), torch.randn(6, 8)
    weights, ids = logits.softmax(-1).topk(2)
    mine = experts_fp64(x, experts.gate_up_proj, experts.down_proj, weights, ids)
    torch.testing.assert_close(mine.float(), experts(x, ids, weights), rtol=1e-4, atol=1e-5)


def test_bound_is_twice_the_peers_error_and_a_rounding_step():
    truth = torch.tensor([4.0, 1.0])
    error, allowed = error_and_bound(torch.tensor([4.5, 1.0]), truth, torch.tensor([4.25, 1.0]))
    assert error == 0.5 and allowed == pytest.approx(0.5 + 4 * 2.0**-23, rel=1e-9)


def _observation(last: int) -> Observation:
    return Observation(torch.tensor([1, 2, last]), 1.0, (), ())


def test_a_different_byte_is_reported():
    logits = torch.randn(3, 8)
    args = (logits, logits, logits.double(), 2)
    assert [check.ok for check in check_outputs(_observation(5), _observation(6), *args)] == [
        False,
        True,
    ]


def test_wrong_logits_are_reported():
    logits = torch.randn(3, 8)
    same = _observation(5)
    checks = check_outputs(same, same, logits, logits + 1e-3, logits.double(), 2)
    assert [check.ok for check in checks] == [True, False]


def test_shapes_of_models_are_distinct():
    assert len({shape.name for shape in MODEL_SHAPES}) == len(MODEL_SHAPES) == 5


def test_peer_layer_runs_and_agrees_on_a_cpu():
    shapes = [MoEShape("tiny", 5, 2, 32, 24)]
    rows = list(layer_table.measure(CPU, torch.float32, shapes, tokens=(1, 7), repeats=1))
    assert [row.tokens for row in rows] == [1, 7]
    for row in rows:
        assert row.error <= row.allowed and row.tmoe_ms > 0 and row.peer_ms > 0


@pytest.mark.parametrize(("error", "said"), [(0.1, "within twice"), (0.3, "tiny at 7 tokens")])
def test_table_of_model_shapes(monkeypatch, error, said):
    shape = MoEShape("tiny", 5, 2, 32, 24)
    row = layer_table.Row(shape, 7, tmoe_ms=0.5, peer_ms=1.0, error=error, allowed=0.2)
    monkeypatch.setattr(layer_table, "measure", lambda device: [row])
    console = Console(record=True, width=120)
    check = show_model_shapes(console, CPU)
    assert check.ok == (error <= row.allowed) and said in check.detail
    assert "2.00x" in console.export_text()


def test_median_is_per_call():
    calls = []
    assert median_ms([lambda: calls.append(0), lambda: calls.append(1)], CPU, repeats=3) >= 0
    assert calls == [0, 1] * 4  # one warm-up round


@pytest.mark.gpu
def test_peer_layer_on_a_gpu(device):
    shapes = [MoEShape("small", 8, 2, 256, 512)]
    for row in layer_table.measure(device, shapes=shapes, tokens=(1, 64), repeats=3):
        assert row.error <= row.allowed and row.tmoe_ms > 0 and row.peer_ms > 0


@pytest.mark.gpu
def test_restored_model_is_the_one_we_started_with(device):
    model = load(device, torch.bfloat16)
    ids = torch.arange(64, device=device)[None]
    before = model(input_ids=ids).logits
    tmoe.replace_moe(model).restore()
    assert torch.equal(model(input_ids=ids).logits, before)
