"""Compiled functions (`torch.compile`) under the modes: the code that trains is the code that is counted.

torch leaves what it compiled unused under a dispatch mode that does not ask otherwise, and compiles again
under another stack of function modes. So inside a compiled function the function mode is off. While one of
its graphs runs, or the backward of one, the dispatch mode looks for waits alone, and the graph is one
operation, by name. What runs between two graphs (a graph break) is counted like any other code.

A compile is a wait of the host and counts as one, by kind: `COMPILE`, or `RECOMPILE` where the function had
been compiled before. Both modes are off in it. A compiled function of whose calls no graph runs, only single
operators, is `EAGER`: past torch's recompile limit, for example.

`install` wraps private functions of torch 2.13 through which every compiled function goes, whoever compiled
it, also before. While nothing is counted they are torch's own, so that training pays nothing."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch import overrides
from torch._dynamo import eval_frame
from torch._dynamo.callback import callback_handler
from torch._dynamo.utils import get_compilation_metrics
from torch.utils import _python_dispatch as operators

from steptime.syncs.dispatch import WatchingMode
from steptime.syncs.rules import tensors_in
from steptime.syncs.scopes import GRAPH, OPERATION, Region, Scope, calling_place, current_scope, entered

COMPILE, RECOMPILE = "compile", "recompile"
EAGER = "compiled function ran eager"

_FORWARD, _BACKWARD = "do not trace Dynamo-compiled graph", "do not trace generated backwards pass"


def _nested(function: Callable[..., Any], name: str) -> CodeType:
    return next(c for c in function.__code__.co_consts if isinstance(c, CodeType) and c.co_name == name)


_CALL = _nested(eval_frame._TorchDynamoContext.__call__, "compile_wrapper")
"""Code of every function that `torch.compile` gives."""
_OUTSIDE = _nested(eval_frame.DisableContext.__call__, "_fn")
"""Code of whatever torch keeps its compiler out of; the reason tells graphs from the rest."""


@dataclass(slots=True)
class _Open:
    """A compiled function, or a graph of it, that the thread is in.

    Attributes:
        taken: function modes to put back.
        outer: the scope's region or graph before.
        started: torch has begun to run it.
    """

    frame: FrameType
    scope: Scope
    taken: tuple[list[Any], Any]
    outer: Any
    started: bool = False


class _Here(threading.local):
    def __init__(self) -> None:
        self.open: list[_Open] = []


_here = _Here()
_node_counts: dict[int, tuple[CodeType, int | None]] = {}
"""By compiled code, which is held so that its id stays its own."""
NODES_SEARCHED = 64
_names: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()
"""Of the autograd functions that torch made, by whose backward they are."""


# ---- the three places of torch that are wrapped


def _entering(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(callback: Any) -> Any:
        frame = sys._getframe(1)
        if frame.f_code is _CALL:
            scope = current_scope()
            if scope is not None and scope.unfused:
                if frame.f_locals["fullgraph_count_enabled"]:
                    # Or torch would count compiled frames, and raise for want of any.
                    eval_frame.set_fullgraph_compiled_frame_count(-1)
                return original(None)
            if scope is not None:
                _enter_function(frame, scope)
        elif frame.f_code is _OUTSIDE:
            reason = frame.f_locals["self"].msg
            if reason in (_FORWARD, _BACKWARD):
                scope = current_scope()
                if scope is not None:
                    _enter_graph(frame, scope, backward=reason == _BACKWARD)
        return original(callback)

    return call


def _leaving(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(callback: Any) -> None:
        original(callback)
        opened = _here.open
        if not opened or opened[-1].frame is not sys._getframe(1):
            return
        if not opened[-1].started:
            opened[-1].started = True
            return
        last = opened.pop()
        _put_back(last.scope, last.taken)
        if last.frame.f_code is _CALL:
            _leave_function(last)
        else:
            last.scope.graph = last.outer

    return call


def _compiling(original: Callable[..., Any]) -> Callable[..., Any]:
    @contextlib.contextmanager
    def call(trigger: Any, compile_id: str) -> Iterator[None]:
        scope = current_scope()
        if scope is None:
            with original(trigger, compile_id):
                yield
            return
        with entered(scope), _without_modes(scope), original(trigger, compile_id):
            yield
        again = int(compile_id.rpartition("/")[2].partition("_")[0]) > 0
        kind = RECOMPILE if again and trigger.name == "DYNAMO" else COMPILE
        if scope.region is not None:
            scope.region.compiles.append(
                kind
            )  # Told on leaving: an error raised here would be the compiler's.
        else:
            _record(scope, kind, _backward_name())

    return call


HOOKS: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (eval_frame, "_callback_from_stance", _entering),
    (eval_frame, "_maybe_set_eval_frame", _leaving),
    (callback_handler, "install_callbacks", _compiling),
)
"""(owner, name, wrapper) for `calls.install`."""


# ---- what they do


def _enter_function(frame: FrameType, scope: Scope) -> None:
    function = frame.f_locals["fn"]
    _here.open.append(_Open(frame, scope, _without_function_mode(scope), scope.region))
    scope.region = Region(_name_of(function), getattr(function, "__code__", None))


def _leave_function(opened: _Open) -> None:
    scope, region = opened.scope, opened.scope.region
    scope.region = opened.outer
    if region is None:
        return
    result = opened.frame.f_locals.get("result")
    boundary = getattr(opened.taken[1], "_boundary", None)
    if region.graphs and boundary is not None:
        # Generated code allocates past the dispatcher.
        for tensor in tensors_in((result,)):
            boundary.place_result(tensor)
    _name_backward(result, region.name)
    for kind in region.compiles:
        _record(scope, kind, region.name)
    if region.operators and not region.graphs:
        _record(scope, EAGER, region.name)


def _enter_graph(frame: FrameType, scope: Scope, *, backward: bool) -> None:
    _here.open.append(_Open(frame, scope, _without_function_mode(scope), scope.graph))
    if scope.graph is not None:
        return
    place = calling_place()
    if backward:
        name = f"backward of {_backward_name()}"
    else:
        region = scope.region
        name = region.name if region is not None else "?"
        nodes = _nodes(frame.f_back, region)
        if region is not None:
            region.graphs += 1
        if nodes is not None:
            name += f", {nodes} nodes"
    place = place._replace(function=GRAPH + name)
    if scope.on_device:
        scope.record(OPERATION, 1, place)
    scope.graph = place


def _record(scope: Scope, kind: str, name: str) -> None:
    place = calling_place()
    scope.record(kind, 1, place._replace(function=f"{place.function} calls {name}"))


def _name_of(function: Any) -> str:
    function = inspect.unwrap(function)
    owner = getattr(function, "__self__", function)
    if isinstance(owner, torch.nn.Module):
        return type(owner).__qualname__
    return getattr(function, "__qualname__", type(function).__qualname__)


def _nodes(frame: FrameType | None, region: Region | None) -> int | None:
    """Nodes of the graph that the code of `frame` calls; None: unknown. Said alike each time."""
    if frame is None:
        return None
    code = frame.f_code
    if id(code) not in _node_counts:
        _node_counts[id(code)] = code, _recorded_nodes(code, region)
    return _node_counts[id(code)][1]


def _recorded_nodes(code: CodeType, region: Region | None) -> int | None:
    """As torch's own record of the compile has it."""
    compile_id = None
    if region is not None and region.code is not None:
        for entry in torch._C._dynamo.eval_frame._debug_get_cache_entry_list(region.code):
            if entry.code is code:
                compile_id = str(entry.compile_id)
    wanted = code.co_name, code.co_filename, code.co_firstlineno
    for record in reversed(get_compilation_metrics()):
        same = (record.co_name, record.co_filename, record.co_firstlineno) == wanted
        if same and compile_id in (None, record.compile_id) and record.graph_node_count:
            return int(record.graph_node_count)
    return None


