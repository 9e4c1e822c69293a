"""Draw call i of a seed: the same on every machine."""

from random import Random

from .call import Call, Options, from_json, plain
from .families import FAMILIES


def draw(seed: int, index: int, families: tuple[str, ...] = (), compiles: bool = False, small: bool = False) -> Call:
    """Return call `index` of a seed.

    families: those to draw from; none: all. compiles: whether to draw calls whose kernels no bundle holds. small: sizes
    for a slow device.
    """
    rng = Random(f"fuzz {seed} {index}")
    names = families or tuple(FAMILIES)
    family = rng.choices(names, [FAMILIES[name].weight for name in names])[0]
    return from_json(plain(FAMILIES[family].draws.draw(family, rng, Options(compiles, small)).to_json()))
