"""`pytest bench/ --benchmark-compare`: hooks and fixtures stand in bench/pytest_benchmark/plugin.py."""

from bench.pytest_benchmark.plugin import *  # noqa: F403
