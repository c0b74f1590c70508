"""Building blocks of draws: worker/draws.py is the definition.

Weights are summed as integers: a weight (at most 1) counts in units of 2^-40. So sums are exact in any order: the bits do not
depend on the number of programs, and a search among running sums cannot fall between two roundings.

A limit on weights is a search for the smallest included weight. As integers the bits of positive floats have the order of the
floats, so the search is a bisection of 30 steps over the bits.
"""

import triton
import triton.language as tl


@triton.jit
def mixed(word):
    """The finaliser of SplitMix64: every bit of the result depends on every bit of the word."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


@triton.jit
def uniform(seed, index, position):
    """The number of worker/draws.uniforms: in [0, 1), of 53 random bits. seed: int64 whose bits are the uint64."""
    word = seed.to(tl.uint64, bitcast=True)
    word = mixed(word + 0x9E3779B97F4A7C15) ^ index.to(tl.uint64)
    word = mixed(word + 0x9E3779B97F4A7C15) ^ position.to(tl.uint64)
    return (mixed(word + 0x9E3779B97F4A7C15) >> 11).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def weigh(x, peak, temperature):
    """The weights e^(logit / temperature), scaled so that the likeliest has 1."""
    return tl.exp((x - peak) / temperature)


@triton.jit
def units(weight):
    return (weight * 1099511627776.0).to(tl.int64)


@triton.jit
def order_bits(weight):
    return weight.to(tl.int32, bitcast=True)


@triton.jit
def share_of(part, whole):
    """floor(part * whole): the largest running sum of units that is not above it. part: float64 in [0, 1]."""
    return (part * whole.to(tl.float64)).to(tl.int64)
