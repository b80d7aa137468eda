"""Slices without torch: what a valid one is, and how it is printed."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from rkmate.codegen.printer import print_listing, print_slice
from rkmate.codegen.slices import Call, Copy, Drop, Free, Function, Listing, Run, Slice, Write
from rkmate.errors import GraphError

FORWARD = Slice(
    "block_A_forward", ("x",), (), ("weight",),
    (Run("aten.mm.default(x, weight.t())", ("x", "weight"), ("mm",)),
     Free(("x",), 2**20),
     Run("aten.bernoulli.default(mm)", ("mm",), ("bernoulli",), draws="remember", state=0),
     Run("aten.native_dropout.default(mm, 0.5, True)", ("mm",), ("dropout_a", None), several=True, over="mm"),
     Free(("mm",), 0)),
    ("bernoulli", "dropout_a"), 1)
AGAIN = Slice(
    "block_A_backward", (), ("x",), ("weight",),
    (Run("aten.mm.default(x, weight)", ("x", "weight"), ("mm",), again=2e-3),
     Run("mine.pair.default(mm)", ("mm",), ("pair_a", None, "pair_c"), several=True),
     Run("mine.note.default(pair_a)", ("pair_a",), (None,)),
     Free(("mm", "pair_a"), 100)),
    ("pair_c",))
LISTING = Listing("a plan", {"aten": "aten", "mine": "mine"}, (
    Function("forward", "the forward", (
        Call(FORWARD, ("in",), (), ("param:weight",), ("b", "d"), ("drop",)),
        Drop(("b",)), Write("buffer:n", "env['d']")), ("env['d']",)),
    Function("backward_0", "block 0", (
        Call(AGAIN, (), ("grad",), ("param:weight",), ("c",), ()),), ("env.pop('c')",), ("c",))), ("grad",))


def test_a_slice_is_printed() -> None:
    assert print_slice(FORWARD.verify(["aten"]), "f") == """\
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
    found = [" ".join(line.split()) for line in print_slice(AGAIN.verify(["aten", "mine"]), "g").splitlines()]
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
                                     Call(replace(FORWARD, body=(*FORWARD.body[:1], Free(("x",), 5),
                                                                 *FORWARD.body[2:])),
                                          ("in",), (), ("p",), ("b", "d"), ("drop",))), ())
    text = print_listing(replace(LISTING, functions=(twice,)))
    assert text.count("def block_A_forward_1(") == text.count("def block_A_forward_2(") == 1
    assert text.count("    block_A_forward_1(env") == 2
    assert text.count("    block_A_forward_2(env") == 1


def test_the_functions_of_a_step_are_printed() -> None:
    text = print_listing(LISTING)
    compile(text, "step", "exec")
    assert "\naten = torch.ops.aten\nmine = torch.ops.mine\n" in text
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
    _first(reads=("x",)),                                       # reads more than it says
    _first(call="aten.mm.default(y, weight)", reads=("y", "weight")),
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
        broken.verify(["aten"])


def test_the_environment_has_what_is_read() -> None:
    forward, backward = LISTING.functions
    body = (forward.body[0], forward.body[0], *forward.body[1:])
    with pytest.raises(GraphError, match="in ends, which is not there"):
        replace(LISTING, functions=(replace(forward, body=body), backward)).verify()
    given = replace(LISTING, functions=(replace(forward, body=forward.body[1:]), backward))
    with pytest.raises(GraphError, match="b ends"):
        given.verify()
    with pytest.raises(GraphError, match="block_A_backward reads grad"):
        Listing("", LISTING.namespaces, (Function("forward", "", (), ()), backward), ()).verify()
    call = replace(backward.body[0], give=())  # type: ignore[type-var]
    with pytest.raises(GraphError, match="other values"):
        replace(LISTING, functions=(Function("forward", "", (), ()),
                                    replace(backward, body=(call,)))).verify()  # type: ignore[arg-type]


def test_no_torch_is_needed() -> None:
    code = "import sys, rkmate.codegen.printer, rkmate.codegen.liveness; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _copied(*forward: Copy | Drop | Write | Call, backward: tuple[Copy | Drop | Call, ...] = (),
            returns: tuple[str, ...] = ()) -> Listing:
    """X is made, then what is given."""
    make = Slice("a", (), (), (), (Run("aten.f.default()", (), ("x",)),), ("x",))
    made = Call(make, (), (), (), ("x",), ())
    return Listing("", {"aten": "aten"}, (Function("forward", "", (made, *forward), returns),
                                          Function("backward_0", "", backward, ())), ())


def _reading(key: str, *, end: bool = False, give: bool = False) -> Call:
    step = Run("aten.g.default(x)", ("x",), ("y" if give else None,))
    body = (step, Free(("x",), 1)) if end else (step,)
    part = Slice("b", ("x",) if end else (), () if end else ("x",), (), body, ("y",) if give else ())
    return Call(part, (key,) if end else (), () if end else (key,), (), (key,) if give else (), ())


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
    (_copied(OUT, LEAVE, Write("buffer:n", "env['x']")), "reads x, which is not there"),
    (_copied(OUT, LEAVE, IN, Write("buffer:n", "env['x'].t()")), "reads x, which has not arrived"),
    (_copied(OUT, LEAVE, returns=("None", "env['x'].t()")), "reads x, which is not there"),
    (_copied(OUT, returns=("env['x']",)), "returns x, which is copied away"),
    (_copied(backward=(OUT,), returns=("env.pop('x')",)), "copy_out of x, which the caller has"),
])
def test_copies_that_cannot_be(listing: Listing, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        listing.verify()


def test_calls_that_differ_in_numbers_read_the_same_names() -> None:
    for call in ("x_1.reshape(2, 64).add(w2, alpha=1.5)", "x_1.reshape(17, 8).add(w2, alpha=1e-05)"):
        body = Run(call, ("x_1", "w2"), ("y",)), Free(("x_1",), 8)
        made = Slice("a", ("x_1",), (), ("w2",), body, ("y",))
        assert made.verify(["aten"]) is made
        with pytest.raises(GraphError):
            replace(made, body=(Run(call, ("x_1",), ("y",)), made.body[1])).verify(["aten"])
