"""Slices without torch: what a valid one is, and how it is printed."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from rkmate.codegen.printer import print_listing, print_slice
from rkmate.codegen.slices import Copy, Drop, Enter, Free, Function, Listing, Run, Slice, Write
from rkmate.errors import GraphError
from rkmate.ir.calls import Argument, Call, Constant, Held, Method, Name, Operator, Writer


def _called(operator: str, *arguments: str | Argument) -> Call:
    """A call of an operator on values by their names, or on other arguments."""
    return Call(Operator(f"torch.ops.{operator}"),
                tuple([Name(a) if isinstance(a, str) else a for a in arguments]))


def _transposed(of: Argument) -> Call:
    return Call(Method("t"), (of,))


FORWARD = Slice(
    "block_A_forward", ("x",), (), ("weight",),
    (Run(_called("aten.mm.default", "x", _transposed(Name("weight"))), ("mm",)),
     Free(("x",), 2**20),
     Run(_called("aten.bernoulli.default", "mm"), ("bernoulli",), draws="remember", state=0),
     Run(_called("aten.native_dropout.default", "mm", Constant("0.5"), Constant("True")), ("dropout_a", None),
         several=True, over="mm"),
     Free(("mm",), 0)),
    ("bernoulli", "dropout_a"), 1)
AGAIN = Slice(
    "block_A_backward", (), ("x",), ("weight",),
    (Run(_called("aten.mm.default", "x", "weight"), ("mm",), again=2e-3),
     Run(_called("mine.pair.default", "mm"), ("pair_a", None, "pair_c"), several=True),
     Run(_called("mine.note.default", "pair_a"), (None,)),
     Free(("mm", "pair_a"), 100)),
    ("pair_c",))
LISTING = Listing("a plan", (
    Function("forward", "the forward", (
        Enter(FORWARD, ("in",), (), ("param:weight",), ("b", "d"), ("drop",)),
        Drop(("b",)), Write("buffer:n", Held("d"))), (Held("d"),)),
    Function("backward_0", "block 0", (
        Enter(AGAIN, (), ("grad",), ("param:weight",), ("c",), ()),), (Held("c", "ends"),), ("c",))),
    ("grad",))


def test_a_slice_is_printed() -> None:
    assert print_slice(FORWARD.verify(), "f") == """\
def f(env, take, give, sources, rng):
    x, = env.take(take)
    weight, = env.sources(sources)
    mm = aten.mm.default(x, weight.t())
    del x                                                                         # forget      1.0 MiB
    with env.remember(rng[0]): bernoulli = aten.bernoulli.default(mm)
    dropout_a = aten.native_dropout.default(mm, 0.5, True)[0]                     # in place
    del mm
    env.give(give, bernoulli, dropout_a)"""


def test_what_is_recomputed_and_what_goes_at_once_is_printed() -> None:
    found = [" ".join(line.split()) for line in print_slice(AGAIN.verify(), "g").splitlines()]
    assert found[3:] == [
        "mm = aten.mm.default(x, weight) # recompute 2.00 ms",
        "pair_a, _, pair_c = mine.pair.default(mm)",
        "del _ # forget",
        "mine.note.default(pair_a)",
        "del mm, pair_a # forget 0.1 KiB",
        "env.give(give, pair_c)"]


def test_equal_slices_are_one_function() -> None:
    forward = LISTING.functions[0]
    twice = Function("forward", "", (*forward.body[:1], *forward.body[:1],
                                     Enter(replace(FORWARD, body=(*FORWARD.body[:1], Free(("x",), 5),
                                                                  *FORWARD.body[2:])),
                                           ("in",), (), ("p",), ("b", "d"), ("drop",))), ())
    text = print_listing(replace(LISTING, functions=(twice,))).text
    assert text.count("def block_A_forward_1(") == text.count("def block_A_forward_2(") == 1
    assert text.count("    block_A_forward_1(env") == 2
    assert text.count("    block_A_forward_2(env") == 1


def test_the_functions_of_a_step_are_printed() -> None:
    printed = print_listing(LISTING)
    text = printed.text
    compile(text, "step", "exec")
    assert printed.slices == ("block_A_forward_1", "block_A_backward_1")
    assert text.endswith("""\
