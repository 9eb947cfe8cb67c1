"""Programs for TPUs, compiled by XLA's own TPU compiler: it needs no TPU.

CI installs the compiler by `.ci/libtpu FOLDER`, and runs this folder of tests with
PYTHONPATH=FOLDER. Everywhere else they are skipped.
"""

import importlib.util

import pytest


@pytest.fixture(autouse=True, scope="session")
def tpu_compiler():
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("no TPU compiler; `.ci/libtpu FOLDER` and PYTHONPATH=FOLDER")
