"""The table of bad inputs: each gets an error of this package that names what is wrong."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

import rkmate
from tests.options import options_of

X = torch.randn(4, 8)


def _wrap(model: Any = None, args: Any = (X,), kwargs: Any = None, **options: Any) -> Any:
    options.setdefault("budget", 1.0)
    return rkmate.wrap(model if model is not None else nn.Linear(8, 8), args, kwargs, progress=False,
                       **options_of(costs=options.pop("costs", "analytic"), **options))


def _hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8))
    model[0].register_full_backward_hook(lambda *a: None)
    return model


def _frozen() -> nn.Module:
    return nn.Linear(8, 8).requires_grad_(False)


class _Raises(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("the model's own complaint")


class _Drawing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + torch.rand(8, generator=torch.Generator().manual_seed(1)))


class _Adding(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).index_add(0, torch.tensor([0, 1, 0, 1]), x.half())


class _Resizing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = super().forward(x)[None, None]
        height, width = 2 + (image[0, 0, :2, 0] > 0).long()
        return nn.functional.interpolate(image, size=(height, width), mode="bilinear")


class _Multiplied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, n: int) -> torch.Tensor:
        ctx.n = n
        return x * n

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.n, None


class _Counting(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        out: torch.Tensor = _Multiplied.apply(x, (x > 0).sum().item())
        return out


class _Timed(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.times = {"begun": (time.perf_counter(), self.in_features)}
        return super().forward(x)


class _Packed(nn.LSTM):
    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> Any:  # type: ignore[override]
        return super().forward(nn.utils.rnn.pack_padded_sequence(x, lengths))[0].data


class _Backward(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        super().forward(x).sum().backward()
        return super().forward(x)


def _positive(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0]


class _Picking(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _positive(super().forward(x)).sum()


class _Asserting(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        assert x.abs().max().item() < 1e9
        return x


class _Sparse(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(self.weight.to_sparse(), x.T)


class _AskingSparse(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        taken = self.weight.to_sparse()
        return x if taken._nnz() == 0 else torch.sparse.mm(taken, x.T)


class _Merged(nn.Linear):
    merged_adapters = ("default",)


class _Leaving(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        with ExitStack() as stack:
            stack.callback(bool, x.sum() > 0)
        return x


class _Assigning(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = 0.9 * self.weight.data
        return super().forward(x)


class _Freezing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.requires_grad_(False)
        x = super().forward(x)
        self.weight.requires_grad = True
        return x


class _Threaded(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with ThreadPoolExecutor(1) as threads:
            return threads.submit(super().forward, x).result()


def _inside_grad() -> Any:
    module = _wrap()
    return torch.func.grad(lambda x: module(x).sum())(X)


A, C = rkmate.ArgumentError, rkmate.CaptureError
TABLE: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "no module": (A, "torch.nn.Module", lambda: _wrap("model")),
    "a function": (A, "torch.nn.Module", lambda: _wrap(lambda x: x)),
    "args no tuple": (A, "args is Tensor", lambda: _wrap(args=X)),
    "kwargs no mapping": (A, "kwargs is list", lambda: _wrap(kwargs=[X])),
    "budget missing": (A, "budget or a plan", lambda: _wrap(budget=None)),
    "budget zero": (A, "budget is 0", lambda: _wrap(budget=0)),
    "budget negative": (A, "budget is -5", lambda: _wrap(budget=-5)),
    "budget above one": (A, "budget is 1.5", lambda: _wrap(budget=1.5)),
    "budget NaN": (A, "budget is nan", lambda: _wrap(budget=float("nan"))),
    "budget infinite": (A, "budget is inf", lambda: _wrap(budget=float("inf"))),
    "budget bool": (A, "budget is True", lambda: _wrap(budget=True)),
    "budget list": (A, r"budget is \[1\]", lambda: _wrap(budget=[1])),
    "budget unit": (A, "unit 'mx'", lambda: _wrap(budget="5MX")),
    "budget words": (A, "budget is 'a lot'", lambda: _wrap(budget="a lot")),
    "budget too small": (rkmate.InfeasibleBudget, "smallest budget", lambda: _wrap(budget=1)),
    "planner unknown": (A, "planner is 'best'", lambda: _wrap(planner="best")),
    "costs unknown": (A, "costs is 'guessed'", lambda: _wrap(costs="guessed")),
    "on_new_shape unknown": (A, "on_new_shape is 'ignore'", lambda: _wrap(on_new_shape="ignore")),
    "plan of a wrong type": (A, "plan is dict", lambda: _wrap(budget=None, plan={})),
    "plan of another model": (rkmate.PlanError, "another model", lambda: _wrap(
        nn.Linear(8, 9), budget=None, plan=_wrap().plan)),
    "plan file missing": (rkmate.PlanError, "cannot be read", lambda: rkmate.Plan.load("nowhere.json")),
    "too few arguments": (A, "do not fit Linear.forward", lambda: _wrap(args=())),
    "too many arguments": (A, "do not fit Linear.forward", lambda: _wrap(args=(X, X))),
    "unknown keyword": (A, "do not fit Linear.forward", lambda: _wrap(kwargs={"mask": X})),
    "wrong shape": (C, "Linear cannot be captured", lambda: _wrap(args=(X[:, :3],))),
    "wrong dtype": (C, "does not run on the sample", lambda: _wrap(args=(X.long(),))),
    "half precision": (C, "gets tensors of the types float32 and bfloat16, and needs one", lambda: _wrap(
        nn.Linear(8, 8, bias=False).to(torch.bfloat16))),
    "sums of another type": (C, "super.*: aten.index_add.default gets", lambda: _wrap(_Adding(8, 8))),
    "not a tensor": (C, "Linear cannot be captured", lambda: _wrap(args=("text",))),
    "nothing to train": (A, r"None of its 2 parameters .*requires_grad_\(\)", lambda: _wrap(_frozen())),
    "merged adapters": (A, r"unmerge_adapter\(\)", lambda: _wrap(_Merged(8, 8).requires_grad_(False))),
    "no parameters": (A, "no parameters: give it an input", lambda: _wrap(nn.Tanh())),
    "nothing computed": (A, "computes nothing",
                         lambda: _wrap(nn.Identity(), (torch.randn(4, 8, requires_grad=True),))),
    "no tensor returned": (A, "nothing to train. 2 of its 2 .*'weight'.*return a tensor",
                           lambda: _wrap(_Shape(8, 8))),
    "forward raises": (C, "own complaint.*without rkmate, correct its inputs",
                       lambda: _wrap(_Raises(8, 8))),
    "no forward": (C, "forward", lambda: _wrap(nn.Module())),
    "lazy module": (A, "no shape yet", lambda: _wrap(nn.LazyLinear(3))),
    "meta device": (A, "meta device", lambda: _wrap(nn.Linear(8, 8, device="meta"))),
    "sparse input": (C, "sparse", lambda: _wrap(args=(X.to_sparse(),))),
    "nested input": (C, "is nested", lambda: _wrap(args=(torch.nested.nested_tensor(
        [X, X[:2]], layout=torch.jagged),))),
    "a generator of its own": (C, r"generator=torch.* outside of the forward", lambda: _wrap(_Drawing(8, 8))),
    "a time": (C, r"assigns times at .*\(a time, or", lambda: _wrap(_Timed(8, 8))),
    "a branch in a submodule": (C, "plans the parts of such a model", lambda: rkmate.plan(
        nn.Sequential(nn.Linear(8, 8), _Asserting(8, 8)), (X,), budget=0.5)),
    "packed sequence": (C, "lengths of a packed sequence", lambda: _wrap(
        _Packed(8, 8), (torch.randn(3, 2, 8), torch.tensor([3, 2])))),
    "packed sequence as an argument": (C, "lengths of a packed sequence", lambda: _wrap(
        nn.GRU(8, 8), (nn.utils.rnn.pack_sequence([torch.randn(3, 8), torch.randn(2, 8)]),))),
    "rows that a mask picks": (C, r"return x\[x > 0\]: .* Compute all rows", lambda: _wrap(_Picking(8, 8))),
    "sizes of an image in a tensor": (C, "interpolate.* A value of a tensor decides .* pass what was decided",
                                      lambda: _wrap(_Resizing(8, 8))),
    "a number for a custom function": (C, "_Multiplied takes a number that the forward reads from a tensor",
                                       lambda: _wrap(_Counting(8, 8))),
    "an assertion": (C, r"compare the tensor itself .*python -O", lambda: _wrap(_Asserting(8, 8))),
    "sparse intermediate": (C, "makes a tensor with the layout torch.sparse_coo", lambda: _wrap(
        _Sparse(8, 8))),
    "number of values of a sparse tensor": (C, r"== 0 else .* torch.sparse_coo \(_nnz\)", lambda: _wrap(
        _AskingSparse(8, 8))),
    "a value at the end of a block": (C, r"with ExitStack\(\) as stack", lambda: _wrap(_Leaving(8, 8))),
    "data that is assigned": (C, "assigns to the .data of a tensor", lambda: _wrap(_Assigning(8, 8))),
    "a parameter that is frozen for a while": (C, "sets requires_grad of the parameter 'weight'",
                                               lambda: _wrap(_Freezing(8, 8))),
    "an iterator of tensors": (C, "object of the type generator, which cannot be copied", lambda: _wrap(
        args=((x for x in [X]),))),
    "another thread": (C, "compute in the thread of the caller", lambda: _wrap(_Threaded(8, 8))),
    "backward in the forward": (C, r"torch\.autograd\.grad", lambda: _wrap(_Backward(8, 8))),
    "another module": (C, "make it a submodule", lambda: _wrap(args=(X, nn.Linear(8, 8)))),
    "generator": (C, "Generator", lambda: _wrap(args=(X, torch.Generator()))),
    "backward hooks": (C, "module backward hooks", lambda: _wrap(_hooked())),
    "torch.func": (A, "torch.func", _inside_grad),
}


class _Shape(nn.Linear):
    def forward(self, x: torch.Tensor) -> int:  # type: ignore[override]
        return x.shape[0]


@pytest.mark.filterwarnings("ignore::rkmate.RkmateWarning")      # a lazy module has a hook
@pytest.mark.parametrize("case", TABLE)
def test_bad_input(case: str) -> None:
    kind, words, call = TABLE[case]
    with pytest.raises(kind, match=words) as caught:
        call()
    assert isinstance(caught.value, rkmate.RkmateError)


def test_the_table_is_long_enough() -> None:
    assert len(TABLE) >= 25


def _plan(model: nn.Module, args: tuple[Any, ...]) -> None:
    rkmate.plan(model, args, budget=1.0, settings=rkmate.Settings(costs="analytic"), progress=False)


def _tradeoff(model: nn.Module, args: tuple[Any, ...]) -> None:
    rkmate.tradeoff(model, args, settings=rkmate.Settings(costs="analytic"), progress=False)


def _compare(model: nn.Module, args: tuple[Any, ...]) -> None:
    rkmate.compare(model, args, settings=rkmate.Settings(costs="analytic"), progress=False)


def _largest_batch(model: nn.Module, args: tuple[Any, ...]) -> None:
    rkmate.max_batch_size(model, lambda n: args, device_memory="1GiB",
                          settings=rkmate.Settings(costs="analytic"), progress=False)


@pytest.mark.parametrize("call", [_plan, _tradeoff, _compare, _largest_batch])
@pytest.mark.parametrize(("kind", "words", "model", "args"), [
    (C, "module backward hooks", _hooked, (X,)),
    (C, "sparse", lambda: nn.Linear(8, 8), (X.to_sparse(),)),
    (C, "Generator", lambda: nn.Linear(8, 8), (X, torch.Generator()))])
def test_other_calls_refuse_what_wrap_refuses(
        call: Callable[[nn.Module, tuple[Any, ...]], None], kind: type[Exception], words: str,
        model: Callable[[], nn.Module], args: tuple[Any, ...]) -> None:
    with pytest.raises(kind, match=words):
        call(model(), args)
