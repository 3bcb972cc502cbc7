"""Write tests/reference/golden/*.json from the reference: `python -m tests.reference.make_golden`."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.reference import method, toy
from tests.reference.schedule import one_cycle
from tests.reference.simulator import Settings, simulate

FOLDER = Path(__file__).parent / "golden"

TRAJECTORIES = {
    "one_replica": Settings(replicas=1, controller=False, weight_decay=0.1),
    "no_spread": Settings(spread=0.0, controller=False),
    "spread_only": Settings(spread=0.3, controller=False),
    "two_replicas_decayed_weights": Settings(replicas=2, spread=1 / 9, weight_decay=0.1, controller=False),
    "softmax_multiplies_the_schedule": Settings(decay=None, warmup=10, sigma=0.02, step_size=2.0, momentum=0.5),
    "softmax_floor": Settings(decay="floor", warmup=10),
    "softmax_printed": Settings(decay="printed", warmup=10),
    "softmax_average": Settings(average="softmax", controller=False, sigma=0.1),
    "last_cycle_is_short": Settings(steps=38, decay=None, sigma=0.05, momentum=0.0),
}


def multipliers() -> list[dict[str, Any]]:
    return [
        {"count": count, "spread": spread, "multipliers": method.multipliers(count, spread)}
        for count in (1, 2, 3, 4, 5, 8, 16)
        for spread in (0.0, 1 / 9, 0.3, 0.5, 0.99)
    ]


def gammas() -> list[dict[str, Any]]:
    cases = []
    for div, final_div in ((25.0, 1e4), (10.0, 100.0), (4.0, 2.0)):
        for steps, warmup, interval in ((200_000, 100_000, 1000), (2000, 0, 50), (90, 30, 20)):
            intervals = method.intervals_left(steps, warmup, interval)
            peak, floor = 9e-4, 9e-4 / (div * final_div)
            cases.append(
                {
                    "div_factor": div, "final_div_factor": final_div, "intervals": intervals, "base": peak, "floor": floor,
                    "printed": method.gamma_printed(div, final_div, intervals), "corrected": method.gamma_corrected(floor, peak, intervals),
                }
            )  # fmt: skip
    return cases


def softmax() -> list[dict[str, Any]]:
    """Eq. 4 to 6 over several cycles with made-up losses: base and velocity go on from one cycle to the next."""
    cases = []
    for count, sigma, beta, step_size, gamma in (
        (2, 0.1, 0.9, 0.5, 0.0),
        (4, 0.1, 0.9, 0.5, 0.02),
        (8, 0.002, 0.5, 1.0, -0.06),
        (5, 3.0, 0.0, 0.1, 0.5),
    ):
        rho, base, velocity, cycles = method.multipliers(count, 1 / 9), 9e-4, 0.0, []
        for cycle in range(6):
            losses = [2.5 + 0.2 * x for x in toy.uniforms(77 + 100 * cycle + count, count)]
            rates = [base * r for r in rho]
            weights = method.softmax(method.scores(losses, sigma))
            delta = method.signal(weights, rates)
            velocity = method.velocity_update(velocity, delta, beta)
            base = method.base_update(base, gamma, step_size, velocity)
            cycles.append({"losses": losses, "rates": rates, "weights": weights, "delta": delta, "velocity": velocity, "base": base})
        cases.append(
            {"count": count, "sigma": sigma, "beta": beta, "step_size": step_size, "gamma": gamma, "start": 9e-4, "cycles": cycles}
        )
    return cases


def warm_noise() -> list[dict[str, Any]]:
    tensors = [toy.uniforms(5, 7), [3.0, 4.0], [0.0] * 5, [1e-3] * 11]
    return [{"theta": theta, "nu": nu, "variance": method.warm_noise_variance(theta, nu)} for theta in tensors for nu in (0.01, 0.1)]


def schedules() -> list[dict[str, Any]]:
    return [
        {
            "total": total,
            "peak": peak,
            "pct_start": pct,
            "shape": shape,
            "rates": [one_cycle(t, total, peak, pct_start=pct, shape=shape) for t in range(total)],
        }
        for total, peak, pct in ((40, 0.05, 0.3), (25, 1.0, 0.5))
        for shape in ("cos", "linear")
    ]


def one_cycle_rates(settings: Settings) -> list[float]:
    """The untouched schedule of a trajectory, one rate per step."""
    return [one_cycle(t, settings.steps, settings.peak, div=settings.div, final_div=settings.final_div) for t in range(settings.steps)]


def trajectories() -> dict[str, Any]:
    return {name: {"settings": asdict(settings), **simulate(settings)} for name, settings in TRAJECTORIES.items()}


PARTS: dict[str, Callable[[], Any]] = {
    "multipliers": multipliers,
    "gammas": gammas,
    "softmax": softmax,
    "warm_noise": warm_noise,
    "schedules": schedules,
    "trajectories": trajectories,
}


def read(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def write() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, make in PARTS.items():
        (FOLDER / f"{name}.json").write_text(_one_case_per_line(make()), encoding="utf-8")


def _one_case_per_line(cases: Any) -> str:
    if isinstance(cases, dict):
        return "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(case)}" for name, case in cases.items()) + "\n}\n"
    return "[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n"


if __name__ == "__main__":
    write()
