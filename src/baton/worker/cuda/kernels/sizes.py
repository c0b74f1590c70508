"""Sizes of tiles and grids. Triton's own functions cost microseconds per call, because kernels may call them too."""


def next_power_of_2(count: int) -> int:
    return 1 << (count - 1).bit_length()


def cdiv(count: int, per: int) -> int:
    return -(-count // per)
