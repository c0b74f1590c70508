"""No damaged block is ever served. 6,000 faults here; `make chaos` injects a million."""

from time import time

import pytest
import storage_faults
from storage_faults import FAULTS, Campaign, run


def test_no_corrupt_block_is_served(folder):
    seen = run(folder, 6_000, seed=int(time()))
    assert seen.served_corrupt == 0
    assert seen.lost_good == 0, "blocks before the damaged one are good"
    assert seen.injected.keys() == FAULTS.keys()


@pytest.mark.parametrize("blind", ["nothing is checked", "the payload is not checked", "the key is not checked"])
def test_the_campaign_finds_a_reader_that_does_not_look(folder, monkeypatch, blind):
    real = storage_faults.files_module.fault_of

    def lazy(header, key, layout, payload):
        fault = real(header, key, layout, payload)
        ignored = {"the payload is not checked": "payload", "the key is not checked": "key"}.get(blind, fault)
        return None if fault == ignored else fault

    monkeypatch.setattr(storage_faults.files_module, "fault_of", lazy)
    campaign = Campaign(folder, 1)
    while not campaign.served_corrupt:
        campaign.inject()
        assert sum(campaign.injected.values()) < 1000
