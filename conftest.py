"""For the whole repository: one guard that cannot stand in bench/conftest.py, because that is not loaded when
it is needed."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """`pytest --benchmark-compare bench/` takes the folder for the option's value and runs the other tests,
    in silence."""
    value = getattr(config.option, "benchmark_compare", None)
    if isinstance(value, str) and Path(value).is_dir():
        raise pytest.UsageError(
            f"--benchmark-compare took {value!r} as its value; put it last (pytest {value} "
            "--benchmark-compare)"
        )
