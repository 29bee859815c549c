"""What this machine can run and observe. Each check looks at one thing, never waits long, and never starts
CUDA needlessly."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dflash.observe.state import State

Check = Callable[[], "tuple[State, str] | None"]
_WIDTH = 80
_COLOURS = {"ok": "32", "absent": "2", "warning": "33", "broken": "31"}
_GB = 1e9


@dataclass(frozen=True)
class Finding:
    """One line of the page.

    Attributes:
        state: ok; absent (fine, something is not observed or slower); warning (look at it); broken (training
            cannot work).
        text: what is there, or why not and what would help.
    """

    name: str
    state: State
    text: str


def examine() -> list[Finding]:
    """Run every check; one that fails in an unforeseen way is a warning, and the others go on."""
    findings = []
    for name, check in (*CHECKS, *_sinks()):
        try:
            found = check()
        except Exception as error:
            found = "warning", f"could not be checked: {type(error).__name__}: {error}"
        if found is not None:
            findings.append(Finding(name, *found))
    return findings


def _sinks() -> tuple[tuple[str, Check], ...]:
    """What the sinks bring. Without an import that every run needs there is none: other lines say so."""
    try:
        from dflash.observe.registry import SINKS
    except ImportError:
        return ()
    return tuple((sink.name, sink.examine) for sink in SINKS)


def page(findings: list[Finding], colour: bool = False) -> str:
    """The findings as aligned text of at most 80 columns."""
    widest = max(len(finding.name) for finding in findings)
    indent = " " * (widest + 12)
    lines = ["What this machine can run and observe", ""]
    for finding in findings:
        state = f"{finding.state:<8}"
        first, *rest = textwrap.wrap(finding.text, _WIDTH - len(indent), break_on_hyphens=False) or [""]
        if colour:
            state = f"\033[{_COLOURS[finding.state]}m{state}\033[0m"
        lines.append(f"  {finding.name:<{widest}}  {state}{first}")
        lines += [f"  {' ' * widest}  {' ' * 8}{line}" for line in rest]
    return "\n".join(lines) + "\n"


def check_python() -> tuple[State, str]:
    text = (
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, {os.cpu_count()} "
        "cores"
    )
    return ("ok", text) if sys.version_info >= (3, 11) else ("broken", f"{text}; 3.11 or newer is needed")


def check_torch() -> tuple[State, str]:
    import torch
    import transformers

    text = f"torch {torch.__version__}, transformers {transformers.__version__}"
    amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
    return "ok", text + (", bfloat16 in AMX tiles" if amx else "")


def check_clash() -> tuple[State, str]:
    """z-lab's inference package has our import name; whichever lies first on the path wins."""
    try:
        version = importlib.metadata.version("dflash")
    except importlib.metadata.PackageNotFoundError:
        return "ok", "no other package named dflash is installed"
    where = importlib.util.find_spec("dflash")
    origin = where.origin if where else "nowhere"
    return "warning", (
        f"z-lab's package dflash {version} is installed too and has the same import name; `import dflash` "
        f"now finds {origin}. Give it an environment of its own"
    )


def check_cuda() -> tuple[State, str]:
    import torch

    if not torch.backends.cuda.is_built():
        return "absent", "this torch is built without CUDA; everything runs on the CPU"
    if not torch.cuda.is_available():
        return "absent", "torch has CUDA but finds no GPU or driver; everything runs on the CPU"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    reach = [
        f"{a}-{b}"
        for a in range(len(names))
        for b in range(len(names))
        if a < b and not torch.cuda.can_device_access_peer(a, b)
    ]
    text = f"{len(names)} GPUs: {', '.join(sorted(set(names)))}; CUDA {torch.version.cuda}"
    return ("warning", f"{text}; no direct path between {', '.join(reach)}") if reach else ("ok", text)


