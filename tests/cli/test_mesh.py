"""Plans for a rank of a mesh that is not here."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import rkmate
from rkmate.cli.main import main
from rkmate.devices import A100, H100, HOST
from rkmate.graph.ops.collectives import numbers_in

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="no torch.distributed")
HERE = "tests.cli.test_mesh:"


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(512, 1024, bias=False), nn.Linear(1024, 512, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def sample() -> tuple[nn.Module, tuple[torch.Tensor]]:
    with torch.device("meta"):
        return nn.Sequential(*(_Block() for _ in range(3))), (torch.empty(512, 512),)


def tensor_parallel(mesh: Any) -> tuple[nn.Module, tuple[torch.Tensor]]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, args = sample()
    for block in model.children():
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model, args


PARAMETERS = 3 * 2 * 512 * 1024 * 4
"""Bytes of all parameters."""


def _rank(capsys: pytest.CaptureFixture[str], target: str, mesh: str, *more: str) -> dict[str, Any]:
    assert main(["plan", HERE + target, "--device", "h100", "--budget", "0.8", "--quiet", "--json",
                 "--mesh", mesh, *more]) == 0
    assert not dist.is_initialized()
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["peak_bytes"] == found["rank"]["step_bytes"] <= found["budget_bytes"]
    return found["rank"]


def test_sharded(capsys: pytest.CaptureFixture[str]) -> None:
    eight, replicas = _rank(capsys, "sample", "shard=8"), _rank(capsys, "sample", "dp=2,shard=8")
    assert eight["mesh"] == {"shard": 8} and replicas["mesh"] == {"dp": 2, "shard": 8}
    for rank in (eight, replicas):
        assert rank["parameter_bytes"] == rank["gradient_bytes"] == PARAMETERS // 8
        assert rank["optimizer_bytes"] == PARAMETERS // 4
        assert 0 < rank["gathered_bytes"] < rank["step_bytes"]
        assert rank["total_bytes"] == PARAMETERS // 2 + rank["step_bytes"]
        assert rank["replicas_seconds"] == 0 < rank["exchange_seconds"] < rank["step_seconds"]
        assert 0 < rank["hidden_seconds"] < rank["exchange_seconds"]
    assert eight["exchange_seconds"] < replicas["exchange_seconds"]


def test_tensor_parallel(capsys: pytest.CaptureFixture[str]) -> None:
    rank = _rank(capsys, "tensor_parallel", "dp=8,tp=2")
    assert rank["parameter_bytes"] == PARAMETERS // 2
    assert rank["gathered_bytes"] == 0 < rank["exchange_seconds"]
    # Every second rank is a replica, four in a machine.
    seconds = 2 * PARAMETERS / 2 * 7 / 8 / H100.expected.between(range(0, 16, 2))
    assert rank["replicas_seconds"] == pytest.approx(seconds)


def test_it_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", HERE + "sample", "--device", "h100", "--budget", "0.8", "--quiet",
                 "--mesh", "shard=8"]) == 0
    out = capsys.readouterr().out
    assert "one of 8 ranks (shard=8) on NVIDIA H100 SXM 80 GB\n  parameters  1.5 MiB\n" in out


@pytest.mark.parametrize(("arguments", "words"), [
    (["--mesh", "shard=8"], "mesh is 'shard=8', and device is None"),
    (["--mesh", "8", "--device", "h100"], "mesh is '8'; it should be names and numbers"),
    (["--mesh", "shard=0", "--device", "h100"], "shard is 0; it should be a positive number of ranks"),
    (["--mesh", "shard=3,dp=2", "--device", "h100"], "it should be dp=2,shard=3"),
    (["--mesh", "tp=2", "--device", "h100"], "the dimension tp of the mesh is not used")])
def test_wrong_meshes(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", HERE + "sample", "--budget", "0.8", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_rates_between_ranks() -> None:
    nvlink, adapter = H100.rates.peer_bytes_per_second, H100.rates.network_bytes_per_second
    assert H100.rates.between(range(8)) == nvlink > 8 * adapter
    assert H100.rates.between(range(64)) == 8 * adapter
    assert H100.rates.between(range(0, 64, 8)) == adapter > A100.rates.between(range(0, 64, 8))
    assert HOST.between(range(64)) == HOST.peer_bytes_per_second


def test_numbers_of_ranks() -> None:
    with rkmate.distributed.fake_mesh(dp=2, tp=4) as mesh:
        assert numbers_in(mesh.get_group("tp").group_name) == [0, 1, 2, 3]
        assert numbers_in(mesh.get_group("dp").group_name) == [0, 4]
        with pytest.raises(rkmate.ArgumentError, match="without a process group"), \
                rkmate.distributed.fake_mesh(shard=2):
            pass


def test_a_mesh_without_dimensions() -> None:
    with pytest.raises(rkmate.ArgumentError, match="at least one dimension"), rkmate.distributed.fake_mesh():
        pass
