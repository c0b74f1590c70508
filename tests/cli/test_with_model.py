"""What a server's settings leave open and its model decides."""

import pytest

from baton.cli.say import with_model
from baton.config import ServeConfig
from baton.models.aliases import ALIASES

BUILT_IN = ALIASES["smollm2"]


def file_of(folder, name, nbytes):
    """As large as it says, and empty on the disk."""
    path = folder / name
    with path.open("wb") as file:
        file.truncate(nbytes)
    return path


@pytest.mark.parametrize("asked", [None, True, False])
def test_answers_of_the_built_in_model_end_when_they_repeat_themselves_unless_the_user_says_no(tmp_path, asked):
    path = file_of(tmp_path, BUILT_IN.file, BUILT_IN.nbytes)
    assert with_model(ServeConfig(stop_on_repetition=asked), path).stop_on_repetition is (asked is not False)


@pytest.mark.parametrize("asked", [None, True, False])
def test_those_of_other_models_only_if_the_user_says_so(tmp_path, asked):
    """A file of its name and another size is another model."""
    for path in (file_of(tmp_path, "model.gguf", BUILT_IN.nbytes), file_of(tmp_path, BUILT_IN.file, 7), tmp_path):
        assert with_model(ServeConfig(stop_on_repetition=asked), path).stop_on_repetition is bool(asked)


def test_clients_call_it_by_the_name_that_was_typed(tmp_path):
    path = file_of(tmp_path, "model.gguf", 1)
    assert with_model(ServeConfig(model="owner/model"), path).served_model_name == ("owner/model",)
    assert with_model(ServeConfig(model=str(path)), path).served_model_name == ("model",)
    assert with_model(ServeConfig(served_model_name=("mine",)), path).served_model_name == ("mine",)
    assert with_model(ServeConfig(), path).model == str(path)
