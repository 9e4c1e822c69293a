"""Every public name has a docstring with an example, which runs on the CPU after `from wrappers import *`."""

import doctest

import pytest
import torch

import wrappers

pytestmark = pytest.mark.by_shape
PUBLIC = {name: getattr(wrappers, name) for name in wrappers.__all__}


@pytest.mark.parametrize("name", wrappers.__all__)
def test_example_runs(name):
    found = doctest.DocTestFinder(recurse=True).find(PUBLIC[name], name, globs=PUBLIC | {"torch": torch})
    assert found[0].examples, "no example"
    runner = doctest.DocTestRunner()
    for test in found:
        runner.run(test)
    assert not runner.failures
