"""Equations 1 to 9, one function each.

Plain Python floats are float64; a vector is a list of floats.

Replica r of N, spread alpha, multiplier rho_r, base value b, cycle k of T steps, S steps in all,
the controller begins at step S_warm.
"""

import math

Vector = list[float]


def multipliers(count: int, spread: float) -> Vector:
    """Eq. 1: rho_r = 1 + alpha (r - (N-1)/2) / delta with delta = max((N-1)/2, 1/2)."""
    middle = (count - 1) / 2
    delta = max(middle, 1 / 2)
    return [1 + spread * (r - middle) / delta for r in range(count)]


def converge(replicas: list[Vector], weights: Vector) -> Vector:
    """Eq. 3: sum_r w_r theta_r."""
    return [
        math.fsum(w * x for w, x in zip(weights, column, strict=True))
        for column in zip(*replicas, strict=True)
    ]


def uniform_weights(count: int) -> Vector:
    """Eq. 3 as the paper uses it: w_r = 1/N."""
    return [1 / count] * count


def scores(losses: Vector, sigma: float) -> Vector:
    """Eq. 4, first half: s_r = (mean(L) - L_r) / sigma; lower loss, higher score."""
    mean = math.fsum(losses) / len(losses)
    return [(mean - loss) / sigma for loss in losses]


def softmax(values: Vector) -> Vector:
    """Eq. 4, second half: w_r = exp(s_r) / sum exp(s)."""
    top = max(values)
    powers = [math.exp(value - top) for value in values]
    return [power / math.fsum(powers) for power in powers]


def signal(weights: Vector, rates: Vector) -> float:
    """Eq. 5: Delta = sum_r w_r eta_r - mean_r eta_r."""
    return math.fsum(w * rate for w, rate in zip(weights, rates, strict=True)) - math.fsum(
        rates
    ) / len(rates)


def velocity_update(velocity: float, delta: float, beta: float) -> float:
    """Eq. 6, first half: v <- beta v + (1 - beta) Delta."""
    return beta * velocity + (1 - beta) * delta


def base_update(base: float, gamma: float, step_size: float, velocity: float) -> float:
    """Eq. 6, second half: b <- b (1 - gamma) + lambda v."""
    return base * (1 - gamma) + step_size * velocity


def intervals_left(total_steps: int, warmup_steps: int, interval: int) -> float:
    """K of Eq. 7: (S - S_warm) / T."""
    return (total_steps - warmup_steps) / interval


def gamma_printed(div_factor: float, final_div_factor: float, intervals: float) -> float:
    """Eq. 7 as printed: 1 - exp(-log(f_div / f_final) / K). Negative (growth) with torch's
    meaning and defaults of the factors."""
    return 1 - math.exp(-math.log(div_factor / final_div_factor) / intervals)


def gamma_corrected(floor: float, base_at_warmup: float, intervals: float) -> float:
    """Eq. 7 corrected: 1 - (min_lr / base_at_warm)^(1/K), so that K intervals of decay alone end
    at OneCycle's floor."""
    return 1 - (floor / base_at_warmup) ** (1 / intervals)


def is_reassignment(order: list[int], count: int) -> bool:
    """Eq. 8 asks for a permutation of the grid positions over the replicas, whichever it is."""
    return sorted(order) == list(range(count))
