"""Bugs to plant in the sources: each is one replacement, and the check that must notice it.

A check is a test that CI runs, or a kernel of Blackwell, which the simulator runs as `test_kernel_of_blackwell` does.
`python -m tests.bugs` plants them, each in a copy of the tree.
"""

from .adapters import ADAPTERS
from .general import GENERAL
from .latent import LATENT
from .plant import ROOT, Bug, noticed, places, shipped

__all__ = ["BUGS", "ROOT", "Bug", "noticed", "places", "shipped"]
BUGS = (*GENERAL, *LATENT, *ADAPTERS)