def check_nvml() -> tuple[State, str]:
    """Reads everything once, and says what a GPU refuses: a MIG instance has no utilisation, say."""
    try:
        from dflash.observe.nvml import READINGS, pynvml
    except ImportError:
        return "absent", "nvidia-ml-py is not installed: gpu/* is off"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return "absent", f"no NVML ({error}): gpu/* is off"
    refused: dict[str, str] = {}
    lost: list[str] = []
    try:
        count, driver = pynvml.nvmlDeviceGetCount(), pynvml.nvmlSystemGetDriverVersion()
        for index in range(count):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            except pynvml.NVMLError as error:
                lost.append(f"GPU {index} is not reached ({error})")
                continue
            for name, read in READINGS.items():
                try:
                    read(handle)
                except pynvml.NVMLError as error:
                    refused.setdefault(name, f"no {name} on GPU {index} ({error})")
    finally:
        pynvml.nvmlShutdown()
    text = "; ".join((f"{count} GPUs seen, driver {driver}: gpu/* is on", *lost, *refused.values()))
    return "warning" if lost else "ok", text


def check_collectors() -> tuple[State, str]:
    """What each collector says it can see, and what a recorded span costs on this machine."""
    import torch

    from dflash.observe.registry import COLLECTORS

    told = {collector.name: collector.unavailable() for collector in COLLECTORS}
    clock = "CUDA events" if torch.cuda.is_available() else "the host clock"
    on = ", ".join(name for name, why in told.items() if not why)
    text = f"{on}; stages by {clock}, a span costs {_span_ns():.0f} ns here"
    off = (f"{name} has nothing to report: {why}" for name, why in told.items() if why)
    return "ok", "; ".join((text, *off))


def _span_ns() -> float:
    from dflash.observe.accounting import cost_ns
    from dflash.observe.recorder import StageTimer

    timer = StageTimer("probe")
    timer.switch(True)

    def span() -> None:
        timer.start()
        timer.stop()

    return cost_ns(span)


def check_kernels() -> tuple[State, str]:
    """The hybrid targets' kernels; without them transformers computes the same, much slower."""
    have = {name: importlib.util.find_spec(module) is not None for name, module in _KERNELS.items()}
    missing = [name for name, there in have.items() if not there]
    if not missing:
        return "ok", f"{' and '.join(have)} are installed"
    return "absent", (
        f"{' and '.join(missing)} not installed: gated delta net layers run on torch's operations, right but "
        "much slower on a GPU; pip install 'dflash-harness[cuda]'"
    )


def check_flex() -> tuple[State, str]:
    import torch

    if not torch.cuda.is_available():
        return "absent", "flex attention needs a GPU for its backward pass; the CPU uses split attention"
    return (
        ("ok", "flex attention on the GPU")
        if importlib.util.find_spec("triton")
        else ("absent", "Triton is not installed")
    )


def check_sync_counters() -> tuple[State, str]:
    import torch

    if not torch.cuda.is_available():
        return (
            "absent",
            "CUDA trace hooks and CUPTI need a GPU; the modes on CPU tensors count where one would wait",
        )
    cupti = (
        "with CUPTI as a cross-check" if importlib.util.find_spec("cupti") else "without CUPTI (cupti-python)"
    )
    return "ok", f"CUDA trace hooks, copy wrappers, allocator counters; {cupti}"


def check_disk() -> tuple[State, str]:
    folder = Path.cwd()
    free_gb = shutil.disk_usage(folder).free / _GB
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return "broken", f"cannot write in the current folder: {error.strerror}"
    return ("ok" if free_gb > 5 else "warning"), f"{free_gb:,.1f} GB free in the current folder"


def check_shared_memory() -> tuple[State, str]:
    path = Path("/dev/shm")
    if not path.exists():
        return "absent", "no /dev/shm; nothing here needs it, NCCL across processes would"
    free_gb = shutil.disk_usage(path).free / _GB
    return ("ok" if free_gb > 0.5 else "warning"), f"{free_gb:,.1f} GB free in {path}"


_KERNELS = {"flash-linear-attention": "fla", "causal-conv1d": "causal_conv1d"}

CHECKS: tuple[tuple[str, Check], ...] = (
    ("Python", check_python),
    ("torch", check_torch),
    ("import name", check_clash),
    ("CUDA", check_cuda),
    ("NVML", check_nvml),
    ("collectors", check_collectors),
    ("kernels", check_kernels),
    ("attention", check_flex),
    ("sync counters", check_sync_counters),
    ("disk", check_disk),
    ("shared memory", check_shared_memory),
)
