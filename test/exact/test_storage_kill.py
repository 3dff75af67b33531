"""Processes killed with SIGKILL while they write: the next one on the same folder answers exactly."""

import multiprocessing
import random
import signal

import pytest
from killed_engine import serve
from oracle import bytes_of
from rank_pair import PRELOAD
from storage_folder import pages, records

LENGTHS = (444, 700, 950, 1100)


@pytest.fixture(scope="module")
def processes():
    """Forks of a process that has SGLang imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


class Server:
    """An engine in a process of its own that answers prefixes of one text."""

    def __init__(self, processes, model_path, folder, text, lengths):
        self.answers, there = processes.Pipe(duplex=False)
        arguments = (str(model_path), str(folder), text, lengths, there)
        self.process = processes.Process(target=serve, args=arguments)
        self.process.start()
        there.close()

    def take(self, oracle) -> int | None:
        """Check the next answer; its tokens from storage, None if the process ended."""
        try:
            length, output_ids, logits, resumed, storage = self.answers.recv()
        except (EOFError, OSError):  # ended, perhaps in the middle of an answer
            return None
        cold = oracle.run(length)
        assert output_ids == cold.output_ids[:2], length
        assert logits == [row.numpy().tobytes() for row in cold.logits[:2]], length
        if resumed is not None:
            boundary, rows = resumed
            assert rows == bytes_of(oracle.at(boundary)), (length, boundary)
        return storage


@pytest.mark.parametrize(
    "rounds", [1, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_what_a_killed_process_left_is_exact_or_a_miss(
    processes, model_path, oracle, tmp_path, rounds
):
    answered = from_storage = 0
    for number in range(rounds):
        chance = random.Random(number)
        for path in [*records(tmp_path), *pages(tmp_path)]:
            # So that there is something to write in every round.
            if chance.random() < 0.4:
                path.unlink()
        lengths = [chance.choice(LENGTHS) for _ in range(8)]
        server = Server(processes, model_path, tmp_path, oracle.text, lengths)
        for _ in range(chance.randrange(1, 4)):
            from_storage += bool(server.take(oracle))
            answered += 1
        # In the middle of writing the next prompt's objects, if it has any.
        most = len(list(tmp_path.iterdir())) + chance.randrange(1, 12)
        while len(list(tmp_path.iterdir())) < most and not server.answers.poll():
            pass
        server.process.kill()
        server.process.join()
        assert server.process.exitcode == -signal.SIGKILL
        while (storage := server.take(oracle)) is not None:
            from_storage += bool(storage)
            answered += 1
    last = Server(processes, model_path, tmp_path, oracle.text, list(LENGTHS) * 2)
    for _ in range(2 * len(LENGTHS)):
        from_storage += bool(last.take(oracle))
    assert last.take(oracle) is None
    last.process.join()
    assert last.process.exitcode == 0
    print(f"{rounds} processes killed, {answered} answers before, {from_storage} from storage")
    assert from_storage >= len(LENGTHS)
