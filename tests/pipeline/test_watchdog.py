"""Who hangs is named, with where it stands; who waits, works long or was stopped is not."""

from __future__ import annotations

import sys
import threading

import pytest

from dflash.pipeline import watchdog
from dflash.pipeline.supervisor import WorkerFailed
from dflash.pipeline.watchdog import LOOKS, View, Watch, Watched, WorkerHung, view
from dflash.ranks.across import Share
from tests.pipeline.run import Hooks, losses, small_trainer
from tests.ranks.worlds import worlds
from tests.waiting import HANG_S, wait_until

pytestmark = [pytest.mark.timeout(2 * HANG_S), pytest.mark.fault]


def looks(watch: Watch, *rounds: list[View]) -> list[str | None]:
    return [found.role if (found := watch.look(views)) else None for views in rounds]


def test_one_that_stands_still_is_named_after_so_many_looks():
    still = [View("target/0", 5, False), View("drafter/0", 5, True)]
    assert looks(Watch(), *[still] * (LOOKS + 1)) == [None] * LOOKS + ["target/0"]


def test_one_that_moves_or_waits_is_not():
    watch = Watch()
    for count in range(5 * LOOKS):
        # The drafter waits for as long as the target takes; the target moves once in a while.
        views = [View("target/0", count // (LOOKS - 1), False), View("drafter/0", 1, True)]
        assert watch.look(views) is None


def test_a_wait_in_between_starts_the_count_anew():
    still, waits = [View("target/0", 5, False)], [View("target/0", 5, True)]
    watch = Watch()
    assert looks(watch, *[still] * LOOKS, waits, *[still] * (LOOKS - 1)) == [None] * (2 * LOOKS)


def test_all_that_wait_for_each_other_are_a_hang_too():
    deadlock = [View("target/0", 5, True), View("drafter/0", 5, True)]
    assert looks(Watch(), *[deadlock] * (LOOKS + 1))[-1] == "target/0"
    assert looks(Watch(), *[[]] * (2 * LOOKS)) == [None] * (2 * LOOKS)


def test_a_wait_for_another_rank_is_no_hang_of_this_one():
    elsewhere = [View("target/0", 5, True), View("drafter/0", 5, True, elsewhere=True)]
    assert looks(Watch(), *[elsewhere] * (3 * LOOKS)) == [None] * (3 * LOOKS)


@pytest.mark.parametrize("where", ["agree", "blame"])
def test_a_drafter_that_waits_for_another_rank_shows_it(where):
    with worlds(2) as (first, second):
        waits = (lambda: first.across.agree(Share(1.0, 1, False))) if where == "agree" else first.watch.blame
        words = () if where == "agree" else ("a connection broke",)
        thread = threading.Thread(target=waits, args=words, daemon=True)
        thread.start()
        seen = lambda: view(Watched("drafter/0", thread, "step", 1), sys._current_frames()[thread.ident])  # noqa: E731
        wait_until(lambda: seen().elsewhere)
        assert seen().waits
        if where == "agree":
            second.across.agree(Share(1.0, 1, False))
        else:
            second.fail("planted")
        thread.join()


def test_a_thread_shows_where_it_stands_and_whether_it_waits():
    from dflash.data.prefetch import BatchPrefetcher

    held = threading.Event()

    def hangs_here() -> None:
        held.wait()

    prefetcher = BatchPrefetcher(None, None, 1)  # type: ignore[arg-type]
    seen = {}
    for name, body, condition in (
        ("stuck", hangs_here, held._cond),  # type: ignore[attr-defined]
        ("waits", prefetcher.get, prefetcher._filled),
    ):
        thread = threading.Thread(target=body, daemon=True)
        thread.start()

        def place(one=thread, role=name) -> View:
            return view(Watched(role, one, "batch", 3), sys._current_frames().get(one.ident))

        # The place of each is its last one: it has let go of the condition's lock.
        wait_until(lambda it=condition: it._waiters and "acquire" in place().stack.splitlines()[-1])
        seen[name] = place()
        assert place() == place()
    assert not seen["stuck"].waits
    assert "hangs_here" in seen["stuck"].at
    assert seen["stuck"].at.startswith("batch 3; it stands at")
    assert seen["waits"].waits
    held.set()
    prefetcher.close()


HUNG = ["target/0", "drafter/0", "drafter/1", "prefetcher"]


def hang(trainer, role: str, reached: threading.Event, held: threading.Event) -> None:
    """Let a worker stand still for ever, after a few batches."""
    owner, name = {
        "target/0": (trainer.target_workers[0]._target, "taps"),
        "drafter/0": (trainer.replicas[0].drafter, "forward"),
        "drafter/1": (trainer.replicas[-1].drafter, "forward"),
        "prefetcher": (trainer.prefetcher, "_collate"),
    }[role]
    real, calls = getattr(owner, name), [0]

    def sleeps_for_ever(*arguments, **named):
        calls[0] += 1
        if calls[0] > 6:
            reached.set()
            held.wait()
        return real(*arguments, **named)

    setattr(owner, name, sleeps_for_ever)


@pytest.mark.slow
@pytest.mark.parametrize("role", HUNG)
def test_a_hung_worker_is_named_and_the_state_is_saved(tmp_path, role, monkeypatch):
    from dflash.pipeline import checkpoint

    trainer = small_trainer(
        tmp_path, "train.steps=100000", "train.hang_s=0.6", 'drafter.devices=["cpu:0", "cpu:1"]'
    )
    reached, held = threading.Event(), threading.Event()
    hang(trainer, role, reached, held)
    real = watchdog.Watchdog.look

    def when_the_others_wait(self):
        """A worker that a busy machine holds up stands still too; it is looked at when it has come to
        rest."""
        frames = sys._current_frames()
        others = [one for one in self._watched() if one.role != role]
        rest = all(view(one, frames.get(one.thread.ident)).waits for one in others)
        return real(self) if reached.is_set() and rest else None

    monkeypatch.setattr(watchdog.Watchdog, "look", when_the_others_wait)
    try:
        with pytest.raises(WorkerFailed) as caught:
            trainer.run()
    finally:
        held.set()
    trainer.observer.close()
    error = caught.value.failure.error
    assert isinstance(error, WorkerHung)
    assert error.role == role
    assert "sleeps_for_ever" in str(error)
    assert "sleeps_for_ever" in error.stack
    step = max(worker.step_index for worker in trainer.drafter_workers)
    assert step > 0
    saved = checkpoint.newest(tmp_path / "run" / "checkpoints")
    assert saved is not None
    assert saved.progress.step == step


@pytest.mark.slow
def test_a_run_in_which_nobody_hangs_is_left_alone(tmp_path, monkeypatch):
    """Looked at all the time."""
    looked = []
    real = watchdog.Watchdog.look
    monkeypatch.setattr(watchdog.Watchdog, "look", lambda self: looked.append(1) or real(self))
    monkeypatch.setattr(watchdog, "LOOKS", 10**6)

    class UntilItLooks(Hooks):
        def after_step(self, step, tokens):
            before = len(looked)
            wait_until(lambda: len(looked) > before)
            return True

    trainer = small_trainer(tmp_path, "train.steps=20", "train.hang_s=1000", hooks=UntilItLooks())
    assert len(losses(trainer)) == 20
