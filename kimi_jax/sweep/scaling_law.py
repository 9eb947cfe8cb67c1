"""Loss against compute: fitted laws, their uncertainty, and compute multipliers.

    fit = fit_power(flops_N, loss_N)              L(C) = a C^-b
    fit = fit_offset(flops_N, loss_N)             L(C) = floor + a C^-b
    low, high = band(fit, flops_P)                of the law itself, 95 %
    gain = compute_multiplier(base, other, 1e18)  how much more compute `base` needs

Everything is least squares with the covariance of its parameters, carried on to what is
asked by first-order propagation (the delta method) and Student's t with as many degrees
of freedom as there are points beyond parameters. Pure numpy, float64.

"Compute multiplier" is what the Attention Residuals report calls it: at compute C the
other setting reaches some loss; the base reaches that loss at m C.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

CONFIDENCE = 0.95
_EXPONENTS = (1e-3, 3.0)  # where the exponent of an offset law is looked for


class Law(NamedTuple):
    """A fitted law, in log parameters, so that a and b stay positive.

    theta_K: (log a, log b), or (log a, log b, floor); a is the loss, or its part above
    the floor, at `scale` FLOPs, which lies amid the data: there a and b are nearly
    independent, where at one FLOP they would not be.
    """

    kind: Literal["power", "offset"]
    theta_K: np.ndarray
    covariance_KK: np.ndarray
    scale: float
    freedom: int  # points beyond parameters

    @property
    def exponent(self) -> float:
        """b."""
        return math.exp(self.theta_K[1])

    @property
    def coefficient(self) -> float:
        """a of a C^-b, with C in FLOPs."""
        return math.exp(self.theta_K[0] + self.exponent * math.log(self.scale))

    @property
    def floor(self) -> float:
        """The loss of unlimited compute; 0 of a power law."""
        return float(self.theta_K[2]) if self.kind == "offset" else 0.0


class Estimate(NamedTuple):
    """A number and its confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3g} ({self.low:.3g} to {self.high:.3g})"


def fit_power(compute_N: np.ndarray, loss_N: np.ndarray) -> Law:
    """L(C) = a C^-b by least squares of log L: errors are a share of the loss.

    Args:
      compute_N: FLOPs, positive, at least two different ones.
      loss_N: nats, positive.

    Raises:
      ValueError: there are fewer than three points, or the loss does not fall.
    """
    x_N, y_N, scale = _prepare(compute_N, loss_N, parameters=2)
    design_NK = np.stack([np.ones_like(x_N), -x_N], axis=1)
    (log_a, b), *_ = np.linalg.lstsq(design_NK, np.log(y_N), rcond=None)
    if b <= 0:
        raise ValueError(f"the loss does not fall with compute: exponent {b:.3g}")
    residual_N = np.log(y_N) - design_NK @ (log_a, b)
    jacobian_NK = design_NK * (1.0, b)  # by log b
    theta_K = np.array([log_a, math.log(b)])
    return _law("power", theta_K, jacobian_NK, residual_N, scale)


def fit_offset(compute_N: np.ndarray, loss_N: np.ndarray) -> Law:
    """L(C) = floor + a C^-b by least squares of L, with floor >= 0.

    For a given exponent the best floor and a are a linear fit; the exponent is found by
    a golden section after a grid.

    Args: as `fit_power`; at least three different computes.

    Raises:
      ValueError: there are fewer than four points, or the loss does not fall.
    """
    x_N, y_N, scale = _prepare(compute_N, loss_N, parameters=3)

    def solve(log_b: float) -> tuple[np.ndarray, float]:
        falling_N = np.exp(-math.exp(log_b) * x_N)
        design_NK = np.stack([falling_N, np.ones_like(x_N)], axis=1)
        linear_K, *_ = np.linalg.lstsq(design_NK, y_N, rcond=None)
        if linear_K[1] < 0:
            linear_K = np.array([falling_N @ y_N / (falling_N @ falling_N), 0.0])
        return linear_K, float(((design_NK @ linear_K - y_N) ** 2).sum())

    log_b = _minimise(lambda log_b: solve(log_b)[1], *map(math.log, _EXPONENTS))
    (a, floor), _ = solve(log_b)
    if a <= 0:
        raise ValueError("the loss does not fall with compute")
    b = math.exp(log_b)
    falling_N = a * np.exp(-b * x_N)
    jacobian_NK = np.stack([falling_N, -b * x_N * falling_N, np.ones_like(x_N)], axis=1)
    theta_K = np.array([math.log(a), log_b, floor])
    return _law("offset", theta_K, jacobian_NK, y_N - floor - falling_N, scale)


def predict(law: Law, compute_P: np.ndarray) -> np.ndarray:
    """The loss that the law gives, nats [P]."""
    return _loss(law, law.theta_K, np.asarray(compute_P, np.float64))


