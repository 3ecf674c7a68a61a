"""The formats and schemes written a second time, in numpy and by search, to hold the references
against.

A number format is the sorted list of its non-negative values, and rounding is the search for the
nearest of them, in fp64, where fp32 numbers and midpoints are exact. Nothing is taken from the
package.
"""

import numpy as np

F32 = np.float32


def minifloat(exponents: int, mantissa: int, bias: int, last: int) -> np.ndarray:
    """List the values of codes 0 to `last` of a format with these bits, by its definition."""
    values = []
    for code in range(last + 1):
        e, m = code >> mantissa, code & ((1 << mantissa) - 1)
        fraction = m / (1 << mantissa)
        values.append((1 + fraction) * 2.0 ** (e - bias) if e else fraction * 2.0 ** (1 - bias))
    assert e < 1 << exponents
    return np.array(values)


E2M1 = minifloat(2, 1, 1, 7)
E4M3 = minifloat(4, 3, 7, 0x7E)
E5M2 = minifloat(5, 2, 15, 0x7B)
E8M0 = 2.0 ** np.arange(-127, 128, dtype=np.float64)


def nearest(values: np.ndarray, a: np.ndarray) -> np.ndarray:
    """Return the code of the value nearest to each magnitude `a`, ties to the even code."""
    a = np.asarray(a, np.float64)
    above = np.minimum(np.searchsorted(values, a), len(values) - 1)
    below = np.maximum(above - 1, 0)
    up, down = values[above] - a, a - values[below]
    take_above = (up < down) | ((up == down) & (above % 2 == 0))
    return np.where(take_above | (a >= values[-1]), above, below)


def around_midpoints(values: np.ndarray) -> np.ndarray:
    """Return the midpoints between neighbours, and the fp32 numbers just below and above them."""
    middle = ((values[1:] + values[:-1]) / 2).astype(F32)
    return np.concatenate([np.nextafter(middle, F32(0)), middle, np.nextafter(middle, F32(np.inf))])


def fp8(x: np.ndarray, values: np.ndarray = E4M3) -> np.ndarray:
    """Return the FP8 codes of fp32 `x`; the sign of -0.0 stays."""
    return (nearest(values, np.abs(x)) | (np.signbit(x) * 0x80)).astype(np.uint8)


def fp4(q: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the E2M1 codes of q, with bit 3 where x < 0."""
    return (nearest(E2M1, np.abs(q)) | ((x < 0) * 8)).astype(np.uint8)


def pack(codes: np.ndarray) -> np.ndarray:
    """Pack two codes to a byte, the even column low."""
    return codes[..., 0::2] + codes[..., 1::2] * 16


def fp8_scaled(
    x: np.ndarray, amax: np.ndarray, values: np.ndarray = E4M3
) -> tuple[np.ndarray, np.ndarray]:
    """Return codes and scales of x by FP8's rule, `amax` in a shape that broadcasts."""
    scale = amax.astype(F32) / F32(values[-1])
    scale = np.where(amax == 0, F32(1), np.maximum(scale, F32(2.0**-149)))
    with np.errstate(over="ignore"):
        return fp8(x / scale, values), scale


def mx(x: np.ndarray, values: np.ndarray, rule: str = "amax") -> tuple[np.ndarray, np.ndarray]:
    """Return codes (one each) and E8M0 codes of x `[R, C]` by an MX rule, logarithms by search."""
    blocks = x.reshape(x.shape[0], -1, 32)
    a = np.abs(blocks).max(-1)
    largest = values[-1]
    emax = int(np.floor(np.log2(largest)))
    if rule == "amax":
        target = (a / F32(largest)).astype(np.float64)
        code = np.searchsorted(E8M0, target)
    else:
        target = a.astype(np.float64)
        if rule == "even":  # half a step of the mantissa, of a number of a's exponent
            step = values[-1] - values[-2]
            target = target + step / 2.0 ** (emax + 1) * 2.0 ** _exponent(target)
        powers = 2.0 ** np.arange(-149, 129, dtype=np.float64)
        if rule == "ceil":
            code = np.searchsorted(powers, target) - 149 - emax + 127
        else:
            code = np.searchsorted(powers, target, side="right") - 1 - 149 - emax + 127
        code = np.clip(np.where(a == 0, 0, code), 0, 254)
    y = blocks.astype(np.float64) / E8M0[code][..., None]
    codes = fp4(y, blocks) if largest == 6 else fp8(y, values)
    return codes.reshape(x.shape), code.astype(np.uint8)


def _exponent(a: np.ndarray) -> np.ndarray:
    return np.frexp(np.where(a == 0, 1, a))[1] - 1


def nvfp4(x: np.ndarray, g: F32 | None = None) -> tuple[np.ndarray, np.ndarray, F32]:
    """Return packed codes, E4M3 scale codes and global scale of fp32 x `[R, C]`."""
    amax = np.abs(x).max()
    if g is None:
        g = F32(1) if amax == 0 else max(F32(amax / F32(2688)), F32(2.0**-149))
    blocks = x.reshape(x.shape[0], -1, 16)
    with np.errstate(over="ignore"):
        quotient = np.abs(blocks).max(-1) / (F32(6) * g)
    quotient = np.where(quotient == 0, F32(1), quotient)
    code = nearest(E4M3, np.clip(quotient, 2.0**-9, 448.0))
    step = (E4M3[code].astype(F32) * g)[..., None]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        q = np.where(step == 0, F32(0), blocks / step)
    return pack(fp4(q, blocks).reshape(x.shape)), code.astype(np.uint8), g
