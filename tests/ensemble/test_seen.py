"""Examples that come again are noticed by what a model is given."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from hdet.core.rules.trial.rises import MANY
from hdet.measure.seen import Seen, part_of_data
from tests.harness import Run, batch, losses_of, model

from ..distributed import run_ranks
from .test_trials import SCORES, STEPS, tries


class Net(nn.Module):
    """Takes anything."""

    def forward(self, *args: Any, **kwargs: Any) -> None:
        pass


def shares(*steps: Any, seen: Seen | None = None) -> tuple[float, float]:
    """(seen again, examples). ``steps``: lists of calls, each with a function that makes it. What is seen again among the first of ``seen`` counts
    twice."""
    seen, net = seen or Seen(1), Net()
    for calls in steps:
        with seen.looking_at(net):
            for call in calls:
                call(net)
    net(torch.randn(99, 9))  # nobody looks
    again, examples, *_ = seen.share()
    return again * seen._window, examples


def numbers(*rows: int, size: int = 5) -> torch.Tensor:
    """(rows, size): a row for each of these numbers, which are its seed."""
    return torch.stack([torch.randn(size, generator=torch.Generator().manual_seed(row)) for row in rows])


def test_examples_are_known_again_whatever_their_place_and_company() -> None:
    one, two = numbers(1, 2, 3, 4), numbers(9, 3, 8)
    assert shares([lambda net: net(one)], [lambda net: net(two)]) == (2, 7)
    seen = Seen(1)
    shares([lambda net: net(one)], seen=seen)
    assert shares([lambda net: net(two)], [lambda net: net(two)], seen=seen) == (2, 6)
    assert shares(seen=seen) == (0, 0)


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16, torch.int64, torch.uint8])
def test_of_any_kind_and_however_they_are_given(kind: torch.dtype) -> None:
    rows = (100 * numbers(1, 2, 3, size=64)).abs().to(kind)
    masked = {"ids": rows[1:], "mask": rows[1:] > 0}
    assert shares([lambda net: net(rows[:2])], [lambda net: net(masked)]) == (0, 4), "a mask more: another example"
    again = [lambda net: net(ids=rows.clone())], [lambda net: net((rows.view(3, 8, 8),))]
    assert shares([lambda net: net({"ids": rows})], *again) == (12, 9)


def test_what_is_given_twice_in_a_step_counts_once() -> None:
    one = numbers(1, 2, 3)
    assert shares([lambda net: net(one), lambda net: net(one)], [lambda net: net(numbers(4, 5))]) == (0, 5)


def test_what_is_the_same_in_each_call_is_no_example_unless_all_is() -> None:
    mask, one, two = numbers(7, 8, 9), numbers(1, 2, 3, 4), numbers(4, 5, 6, 1)
    for order in (lambda x: (mask, x), lambda x: (x, mask)):
        steps = [[lambda net, x=x, order=order: net(*order(x))] for x in (one, two)]
        assert shares(*steps) == (4, 8)
    assert shares([lambda net: net(mask, one)], [lambda net: net(mask, one)])[1] > 0  # a whole set in each step


@pytest.mark.parametrize("few", [torch.arange(6), torch.randn(6), torch.tensor(3.0), "no tensor", torch.empty(0, 4)])
def test_what_says_too_little_of_an_example_is_passed_over(few: Any) -> None:
    assert shares([lambda net: net(few)], [lambda net: net(few)]) == (0, 0)


def test_a_copy_of_a_model_that_is_looked_at_has_no_hook_that_does_anything(tmp_path: Path) -> None:
    net, seen = Net(), Seen(1)
    with seen.looking_at(net):
        torch.save(net, tmp_path / "net.pt")
        copies = [copy.deepcopy(net), torch.load(tmp_path / "net.pt", weights_only=False)]
        for other in copies:
            other(numbers(1, 2))
            assert [vars(hook).keys() for hook in other._forward_pre_hooks.values()] == [{}.keys()], "it would keep what the copy is given"
    assert seen.share() == (0, 0, 0, 0)


def test_few_steps_are_not_enough_to_know_what_comes_by_chance() -> None:
    """As where a run is resumed, which has no first trial."""
    generator, net, seen = torch.Generator().manual_seed(0), Net(), Seen()
    for _ in range(12):
        for _ in range(3):
            with seen.looking_at(net):
                net(of_users(generator, 512, 300, 300))
        assert part_of_data(*seen.share()) == 0
    assert seen._window >= 16


def of_users(generator: torch.Generator, rows: int, users: int = 6000, things: int = 400) -> torch.Tensor:
    """(rows, 2), things as frequent as words are: many pairs come again by chance."""
    return torch.stack(
        [torch.randint(users, (rows,), generator=generator), (things ** torch.rand(rows, generator=generator)).long() - 1], 1
    )


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("times", [0, 3, 10])
def test_examples_of_few_numbers_come_again_if_they_do_more_than_by_chance(times: int, apart: bool) -> None:
    """``times``: in 10 000 steps of 64, 0: all are new."""
    generator, net, seen = torch.Generator().manual_seed(0), Net(), Seen()
    rows = of_users(generator, 640_000 // times) if times else torch.empty(0, 2)
    orders = [torch.randperm(len(rows), generator=generator) for _ in range(times)]

    def step(number: int) -> None:
        epoch, at = divmod(number, len(rows) // 64) if times else (0, 0)
        given = rows[orders[epoch][at * 64 :][:64]] if times else of_users(generator, 64)
        with seen.looking_at(net):
            net(*given.unbind(1)) if apart else net(given)

    def part(first: int, last: int, stride: int = 1) -> float:
        for number in range(first, last, stride):
            step(number)
        found = seen.share()
        assert not first or found[2] * 42 > 10
        return 10_000 * part_of_data(*found)

    assert part(0, 42) == 0 == part(600, 800, 8)
    assert part(4000, 4400, 8) == pytest.approx(times, rel=0.3)


def test_a_model_that_was_compiled_in_place_is_not_hooked() -> None:
    net, seen, calls = Net(), Seen(), []
    net.compile(backend=lambda graph, inputs: calls.append(graph) or graph.forward)
    for _ in range(2):
        with seen.looking_at(net):
            assert not net._forward_pre_hooks
    assert seen.share() == (0, 0, 0, 0)


def test_a_large_example_is_told_by_some_thousand_of_its_numbers() -> None:
    one = numbers(1, 2, size=40_000)
    other = one.clone()
    other[0] += 1
    assert shares([lambda net: net(one)], [lambda net: net(other)]) == (2, 4)


# -- in a run ------------------------------------------------------------------------------------------------------------------


def part(examples: int, rank: int = 0, **settings: Any) -> list[float]:
    """By trial: the part of the data that a step takes, of so many batches that come again and again."""
    run = tries(rank, net=model(), multiples=(1.0, 2.0), data=lambda key: batch(rank + 100 * (key // 100 % examples)), **settings)
    run.steps(2 * (STEPS + SCORES))
    return [row[-2] for told in run.controller.told for row in told or ()]


def test_a_trial_says_which_part_of_the_data_a_step_takes() -> None:
    window = STEPS + SCORES
    assert part(10**6) == [0, 0]
    first, second = part(7)  # all of them come twice in a trial
    assert (first, second) == (pytest.approx(2 * 0.5 / window), pytest.approx(1 / window))


def _ranks(rank: int, world: int) -> list[float]:
    return part(7, rank, gradients="local", moments="keep")


def test_each_rank_looks_at_its_own_examples() -> None:
    one, other = run_ranks(_ranks, 2)  # [trial, replica]: of each replica the part that its own steps take
    assert one == other == pytest.approx(2 * part(7))


def test_a_loop_may_say_how_often_it_sees_its_examples() -> None:
    net = model()
    run = Run(net=net, controller=lambda it: hdet.AutoLR(it, budget=0.3), closure=True, lr=1e-5, total=1000, epochs=50)
    run.losses = lambda data: losses_of(net, data)  # data that is new in each step, for which the rate would be raised (below)
    run.steps()
    assert run.ensemble.corrections["lr"] == 1 and "50 times" in run.controller.report()


def test_what_is_no_number_of_epochs_is_refused() -> None:
    with pytest.raises(ValueError, match="epochs"):
        Run(net=model(), controller=hdet.AutoLR, total=1000, epochs=-1)


@pytest.mark.parametrize(("examples", "moves"), [(64, False), (10**9, True)])
def test_a_rate_that_is_far_too_low_is_raised_only_where_examples_are_new(examples: int, moves: bool) -> None:
    net = model()
    run = Run(
        net=net,
        controller=lambda it: hdet.AutoLR(it, budget=0.3),
        closure=True,
        lr=1e-5,
        total=1000,
        data=lambda key: batch(key % examples),
    )
    run.losses = lambda data: losses_of(net, data)
    run.steps()
    rule = run.controller.rule
    assert (rule.epochs > MANY) == (not moves) and (run.ensemble.corrections["lr"] > 1) == moves
    assert ("judge=" in run.controller.report()) == (not moves)


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize(("examples", "stays"), [(400, False), (10**9, True)])
def test_a_raised_rate_is_taken_back_in_the_second_epoch(examples: int, stays: bool, shuffled: bool) -> None:
    """It begins between the trials, and nothing but the rate is touched."""
    net = model()

    def data(key: int) -> Any:
        epoch, at = divmod(key // 100, examples)
        return batch(int(torch.randperm(examples, generator=torch.Generator().manual_seed(epoch))[at]) if shuffled and not stays else at)

    run = Run(net=net, controller=lambda it: hdet.AutoLR(it, budget=0.1), closure=True, lr=1e-5, total=3000, data=data)
    run.losses = lambda data: losses_of(net, data)
    run.steps(900)
    rule = run.controller.rule
    assert max(peak for _, peak in rule.peaks) > 1e-5, "it was raised in the first epoch"
    assert (run.ensemble.corrections["lr"] > 1) == stays == (rule.epochs == 0)
