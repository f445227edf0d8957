"""What is measured on GPUs runs on CPUs too, and its records make the tables."""

import json

from bench.parallel import say
from tests.parallel import bench_ranks
from tests.parallel.document import times
from tests.parallel.ranks import ranks
from tests.plan import document as planning

MACHINE = {"device": "CPU", "versions": {"torch": "2", "triton": "3"}}


def test_exchanges_are_measured_where_they_run(capsys):
    with ranks(2) as two:
        usual = two.run(bench_ranks.exchanges, False)[0]
        peers = two.run(bench_ranks.exchanges, True)[0]
    assert "symmetric_memory_us" not in usual[0] and usual[0]["all_to_all_beside_us"] == 1
    for name in ("all_gather", "all_to_all", "symmetric_memory"):
        for what in ("", "_experts", "_exchange", "_beside", "_in_turn", "_routed"):
            assert peers[0][f"{name}{what}_us"] == (what != "_experts")  # 1, less a meeting's 1
    table = times({"rows": [*usual, *peers], "machine_info": MACHINE})
    two = "1 | 1.00 | 1, 100 % | 1 | 1.00 | 1, 100 %"
    assert f"| tiny | fp8_block | 3 | 1 | {two} |  |  |  |" in table
    assert f"| tiny | bf16 | 1 | 1 | {two} | 1 | 1.00 | 1, 100 % |" in table
    assert "| tiny | fp8_block | 3 | 1 | 1.00 | 1 | 1.00 |  |  |" in table  # alone
    assert "| tiny | bf16 | 1 | 1 → 1 | — | 1 → 1 | — | 1 → 1 | — |" in table
    assert "Of all-gather's 2 rows 2 are within 15 %" in table
    say(peers[0])
    assert "shared expert beside 1.0, in turn 1.0" in capsys.readouterr().out


def test_placement_is_measured(monkeypatch, tmp_path):
    with ranks(2) as two:
        rows = two.run(bench_ranks.placed)[0]
    assert [row["redundant"] for row in rows] == [None, 0, 2] * 2
    assert rows[1]["received_bytes"] > 0 and rows[1]["rebalance_ms"] > 0
    record = tmp_path / "record.json"
    record.write_text(json.dumps({"rows": rows, "machine_info": MACHINE}))
    monkeypatch.setattr(planning, "PLACED", record)
    assert "| tiny | bf16 | together | 4 | " in planning.placed()
    assert "| 1 → 1 → 1 | " in planning.placed()
