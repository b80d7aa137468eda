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


def fresh(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process whose torch says that it is a release that nobody has tested."""
    return subprocess.run(
        [sys.executable, "-c", f"import torch, warnings\ntorch.__version__ = '9.1.0'\n{program}"],
        cwd=ROOT, capture_output=True, text=True, check=False)


MODEL = ("m = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))\n"
         "x = torch.randn(4, 8)\n"
         "w = rkmate.wrap(m, (x,), budget=1.0, progress=False, settings=rkmate.Settings(costs='analytic'))\n"
         "w(x).sum().backward()\n")


def test_a_new_torch_that_has_all_works_without_a_word() -> None:
    done = fresh(f"warnings.simplefilter('error')\nimport rkmate\n{MODEL}")
    assert done.returncode == 0, done.stderr
    assert "rkmate" not in done.stderr


@pytest.mark.parametrize(("rename", "feature"), [
    pytest.param("torch._C._dynamo.guards.dict_version = lambda known: 0", features.GUARDS,
                 marks=pytest.mark.slow),
    ("del torch.distributions.Distribution._validate_args", features.CHECKS)])
def test_a_renamed_name_turns_one_feature_off(rename: str, feature: str) -> None:
    done = fresh(f"{rename}\nimport rkmate\nwith warnings.catch_warnings(record=True) as told:\n"
                 f"    warnings.simplefilter('always')\n"
                 + "".join(f"    {line}\n" for line in MODEL.splitlines())
                 + "for w in told: print(w.category.__name__, w.message)")
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if line.startswith(RkmateWarning.__name__)]
    assert len(told) == 1, told
    assert feature in told[0] and "torch 9.1.0" in told[0] and "pip install 'torch>=" in told[0]


@pytest.mark.parametrize("rename", [
    "del torch._C._will_engine_execute_node",
    pytest.param("import torch._prims_common\ndel torch._prims_common.suggest_memory_format",
                 marks=pytest.mark.slow),
    pytest.param("import torch._functorch.aot_autograd as a\ndel a.aot_export_joint_with_descriptors",
                 marks=pytest.mark.slow)])
def test_a_torch_that_lacks_what_everything_needs_is_refused(rename: str) -> None:
    done = fresh(f"{rename}\nimport rkmate\ntry:\n"
                 + "".join(f"    {line}\n" for line in MODEL.splitlines())
                 + "except rkmate.TorchVersionError as error:\n    print('refused:', error)")
    assert done.returncode == 0, done.stderr
    assert "refused: this version of rkmate cannot work with torch 9.1.0" in done.stdout
    assert "pip install 'torch>=" in done.stdout


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
