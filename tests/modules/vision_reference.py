"""The vision tower written plainly in numpy, item by item, in float64."""

import math

import numpy as np


def encode(vision, params, pixel_values, grids):
    """Merged features [M, merge^2 D] of the items of one sequence."""
    merged, start = [], 0
    for t, h, w in grids:
        n = t * h * w
        x = tower(vision, params, pixel_values[start : start + n], t, h, w)
        merged.append(merge(x.reshape(t, h, w, -1), vision.merge))
        start += n
    return np.concatenate(merged)


def project(vision, params, merged):
    own = params["projector"]
    erf = np.vectorize(math.erf)
    x = merged @ own["project_in"]
    x = 0.5 * x * (1 + erf(x / math.sqrt(2)))
    return norm(x @ own["project_out"], own["norm"], vision.projector_norm_eps)


def tower(vision, params, pixels, t, h, w):
    own = params["embedding"]
    x = pixels.reshape(len(pixels), -1).astype(np.float64) @ own["patch"]
    resized = resize(np.asarray(own["position"], np.float64), h, w).reshape(h * w, -1)
    x += np.tile(resized, (t, 1))
    if t > 1:
        x += np.repeat(time_code(t, vision.width), h * w, axis=0)
    at = [(y, x_) for _ in range(t) for y in range(h) for x_ in range(w)]
    for i in range(vision.num_layers):
        layer = {name: np.asarray(a[i], float) for name, a in params["layers"].items()}
        x = block(vision, layer, x, at)
    return norm(x, params["merge"]["norm"], np.finfo(np.float32).eps)


def resize(table, h, w):
    """Bilinear, one output at a time."""
    out = np.zeros((h, w, table.shape[2]))
    for y in range(h):
        for x in range(w):
            sy = max(0.0, (y + 0.5) * table.shape[0] / h - 0.5)
            sx = max(0.0, (x + 0.5) * table.shape[1] / w - 0.5)
            for cy in range(table.shape[0]):
                for cx in range(table.shape[1]):
                    # A tent; past the last cell's centre that cell alone.
                    near_y = min(sy, table.shape[0] - 1)
                    near_x = min(sx, table.shape[1] - 1)
                    share = max(0, 1 - abs(near_y - cy)) * max(0, 1 - abs(near_x - cx))
                    out[y, x] += share * table[cy, cx]
    return out


def time_code(t, width):
    half = width // 2
    code = np.zeros((t, width))
    for frame in range(t):
        for i in range(half):
            angle = frame / 10000 ** (i / half)
            code[frame, i], code[frame, half + i] = math.sin(angle), math.cos(angle)
    return code


def block(vision, own, x, at):
    eps, K = np.finfo(np.float32).eps, vision.head_dim
    q, k, v = np.einsum(
        "pd,dshk->sphk", norm(x, own["attention_norm"], eps), own["qkv"]
    )
    for p, (y, x_) in enumerate(at):
        for head in range(vision.num_heads):
            for z in (q, k):
                z[p, head] = turn(z[p, head], y, x_, vision.rope_base)
    scores = np.einsum("phk,shk->hps", q, k) / math.sqrt(K)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    x = x + np.einsum("hps,shk,hkd->pd", weights, v, own["o"])
    hidden = norm(x, own["mlp_norm"], eps) @ own["up"]
    inner = math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)
    return x + (0.5 * hidden * (1 + np.tanh(inner))) @ own["down"]


def turn(z, y, x, base):
    """Complex pairs: even ones turn with x, odd ones with y."""
    pairs = z[0::2] + 1j * z[1::2]
    for p in range(len(pairs)):
        rate = base ** (-4 * (p // 2) / len(z))
        pairs[p] *= np.exp(1j * rate * (y if p % 2 else x))
    return np.stack([pairs.real, pairs.imag], axis=-1).reshape(-1)


def merge(x_thwd, side):
    h, w, d = x_thwd.shape[1:]
    x = x_thwd.mean(axis=0).reshape(h // side, side, w // side, side, d)
    return x.transpose(0, 2, 1, 3, 4).reshape(-1, side * side * d)


def norm(x, gain, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * np.asarray(gain, float)
