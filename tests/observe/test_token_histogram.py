"""The cheap histogram says what the library's own would say."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram

from baton.observe.token_histogram import TokenHistogram
from baton.protocol.control import STEP_TOKEN_BUCKETS, STEP_TOKEN_SUM
from baton.runtime.engine.worker_supervisor import StepTokens

EDGES = (0.001, 0.01, 0.5, 1.0, 10.0)


@given(st.lists(st.one_of(st.sampled_from((0.0, *EDGES, 11.0)), st.floats(0, 20)), max_size=30))
def test_same_samples_as_the_library(values):
    ours, registry = TokenHistogram("h", "words", EDGES), CollectorRegistry()
    theirs = Histogram("h", "words", buckets=EDGES, registry=registry)
    for value in values:
        ours.observe(value)
        theirs.observe(value)
    assert samples(ours) == samples(theirs)


def test_several_that_came_together_are_as_if_each_had_come_alone():
    together, alone = TokenHistogram("h", "words", EDGES), TokenHistogram("h", "words", EDGES)
    together.observe(1.5, 3)
    for _ in range(3):
        alone.observe(0.5)
    assert samples(together) == samples(alone)


def samples(histogram) -> dict:
    (family,) = histogram.collect()
    assert (family.name, family.documentation, family.type) == ("h", "words", "histogram")
    return {
        (sample.name, tuple(sample.labels.items())): sample.value
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@given(st.integers(0, 40_000))
def test_step_tokens_are_in_the_first_bucket_that_holds_them(tokens):
    table = StepTokens()
    table.observe(tokens)
    held = next((str(edge) for edge in STEP_TOKEN_BUCKETS if tokens <= edge), "+Inf")
    assert {name for name, count in table.table().items() if count and name != STEP_TOKEN_SUM} == {held}
    assert table.table()[STEP_TOKEN_SUM] == tokens
