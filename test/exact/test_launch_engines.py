"""An engine from the flags of every launch line that we print: it starts, and hits exactly.

SGLang's own parser reads the flags; ``test_launches.py`` holds that nothing is replaced but what is listed.
"""

import os
from dataclasses import replace

import pytest
from rank_pair import engine_of, rank_pair
from sglang_unified_kv.cli.client import SGLangClient
from sglang_unified_kv.cli.server import ServerProcess, free_port
from sglang_unified_kv.config import CHECKPOINT_HOST_GB, CHECKPOINT_POLICY, HISPARSE
from sglang_unified_kv.launches import LINES, STORAGE_DIR, pairs, reduced
from sglang_unified_kv.reference.harness import prompt

# Before SGLang loads its plugins: some of the lines are HiSparse's.
os.environ[HISPARSE] = "1"
IN_FRONT = {"--port", "--skip-server-warmup", "--skip-tokenizer-init", "--enable-cache-report"}
"""Flags of the processes in front of the scheduler."""
IDS = prompt(17, 700)
REUSED = 512


def groups():
    """Lines that start the same engine, by their names."""
    found = {}
    for line in map(reduced, LINES.values()):
        flags = sorted(pair for pair in pairs(line.flags) if pair[0] not in IN_FRONT)
        found.setdefault((str(flags), str(sorted(line.env.items()))), []).append(line)
    return {", ".join(line.name for line in lines): lines[0] for lines in found.values()}


GROUPS = groups()


def one_rank(line):
    """As :func:`reduced`, of a line that is the reference engine's already."""
    if line.ranks == 1:
        return line
    sizes = ("--tp-size", "--attn-dp-size")
    flags = [word for pair in pairs(line.flags) if pair[0] not in sizes for word in pair]
    return replace(line, flags=tuple(flags))


def environment_of(line, folder):
    """The line's own variables: not those that the tests have besides, but for a budget as small."""
    env = {CHECKPOINT_POLICY: None, CHECKPOINT_HOST_GB: "0.1", HISPARSE: None} | line.env
    return env | ({STORAGE_DIR: str(folder / "new" / "folder")} if line.storage else {})


def model_of(line, model_path, next_n_path):
    return str(next_n_path if line.drafts else model_path)


def assert_same(answers, reused):
    cold, *others = answers
    assert cold.cached_tokens == 0
    for answer in others:
        assert answer.cached_tokens == reused
        assert answer.output_ids == cold.output_ids
        assert answer.output_logprobs == cold.output_logprobs


@pytest.mark.parametrize("name", GROUPS)
def test_a_line_starts_an_engine_that_hits(name, make_engine, model_path, next_n_path, tmp_path):
    line = one_rank(GROUPS[name])
    given = {flag: value for flag, *value in pairs(line.flags)}
    answers = []
    for start in range(1 + line.storage):
        with make_engine(
            stock=True,
            env=environment_of(line, tmp_path),
            model=model_of(line, model_path, next_n_path),
            flags=line.flags,
        ) as engine:
            args = engine.server_args
            for flag in ("--hicache-mem-layout", "--hicache-io-backend") if line.hicache else ():
                assert [getattr(args, flag[2:].replace("-", "_"))] == given[flag]
            assert (getattr(engine.tree, "checkpoints", None) is None) == line.hisparse
            for _ in range(2 - start):
                answers.append(engine.run(IDS, 4, return_logprob=True))
                engine.drain()
    assert_same(answers, 0 if line.hisparse else REUSED)
    if line.storage:
        assert answers[-1].details["storage"] == REUSED


def run_in_step(rank, port, model, flags, env):
    """The prompt twice on every rank, at the same time."""
    answers = []
    with engine_of(rank, port, model, env=env, flags=flags) as engine:
        for _ in range(2):
            rid = engine.submit(IDS, 4, return_logprob=True)
            engine.step_until(lambda rid=rid: engine.is_done(rid), 300.0, "every rank's answer")
            engine.drain()
            answers.append(engine.output(rid))
        assert engine.server_args.tp_size == 2
    return answers


@pytest.mark.slow
def test_two_ranks_of_a_line_hit_as_one_does(next_n_path, tmp_path):
    (line,) = [line for line in GROUPS.values() if line.ranks > 1]
    env = {n: v for n, v in environment_of(line, tmp_path).items() if v is not None}
    with rank_pair(line.ranks) as pair:
        first, second = pair(run_in_step, str(next_n_path), line.flags, env)
    assert_same(first, REUSED)
    assert_same([first[0], *second[1:]], REUSED)


BY_HAND = {"tiny eagle", "tiny storage", "tiny ranks"}
"""Those that ``test_by_hand.py`` starts as a reader of the page does."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [name for name in GROUPS if name not in BY_HAND])
def test_a_line_starts_a_server_that_hits(name, model_path, next_n_path, tmp_path):
    line, port = GROUPS[name], free_port()
    command = line.here(model_of(line, model_path, next_n_path), port)
    env = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
    env |= {n: v for n, v in environment_of(line, tmp_path).items() if v is not None}
    client = SGLangClient(f"http://127.0.0.1:{port}")
    with ServerProcess(command, env, tmp_path / "log") as process:
        process.wait_until(client.healthy, timeout_s=500)
        cold, hit = (client.generate(IDS, max_new_tokens=4) for _ in range(2))
    assert cold.cached_tokens == 0 and hit.output_ids == cold.output_ids
    assert hit.cached_tokens == (0 if line.hisparse else REUSED)
