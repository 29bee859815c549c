"""Every combination of a layout's choices on simulated devices, beside the plain CPU run. It takes half an
hour on two cores, so it runs only when it is named:

    python -m pytest tests/pipeline/simulated/product.py -n logical
"""

from __future__ import annotations

import itertools

import pytest

from tests.pipeline.simulated.test_layouts import ALL_COLLECTORS, same_as_the_cpu

pytestmark = pytest.mark.timeout(600)

CHOICES = {
    "targets": (1, 5),
    "drafters": (1, 3),
    "objective": ("ce", "dpace", "kd"),
    "ordered": ("true", "false"),
    "accumulation": (1, 2),
    "pack": ("true", "false"),
    "hand_over": ("peer", "pinned"),
}


@pytest.mark.parametrize(tuple(CHOICES), list(itertools.product(*CHOICES.values())))
def test_it_gives_the_cpus_bits(
    tmp_path, targets, drafters, objective, ordered, accumulation, pack, hand_over
):
    same_as_the_cpu(
        tmp_path,
        targets,
        drafters,
        f"objective.kind={objective}",
        f"queue.ordered={ordered}",
        f"train.accumulation={accumulation}",
        f"data.pack={pack}",
        f"queue.hand_over={hand_over}",
        "train.steps=3",
        *ALL_COLLECTORS,
    )