def band(law: Law, compute_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Confidence band of the law, not of single runs: low and high, nats [P]."""
    compute_P = np.asarray(compute_P, np.float64)
    mean_P, spread_P = _propagate(
        lambda theta_K: np.log(_loss(law, theta_K, compute_P)),
        law.theta_K,
        law.covariance_KK,
    )
    reach_P = t_quantile(law.freedom) * spread_P
    return np.exp(mean_P - reach_P), np.exp(mean_P + reach_P)


def compute_multiplier(base: Law, other: Law, compute: float) -> Estimate:
    """m: `base` needs m times the compute to reach the loss of `other` at `compute`.

    Above 1, `other` is the better one. The interval treats the two fits as independent
    and takes the smaller number of degrees of freedom.

    Raises:
      ValueError: the base never reaches that loss.
    """
    target = float(predict(other, np.array([compute]))[0])
    if target <= base.floor:
        raise ValueError(
            f"the base never reaches {target:.4g}: its floor is {base.floor:.4g}"
        )
    split = len(base.theta_K)
    theta_K = np.concatenate([base.theta_K, other.theta_K])
    covariance_KK = np.zeros((len(theta_K),) * 2)
    covariance_KK[:split, :split] = base.covariance_KK
    covariance_KK[split:, split:] = other.covariance_KK
    at = np.array([compute])

    def log_multiplier(theta_K: np.ndarray) -> np.ndarray:
        loss = _loss(other, theta_K[split:], at)
        floor = theta_K[2] if base.kind == "offset" else 0.0
        above = np.log(np.maximum(loss - floor, 1e-300))
        log_a, log_b = theta_K[:2]
        return (log_a - above) / np.exp(log_b) + math.log(base.scale / compute)

    (mean,), (spread,) = _propagate(log_multiplier, theta_K, covariance_KK)
    reach = t_quantile(min(base.freedom, other.freedom)) * spread
    return Estimate(*(float(np.exp(x)) for x in (mean, mean - reach, mean + reach)))


def exponent(law: Law) -> Estimate:
    """b with its interval."""
    reach = t_quantile(law.freedom) * math.sqrt(law.covariance_KK[1, 1])
    mean = law.theta_K[1]
    return Estimate(*(math.exp(x) for x in (mean, mean - reach, mean + reach)))


@functools.cache
def t_quantile(freedom: int, confidence: float = CONFIDENCE) -> float:
    """Student's t: |t| is below this with the probability `confidence`.

    By bisection of the integral of the density, which with t = sqrt(n) tan(u) is a
    smooth one over a finite range.
    """
    n = freedom
    log_norm = math.lgamma((n + 1) / 2) - math.lgamma(n / 2) - 0.5 * math.log(math.pi)
    u_Q, weight_Q = np.polynomial.legendre.leggauss(64)

    def inside(u: float) -> float:
        nodes_Q = 0.5 * u * (u_Q + 1)
        density_Q = np.exp(log_norm) * np.cos(nodes_Q) ** (n - 1)
        return float(u * (weight_Q * density_Q).sum())

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle) < confidence else (low, middle)
    return math.sqrt(n) * math.tan((low + high) / 2)


def _prepare(
    compute_N: np.ndarray, loss_N: np.ndarray, parameters: int
) -> tuple[np.ndarray, np.ndarray, float]:
    """log(C / scale), L and the scale: the geometric mean of the computes."""
    compute_N, loss_N = (np.asarray(x, np.float64) for x in (compute_N, loss_N))
    if not (compute_N > 0).all() or not (loss_N > 0).all():
        raise ValueError("compute and loss must be positive numbers")
    if len(loss_N) <= parameters or len(np.unique(compute_N)) < parameters:
        raise ValueError(
            f"{len(loss_N)} runs at {len(np.unique(compute_N))} computes cannot tell "
            f"{parameters} parameters and their error; at least {parameters + 1} runs "
            f"at {parameters} computes can"
        )
    scale = float(np.exp(np.log(compute_N).mean()))
    return np.log(compute_N / scale), loss_N, scale


def _law(
    kind: Literal["power", "offset"],
    theta_K: np.ndarray,
    jacobian_NK: np.ndarray,
    residual_N: np.ndarray,
    scale: float,
) -> Law:
    freedom = len(residual_N) - len(theta_K)
    variance = float(residual_N @ residual_N) / freedom
    # Near a vanishing exponent floor and a cannot be told apart: a wide band, no error.
    inverse_KK = np.linalg.pinv(jacobian_NK.T @ jacobian_NK)
    return Law(kind, theta_K, variance * inverse_KK, scale, freedom)


def _loss(law: Law, theta_K: np.ndarray, compute_P: np.ndarray) -> np.ndarray:
    floor = theta_K[2] if law.kind == "offset" else 0.0
    exponent = np.exp(theta_K[1])
    return floor + np.exp(theta_K[0] - exponent * np.log(compute_P / law.scale))


def _propagate(
    function: Callable[[np.ndarray], np.ndarray],
    theta_K: np.ndarray,
    covariance_KK: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Value and standard deviation of a function of the parameters [P]."""
    step = 1e-5
    gradient_KP = np.stack(
        [
            (function(theta_K + move_K) - function(theta_K - move_K)) / (2 * step)
            for move_K in step * np.eye(len(theta_K))
        ]
    )
    variance_P = np.einsum("kp,kl,lp->p", gradient_KP, covariance_KK, gradient_KP)
    return function(theta_K), np.sqrt(np.maximum(variance_P, 0.0))


def _minimise(function: Callable[[float], float], low: float, high: float) -> float:
    """The minimum of a function with one valley that a grid of 64 does not miss."""
    grid = np.linspace(low, high, 64)
    best = int(np.argmin([function(x) for x in grid]))
    low, high = grid[max(0, best - 1)], grid[min(63, best + 1)]
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(60):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if function(left) < function(right):
            high = right
        else:
            low = left
    return (low + high) / 2
