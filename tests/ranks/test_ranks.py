"""Board, watch and collectives between ranks: messages, agreement, and a bounded end when one fails."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from dflash.ranks.across import RanksClosed, Share
from dflash.ranks.board import Board, Mailbox, Post, StoreGone
from dflash.ranks.join import Seat, check_devices, seat
from dflash.ranks.watch import RankFailed, RankWatch
from steptime.errors import UserError
from tests.clock import Clock
from tests.ranks.worlds import PERIOD_S, TIMEOUT_S, move_on, on_each, worlds
from tests.waiting import HANG_S, wait_until

pytestmark = pytest.mark.timeout(3 * HANG_S)


# -- the environment -----------------------------------------------------------------------------------------

TORCHRUN = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}


def test_the_place_of_a_process_is_read_from_its_environment():
    assert seat(TORCHRUN) == Seat(rank=3, ranks=4, ranks_here=2)
    assert seat({}) is None
    assert seat({"WORLD_SIZE": "1", "RANK": "0"}) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"RANK": "four"}, "RANK = 'four' in the environment: must be a number, as torchrun sets it"),
        ({"RANK": "4"}, "must be below WORLD_SIZE = 4"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE = 'two'"),
        (
            {"MASTER_PORT": None},
            "WORLD_SIZE = 4 without MASTER_PORT in the environment: start it with torchrun",
        ),
    ],
)
def test_a_broken_environment_is_one_line(change, words):
    environment = {key: value for key, value in (TORCHRUN | change).items() if value is not None}
    with pytest.raises(UserError, match=words):
        seat(environment)


def test_devices_that_ranks_cannot_share_are_refused():
    one, two = Seat(0, 2, 1), Seat(0, 2, 2)
    assert check_devices(two, ["cpu", "cpu:1"]) == "gloo"
    assert check_devices(one, ["cuda:0", "cuda:1"]) == "nccl"
    with pytest.raises(UserError, match="2 ranks on this machine would share its GPUs: start one a machine"):
        check_devices(two, ["cuda:0"])
    with pytest.raises(UserError, match="sim:K devices are of one process"):
        check_devices(one, ["sim:0"])


# -- the board -----------------------------------------------------------------------------------------------


def test_a_board_keeps_values_and_the_first_of_several():
    board = Board(dist.HashStore())
    assert board.look("a") is None
    board.post("a", [1, "two", None, float("nan")])
    assert board.look("a")[:3] == [1, "two", None]
    assert board.post_first("b", 1) == 1
    assert board.post_first("b", 2) == 1
    assert board.take("b") == 1
    assert board.look("b") is None
    assert board.wait("b", 0.05) is None
    assert board.wait("b", HANG_S, over=lambda: True) is None


def test_messages_come_once_and_in_order():
    board = Board(dist.HashStore())
    post, box = Post(board, 3), Mailbox(board, 3)
    assert box.take() is None
    for number in range(5):
        post.send("kind", number)
    assert [box.take() for _ in range(6)] == [("kind", number) for number in range(5)] + [None]


@pytest.mark.fault
def test_a_store_that_is_gone_is_one_line():
    def gone(*arguments):
        raise dist.DistNetworkError("connection reset\nC++ stack")

    board = Board(SimpleNamespace(set=gone, check=gone))
    with pytest.raises(StoreGone, match=r"rank 0's machine keeps cannot be reached: connection reset$"):
        board.post("a", 1)
    lost = []
    watch = RankWatch(board, 1, 2, HANG_S, period_s=PERIOD_S)
    watch.report_to(lost.append)
    watch.start()
    wait_until(lambda: lost)
    assert "cannot be reached" in str(lost[0])
    watch.close()


# -- agreement and sums --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_ranks_agree_on_the_same_numbers_and_sum_the_same_gradient(ranks):
    shares = [Share(0.1 * rank, 10**9 + rank, rank == 1, rank == 0) for rank in range(ranks)]
    gradients = [torch.arange(7.0) * (rank + 1) for rank in range(ranks)]

    def body(rank):
        across = all_of_them[rank].across
        agreed = across.agree(shares[rank])
        across.add(0, gradients[rank])
        return agreed

    with worlds(ranks) as all_of_them:
        agreed = on_each(ranks, body)
    weight = sum(0.1 * rank for rank in range(ranks))
    assert agreed == [Share(weight, ranks * 10**9 + sum(range(ranks)), True, True)] * ranks
    assert all(torch.equal(gradient, torch.arange(7.0) * sum(range(1, ranks + 1))) for gradient in gradients)


def test_bfloat16_gradients_can_be_summed():
    gradients = [torch.full((5,), 1.5, dtype=torch.bfloat16) for _ in range(2)]
    with worlds(2) as all_of_them:
        on_each(2, lambda rank: all_of_them[rank].across.add(0, gradients[rank]))
    assert gradients[0].tolist() == [3.0] * 5


def test_rank_0s_tensors_go_to_all():
    tensors = [{"b": torch.full((2, 3), float(rank)), "a": torch.tensor(float(rank))} for rank in range(3)]
    with worlds(3) as all_of_them:
        on_each(3, lambda rank: all_of_them[rank].broadcast(0, tensors[rank]))
    assert all(torch.equal(one["b"], tensors[0]["b"]) and one["a"] == 0.0 for one in tensors)


@pytest.mark.fault
def test_closing_ends_the_wait_for_a_rank_that_never_comes():
    with worlds(2) as all_of_them:
        across = all_of_them[0].across

        reduce, begun = across._host.allreduce, []

        def seen(*arguments):
            work = reduce(*arguments)
            begun.append(work)
            return work

        across._host = SimpleNamespace(allreduce=seen)

        def body(rank):
            if rank == 0:
                across.agree(Share(1.0, 1, False))
            else:
                wait_until(lambda: begun)
                across.close()

        first, _ = on_each(2, body)
    assert isinstance(first, RanksClosed)


# -- who has failed ------------------------------------------------------------------------------------------


@pytest.mark.fault
@pytest.mark.parametrize("failing", [0, 2])
def test_every_rank_hears_who_failed_and_nobody_hears_of_himself(failing):
    with worlds(3) as all_of_them:
        lost = {rank: [] for rank in range(3)}
        for rank, world in enumerate(all_of_them):
            world.watch.report_to(lost[rank].append)
        all_of_them[failing].fail("target/0 failed: RuntimeError: planted")
        all_of_them[failing].fail("a later line")
        others = [rank for rank in range(3) if rank != failing]
        wait_until(lambda: all(lost[rank] for rank in others))
        assert {str(lost[rank][0]) for rank in others} == {
            f"rank {failing}: target/0 failed: RuntimeError: planted"
        }
        assert not lost[failing]


@pytest.mark.fault
@pytest.mark.parametrize("gone", [0, 1])
def test_a_rank_without_a_sign_of_life_is_gone(gone):
    board, clock = Board(dist.HashStore()), Clock()
    watches = [
        RankWatch(board, rank, 3, TIMEOUT_S, period_s=PERIOD_S, clock_s=clock.seconds) for rank in range(3)
    ]
    lost = {rank: [] for rank in range(3)}
    for rank, watch in enumerate(watches):
        watch.report_to(lost[rank].append)
        if rank != gone:
            watch.start()
    others = [rank for rank in range(3) if rank != gone]
    move_on(clock, [watches[rank] for rank in others], until=lambda: all(lost[rank] for rank in others))
    assert all(str(lost[rank][0]).startswith(f"rank {gone}: no sign of life for 60 s") for rank in others)
    for rank in others:
        watches[rank].close()


@pytest.mark.fault
def test_a_broken_connection_is_blamed_on_the_rank_that_failed():
    with worlds(2) as all_of_them:
        first, second = all_of_them
        second.fail("drafter/0 failed: OutOfMemoryError: planted")
        assert str(first.watch.blame("Connection closed by peer")).startswith("rank 1: drafter/0 failed")


@pytest.mark.fault
def test_behind_a_broken_connection_nobody_waits_long_for_a_sign_of_life():
    """Rank 2 notices, rank 1 is the one that is gone, and only rank 0 looks after it."""
    board, clock = Board(dist.HashStore()), Clock()
    watches = [
        RankWatch(board, rank, 3, TIMEOUT_S, period_s=PERIOD_S, clock_s=clock.seconds) for rank in range(3)
    ]
    for rank in (0, 2):
        watches[rank].start()

    def body(rank):
        if rank == 2:
            return watches[2].blame("Connection closed by peer")
        return move_on(clock, [watches[0], watches[2]], until=lambda: watches[2].failure)

    found = on_each(3, lambda rank: body(rank) if rank else None)
    assert str(found[2]).startswith("rank 1: no sign of life for 3 s")
    for rank in (0, 2):
        watches[rank].close()


@pytest.mark.fault
def test_a_rank_that_failed_before_anybody_listened_is_told_of():
    with worlds(2) as all_of_them:
        first, second = all_of_them
        second.fail("planted")
        wait_until(lambda: first.watch.failure)
        lost = []
        first.watch.report_to(lost.append)
        assert [type(error) for error in lost] == [RankFailed]
        with pytest.raises(RankFailed, match="rank 1: planted"):
            first.of_first("what rank 1 would have said")


def test_different_settings_name_both_values():
    with worlds(2) as all_of_them:
        first, second = all_of_them
        first.check_same({"train.lr": 0.1, "train.betas": (0.9, 0.99), "a": 1}, "the ranks' settings differ")
        second.check_same({"train.lr": 0.1, "train.betas": [0.9, 0.99], "a": 1}, "the ranks' settings differ")
        words = r"settings differ: train.lr is 0.1 on rank 0 and 0.2 on rank 1$"
        with pytest.raises(UserError, match=words):
            second.check_same(
                {"train.lr": 0.2, "train.betas": (0.9, 0.99), "a": 1}, "the ranks' settings differ"
            )


def test_ranks_leave_together_and_the_last_message_is_heard():
    heard = []
    with worlds(3) as all_of_them:
        all_of_them[0].watch.report_to(heard.append, lambda *message: heard.append(message))

        def body(rank):
            world = all_of_them[rank]
            if rank:
                wait_until(lambda: world.board.look("left/0"))
                world.post.send("last", rank)
            world.leave()

        on_each(3, body)
    assert sorted(heard) == [(1, "last", 1), (2, "last", 2)]