def forward(env):  # the forward
    block_A_forward_1(env, take=('in',), give=('b', 'd'), sources=('param:weight',), rng=('drop',))
    env.drop(('b',))
    env.write('buffer:n', env['d'])
    return [env['d']]


def backward_0(env):  # block 0
    block_A_backward_1(env, read=('grad',), give=('c',), sources=('param:weight',))
    return [env.pop('c')]
""")


def _first(**changes: object) -> Slice:
    run = replace(FORWARD.body[0], **changes)  # type: ignore[arg-type]
    return replace(FORWARD, body=(run, *FORWARD.body[1:]))


@pytest.mark.parametrize("broken", [
    _first(call=_called("aten.mm.default", "y", "weight")),     # reads what is not there
    _first(call=_called("aten.mm.default", "x", (_transposed(Name("y")),))),
    _first(makes=("x",)),                                       # over what is there
    _first(makes=("take",)),                                    # a reserved word
    _first(makes=("a b",)),
    _first(makes=("mm", None)),                                 # two results of one
    _first(draws="replay"),                                     # without a state
    _first(over="weight"),                                      # overwritten, and still there
    replace(FORWARD, take=(), read=("x",)),                     # ends what stays
    replace(FORWARD, sources=("x",)),                           # one name for two
    replace(FORWARD, give=("bernoulli",)),                      # a value is lost
    replace(FORWARD, give=("bernoulli", "dropout_a", "dropout_a")),
    replace(FORWARD, states=2),
    replace(FORWARD, body=FORWARD.body[2:]),                    # reads what nothing makes
    replace(FORWARD, body=(*FORWARD.body, Free(("mm",), 0))),   # ends twice
])
def test_a_broken_slice_is_refused(broken: Slice) -> None:
    with pytest.raises(GraphError):
        broken.verify()


def test_the_environment_has_what_is_read() -> None:
    forward, backward = LISTING.functions
    body = (forward.body[0], forward.body[0], *forward.body[1:])
    with pytest.raises(GraphError, match="in ends, which is not there"):
        replace(LISTING, functions=(replace(forward, body=body), backward)).verify()
    given = replace(LISTING, functions=(replace(forward, body=forward.body[1:]), backward))
    with pytest.raises(GraphError, match="b ends"):
        given.verify()
    with pytest.raises(GraphError, match="block_A_backward reads grad"):
        Listing("", (Function("forward", "", (), ()), backward), ()).verify()
    call = replace(backward.body[0], give=())  # type: ignore[type-var]
    with pytest.raises(GraphError, match="other values"):
        replace(LISTING, functions=(Function("forward", "", (), ()),
                                    replace(backward, body=(call,)))).verify()  # type: ignore[arg-type]


def test_no_torch_is_needed() -> None:
    code = "import sys, rkmate.codegen.printer, rkmate.codegen.liveness; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _copied(*forward: Copy | Drop | Write | Enter, backward: tuple[Copy | Drop | Enter, ...] = (),
            returns: tuple[Argument, ...] = ()) -> Listing:
    """X is made, then what is given."""
    make = Slice("a", (), (), (), (Run(_called("aten.f.default"), ("x",)),), ("x",))
    made = Enter(make, (), (), (), ("x",), ())
    return Listing("", (Function("forward", "", (made, *forward), returns),
                        Function("backward_0", "", backward, ())), ())


def _reading(key: str, *, end: bool = False, give: bool = False) -> Enter:
    step = Run(_called("aten.g.default", "x"), ("y" if give else None,))
    body = (step, Free(("x",), 1)) if end else (step,)
    part = Slice("b", ("x",) if end else (), () if end else ("x",), (), body, ("y",) if give else ())
    return Enter(part, (key,) if end else (), () if end else (key,), (), (key,) if give else (), ())


OUT, LEAVE, IN, ARRIVE = (Copy(word, "x") for word in  # type: ignore[arg-type]
                          ("copy_out", "leave", "copy_in", "arrive"))


def test_a_value_goes_away_and_comes_back_twice() -> None:
    _copied(OUT, _reading("x"), LEAVE, backward=(
        IN, ARRIVE, _reading("x", end=True), IN, ARRIVE, _reading("x", end=True))).verify()


@pytest.mark.parametrize(("listing", "message"), [
    (_copied(LEAVE), "leave of x, out of turn"),
    (_copied(IN), "copy_in of x, out of turn"),
    (_copied(OUT, OUT), "copy_out of x, out of turn"),
    (_copied(OUT, LEAVE, LEAVE), "leave of x, out of turn"),
    (_copied(OUT, IN), "copy_in of x, out of turn"),
    (_copied(OUT, LEAVE, ARRIVE), "arrive of x, out of turn"),
    (_copied(OUT, LEAVE, IN, IN), "copy_in of x, out of turn"),
    (_copied(OUT, LEAVE, _reading("x")), "reads x, which is not there"),
    (_copied(OUT, LEAVE, IN, _reading("x")), "reads x, which has not arrived"),
    (_copied(OUT, LEAVE, IN, _reading("x", end=True)), "reads x, which has not arrived"),
    (_copied(OUT, LEAVE, IN, Drop(("x",))), "x ends while it is copied"),
    (_copied(OUT, Drop(("x",))), "x ends while it is copied"),
    (_copied(OUT, _reading("x", end=True)), "x ends while it is copied"),      # and may be overwritten
    (_copied(OUT, _reading("x", give=True)), "b makes x while it is copied"),
    (_copied(OUT, LEAVE, Write("buffer:n", Held("x"))), "reads x, which is not there"),
    (_copied(OUT, LEAVE, IN, Write("buffer:n", _transposed(Held("x")))), "reads x, which has not arrived"),
    (_copied(OUT, LEAVE, returns=(Constant("None"), _transposed(Held("x")))), "reads x, which is not there"),
    (_copied(OUT, returns=(Held("x"),)), "returns x, which is copied away"),
    (_copied(backward=(OUT,), returns=(Held("x", "ends"),)), "copy_out of x, which the caller has"),
])
def test_copies_that_cannot_be(listing: Listing, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        listing.verify()


def test_an_operator_is_bound_once_under_a_name_that_no_value_has() -> None:
    class Doubled:
        name, prefix, imports = "doubled", "tiled", ("import math",)

        def function(self, name: str, write: Writer) -> str:
            return f"def {name}(x):\n    return {write(_called('aten.mul.Tensor', 'x', Constant('2')))}\n"

    own = Doubled()
    part = Slice("a", ("x", "aten_mul_Tensor"), (), (), (
        Run(_called("aten.mul.Tensor", "x", "aten_mul_Tensor"), ("y",)),
        Run(Call(own, (Name("y"),)), ("z",)), Free(("x", "aten_mul_Tensor", "y"), 8)), ("z",))
    call = Enter(part.verify(), ("a", "b"), (), (), ("c",), ())
    text = print_listing(Listing("", (Function("forward", "", (call, call), ()),), ())).text
    assert """
import torch
import math

aten_mul_Tensor_ = torch.ops.aten.mul.Tensor

def tiled_doubled(x):
    return aten_mul_Tensor_(x, 2)


def a_1(env, take, give):
    x, aten_mul_Tensor = env.take(take)
    y = aten_mul_Tensor_(x, aten_mul_Tensor)
    z = tiled_doubled(y)
""" in text
    assert text.count("torch.ops.") == 1


def test_slices_are_equal_where_all_their_values_are() -> None:
    def one(number: str) -> Slice:
        return _first(call=_called("aten.mm.default", "x", "weight", Constant(number)))

    assert one("1") == one("1") and hash(one("1")) == hash(one("1"))
    assert one("1") != one("1.0") and len({one("1"), one("1.0"), one("True")}) == 3
