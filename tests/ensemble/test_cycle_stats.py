"""What a replica contributes at the end of a cycle: its parameters' digest and its masters."""

from __future__ import annotations

import torch

import hdet
from hdet.run.cycle_stats import gather_stats, local_replicas
from tests.harness import batch, loss_of, model


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
            digests.append(gather_stats(hdet.Replicas.single(), members, None, compare=True)[0].digest)
    assert digests[1] == digests[3] and len(set(digests)) == 3


def test_a_foreign_optimizers_masters_are_not_taken_for_ours() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    parameters = list(net.parameters())
    optimizer.state[parameters[0]]["master_param"] = torch.full_like(parameters[0], 5.0)
    assert local_replicas(hdet.Replicas.single(), optimizer, parameters)[0].masters() == [None] * len(parameters)
