"""`python -m bench overhead | gate | baseline | selfcheck | syncs`."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from steptime.errors import UserError, nearest

COMMANDS = ("overhead", "gate", "baseline", "selfcheck", "syncs")
DEFAULT_CONFIG = "configs/cpu-tiny.toml"
BASELINE_TEXT = "Stored tokens per second of this machine: record (by hand, on a clean tree), compare, list."
EPILOG = """exit codes:
  0 within budget    1 over budget, or an exact count rose    2 usage or tool error
  3 slower or unresolved    4 invalid, or another machine    5 no baseline, or an incomplete set"""


class Parser(argparse.ArgumentParser):
    """Complains in one line and names the nearest option; everything else is argparse."""

    def error(self, message: str) -> NoReturn:
        unknown, _, rest = message.partition("unrecognized arguments: ")
        if rest and not unknown:
            word = rest.split()[0]
            message = f"no such option {word}{nearest(word, self.known_options())}"
        raise UserError(f"{self.prog}: {message} (see --help)")

    def known_options(self) -> set[str]:
        """Every option of this parser and of those below it."""
        known = {option for action in self._actions for option in action.option_strings}
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                known.update(*(parser.known_options() for parser in action.choices.values()))
        return known


def percent(text: str) -> float:
    """`1%` or `1` as 1.0; argparse reports the ValueError's text."""
    try:
        value = float(text.strip().removesuffix("%"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a percentage such as 1% or 0.5%") from None
    if not 0.0 <= value < 100.0:
        raise argparse.ArgumentTypeError(f"{text!r} is outside 0% to 100%")
    return value


def budget(text: str) -> float:
    """A percentage above 0: nothing can be shown to cost nothing at all."""
    value = percent(text)
    if value == 0.0:
        raise argparse.ArgumentTypeError("a budget of 0% cannot be met by any measurement; try 0.1%")
    return value


def minutes(text: str) -> float:
    """Minutes above 0, at most a day."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes") from None
    if not 0.0 < value <= 1440.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 0 and 1440 minutes")
    return value


def natural(text: str) -> int:
    """An integer of at least 0."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def names(text: str) -> tuple[str, ...]:
    """Comma-separated names."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def percents(text: str) -> tuple[float, ...]:
    """Comma-separated percentages."""
    return tuple(percent(part) for part in text.split(","))


def build_parser() -> Parser:
    """The whole command line."""
    parser = Parser(
        prog="python -m bench",
        description="Measures what the trainer's metrics cost, and whether a commit is slower than another.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    _overhead(
        commands.add_parser(
            "overhead", help="what does each collector cost?", description=run_overhead.__doc__
        )
    )
    _gate(
        commands.add_parser("gate", help="is this commit slower than that one?", description=run_gate.__doc__)
    )
    _baseline(
        commands.add_parser(
            "baseline", help="are we drifting from the stored figure?", description=BASELINE_TEXT
        )
    )
    _selfcheck(
        commands.add_parser(
            "selfcheck", help="how often is the harness wrong?", description=run_selfcheck.__doc__
        )
    )
    commands.add_parser("syncs", help="count the host syncs of any PyTorch program", add_help=False)
    return parser


def _subject(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int]) -> None:
    parser.add_argument(
        "--config",
        default=DEFAULT_CONFIG,
        metavar="FILE",
        help="TOML of what is trained (default %(default)s)",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="lay a setting over the config"
    )
    parser.set_defaults(run=run)


def _common(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int]) -> None:
    _subject(parser, run)
    parser.add_argument("--seed", type=natural, default=0, metavar="N", help="order of the arms (default 0)")
    parser.add_argument(
        "--out", metavar="DIR", help="folder for receipt and reports (default: one under bench-out/)"
    )


def _overhead(parser: argparse.ArgumentParser) -> None:
    _common(parser, run_overhead)
    parser.add_argument("--quick", action="store_true", help="isolated costs only; under 90 s in all")
    parser.add_argument(
        "--minutes", type=minutes, metavar="M", help="time for measuring (default 4, quick 0.75)"
    )
    parser.add_argument(
        "--budget",
        type=budget,
        default=1.0,
        metavar="PERCENT",
        help="of all together, half for each (default 1%%)",
    )
    parser.add_argument(
        "--only", type=names, default=(), metavar="C,...", help="measure these collectors only"
    )
    parser.add_argument(
        "--together", action="store_true", help="all collectors as one against off: more precise, blames none"
    )
    parser.add_argument(
        "--inject",
        type=percent,
        default=0.0,
        metavar="PERCENT",
        help="add a collector of known cost, e.g. 2%%",
    )
    parser.add_argument("--plant", default="", metavar="NAME", help="add a bad collector, to see it found")
    parser.add_argument(
        "--subject", default="trainer", metavar="NAME", help="trainer, or spin: light, of known speed"
    )


def run_overhead(arguments: argparse.Namespace) -> int:
    """What does each collector cost? Every arm replays the same batches; costs come with intervals and a
    verdict."""
    from bench.commands import overhead
    from bench.progress import Reporter
    from dflash.config import load_config

    options = overhead.Options(
        config=load_config(arguments.config, arguments.set),
        quick=arguments.quick,
        minutes=arguments.minutes,
        budget_percent=arguments.budget,
        only=arguments.only,
        together=arguments.together,
        inject_percent=arguments.inject,
        plant=arguments.plant,
        seed=arguments.seed,
        out=arguments.out,
    )
    subject, counter = overhead.make_subject(
        arguments.subject,
        options.config,
        inject_percent=arguments.inject,
        plant=arguments.plant,
        time_stages=True,
    )
    return int(overhead.run_overhead(options, subject, Reporter(), count=counter).exit_code)


def _gate(parser: argparse.ArgumentParser) -> None:
    _common(parser, run_gate)
    parser.add_argument(
        "--base", required=True, metavar="REF", help="commit to compare with, e.g. origin/main or HEAD^1"
    )
    parser.add_argument(
        "--minutes", type=minutes, default=10.0, metavar="M", help="time for measuring (default 10)"
    )
    parser.add_argument(
        "--budget", type=budget, default=1.0, metavar="PERCENT", help="slowdown allowed (default 1%%)"
    )
    parser.add_argument(
        "--inject",
        type=percent,
        default=0.0,
        metavar="PERCENT",
        help="slow head by a known share, to see it found",
    )
    parser.add_argument(
        "--launches", type=natural, metavar="N", help="pairs of processes (default 3 to 10, by the time)"
    )
    parser.add_argument(
        "--subject", default="trainer", metavar="NAME", help="trainer, or spin: light, of known speed"
    )


def run_gate(arguments: argparse.Namespace) -> int:
    """Is this commit slower than that one, on this machine, now? Two persistent worker processes take
    turns."""
    from bench.commands.gate import run_gate as measure_both
    from bench.gate.verdict import Options
    from bench.progress import Reporter
    from bench.subjects.registry import SUBJECTS
    from dflash.config import load_config

    options = Options(
        base=arguments.base,
        config=load_config(arguments.config, arguments.set),
        minutes=arguments.minutes,
        budget_percent=arguments.budget,
        seed=arguments.seed,
        out=arguments.out,
        kind=SUBJECTS[arguments.subject],
        inject_percent=arguments.inject,
        launches=arguments.launches or None,
    )
    return int(measure_both(options, Reporter()).exit_code)


def _baseline(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(
        dest="action", metavar="record|compare|list", required=True, parser_class=Parser
    )
    for name, sessions, text in (
        ("record", 3, "measure several sessions and write baselines/<machine>/<config>.json"),
        ("compare", 1, "hold new sessions against the stored figure"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        _subject(action, run_baseline)
        action.add_argument(
            "--sessions",
            type=natural,
            default=sessions,
            metavar="N",
            help="fresh launches (default %(default)s)",
        )
        action.add_argument("--minutes", type=minutes, metavar="M", help="time for measuring in each session")
        action.add_argument(
            "--receipt",
            action="append",
            default=[],
            metavar="FILE",
            help="use a finished session; repeatable",
        )
        action.add_argument("--note", default="", metavar="TEXT", help="kept with the figure")
    actions.add_parser("list", help="what is stored", description="What is stored.").set_defaults(
        run=run_baseline
    )


def run_baseline(arguments: argparse.Namespace) -> int:
    """Record, compare or list stored figures."""
    from bench.commands import baseline
    from bench.progress import Reporter
    from dflash.config import load_config

    if arguments.action == "list":
        return baseline.run_list()
    options = baseline.Options(
        config=load_config(arguments.config, arguments.set),
        config_path=arguments.config,
        settings=tuple(arguments.set),
        sessions=max(1, arguments.sessions),
        minutes=arguments.minutes,
        receipts=tuple(arguments.receipt),
        note=arguments.note,
    )
    run = baseline.run_record if arguments.action == "record" else baseline.run_compare
    return run(options, Reporter())


def _selfcheck(parser: argparse.ArgumentParser) -> None:
    _common(parser, run_selfcheck)
    parser.add_argument("--minutes", type=minutes, default=20.0, metavar="M", help="time in all (default 20)")
    parser.add_argument(
        "--gate-minutes", type=minutes, default=1.5, metavar="M", help="time of each gate (default 1.5)"
    )
    parser.add_argument(
        "--subjects",
        type=names,
        default=("spin",),
        metavar="S,...",
        help="spin, trainer or both (default spin)",
    )
    parser.add_argument(
        "--inject",
        type=percents,
        default=None,
        metavar="PERCENT,...",
        help=(
            "real slowdowns to find, a gate of identical code before each (default 1,2,5); with a 0 in it "
            "just these, in turn"
        ),
    )
    parser.add_argument("--no-plants", action="store_true", help="leave the planted faults out: gates only")
    parser.add_argument(
        "--again",
        nargs="+",
        default=(),
        metavar="FILE",
        help="judge the gates.jsonl of earlier checks; measure nothing",
    )


def run_selfcheck(arguments: argparse.Namespace) -> int:
    """How often is the harness wrong? Identical code, known slowdowns, planted faults; rates with exact
    bounds."""
    from bench.commands import selfcheck
    from bench.progress import Reporter
    from bench.subjects.registry import SUBJECTS
    from dflash.config import load_config

    if arguments.again:
        return selfcheck.judge_again([Path(file) for file in arguments.again], arguments.out, Reporter())
    for name in arguments.subjects:
        SUBJECTS[name]  # unknown ones are refused before anything is measured
    return selfcheck.run_selfcheck(
        load_config(arguments.config, arguments.set),
        config_path=arguments.config,
        settings=tuple(arguments.set),
        minutes=arguments.minutes,
        subjects=arguments.subjects,
        gate_minutes=arguments.gate_minutes,
        out=arguments.out,
        reporter=Reporter(),
        seed=arguments.seed,
        injected=selfcheck.COSTS if arguments.inject is None else arguments.inject,
        plants=not arguments.no_plants,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. A mistake of the user is one line on stderr and code 2."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    parser = build_parser()
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if words[:1] == ["syncs"]:
            from bench.syncs.run_script import main as syncs_main

            return syncs_main(words[1:] or ["--help"])
        if words and not words[0].startswith("-") and words[0] not in COMMANDS:
            raise UserError(
                f"no such command {words[0]!r}{nearest(words[0], COMMANDS)} (there are {', '.join(COMMANDS)})"
            )
        parsed = parser.parse_args(words)
        if parsed.command is None:
            parser.print_help()
            return 2
        return int(parsed.run(parsed))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
    except BrokenPipeError:
        pass
    except Exception:
        # Python's own exit code for this would be 1, which says "over budget".
        traceback.print_exc()
        print("error: the harness failed; this is no verdict (exit code 2)", file=sys.stderr)
    return 2
