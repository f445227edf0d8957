"""The tool that reads FlashInfer's wheels: definitions found, changes noted, reasons given."""

from __future__ import annotations

import json
import sys
import zipfile
from textwrap import dedent

import pytest
from packaging.version import Version

from tools import record_flashinfer

TOP = "flashinfer/__init__.py"
FUSED_MOE = "flashinfer/fused_moe/__init__.py"


def make_wheel(folder, version, files, project="flashinfer_python"):
    path = folder / f"{project}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, source in files.items():
            archive.writestr(name, dedent(source))
    return path


OLD = {
    FUSED_MOE: "from .core import cutlass_fused_moe, trtllm_bf16_moe as trtllm_bf16_moe",
    "flashinfer/fused_moe/core.py": """
        import a_package_that_is_not_installed

        class WeightLayout(IntEnum):
            '''Where K is.'''
            MajorK = 0
            BlockMajorK = (2,)

        _UNSET = object()

        @flashinfer_api(trace=something)
        @backend_requirement({}, common_check=check)
        def cutlass_fused_moe(
            input, output=None, /, layout: int = WeightLayout.MajorK.value, *rest,
            kind=WeightLayout.MajorK, mode="auto", shift=-1, given, over6=_UNSET, **more
        ):
            def trtllm_bf16_moe(inner): ...

        if has_cuda():
            def trtllm_bf16_moe(logits, *, scale=1e-20): ...
        else:
            def trtllm_bf16_moe(*unused): ...
        """,
}
NEW = {
    TOP: "from .quantization.fp4 import fp4_quantize, an_alias as block_scale_interleave",
    FUSED_MOE: """
        try:
            from .moved import trtllm_bf16_moe
        except ImportError:
            trtllm_bf16_moe = None
        """,
    "flashinfer/fused_moe/moved.py": "def trtllm_bf16_moe(logits): ...",
    "flashinfer/quantization/fp4.py": """
        from ..shared import fp4_quantize

        def swizzle(scale): ...

        an_alias = swizzle
        """,
    "flashinfer/shared/__init__.py": "def fp4_quantize(x): ...",
    "flashinfer/tllm_enums.py": "class WeightLayout(IntEnum):\n    MajorK = 0\n    MajorMn = 1",
}


def test_the_tool_reads_definitions_without_running_them(tmp_path):
    release, found = record_flashinfer.read(make_wheel(tmp_path, "0.6.0", OLD))
    assert release == Version("0.6.0")
    assert found["signatures"] == {
        "cutlass_fused_moe": [
            *(["input", "positional_only"], ["output", "positional_only", "None"]),
            *(["layout", "any", "WeightLayout.MajorK.value"], ["rest", "var_positional"]),
            *(["kind", "keyword_only", "WeightLayout.MajorK"], ["mode", "keyword_only", "'auto'"]),
            *(["shift", "keyword_only", "-1"], ["given", "keyword_only"]),
            *(["over6", "keyword_only", "_UNSET"], ["more", "var_keyword"]),
        ],
        "trtllm_bf16_moe": [["logits", "any"], ["scale", "keyword_only", "1e-20"]],
    }
    assert found["enums"] == {"WeightLayout": {"MajorK": 0, "BlockMajorK": 2}}


def test_the_tool_follows_a_name_to_where_it_is_defined(tmp_path):
    _, found = record_flashinfer.read(make_wheel(tmp_path, "0.6.1", NEW))
    assert found["signatures"]["trtllm_bf16_moe"] == [["logits", "any"]]
    assert found["signatures"]["block_scale_interleave"] == [["scale", "any"]]
    assert found["signatures"]["fp4_quantize"] == [["x", "any"]]
    assert found["enums"] == {"WeightLayout": {"MajorK": 0, "MajorMn": 1}}


def test_the_file_says_where_something_changed(tmp_path, monkeypatch):
    wheels = [make_wheel(tmp_path, "0.6.10", OLD), make_wheel(tmp_path, "0.6.9", NEW)]
    output = tmp_path / "record.json"
    monkeypatch.setattr(sys, "argv", ["record", *map(str, wheels), "--output", str(output)])
    record_flashinfer.main()
    record = json.loads(output.read_text())
    assert record["releases"] == ["0.6.9", "0.6.10"]
    assert list(record["signatures"]["trtllm_bf16_moe"]) == ["0.6.9", "0.6.10"]
    assert record["signatures"]["fp4_quantize"] == {"0.6.9": [["x", "any"]], "0.6.10": None}
    assert list(record["signatures"]["cutlass_fused_moe"]) == ["0.6.10"]
    assert list(record["enums"]["WeightLayout"]) == ["0.6.9", "0.6.10"]
    assert '\n   "0.6.9": [["x", "any"]],\n   "0.6.10": null\n' in output.read_text()


def test_an_unreadable_wheel_is_named_with_the_reason(tmp_path, monkeypatch, capsys):
    corrupt = tmp_path / "flashinfer_python-0.6.0-py3-none-any.whl"
    corrupt.write_bytes(b"PK is how a zip starts")
    cases = {
        corrupt: "not a zip file",
        make_wheel(tmp_path, "0.6.1", {FUSED_MOE: "def cutlass_fused_moe(:"}): "invalid syntax",
        make_wheel(tmp_path, "0.6.2", {TOP: ""}): "none of the entry points",
        make_wheel(tmp_path, "0.6.3", OLD, "flashinfer"): "a wheel of flashinfer, not of",
        tmp_path / "any.whl": "[Ii]nvalid wheel filename",
        tmp_path / "flashinfer_python-0.6.4-py3-none-any.whl": "No such file",
    }
    for path, reason in cases.items():
        with pytest.raises(ValueError, match=f"{path.name}: .*{reason}"):
            record_flashinfer.read(path)
    monkeypatch.setattr(sys, "argv", ["record", str(corrupt)])
    with pytest.raises(SystemExit):
        record_flashinfer.main()
    assert f"{corrupt}: File is not a zip file" in capsys.readouterr().err
    with pytest.raises(ValueError, match="two wheels of the same release among 0.6.5, 0.6.5"):
        record_flashinfer.record([make_wheel(tmp_path, "0.6.5", OLD)] * 2)


def test_the_recorded_file_is_as_the_tool_writes_it():
    text = record_flashinfer.OUTPUT.read_text()
    assert record_flashinfer.to_json(json.loads(text)) == text
