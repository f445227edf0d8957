"""lm-evaluation-harness gives a model on tmoe the score that it has on its own loop.

The task is made here: which of four continuations follows a piece of held-out source text, and the
bits per byte of that text. Skipped where lm_eval isn't installed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.processes import python_path
from tmoe.demo.checkpoint import MODEL_DIR
from tmoe.demo.text import held_out_windows, stdlib_dir

ROOT = Path(__file__).parents[2]
TASKS = {
    "continue_source": """
task: continue_source
dataset_path: json
dataset_kwargs: {{data_files: {{test: {choices}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: context
doc_to_choice: endings
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc}}]
""",
    "source_bits": """
task: source_bits
dataset_path: json
dataset_kwargs: {{data_files: {{test: {texts}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: text
metric_list: [{{metric: bits_per_byte}}]
""",
}


def save_model(folder: Path) -> Path:
    """The demo's model with a tokenizer for which a byte is a token."""
    shutil.copytree(MODEL_DIR, folder)
    letters = bytes_to_unicode()
    tokenizer = Tokenizer(models.BPE({letters[byte]: byte for byte in range(256)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    newline = letters[ord("\n")]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=newline)
    fast.model_max_length = 1024
    assert fast("\x00a\n\x7f").input_ids == [0, 97, 10, 127]
    fast.save_pretrained(folder)
    return folder


def save_tasks(folder: Path) -> Path:
    folder.mkdir()
    texts = [
        bytes(window.tolist()).decode("ascii", "replace").replace("�", "?")
        for window in held_out_windows(stdlib_dir(), 512 * 24)
    ]
    docs = []
    for i, text in enumerate(texts):
        others = [texts[(i + j) % len(texts)][256:288] for j in (1, 2, 3)]
        endings = [*others[: i % 4], text[256:288], *others[i % 4 :]]
        docs.append({"context": text[:256], "endings": endings, "answer": i % 4})
    files = {"choices": docs, "texts": [{"text": text} for text in texts[:12]]}
    for name, rows in files.items():
        path = folder / f"{name}.json"
        path.write_text("\n".join(map(json.dumps, rows)))
    for name, text in TASKS.items():
        paths = {file: json.dumps(str(folder / f"{file}.json")) for file in files}
        (folder / f"{name}.yaml").write_text(text.format(**paths))
    return folder


def evaluate(model: str, options: str, tasks: Path, out: Path) -> tuple[dict[str, float], str]:
    """The scores of the two tasks, and what was printed to stderr."""
    command = [
        sys.executable, "-m", "tmoe.integrations.lm_eval", "run", "--model", model,
        "--model_args", options, "--tasks", ",".join(TASKS), "--include_path", str(tasks),
        "--device", "cpu", "--batch_size", "8", "--output_path", str(out),
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": python_path(), "HF_HOME": str(out / "cache")}
    env |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        command, env=env, cwd=out.parent, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = out.rglob("results_*.json")
    results = json.loads(found.read_text())["results"]
    bits = results["source_bits"]["bits_per_byte,none"]
    return {"acc": results["continue_source"]["acc,none"], "bits": bits}, done.stderr


@pytest.mark.timeout(1500)  # three processes, each of which imports all that lm_eval needs
def test_the_same_score(tmp_path):
    pytest.importorskip("lm_eval")
    model, tasks = save_model(tmp_path / "model"), save_tasks(tmp_path / "tasks")
    common = f"pretrained={model},dtype=float32"
    scores, printed = {}, {}
    for name, kind, options in (
        ("eager", "hf", f"{common},experts_implementation=eager"),
        ("tmoe", "hf", f"{common},experts_implementation=tmoe"),
        ("nvfp4", "tmoe", f"{common},scheme=nvfp4"),
    ):
        scores[name], printed[name] = evaluate(kind, options, tasks, tmp_path / name)
    print(scores)
    assert scores["tmoe"] == pytest.approx(scores["eager"], abs=1e-4)
    assert scores["eager"]["acc"] > 0.7 and scores["eager"]["bits"] < 2  # chance: 0.25 and 8
    assert "quantised to nvfp4" in printed["nvfp4"]
    assert scores["eager"]["bits"] < scores["nvfp4"]["bits"] < scores["eager"]["bits"] + 0.2


def test_without_lm_eval_it_says_what_to_install():
    code = (
        "import sys; sys.modules['lm_eval'] = None; sys.modules['lm_eval.__main__'] = None\n"
        "from tmoe.integrations.lm_eval import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and 'pip install "lm_eval[hf]"' in done.stderr
