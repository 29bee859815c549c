"""docs/metrics.md, made from the registry: `python -m dflash.commands.metrics_page > docs/metrics.md`."""

from __future__ import annotations

from collections.abc import Sequence

from dflash.observe.metric import Metric
from dflash.observe.monitor import METRICS as MONITOR_METRICS
from dflash.observe.registry import COLLECTORS, HELDOUT_METRICS, TRAIN_METRICS

_HEAD = """\
# Metrics

<!-- Made by `python -m dflash.commands.metrics_page > docs/metrics.md`; a test compares. -->

Every key that a run can report: what it counts, in which unit, where it comes from. A value that is not
available is absent, never 0. `{i}` is a worker's or a GPU's number, `{k}` a slot of the block. GB is 1e9
bytes.

**Kinds.** *instant*: a state at the sample. *delta*: what came since the last sample. *rate*: a delta per
second. *ratio*: of two numbers.

**Ticks and rows.** The monitor samples every `observe.tick_s` (1 s); the terminal shows each tick. Every
`observe.flush_s` (10 s) the ticks become one row for the other sinks, the same row for each: deltas add up,
the rest is averaged over the time it was there (ratios by their denominator, so that a row's ratio is that of
the whole window), maxima stay maxima, and quantiles are taken over everything in the window. Training scalars
come one row a step, together at the flush (each second while a live screen is on); W&B gets at most one of
them a second.

**Switches.** `observe.collectors` names the collectors that are on at the start; `Observer.switch(name, on)`
throws a switch while training runs. `train/*` and `monitor/*` are always on.
"""

_TAIL = """\
## metrics.jsonl

One JSON object a line in the run's folder: `kind` (`run`, `metrics`, `train`, `event`, `summary`),
`elapsed_s`, `step`, `values`. JSON has no NaN and no infinities: they are the strings `NaN`, `Infinity`,
`-Infinity`. A line is with the operating system when it is written; `fsync` runs at most once a minute and at
the end.

## In Weights & Biases

`train/*` and `heldout/*` are drawn over `train/step`, everything else over `monitor/elapsed_s`;
`monitor/step` is in every row, so any panel can be switched to steps. Panels are grouped by the first part of
the key: one section for each of profile, gpu, pipeline, target, drafter, batch, cuda, train, heldout,
monitor. To have a section for each worker (`target/0`, `target/1`), choose *Organise panels by: last prefix*
in the workspace's settings. Four panels that answer "why are the GPUs idle?":

| panel | keys | reads |
|---|---|---|
| who waits | `pipeline/consumer_wait_s`, `pipeline/producer_wait_s` | consumers: targets or data are slow; producers: drafters |
| is data late | `pipeline/prefetch_fill_ratio`, `target/*/wait_in_s` | empty prefetcher and waiting targets: collation is slow |
| what each could do | `*/*/capacity_tokens_per_second`, `*/*/tokens_per_second` | the lowest capacity sets the pace |
| spikes | `profile/*_ms_p99`, `profile/*_ms_p50` | far apart: some steps stall |

Every other sink gets every key; W&B does not get those that match `observe.wandb_exclude` (shell patterns),
which keeps eight GPUs under its advice of 200 keys. `--set observe.wandb_exclude='[]'` sends all.

W&B's own sampling of the GPUs is off while the `gpu` collector is on at the start, so that NVML is asked
once.

All legs of a run that was stopped and resumed are one run: its id is in `wandb-run.json` in the run's folder.
Offline legs are uploaded together, in the order of their starts: `wandb sync RUN/wandb/offline-run-*`. Events
(a resume, a stall, a NaN, a checkpoint that could not be written) are in the run's summary, `run/events`.

## One more collector

A file in `dflash/observe/collectors/`, its class in `COLLECTORS` of `dflash/observe/registry.py`, its tests,
and this page made anew. Every key it reports is declared in `metrics`; `sample` runs in the monitor's thread,
makes no CUDA call, waits for nothing and reads only what workers wrote for it.

```python
from dflash.observe.collectors.base import Collector
from dflash.observe.metric import Metric


class Strides(Collector):
    name = "strides"
    metrics = (
        Metric(
            "strides/{worker}_steps",
            "steps",
            "delta",
            "steps begun since the last sample",
            "the worker's step",
        ),
    )

    def reset(self):
        self.before = {}

    def sample(self, now_ns):
        now = {f"strides/{one.role}-{one.index}_steps": one.step for one in self.sources.recorders}
        before, self.before = self.before, now
        return {key: step - before[key] for key, step in now.items() if key in before}
```

What it does at a worker's step boundary is an `Instrument`, which `equip` hangs into the worker's recorder.
What else it needs from a worker's path is written there behind a switch of one attribute. `throw` sets the
switches, and `instruments` prices what they switch; without that the accounted cost leaves the path out.
`unavailable` tells the doctor why there is nothing to see on a machine. What it costs shows in `python -m
bench overhead --only strides`: seconds per token, exact counts of host syncs, and its own time as a share of
the time that it was on.

## One more sink

A file in `dflash/observe/sinks/`, its class in `SINKS` of `dflash/observe/registry.py`, and its tests. `name`
and `write` make one, and `observe.sinks = ["its name"]` turns it on. It is made with what it may know of the
run (`Surroundings`); `examine` is its line on the doctor's page.
"""


def render() -> str:
    """The whole page."""
    parts = [_HEAD]
    for collector in COLLECTORS:
        summary = (collector.__doc__ or "").split("\n\n")[0].strip()
        parts.append(f"## {collector.name}\n\n{_one_line(summary)}\n\n{_table(collector.metrics)}")
    parts.append(
        f"## train\n\nAlways on; come some steps late, tagged with their own step.\n\n{_table(TRAIN_METRICS)}"
    )
    parts.append(
        "## heldout\n\nWith `data.heldout`, every `train.heldout_every` steps and at each checkpoint; the step is "
        f"the number of steps done.\n\n{_table(HELDOUT_METRICS)}"
    )
    parts.append(f"## monitor\n\nThe monitor reports on itself. Always on.\n\n{_table(MONITOR_METRICS)}")
    parts.append(_TAIL)
    return "\n".join(parts)


def _table(metrics: Sequence[Metric]) -> str:
    rows = [f"| `{one.key}` | {one.unit} | {one.kind} | {one.meaning} | {one.source} |" for one in metrics]
    return "\n".join(["| key | unit | kind | meaning | source |", "|---|---|---|---|---|", *rows, ""])


def _one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    print(render(), end="")
