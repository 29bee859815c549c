"""Compiled functions under the modes: what trains is what is counted, and what hides in them shows."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo import eval_frame
from torch._dynamo.testing import CompileCounter

from dflash.device import Device
from dflash.observe.syncs.guard import GuardScopes
from steptime.regions import CompileWatch, compiled
from steptime.syncs.compiled import COMPILE, EAGER, HOOKS, RECOMPILE
from steptime.syncs.counting import CountingScopes
from steptime.syncs.scopes import ALLOCATION, OPERATION, WORK, SyncNotAllowed, allowed_sync
from tests.steptime.backend import Recording

Backend = Callable[..., Any]


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def counted(call: Callable[[], Any], *, work: bool = True) -> CountingScopes:
    scopes = CountingScopes(work=work)
    scopes.arm()
    with scopes.enter("drafter/0", Device("cpu")):
        call()
    return scopes


def by_kind(scopes: CountingScopes, *, work: bool = False) -> dict[str, int]:
    found: Counter[str] = Counter()
    for (_, kind, _), n in scopes.counts().items():
        if work or kind not in WORK:
            found[kind] += n
    return dict(found)


def graphs(scopes: CountingScopes) -> dict[str, int]:
    found: Counter[str] = Counter()
    for (_, kind, place), n in scopes.counts().items():
        if kind == OPERATION and place.function.startswith("compiled graph"):
            found[place.function] += n
    return dict(found)


def small(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() + 1).sum()


def leaf(size: int = 3) -> torch.Tensor:
    return torch.ones(size, requires_grad=True)


def test_a_warm_function_runs_what_was_compiled_and_nothing_is_compiled_for_counting() -> None:
    backend = Recording()
    function = torch.compile(small, backend=backend)
    x = leaf()
    function(x)
    assert (backend.compiled, backend.ran) == (1, 1)
    scopes = counted(lambda: function(x))
    assert (backend.compiled, backend.ran) == (1, 2)
    assert graphs(scopes) == {"compiled graph: small, 5 nodes": 1}
    assert by_kind(scopes, work=True) == {OPERATION: 1}, "one operation; what is inside is not seen"
    function(x)
    assert (backend.compiled, backend.ran) == (1, 3), "nor behind it"


@pytest.mark.slow
@pytest.mark.parametrize("warm", [True, False])
def test_as_many_compiles_counted_as_not(warm: bool) -> None:
    def steps(function: Any) -> None:
        for size in (3, 4, 5, 4, 3):
            function(leaf(size))

    plain, watched = CompileCounter(), CompileCounter()
    steps(torch.compile(small, backend=plain, dynamic=False))
    torch._dynamo.reset()
    function = torch.compile(small, backend=watched, dynamic=False)
    if warm:
        steps(function)
    scopes = counted(lambda: steps(function))
    assert (watched.frame_count, watched.op_count) == (plain.frame_count, plain.op_count) == (3, 9)
    assert by_kind(scopes) == ({} if warm else {COMPILE: 1, RECOMPILE: 2})


def test_without_hooks_the_function_mode_would_compile_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that the wrappers are for; it also shows that the tests above can fail."""
    monkeypatch.setattr("steptime.syncs.compiled.HOOKS", ())
    backend = Recording()
    function = torch.compile(small, backend=backend)
    function(leaf())
    counted(lambda: function(leaf()))
    assert backend.compiled > 1


