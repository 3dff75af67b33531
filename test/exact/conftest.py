import pytest
from oracle import Oracle

LENGTHS = (444, 700, 950, 1100, 2700)


@pytest.fixture(scope="package")
def oracle(make_engine):
    """Cold runs of the stock engine, in chunks of one page so that every boundary is passed through."""
    with make_engine(stock=True, chunked_prefill_size=256) as engine:
        found = Oracle(engine)
        found.prepare(*LENGTHS)
    return found
