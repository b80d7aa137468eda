"""Every feature of the seam works with the torch that the tests run with; without one, a user is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rkmate.errors import RkmateWarning, TorchVersionError
from rkmate.torch_seam import versions
from rkmate.torch_seam.patches import features
from rkmate.torch_seam.versions import Feature

EVERY = (*versions.NEEDED, *features.FEATURES)
ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("feature", EVERY, ids=lambda f: f.name)
def test_a_feature_works(feature: Feature) -> None:
    assert versions.failure(feature) == ""


def test_names_are_of_one_feature_each() -> None:
    assert len({f.name for f in EVERY}) == len(EVERY)


def test_this_torch_is_listed() -> None:
    assert versions.was_seen(), f"add {versions.release()} to SEEN once the whole suite passes with it"
    assert list(versions.SEEN) == sorted(versions.SEEN, key=lambda v: [int(n) for n in v.split(".")])


FORKING = """
import os, sys, traceback, warnings
import torch, torch._functorch.aot_autograd, torch._inductor.compile_fx
torch.__version__ = "9.1.0"
for k, program in enumerate(sys.argv[2:]):
    if not os.fork():
        os.dup2(os.open(f"{sys.argv[1]}/{k}", os.O_CREAT | os.O_WRONLY), 1)
        os.dup2(1, 2)
        try:
            exec(program, {"torch": torch, "warnings": warnings})
            print("came to its end")
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(0)
    os.wait()
"""


def fresh(folder: Path, *programs: str) -> list[str]:
    """Run programs, each in a process whose torch says that it is a release that nobody has tested. Return
    what they print. The processes are forked from one that has not loaded rkmate."""
    subprocess.run([sys.executable, "-c", FORKING, str(folder), *programs], cwd=ROOT, check=True)
    return [folder.joinpath(str(k)).read_text() for k in range(len(programs))]


MODEL = ("m = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))\n"
         "x = torch.randn(4, 8)\n"
         "w = rkmate.wrap(m, (x,), budget=1.0, progress=False, settings=rkmate.Settings(costs='analytic'))\n"
         "w(x).sum().backward()\n")
INDENTED = "".join(f"    {line}\n" for line in MODEL.splitlines())


def with_all() -> str:
    return f"warnings.simplefilter('error')\nimport rkmate\n{MODEL}"


def without(name: str) -> str:
    return (f"{name}\nimport rkmate\nwith warnings.catch_warnings(record=True) as told:\n"
            f"    warnings.simplefilter('always')\n{INDENTED}"
            "for w in told: print(w.category.__name__, w.message)")


def lacking(name: str) -> str:
    return (f"{name}\nimport rkmate\ntry:\n{INDENTED}"
            "except rkmate.TorchVersionError as error:\n    print('refused:', error)")


def assert_one_is_off(feature: str, printed: str) -> None:
    assert printed.endswith("came to its end\n"), printed
    told = [line for line in printed.splitlines() if line.startswith(RkmateWarning.__name__)]
    assert len(told) == 1, told
    assert feature in told[0] and "torch 9.1.0" in told[0] and "pip install 'torch>=" in told[0]


def assert_refused(printed: str) -> None:
    assert "refused: this version of rkmate cannot work with torch 9.1.0" in printed
    assert "pip install 'torch>=" in printed and printed.endswith("came to its end\n")


def test_a_new_torch_works_without_a_word_or_with_a_feature_less_or_is_refused(tmp_path: Path) -> None:
    works, less, refused = fresh(
        tmp_path, with_all(), without("del torch.distributions.Distribution._validate_args"),
        lacking("del torch._C._will_engine_execute_node"))
    assert works == "came to its end\n"
    assert_one_is_off(features.CHECKS, less)
    assert_refused(refused)


@pytest.mark.slow
def test_other_names_that_a_new_torch_may_lack(tmp_path: Path) -> None:
    less, *refused = fresh(
        tmp_path, without("torch._C._dynamo.guards.dict_version = lambda known: 0"),
        lacking("import torch._prims_common\ndel torch._prims_common.suggest_memory_format"),
        lacking("import torch._functorch.aot_autograd as a\ndel a.aot_export_joint_with_descriptors"))
    assert_one_is_off(features.GUARDS, less)
    for printed in refused:
        assert_refused(printed)


def test_a_feature_that_fails_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise AttributeError("no such name")

    monkeypatch.setattr(versions, "_off", {})
    with pytest.warns(RkmateWarning, match="a trial.*no such name.*what is lost"):
        versions.check([Feature("a trial", missing, "what is lost")])
    assert versions.is_off("a trial")
    assert versions.why_off("a trial") == "AttributeError: no such name"
    assert not versions.is_off("another")
    with pytest.raises(TorchVersionError, match=f"torch {versions.release()}.*a need"):
        versions.check([Feature("a need", missing, None)])
    assert torch.__version__.startswith(versions.release())
