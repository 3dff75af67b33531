"""Random workloads, faults and interleavings on the real engine; every resume against a cold run.

    python test/fuzz/fuzz.py --minutes 60 --seed 7

Prompts share random prefixes of lengths around pages and C4 blocks; turns continue what the engine
generated. Free request slots, free record slots and free host pages are overwritten all the time. At each
resume the rings are compared with the cold run's before the first layer reads them, and every other row of
every ring with what it held before the restore; at the end of a request its tokens and log-probabilities.
The cold runs are the stock engine's, made first.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "exact"))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["SGLANG_UNIFIED_KV_REFERENCE_ENGINE"] = "1"
os.environ["SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE"] = "1"

import torch  # noqa: E402
from folder_damage import DAMAGES  # noqa: E402
from oracle import POISON, differing, ring_buffers, rows_before  # noqa: E402
from sglang.srt.managers import schedule_policy, scheduler  # noqa: E402
from sglang.srt.managers.io_struct import (  # noqa: E402
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
)
from sglang.srt.managers.schedule_batch import split_cached_prefix_by_tier  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import EvictParams  # noqa: E402
from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool  # noqa: E402
from sglang_unified_kv.checkpoint import manager as manager_module  # noqa: E402
from sglang_unified_kv.reference.harness import prompt  # noqa: E402
from speculation_runs import EAGLE, SpecRun, cold  # noqa: E402
from storage_folder import STORAGE, at  # noqa: E402

PAGE, NEW_TOKENS = 256, 12
TIERS = ("device", "host", "storage")
OVERLAP = dict(disable_overlap_schedule=False)


@dataclass(frozen=True)
class Setup:
    """One way to run the engine.

    Attributes:
        features: what a resume under it is counted for.
        args: server arguments.
        env: environment.
        exact_chunks: SGLang's chunk filling of MI355X, whose chunks start off page.
    """

    features: tuple[str, ...]
    args: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    exact_chunks: bool = False

    @property
    def name(self) -> str:
        return ", ".join(self.features)


RADIX = {"SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE": "0", "SGLANG_UNIFIED_KV_BIT_EXACT_RADIX": "1"}
POLICY = "SGLANG_UNIFIED_KV_CHECKPOINT_POLICY"
SETUPS = (
    Setup(("sequential",), STORAGE),
    Setup(("overlap", "lpm"), STORAGE | OVERLAP | dict(schedule_policy="lpm")),
    Setup(
        ("mixed chunk", "priority"),
        STORAGE | dict(enable_mixed_chunk=True, enable_priority_scheduling=True),
        exact_chunks=True,
    ),
    Setup(("speculation", "overlap"), STORAGE | EAGLE | OVERLAP),
    Setup(
        ("speculation", "stride 2"),
        STORAGE | EAGLE,
        {"SGLANG_HICACHE_SWA_OFFLOAD_PAGE_STRIDE": "2"},
    ),
    Setup(
        ("one staging slot", "overlap"),
        STORAGE | OVERLAP | dict(enable_mixed_chunk=True),
        {"SGLANG_SWA_HICACHE_STATE_STAGING_PAGES": "1"},
    ),
    Setup(("combined placement", "overlap"), STORAGE | OVERLAP, {POLICY: "combined"}),
    Setup(("sparse placement", "speculation"), STORAGE | EAGLE, {POLICY: "sparse"}),
    Setup(("strict provenance",), env={"SGLANG_UNIFIED_KV_PROVENANCE": "strict"}),
    Setup(("HiCache off", "speculation", "overlap"), EAGLE | OVERLAP | dict(hicache=False), RADIX),
)


class Book:
    """Prompts that share prefixes, turns among them, and the stock engine's cold run of each."""

    def __init__(self, engine, chance: random.Random, prompts: int, turns: int):
        trunks = [prompt(chance.randrange(10**6), 1100) for _ in range(2)]
        self.runs: dict[tuple[int, ...], SpecRun] = {}
        for _ in range(prompts):
            shared = chance.choice((PAGE, 2 * PAGE, 3 * PAGE)) + chance.choice((-1, 0, 1, 2, 3, 60))
            tail = chance.choice((0, 1, 3, 40, 130, 250))
            self._add(
                engine, chance.choice(trunks)[:shared] + prompt(chance.randrange(10**6), tail)
            )
        for ids in chance.sample(sorted(self.runs), min(turns, len(self.runs))):
            said = self.runs[ids].output_ids[: chance.randrange(1, NEW_TOKENS + 1)]
            self._add(engine, [*ids, *said, *prompt(chance.randrange(10**6), 300)], turn=True)

    def _add(self, engine, ids: list[int], turn: bool = False) -> None:
        found = cold(engine, ids, NEW_TOKENS)
        found.turn = turn
        self.runs[tuple(ids)] = found


