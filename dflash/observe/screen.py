"""The terminal's picture of a run: rows go in, lines come out; no clock and no terminal in here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.text import Text

from dflash.observe.bottleneck import find_bottleneck
from dflash.observe.metric import drafters_rate
from dflash.observe.roles import RoleMap
from dflash.observe.sinks.base import Row

BAR = 26
GPU_CELL = 39
Stroke = tuple[str, str]
"""A mark and its colour; the marks differ too, for terminals and eyes without colour."""
_BUSY, _IN, _OUT, _FILL = ("█", "green"), ("▒", "yellow"), ("░", "magenta"), ("█", "blue")


@dataclass
class Screen:
    """What is known now. `update` takes rows in any order; `render` and `line` show it."""

    roles: RoleMap
    values: Mapping[str, float] = field(default_factory=dict)
    train: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    elapsed_s: float = 0.0
    step: int = 0
    ended: bool = False
    _first: tuple[int, float] | None = None

    def update(self, row: Row) -> None:
        """Take in a `live`, `metrics` or `train` row; a `summary` turns the picture into that of the whole
        run."""
        self.elapsed_s = max(self.elapsed_s, row.elapsed_s)
        self.step = max(self.step, row.step)
        if row.kind == "train":
            self.train = {**self.train, **row.values}
        elif row.kind == "summary":
            self.values, self.seconds, self.ended = row.values["values"], row.values["elapsed_s"], True
        elif row.kind in ("live", "metrics"):
            self.values, self.seconds = row.values, row.seconds
            if self._first is None and self.step > 0:
                self._first = (self.step, self.elapsed_s)

    @property
    def left_s(self) -> float | None:
        """Time left at the pace so far; None while nothing is known."""
        if self._first is None or not self.roles.total_steps or self.ended:
            return None
        steps, seconds = self.step - self._first[0], self.elapsed_s - self._first[1]
        # `step` is the step in hand, from 0.
        left = self.roles.total_steps - 1 - self.step
        return left * seconds / steps if steps > 0 else None

    # -- one line --------------------------------------------------------------------------------------------

    def line(self) -> str:
        """The run in one line, for a file or a pipe."""
        parts = [
            f"{'whole run, ' if self.ended else ''}step {self._steps()}",
            self._speed(),
            *self._scalars(),
        ]
        if "pipeline/hs_queue_depth" in self.values:
            parts.append(f"queue {self.values['pipeline/hs_queue_depth']:.0f}")
        parts.append(find_bottleneck(self.values, self.seconds).text)
        if self.left_s is not None:
            parts.append(f"{clock(self.left_s)} left")
        return " | ".join(part for part in parts if part)

    def _steps(self) -> str:
        total = self.roles.total_steps
        return f"{self.step + 1:,}/{total:,}" if total else f"{self.step + 1:,}"

    def _speed(self) -> str:
        rate = drafters_rate(self.values)
        return "" if rate is None else f"{rate:,.0f} tok/s"

    def _scalars(self) -> list[str]:
        shown = (
            ("loss", "train/loss", ".4f"),
            ("accept", "train/accept_length", ".2f"),
            ("norm", "train/grad_norm", ".2f"),
            ("held-out", "heldout/loss", ".4f"),
            ("τ", "train/tau", ".2f"),
        )
        return [f"{name} {self.train[key]:{form}}" for name, key, form in shown if key in self.train]

    # -- the live screen -------------------------------------------------------------------------------------

    def render(self) -> Text:
        """The whole picture; fits 80 columns. One text: a table would lay itself out anew at each tick, at
        ten times the cost."""
        lines = [*self._head(), self._verdict(), *self._bars(), *self._gpus()]
        picture = Text("\n", no_wrap=True, overflow="ellipsis").join(lines)
        picture.no_wrap, picture.overflow = True, "ellipsis"
        return picture

    def _head(self) -> list[Text]:
        head = Text(f"step {self._steps()}", style="bold")
        head.append(f"   {clock(self.elapsed_s)} gone", style="default not bold")
        if self.left_s is not None:
            head.append(f", {clock(self.left_s)} left", style="default not bold")
        numbers = "   ".join(part for part in (self._speed(), *self._scalars()) if part)
        return [head, Text(numbers or "no training scalars yet", style="cyan")]

    def _verdict(self) -> Text:
        found = find_bottleneck(self.values, self.seconds)
        style = {"none": "green", "unknown": "dim"}.get(found.side, "bold yellow")
        return Text(f"whole run: {found.text}" if self.ended else found.text, style=style)

    def _bars(self) -> list[Text]:
        values = self.values
        lines = []
        if (share := values.get("pipeline/prefetch_fill_ratio")) is not None:
            lines.append(_row("prefetch", bar([(share, _FILL)]), f"{share:4.0%} full"))
        if (share := values.get("pipeline/hs_queue_fill_ratio")) is not None:
            lines.append(_row("queue", bar([(share, _FILL)]), self._waiting()))
        labels = [f"target/{index}" for index in range(len(self.roles.targets))]
        labels += [f"drafter/{index}" for index in range(len(self.roles.drafters))]
        known = [label for label in labels if f"{label}/wait_in_s" in values]
        if known:
            lines.append(_row("", _legend(), ""))
        return lines + [_row(label, bar(self._shares(label)), self._rates(label)) for label in known]

    def _waiting(self) -> str:
        values = self.values
        notes = [f"{values.get('pipeline/hs_queue_depth', 0.0):4.0f} waiting"]
        if values.get("pipeline/hs_ready_deficit", 0.0) >= 0.5:
            notes.append(f"{values['pipeline/hs_ready_deficit']:.0f} short")
        if "pipeline/hs_oldest_age_s" in values:
            notes.append(f"oldest {values['pipeline/hs_oldest_age_s']:.1f} s")
        return ", ".join(notes)

    def _shares(self, label: str) -> list[tuple[float, Stroke]]:
        keys = (("busy_s", _BUSY), ("wait_in_s", _IN), ("wait_out_s", _OUT))
        return [
            (self.values.get(f"{label}/{key}", 0.0) / max(self.seconds, 1e-9), style) for key, style in keys
        ]

    def _rates(self, label: str) -> str:
        values = self.values
        busy = values.get(f"{label}/busy_s")
        # A step that ends in this tick counts in it whole, so a share may come out over one.
        text = "     " if busy is None else f"{min(1.0, busy / max(self.seconds, 1e-9)):4.0%} "
        text += f"{values.get(f'{label}/tokens_per_second', 0.0):9,.0f} tok/s"
        capacity = values.get(f"{label}/capacity_tokens_per_second")
        return text if capacity is None else f"{text}, could {capacity:,.0f}"

    def _gpus(self) -> list[Text]:
        known = [cell for index in self.roles.cuda_indexes() if (cell := self._gpu(index))]
        pairs = [known[first : first + 2] for first in range(0, len(known), 2)]
        return [Text("  ".join(f"{cell:<{GPU_CELL}}" for cell in pair).rstrip()) for pair in pairs]

    def _gpu(self, index: int) -> str:
        shown = (
            ("util_pct", "{:3.0f}%"),
            ("mem_used_gb", "{:.1f}GB"),
            ("power_w", "{:.0f}W"),
            ("temp_c", "{:.0f}°C"),
        )
        parts = [
            form.format(self.values[key])
            for name, form in shown
            if (key := f"gpu/{index}/{name}") in self.values
        ]
        caps = (("power", "power cap"), ("thermal_sw", "heat cap"), ("thermal_hw", "heat cap"))
        parts += [word for name, word in caps if self.values.get(f"gpu/{index}/throttle_{name}")][:1]
        return f"gpu {index} {' '.join(parts)}" if parts else ""


def _row(label: str, picture: Text, note: str) -> Text:
    return Text(f"{label:<10} ").append_text(picture).append(f" {note}")


def _legend() -> Text:
    text = Text()
    for (mark, style), word in ((_BUSY, "busy"), (_IN, "wait in"), (_OUT, "out")):
        text.append(mark, style=style).append(f" {word} ")
    return text


def bar(shares: list[tuple[float, Stroke]], width: int = BAR) -> Text:
    """Shares of a whole side by side, each with its mark and colour; what is left is dots. Never wider than
    `width`."""
    text = Text()
    edge, drawn = 0.0, 0
    for share, (mark, style) in shares:
        edge += max(0.0, share)
        upto = min(width, round(edge * width))
        text.append(mark * (upto - drawn), style=style)
        drawn = upto
    return text.append("·" * (width - drawn), style="dim")


def clock(seconds: float) -> str:
    """`1:02:03` or `2:03`."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
