"""Every combination of a layout's choices on simulated devices, beside the plain CPU run. It takes a
quarter of an hour on two cores, so it runs only when it is named:

    python -m pytest tests/pipeline/simulated/product.py -n logical
"""

from __future__ import annotations

import itertools

import pytest

from tests.pipeline.simulated.test_layouts import CHOICES, chosen, same_as_the_cpu

pytestmark = pytest.mark.timeout(600)

NAMES = tuple(name for name in CHOICES if name != "collectors")


@pytest.mark.parametrize(NAMES, list(itertools.product(*(CHOICES[name] for name in NAMES))))
def test_it_gives_the_cpus_bits(
    tmp_path, targets, drafters, objective, ordered, accumulation, pack, hand_over
):
    settings = chosen(objective, ordered, accumulation, pack, hand_over)
    same_as_the_cpu(tmp_path, targets, drafters, "train.steps=3", *settings)
