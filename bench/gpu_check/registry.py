"""The stages of the check, the most important first. A new one is a file in `stages/` and its line here."""

from __future__ import annotations

from bench.gpu_check.stage import Stage
from bench.gpu_check.stages.attention import AttentionStage
from bench.gpu_check.stages.bits import BitsStage
from bench.gpu_check.stages.counts import CountsStage
from bench.gpu_check.stages.events import EventsStage
from bench.gpu_check.stages.gate import GateStage
from bench.gpu_check.stages.mfu import MfuStage
from bench.gpu_check.stages.nvml import NvmlStage
from bench.gpu_check.stages.overhead import OverheadStage
from bench.gpu_check.stages.planted import PlantedStage
from bench.gpu_check.stages.sanitizer import SanitizerStage
from bench.gpu_check.stages.simulation import SimulationStage
from bench.gpu_check.stages.step import StepStage
from bench.gpu_check.stages.tests import GpuTestsStage
from steptime.registry import Registry

STAGES: Registry[Stage] = Registry(
    "stage",
    CountsStage(),
    PlantedStage(),
    SanitizerStage(),
    BitsStage(),
    StepStage(),
    MfuStage(),
    AttentionStage(),
    OverheadStage(),
    GateStage(),
    NvmlStage(),
    EventsStage(),
    SimulationStage(),
    GpuTestsStage(),
)
