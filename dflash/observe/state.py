"""How a collector or a sink stands on this machine, in one word: what `dflash doctor` shows."""

from typing import Literal

State = Literal["ok", "absent", "warning", "broken"]