def test_a_mode_that_asks_for_every_operator_would_run_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the dispatch mode as it was."""
    from steptime.syncs.dispatch import DispatchCounter

    monkeypatch.setattr(DispatchCounter, "ignore_compile_internals", classmethod(lambda cls: False))
    backend = Recording()
    function = torch.compile(small, backend=backend)
    x = leaf()
    function(x)
    scopes = counted(lambda: function(x))
    assert backend.ran == 1
    assert by_kind(scopes) == {EAGER: 1}
    assert by_kind(scopes, work=True)[OPERATION] == 3


@pytest.mark.slow
def test_backward_is_one_operation_by_name() -> None:
    function = compiled(small, "small_region", dynamic=False, backend="aot_eager")
    function(leaf()).backward()
    scopes = counted(lambda: function(leaf()).backward())
    assert graphs(scopes) == {
        "compiled graph: small_region, 5 nodes": 1,
        "compiled graph: backward of small_region": 1,
    }
    assert by_kind(scopes) == {}


def test_backward_in_a_thread_of_autograds_is_charged_by_the_mode_that_it_inherits() -> None:
    """As on CUDA: that thread has the dispatch modes of the caller, and no scope of its own."""
    function = compiled(small, "small_region", dynamic=False, backend="aot_eager")
    scopes = CountingScopes()
    scopes.arm()
    with scopes.enter("drafter/0", Device("cpu")):
        loss = function(leaf())
        (mode,) = torch.utils._python_dispatch._get_current_dispatch_mode_stack()

        def device_thread() -> None:
            with mode:
                loss.backward()
                assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == [mode]

        thread = threading.Thread(target=device_thread)
        thread.start()
        thread.join()
    assert graphs(scopes)["compiled graph: backward of small_region"] == 1
    assert by_kind(scopes) == {COMPILE: 2}


def test_backward_compiled_on_its_first_call_shows() -> None:
    function = compiled(small, "small_region", dynamic=False, backend="aot_eager")
    scopes = CountingScopes()
    scopes.arm()
    with scopes.enter("drafter/0", Device("cpu")):
        loss = function(leaf())
        assert by_kind(scopes) == {COMPILE: 1}
        loss.backward()
    assert by_kind(scopes) == {COMPILE: 2}
    assert any(
        "backward of" in place.function or "calls small_region" in place.function
        for *_, place in scopes.counts()
    )


@pytest.mark.slow
def test_a_module_and_functions_with_breaks_are_named() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            torch._dynamo.graph_break()
            return y.relu()

    def steps(model: Any) -> None:
        model(torch.ones(2, 3)).sum().backward()

    for model in (torch.compile(Net(), backend="aot_eager"), Net()):
        if isinstance(model, Net):
            model.compile(backend="aot_eager")
        steps(model)
        found = graphs(counted(lambda: steps(model)))  # noqa: B023
        assert sum(found.values()) == 4, "two graphs, and their backward"
        assert all("Net" in name for name in found), found


def test_a_read_between_two_graphs_is_counted() -> None:
    def waits(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        if y.sum().item() > 0:
            y = y + 1
        return y * 2

    function = torch.compile(waits, backend="eager")
    x = leaf()
    function(x)
    scopes = counted(lambda: function(x))
    assert by_kind(scopes) == {"scalar read": 1}
    assert sum(graphs(scopes).values()) == 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_wait_inside_a_graph_is_counted(backend: str) -> None:
    def waits(x: torch.Tensor) -> torch.Tensor:
        return x.nonzero().sum() + x.argmax().item()

    function = compiled(waits, "waits", dynamic=False, backend=backend)
    x = torch.ones(3)
    function(x)
    scopes = counted(lambda: function(x))
    assert by_kind(scopes) == {"nonzero": 1, "scalar read": 1}
    places = {place.function for _, kind, place in scopes.counts() if kind not in WORK}
    assert all(name.startswith("compiled graph: waits") for name in places)


def test_a_recompile_in_each_step_is_a_fault_in_each_step() -> None:
    function = torch.compile(small, backend="eager", dynamic=False)
    function(leaf(2))

    def steps() -> None:
        for size in range(3, 7):
            function(leaf(size))

    scopes = counted(steps)
    assert by_kind(scopes) == {RECOMPILE: 4}
    ((_, _, place),) = [key for key in scopes.counts() if key[1] == RECOMPILE]
    assert place.file == __file__
    assert place.function.endswith("steps calls small")


def test_what_waits_while_it_compiles_shows_beside_the_compile() -> None:
    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        torch.cuda.synchronize()  # As autotuning does.
        return graph.forward

    function = torch.compile(small, backend=backend)
    assert by_kind(counted(lambda: function(leaf()))) == {COMPILE: 1, "device synchronize": 1}


def test_a_function_past_the_limit_of_torch_runs_eager_and_shows() -> None:
    function = torch.compile(small, backend="eager", dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2):
        for size in (3, 4, 5):
            function(leaf(size))
        x, y = leaf(5), leaf(4)
        scopes = counted(lambda: function(x))
        assert by_kind(scopes) == {EAGER: 1}
        assert by_kind(scopes, work=True)[OPERATION] == 3, "and its operators are seen"
        assert by_kind(counted(lambda: function(y))) == {}


def test_the_guard_names_a_recompile_and_ends_the_step(caplog: pytest.LogCaptureFixture) -> None:
    function = compiled(small, "small_region", dynamic=False, backend="eager")

    def worker(guard: GuardScopes) -> None:
        with guard.enter("drafter/0", Device("cpu")) as scope:
            for index, size in enumerate((3, 3, 4)):
                scope.mark_step(index)
                function(leaf(size))

    with pytest.raises(SyncNotAllowed, match=r"recompile at .*worker calls small_region"):
        worker(GuardScopes("disallow"))
    assert function(leaf(4)) is not None, "torch's state is sound behind the error"
    torch._dynamo.reset()
    guard = GuardScopes("log")
    worker(guard)
    (line,) = guard.summary()
    assert "1 x recompile at" in line


def test_a_declared_compile_passes() -> None:
    function = torch.compile(small, backend="eager")

    def call() -> None:
        with allowed_sync("first batch of a new length"):
            function(leaf())

    scopes = counted(call)
    assert by_kind(scopes) == {}
    assert [reason for *_, reason in scopes.declared()] == ["first batch of a new length"] * 2


def test_errors_leave_the_modes_as_they_were() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        raise ValueError(f"inside {x.sin()}")

    function = torch.compile(fails, backend="eager")
    scopes = CountingScopes()
    scopes.arm()
    with scopes.enter("drafter/0", Device("cpu")) as scope:
        for _ in range(2):
            with pytest.raises(ValueError, match="inside"):
                function(leaf())
        assert (scope.region, scope.graph) == (None, None)
        assert str(leaf().device) == "cpu", (
            "the function mode is on: a factory without a device is the host's"
        )
        torch.ones((), device="cpu:0").tolist()
    assert by_kind(scopes)["tolist()"] == 1


def test_a_mode_of_the_users_stays_on() -> None:
    seen = []

    class Theirs(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    backend = Recording()
    function = torch.compile(small, backend=backend)
    with Theirs():
        function(leaf())

    def call() -> None:
        with Theirs():
            function(leaf())
            seen.extend(torch.overrides._get_current_function_mode_stack())

    counted(call)
    assert backend.compiled == 1
    assert [type(mode).__name__ for mode in seen] == ["FunctionCounter", "Theirs"]


def test_each_thread_has_its_own_region() -> None:
    function = torch.compile(small, backend="eager")
    function(leaf())
    scopes = CountingScopes()
    scopes.arm()
    together = threading.Barrier(2)

    def worker(index: int) -> None:
        with scopes.enter(f"drafter/{index}", Device("cpu")):
            together.wait()
            for _ in range(20):
                function(leaf())

    threads = [threading.Thread(target=worker, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = {(role, kind): n for (role, kind, _), n in scopes.counts().items() if kind not in (ALLOCATION,)}
    assert found == {("drafter/0", OPERATION): 20, ("drafter/1", OPERATION): 20}


@pytest.mark.slow
@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
def test_flex_attention_runs_under_the_modes(backend: str | None) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    plain: Any = flex_attention

    def attend(x: torch.Tensor) -> torch.Tensor:
        return plain(x, x, x)  # type: ignore[no-any-return]

    function = attend if backend is None else compiled(attend, "attend", dynamic=False, backend=backend)
    x = torch.randn(1, 2, 16, 8)
    expected = function(x)
    found = []
    scopes = counted(lambda: found.append(function(x)))
    assert torch.equal(found[0], expected)
    name = "attend" if backend else "flex_attention.<locals>._flex_attention_hop_wrapper"
    assert any(name in graph for graph in graphs(scopes)), graphs(scopes)


def test_nothing_of_torch_is_wrapped_while_nothing_is_counted() -> None:
    wrapped = [getattr(owner, name) for owner, name, _ in HOOKS]
    with CountingScopes().enter("drafter/0", Device("cpu")):
        assert all(
            getattr(owner, name) is not was for (owner, name, _), was in zip(HOOKS, wrapped, strict=True)
        )
    now = [getattr(owner, name) for owner, name, _ in HOOKS]
    assert all(a == b for a, b in zip(now, wrapped, strict=True))
    function = compiled(small, "small_region", dynamic=False, backend="eager")
    assert function.__code__.co_filename == eval_frame.__file__, (
        "torch's own function, with nothing around it"
    )


@pytest.mark.slow
def test_a_region_that_cannot_compile_whole_or_has_too_many_forms_raises() -> None:
    def breaks(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x.sin()

    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(breaks, "breaks", dynamic=False, backend="eager")(leaf())
    function = compiled(small, "small_region", dynamic=False, backend="eager")
    for size in range(2, 20):
        function(leaf(size))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("steptime.regions.MOST_FORMS", 2)
        narrow = compiled(small, "narrow_region", dynamic=False, backend="eager")
        narrow(leaf(3))
        narrow(leaf(4))
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            narrow(leaf(5))


def test_regions_of_one_function_do_not_share_their_forms() -> None:
    counter = CompileCounter()
    first, second = (compiled(small, f"region_{i}", dynamic=False, backend=counter) for i in range(2))
    for function in (first, second):
        assert torch.equal(function(leaf()), small(leaf()))
    assert counter.frame_count == 2


@pytest.mark.slow
def test_nodes_are_known_of_more_compiles_than_torch_keeps_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    records = torch._dynamo.utils
    records.set_compilation_metrics_limit(2)
    monkeypatch.setattr("steptime.regions.RECORDS", 8)
    function = torch.compile(small, backend="eager", dynamic=False)
    other = compiled(small, "other_region", dynamic=False, backend="eager")
    x = leaf(2)
    function(x)
    for size in range(2, 6):
        other(leaf(size))
    assert graphs(counted(lambda: function(x))) == {"compiled graph: small, 5 nodes": 1}
    records.set_compilation_metrics_limit(2)
    torch._dynamo.reset()
    function(x)
    for size in range(2, 6):
        other(leaf(size))
    assert graphs(counted(lambda: function(x))) == {"compiled graph: small": 1}, "torch has forgotten"


def test_a_watch_tells_what_was_compiled_and_why() -> None:
    function = compiled(small, "watched_region", dynamic=False, backend="eager")
    function(leaf(3))
    watch = CompileWatch()
    function(leaf(3))
    assert watch.told() == []
    threads = [threading.Thread(target=function, args=(leaf(size),)) for size in (4, 5)]
    for thread in threads:
        thread.start()
        thread.join()
    (line,) = watch.told()
    assert line.startswith(f"torch compiled watched_region ({__file__}:")
    assert "2 x meanwhile: " in line
    assert "size mismatch at index 0" in line
    assert CompileWatch().told() == []
