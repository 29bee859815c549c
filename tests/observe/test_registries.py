"""A registry's messages; and that what a test registers is picked up by all who ask, without a change
elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from bench.subjects.trainer.harness import harness_config
from bench.subjects.trainer.pairs import PairTrainer
from dflash.commands import checks
from dflash.commands.metrics_page import render
from dflash.config import ObserveConfig
from dflash.models.objectives import OBJECTIVES
from dflash.models.objectives.base import BlockObjective, SlotLoss
from dflash.observe.collectors.base import Collector
from dflash.observe.metric import Metric
from dflash.observe.observer import Observer, make_sinks
from dflash.observe.registry import COLLECTORS, SINKS
from dflash.observe.roles import RoleMap
from dflash.observe.sinks.base import Sink
from dflash.pipeline.build import check_names
from steptime.errors import UserError
from steptime.registry import Registry
from tests.pipeline.run import small_config, small_trainer

ROLES = RoleMap(("cpu",), ("cpu",))


@dataclass(frozen=True)
class Thing:
    name: str


BIG, SMALL = Thing("big"), Thing("small")
THINGS = Registry("thing", BIG, SMALL)


def test_things_come_in_the_order_of_their_registration():
    assert (tuple(THINGS), THINGS.names, len(THINGS)) == ((BIG, SMALL), ("big", "small"), 2)
    assert THINGS["small"] is SMALL


def test_an_unknown_name_gets_the_nearest_one_in_one_line():
    with pytest.raises(UserError) as caught:
        THINGS["smal"]
    assert str(caught.value) == "unknown thing 'smal'; did you mean 'small'? (known: big, small)"


def test_all_stands_for_every_one():
    assert THINGS.chosen(["all"]) == (BIG, SMALL)
    assert THINGS.chosen(["small"]) == (SMALL,)
    assert THINGS.chosen([]) == ()
    with pytest.raises(UserError, match="unknown thing 'none'"):
        THINGS.chosen(["small", "none"])


def test_two_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two things of one name"):
        Registry("thing", BIG, Thing("big"))


class Pulse(Collector):
    """How often somebody looked."""

    name = "pulse"
    metrics = (Metric("pulse/looks", "looks", "delta", "looks since the start", "itself"),)

    def sample(self, now_ns):
        return {"pulse/looks": 1.0}

    @classmethod
    def unavailable(cls):
        return "no patient"


def test_a_registered_collector_is_known_to_all_who_ask(monkeypatch, tmp_path):
    config = small_config(tmp_path, 'observe.collectors=["pulse"]')
    with pytest.raises(UserError, match="unknown collector 'pulse'"):
        check_names(config)
    monkeypatch.setitem(COLLECTORS.entries, "pulse", Pulse)
    check_names(config)
    assert "pulse has nothing to report: no patient" in checks.check_collectors()[1]
    assert "## pulse\n\nHow often somebody looked.\n" in render()
    assert "| `pulse/looks` |" in render()
    assert "pulse" in PairTrainer(config).switches
    observer = Observer(ObserveConfig(), tmp_path, ROLES, sinks=[])
    assert observer.switches()["pulse"]
    observer.start()
    assert observer.close().values["pulse/looks"] >= 1


class Drawer(Sink):
    name = "drawer"

    def write(self, rows):
        pass

    @classmethod
    def examine(cls):
        return "ok", "the drawer is empty"


class Cabinet(Drawer):
    """A sink that hangs on a key of `observe`, as the old ones do."""

    name = "cabinet"
    switch = "terminal"


def names(config, folder):
    return [sink.name for sink in make_sinks(config, folder, ROLES)]


def test_a_registered_sink_is_known_to_all_who_ask(monkeypatch, tmp_path):
    config = small_config(tmp_path, 'observe.sinks=["drawer"]')
    with pytest.raises(UserError, match="unknown sink 'drawer'"):
        check_names(config)
    monkeypatch.setitem(SINKS.entries, "drawer", Drawer)
    check_names(config)
    assert names(config.observe, tmp_path) == ["jsonl", "drawer"]
    assert names(ObserveConfig(terminal="off", wandb="off"), tmp_path) == ["jsonl"]
    assert checks.Finding("drawer", "ok", "the drawer is empty") in checks.examine()


def test_the_harness_turns_every_registered_sink_off(monkeypatch, tmp_path):
    monkeypatch.setattr(SINKS, "entries", {**SINKS.entries, "drawer": Drawer, "cabinet": Cabinet})
    settings = ('observe.sinks=["drawer"]', "observe.terminal=plain", "observe.tensorboard=true")
    config = small_config(tmp_path, *settings)
    on = [sink.name for sink in SINKS if sink.wanted(config.observe)]
    assert on == ["jsonl", "terminal", "tensorboard", "drawer", "cabinet"]
    assert names(harness_config(config).observe, tmp_path) == ["jsonl"]
    assert harness_config(config).train.hang_s == 0.0, "who waits for the harness has not hung"


def test_a_sink_with_a_key_of_its_own_is_not_named_in_the_list(tmp_path):
    with pytest.raises(UserError) as caught:
        check_names(small_config(tmp_path, 'observe.sinks=["wandb"]'))
    assert str(caught.value) == "observe.sinks: 'wandb' has a key of its own, observe.wandb"


class Hinge(BlockObjective):
    """What the right token's logit lacks to the largest."""

    name = "hinge"
    needs_teacher = True

    def slot_loss(self, logits, best, labels, teacher):
        assert teacher.shape == logits.shape
        loss = best - logits.gather(1, labels)
        return SlotLoss(loss, torch.zeros_like(logits).scatter_(1, logits.argmax(dim=1, keepdim=True), 1.0))


def test_a_registered_objective_trains_and_gets_its_teacher(monkeypatch, tmp_path):
    config = small_config(tmp_path, "objective.kind=hinge", "train.steps=1")
    with pytest.raises(UserError, match="unknown objective 'hinge'"):
        check_names(config)
    monkeypatch.setitem(OBJECTIVES.entries, "hinge", Hinge)
    trainer = small_trainer(tmp_path, "objective.kind=hinge", "train.steps=1")
    assert type(trainer.replicas[0].objective) is Hinge
    assert trainer.run().finished