class Report:
    """What was covered."""

    def __init__(self):
        self.resumes: Counter[tuple[str, str]] = Counter()
        self.requests = 0
        self.faults: Counter[str] = Counter()

    def lines(self) -> list[str]:
        features = sorted({feature for feature, _ in self.resumes})
        table = [f"{'resumes':22}" + "".join(f"{tier:>9}" for tier in TIERS)]
        for feature in features:
            counts = "".join(f"{self.resumes[feature, tier]:9}" for tier in TIERS)
            table.append(f"{feature:22}{counts}")
        faults = ", ".join(f"{name} {n}" for name, n in sorted(self.faults.items()))
        return [*table, f"{self.requests} requests; {faults}"]


class Trial:
    """One engine under one setup, driven by a random script."""

    def __init__(self, engine, setup: Setup, book: Book, report: Report, seed: int, folder: Path):
        self.engine, self.setup, self.book, self.report = engine, setup, book, report
        self.chance = random.Random(seed)
        # Apart, since storage threads decide how many steps there are: the script must not depend on it.
        self.noise = random.Random(seed + 1)
        self.where = f"setup {setup.name!r}, seed {seed}"
        self.folder = folder
        self.manager = engine.tree.checkpoints
        self.drafts = engine.draft_runner is not None
        self.ids: dict[str, tuple[int, ...]] = {}
        self.features: dict[str, set[str]] = {}
        self.aborted: set[str] = set()
        self.resumed: dict[str, Counter] = {}
        self.recent: set[str] = set()
        self.failing_load_back = False

    # -- what is watched

    @contextlib.contextmanager
    def watched(self):
        engine, tree, runner = self.engine, self.engine.tree, self.engine.model_runner
        launch, raw, ask = engine.scheduler.run_batch, runner._forward_raw, tree.restore_swa_windows
        restore, load_back = manager_module.restore, tree.load_back
        reqs: list[Any] = []

        def launched(batch, *args, **kwargs):
            reqs[:] = batch.reqs
            return launch(batch, *args, **kwargs)

        def asked(req):
            tiers = split_cached_prefix_by_tier(
                prefix_len=req.prefix_len,
                host_hit_len=req.materialized_host_hit_len(),
                storage_hit_len=req.storage_hit_length,
                storage_hit_start=req.storage_hit_start,
                host_hit_is_storage=req.host_hit_is_storage,
            )
            self.asked[req.rid] = [t for t, n in zip(TIERS, tiers, strict=True) if n]
            return ask(req)

        def forward(batch, *args, **kwargs):
            if batch.forward_mode.is_extend_without_speculative():
                rows = zip(
                    reqs,
                    batch.req_pool_indices.tolist(),
                    batch.extend_prefix_lens.tolist(),
                    strict=True,
                )
                self.judge([row for row in rows if row[0].rid in self.asked])
            return raw(batch, *args, **kwargs)

        def restored(restores, rows, mover, *rest):
            before = [ring.buffer.clone() for ring in rows.rings]
            restore(restores, rows, mover, *rest)
            for ring, old in zip(rows.rings, before, strict=True):
                for item in restores:
                    own = slice(item.slot * ring.size, (item.slot + 1) * ring.size)
                    old[own] = ring.buffer[own]
                same = torch.equal(old.view(torch.uint8), ring.buffer.view(torch.uint8))
                assert same, f"{self.where}: a restore wrote outside its slot"

        def loaded(*args, **kwargs):
            if self.failing_load_back and self.noise.random() < 0.5:
                self.report.faults["failed load-back"] += 1
                return False
            return load_back(*args, **kwargs)

        self.asked: dict[str, list[str]] = {}
        engine.scheduler.run_batch, runner._forward_raw = launched, forward
        tree.restore_swa_windows, tree.load_back = asked, loaded
        manager_module.restore = restored
        try:
            yield
        finally:
            del engine.scheduler.run_batch, runner._forward_raw
            del tree.restore_swa_windows, tree.load_back
            manager_module.restore = restore

    def judge(self, rows) -> None:
        """Compare the rings that requests resume from, and count what kind of resume it was."""
        for req, slot, start in rows:
            tiers = self.asked.pop(req.rid)
            expected = self.book.runs[self.ids[req.rid]].at_boundary[start]
            found = rows_before(self.engine, slot, start)
            if not self.drafts:
                expected = {n: v for n, v in expected.items() if not n.startswith("draft")}
            # The oracle's rings are longer by what drafts need, its rows are not.
            bad = differing(found, expected)
            assert not bad, f"{self.where}: {req.rid} resumes at {start} from {tiers}: {bad}"
            features = self.features[req.rid] | self.recent | set(self.setup.features)
            if req.retraction_count:
                features |= {"retraction"}
            if len(rows) > 1:
                features |= {"several in a batch"}
            self.report.resumes.update((f, tier) for f in features for tier in tiers)

    # -- what happens

    def submit(self) -> None:
        if len(self.ids) >= 4:
            return
        for _ in range(self.chance.choice((1, 1, 2, 3))):
            ids = self.chance.choice(list(self.book.runs))
            new = self.chance.choice((0, 1, 2, NEW_TOKENS, NEW_TOKENS))
            features, request = set(), {}
            if new < 2:
                features.add(f"{new} new tokens")
            if len(ids) % PAGE in (PAGE - 1, 0, 1):
                features.add("page edge")
            if len(ids) % 4:
                features.add("C4 edge")
            if self.book.runs[ids].turn:
                features.add("next turn")
            if self.chance.random() < 0.2:
                name = self.chance.choice(("extra_key", "cache_salt"))
                request[name] = "key"
                features.add(name)
            if "priority" in self.setup.features:
                request["priority"] = self.chance.randrange(3)
            rid = self.engine.submit(ids, new, return_logprob=True, **request)
            self.ids[rid], self.features[rid] = ids, features
            self.report.requests += 1

    def steps(self) -> None:
        for _ in range(self.chance.randrange(1, 8)):
            self.poison()
            self.engine.step()
            self.manager.check_integrity()
        self.collect()

    def collect(self) -> None:
        for rid in [r for r in self.ids if self.engine.is_done(r)]:
            output, expected = self.engine.output(rid), self.book.runs[self.ids.pop(rid)]
            self.features.pop(rid)
            # An abort takes what there is: under speculation that may be more than was asked for.
            most = len(expected.output_ids) if rid in self.aborted else None
            ids, logprobs = output.output_ids[:most], output.output_logprobs[:most]
            assert ids == expected.output_ids[: len(ids)], f"{self.where}: {rid}"
            assert logprobs == expected.logprobs[: len(logprobs)], f"{self.where}: {rid}"

    def finish(self) -> None:
        while not all(map(self.engine.is_done, self.ids)):
            self.poison()
            self.engine.step()
        self.engine.drain()
        self.collect()
        self.manager.check_idle()
        self.engine.tree.sanity_check()

    def abort(self) -> None:
        if self.ids:
            rid = self.chance.choice(list(self.ids))
            self.aborted.add(rid)
            self.engine.abort(rid)
            self.recent.add("after abort")

    def flush(self) -> None:
        self.finish()
        self.engine.flush()
        self.recent = {"after flush"}

    def evict(self) -> None:
        self.engine.tree.evict(EvictParams(num_tokens=self.chance.choice((PAGE, 1024, 10**9))))
        self.recent.add("after eviction")

    def pause(self) -> None:
        mode = self.chance.choice(("in_place", "retract"))
        self.engine.scheduler.pause_generation(PauseGenerationReqInput(mode=mode))
        self.poison()
        again = ContinueGenerationReqInput(torch_empty_cache=False)
        self.engine.scheduler.continue_generation(again)
        self.recent.add("after pause")

    def retract(self) -> None:
        scheduler.TEST_RETRACT = not scheduler.TEST_RETRACT
        scheduler.TEST_RETRACT_INTERVAL = self.chance.choice((2, 3, 5))

    def fail_load_back(self) -> None:
        self.failing_load_back = not self.failing_load_back

    def damage(self) -> None:
        """Only of what is not under way: the folder is whole while requests wait for it."""
        if not any(self.folder.glob("*.bin")):
            return
        self.flush()
        damage = self.chance.choice(DAMAGES)
        # It may find nothing of its kind.
        with contextlib.suppress(IndexError):
            damage(self.chance, self.folder)
            self.report.faults[damage.__name__] += 1

    def poison(self) -> None:
        """Overwrite whatever is free."""
        if self.noise.random() < 0.5:
            return
        for slot in self.engine.req_to_token_pool.free_slots:
            for _, buffer, size, _ in ring_buffers(self.engine):
                buffer[slot * size : (slot + 1) * size] = POISON
        for slot in self.manager.store._free:
            self.manager.mover.host[slot] = 0xEE
        controller = self.engine.tree.cache_controller
        if controller is None:
            return
        group = controller.mem_pool_host
        free = group.anchor_entry.host_pool.free_slots[::PAGE] // PAGE
        for entry in group.entries:
            if isinstance(entry.host_pool, DeepSeekV4PagedHostPool):
                # One tensor, or one of each layer; pages come first in both.
                buffers = entry.host_pool.kv_buffer
                for buffer in buffers if isinstance(buffers, list) else [buffers]:
                    buffer[free] = 0xEE

    def run(self, operations: int) -> None:
        """Do that many random things; then everything must be idle and whole."""
        actions = {
            self.submit: 8,
            self.steps: 8,
            self.finish: 3,
            self.evict: 5,
            self.flush: 1,
            self.abort: 1,
            self.pause: 1,
            self.retract: 1,
            self.fail_load_back: 1,
            self.damage: 1,
        }
        script = self.chance.choices(list(actions), list(actions.values()), k=operations)
        try:
            with self.watched():
                for action in script:
                    action()
                self.failing_load_back = scheduler.TEST_RETRACT = False
                self.finish()
        finally:
            scheduler.TEST_RETRACT = False