def _name_backward(result: Any, name: str) -> None:
    """Remember whose backward it is that the results lead to."""
    found = [tensor.grad_fn for tensor in tensors_in((result,)) if tensor.grad_fn is not None]
    for _ in range(len(found) + NODES_SEARCHED):
        if not found:
            return
        node: Any = found.pop()
        made = getattr(type(node), "_forward_cls", None)
        if made is not None and made.__name__ == "CompiledFunction":
            _names.setdefault(made, name)
        found += [above for above, _ in node.next_functions if above is not None]


def _backward_name() -> str:
    node: Any = torch._C._current_autograd_node()
    made = getattr(type(node), "_forward_cls", None)
    return "?" if made is None else _names.get(made, "?")


# ---- the stacks of modes


def _without_function_mode(scope: Scope) -> tuple[list[Any], Any]:
    """Take the scope's function mode off, others staying. What to put back."""
    modes, mode = _FUNCTIONS.modes(), scope.function_mode
    _FUNCTIONS.put([other for other in modes if other is not mode])
    scope.function_mode = None  # Or a backward inside would put it on.
    return modes, mode


def _put_back(scope: Scope, taken: tuple[list[Any], Any]) -> None:
    modes, scope.function_mode = taken
    _FUNCTIONS.put(modes)


@contextlib.contextmanager
def _without_modes(scope: Scope) -> Iterator[None]:
    """Counting modes off, of both kinds; all are back behind it, in their order."""
    taken, dispatching = _without_function_mode(scope), _OPERATORS.modes()
    _OPERATORS.put([mode for mode in dispatching if not isinstance(mode, WatchingMode)])
    try:
        yield
    finally:
        _OPERATORS.put(dispatching)
        _put_back(scope, taken)


@dataclass(frozen=True)
class _Stack:
    modes: Callable[[], list[Any]]
    pop: Callable[[], Any]
    push: Callable[[Any], None]

    def put(self, modes: list[Any]) -> None:
        """Make it these."""
        now = self.modes()
        if now == modes:
            return
        for _ in now:
            self.pop()
        for mode in modes:
            self.push(mode)


_FUNCTIONS = _Stack(overrides._get_current_function_mode_stack, overrides._pop_mode, overrides._push_mode)
_OPERATORS = _Stack(operators._get_current_dispatch_mode_stack, operators._pop_mode, operators._push_mode)
