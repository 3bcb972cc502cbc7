"""What is compared.

What a method's rate means, and where the search for its best one begins, is in `METHODS`.

A method is a function of its own in `peers` or `replicated`: it puts `Parts` around a fresh model,
and `train` is the loop, the same for all. Betas are (0.9, 0.95) everywhere.
"""

from __future__ import annotations

from . import peers, replicated
from .training import Method

_ADAM, _FREE = (-4, 4), (-8, 6)
"""where to search: around 1e-2 for a rate, wider for what should not need any"""

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("onecycle", peers.one_cycle, 1e-2, _ADAM),
        Method("wsd", peers.wsd, 1e-2, _ADAM),
        Method("schedulefree", peers.schedule_free, 1e-2, _ADAM, package="schedulefree"),
        Method("prodigy", peers.prodigy, 1.0, _FREE, copies=2, package="prodigyopt"),
        Method("prodigy-d0", peers.prodigy_d0, 1e-6, None, copies=2, package="prodigyopt"),
        Method("dadapt", peers.dadapt, 1.0, _FREE, copies=1, package="dadaptation"),
        Method("dadapt-d0", peers.dadapt_d0, 1e-6, None, copies=1, package="dadaptation"),
        Method("dog", peers.dog, 1.0, _FREE, package="dog-optimizer"),
        Method("dog-movement", peers.dog_movement, 1e-4, (-6, 8), package="dog-optimizer"),
        Method("hdet-softmax", replicated.hdet_softmax, 1e-2, None, borrows="onecycle"),
    )
}