def run_setup(make_engine, setup, book, report, seed, operations, model) -> None:
    """One trial: an engine of ``setup`` and ``operations`` random things."""
    with (
        tempfile.TemporaryDirectory() as folder,
        exact_chunk_fill(setup.exact_chunks),
        make_engine(
            model=model,
            chunked_prefill_size=512,
            max_total_tokens=3072,
            env={"SGLANG_UNIFIED_KV_CHECKPOINT_HOST_GB": "0.008"} | at(Path(folder)) | setup.env,
            **setup.args,
        ) as engine,
    ):
        Trial(engine, setup, book, report, seed, Path(folder)).run(operations)


@contextlib.contextmanager
def exact_chunk_fill(on: bool):
    kept = schedule_policy._use_exact_chunk_fill
    if on:
        schedule_policy._use_exact_chunk_fill = lambda: True
    try:
        yield
    finally:
        schedule_policy._use_exact_chunk_fill = kept


def make_book(make_engine, model, seed: int, prompts: int, turns: int) -> Book:
    """The prompts of ``seed``, run cold by the stock engine in chunks of a page."""
    with make_engine(stock=True, model=model, chunked_prefill_size=PAGE, **EAGLE) as engine:
        return Book(engine, random.Random(seed), prompts, turns)


@contextlib.contextmanager
def plain_engine(*, stock=False, env=None, model, **server_args):
    """The engines of ``conftest.make_engine``, without pytest."""
    from sglang_unified_kv.reference.harness import InProcessEngine

    kept = dict(os.environ)
    os.environ["SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE"] = "0" if stock else "1"
    os.environ.update(env or {})
    try:
        with InProcessEngine(
            model, **{"hicache": True, "max_total_tokens": 12288, **server_args}
        ) as engine:
            yield engine
    finally:
        os.environ.clear()
        os.environ.update(kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="stop after this long")
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--operations", type=int, default=150, help="per trial")
    parser.add_argument("--setup", type=int, choices=range(len(SETUPS)), help="only this one")
    args = parser.parse_args()
    from sglang.srt.plugins import load_plugins
    from sglang_unified_kv.reference.model import write_tiny_model

    load_plugins()
    report, trials, deadline = Report(), 0, time.monotonic() + 60 * args.minutes
    setups = SETUPS if args.setup is None else SETUPS[args.setup : args.setup + 1]
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder) / "model", next_n=True)
        seed = args.seed
        while time.monotonic() < deadline:
            book = make_book(plain_engine, model, seed, prompts=10, turns=4)
            for setup in setups:
                print(f"seed {seed}: {setup.name}", flush=True)
                run_setup(plain_engine, setup, book, report, seed, args.operations, model)
                trials += 1
                if time.monotonic() > deadline:
                    break
            seed += 1
    print(*report.lines(), f"{trials} trials", sep="\n")


if __name__ == "__main__":
    main()
