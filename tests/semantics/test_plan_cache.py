"""The plans of a wrapped module: found without waiting for threads that plan."""

from __future__ import annotations

import threading

import torch
from torch import nn

import rkmate
from rkmate.support.planning_lock import planning_lock


def test_a_planned_model_does_not_wait_for_a_thread_that_plans() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    x = torch.randn(4, 8)
    module = rkmate.wrap(model, (x,), budget=1.0, settings=rkmate.Settings(costs="analytic"), progress=False)
    planning, stepped = threading.Event(), threading.Event()

    def plans() -> None:
        with planning_lock:
            planning.set()
            assert stepped.wait(60), "the planned model waited"

    def steps() -> None:
        assert planning.wait(60)
        module(x).sum().backward()
        assert module.plan.overhead == 0
        stepped.set()

    failed: list[BaseException] = []

    def run(act: object) -> None:
        try:
            act()  # type: ignore[operator]
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(act,)) for act in (plans, steps)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failed and stepped.is_set()
    assert model[0].weight.grad is not None
