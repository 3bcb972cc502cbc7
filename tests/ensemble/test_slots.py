"""What a replica contributes at the end of a cycle: its parameters' digest, its masters, the average over the cycle."""

from __future__ import annotations

import pytest
import torch

import hdet
from hdet.probe import CycleAverage
from hdet.slots import gather_slots, local_replicas

from .helpers import batch, loss_of, model


def test_a_digest_knows_what_was_written_to_parameters_with_masters() -> None:
    digests = []
    for key in (0, 1):
        net = model().bfloat16()
        optimizer = hdet.FusedAdamW(net.parameters(), lr=1e-2, master_weights="fp32")
        loss_of(net, batch(key)).backward()
        optimizer.step()
        members = local_replicas(hdet.Replicas.single(), optimizer, list(net.parameters()))
        for fill in (False, True):
            if fill:
                with torch.no_grad():
                    for parameter in net.parameters():
                        parameter.fill_(1.0)
            digests.append(gather_slots(hdet.Replicas.single(), members, None, compare=True)[0].digest)
    assert digests[1] == digests[3] and len(set(digests)) == 3


def test_a_foreign_optimizers_masters_are_not_taken_for_ours() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    parameters = list(net.parameters())
    optimizer.state[parameters[0]]["master_param"] = torch.full_like(parameters[0], 5.0)
    assert local_replicas(hdet.Replicas.single(), optimizer, parameters)[0].masters() == [None] * len(parameters)


# -- the average over a cycle --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_cycle_average_is_the_mean_of_its_samples(dtype: torch.dtype) -> None:
    """Of contiguous and other tensors, also when one has moved."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.nn.Parameter(torch.zeros(size, dtype=dtype)) for size in ((5, 3), (), (0,))] + [torch.zeros(4, 3, dtype=dtype).t()]
    average = CycleAverage(tensors)
    samples = []
    for n in range(4):
        with torch.no_grad():
            if n == 2:
                tensors[0].data = tensors[0].data.clone()
            for tensor in tensors:
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
        samples.append([tensor.detach().double().clone() for tensor in tensors])
        average.add()
    for mean, of in zip(average.means, zip(*samples, strict=True), strict=True):
        torch.testing.assert_close(mean.double(), torch.stack(of).mean(0), rtol=1e-6, atol=1e-6)
    means = [mean.clone() for mean in average.means]
    average.exchange()
    assert all(torch.equal(tensor, mean.to(dtype)) for tensor, mean in zip(tensors, means, strict=True))
    average.exchange()
    assert all(torch.equal(tensor.double(), last) for tensor, last in zip(tensors, samples[-1], strict=True))
    average.reset()
    average.add()
    assert all(torch.equal(mean, tensor.to(mean.dtype)) for mean, tensor in zip(average.means, tensors, strict=True))
