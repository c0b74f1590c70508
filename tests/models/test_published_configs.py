"""A config as the hub has it is the model of the file which transformers 5 writes from the same settings. (That files of
transformers 5 are read rightly is what logits show, test_model_architectures.py.)"""

from __future__ import annotations

import json

import pytest
from published_configs import PUBLISHED, published
from tiny_models import transformers

from baton.models.config_from_hf import config_from_hf


@pytest.mark.parametrize("model", PUBLISHED)
def test_a_published_config_is_the_model_that_transformers_reads(model):
    family, old = PUBLISHED[model][0], published(model)
    config_class = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    new = json.loads(config_class(**json.loads(json.dumps(old))).to_json_string(use_diff=False))
    assert config_from_hf(old) == config_from_hf(new)
