"""Results that are cells of docs/support-matrix.md are compared with the page."""

from __future__ import annotations

import pytest

STALE = "docs/support-matrix.md says {} for {} and {}; run python -m {}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if item.get_closest_marker("column") is None:
        return report
    from tests.integrations import support_matrix as matrix

    writing = any(isinstance(p, matrix.Results) for p in item.config.pluginmanager.get_plugins())
    result = matrix.result_of(report)
    if matrix.PINNED and result is not None and not writing:
        cell = matrix.cell_of(item)
        said = matrix.read_page().get(cell, set())
        if result not in said:
            report.outcome = "failed"
            report.longrepr = STALE.format(said, *cell, matrix.__name__)
    return report
