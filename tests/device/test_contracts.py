"""The contracts on a GPU: every member, and small models in which every two parts occur together."""

from __future__ import annotations

import pytest

import everyformer
from everyformer.study.contracts import contracts
from everyformer.study.sweep import cells, sweep
from tests.contracts.test_contracts import held

SHARES = 24  # of the models, so that several workers can check them

pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")


@pytest.mark.parametrize("name", everyformer.members())
def test_members_satisfy_the_contracts_on_a_gpu(name, record_property):
    held(contracts(name, device="cuda"), record_property)


@pytest.mark.parametrize("share", range(SHARES))
def test_wherever_two_parts_meet_the_contracts_hold_on_a_gpu(share, record_property):
    models = [model for model in cells() if model is not None]
    held(sweep(models[share::SHARES], device="cuda"), record_property)
