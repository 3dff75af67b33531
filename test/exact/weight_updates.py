"""Another model of the same shape, and the four ways to load it into an engine that runs."""

from __future__ import annotations

import multiprocessing
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    InitWeightsUpdateGroupReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
)
from sglang_unified_kv.cli.server import free_port

FILE = "model.safetensors"
GROUP = "trainer"


def write_other(model: Path, folder: Path) -> Path:
    """``model`` with other keys and values in every layer, the drafting one included."""
    shutil.copytree(model, folder)
    weights = load_file(folder / FILE)
    for name in [n for n in weights if n.endswith("attn.wkv.weight")]:
        weights[name] = weights[name].flip(1).contiguous()
    save_file(weights, folder / FILE, metadata={"format": "pt"})
    return folder


class Updates:
    """``updates[path](folder, flush)`` loads the weights of ``folder`` the way of that name.

    Raises:
        AssertionError: SGLang answers that it failed; not where it only refused the flush.
    """

    def __init__(self, engine):
        self._engine = engine
        self._updater = engine.scheduler.weight_updater

    def __getitem__(self, path: str) -> Callable[[Path, bool], None]:
        return getattr(self, path)

    def disk(self, folder: Path, flush: bool) -> None:
        request = UpdateWeightFromDiskReqInput(
            model_path=str(folder), load_format="auto", flush_cache=flush
        )
        _done(self._updater.update_weights_from_disk(request))

    def tensor(self, folder: Path, flush: bool) -> None:
        named = list(load_file(folder / FILE).items())
        request = UpdateWeightsFromTensorReqInput(
            # By value: SGLang has pickled tensors of a GPU in mind since its first update of this kind.
            serialized_named_tensors=[pickle.dumps(named)],
            flush_cache=flush,
        )
        self.begin()
        _done(self._updater.update_weights_from_tensor(request))
        self.end()

    def distributed(self, folder: Path, flush: bool) -> None:
        """From a trainer in a process of its own."""
        weights, port = load_file(folder / FILE), free_port()
        trainer = multiprocessing.get_context("spawn").Process(
            target=broadcast, args=(str(folder / FILE), port), daemon=True
        )
        trainer.start()
        group = InitWeightsUpdateGroupReqInput(
            master_address="127.0.0.1",
            master_port=port,
            rank_offset=1,
            world_size=2,
            group_name=GROUP,
            backend="gloo",
        )
        _done(self._updater.init_weights_update_group(group))
        request = UpdateWeightsFromDistributedReqInput(
            names=list(weights),
            dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()],
            shapes=[list(tensor.shape) for tensor in weights.values()],
            group_name=GROUP,
            flush_cache=flush,
        )
        self.begin()
        _done(self._updater.update_weights_from_distributed(request))
        self.end()
        trainer.join()
        self._engine.model_runner.weight_updater.destroy_weights_update_group(GROUP)

    def ipc(self, folder: Path, flush: bool) -> None:
        """Through SGLang's worker of checkpoint-engine; that package, which needs a GPU, is replaced."""
        worker = ModuleType("checkpoint_engine.worker")

        def receive(context, handle, *, device_id, run, post_hook):
            run(list(load_file(folder / FILE).items()))
            if post_hook is not None:
                post_hook()

        vars(worker)["update_weights_from_ipc"] = receive
        package = ModuleType("checkpoint_engine")
        modules = {"checkpoint_engine": package, "checkpoint_engine.worker": worker}
        request = UpdateWeightsFromIPCReqInput(zmq_handles={"here": ""}, flush_cache=flush)
        with mock.patch.dict(sys.modules, modules):
            from sglang.srt.checkpoint_engine import checkpoint_engine_worker

            extension = checkpoint_engine_worker.SGLangCheckpointEngineWorkerExtensionImpl
            with (
                mock.patch.object(extension, "get_device_uuid", lambda self: "here"),
                mock.patch.object(extension, "get_device_id", lambda self: 0),
            ):
                _done(self._updater.update_weights_from_ipc(request))

    def begin(self) -> None:
        _done(self._updater.begin_weight_update(BeginWeightUpdateReqInput()))

    def end(self) -> None:
        _done(self._updater.end_weight_update(EndWeightUpdateReqInput()))


def _done(answer) -> None:
    assert answer.success or "the cache was not flushed" in answer.message, answer.message


def broadcast(file: str, port: int) -> None:
    from sglang.srt.utils.common import init_custom_process_group

    group = init_custom_process_group(
        backend="gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        world_size=2,
        rank=0,
        group_name=GROUP,
    )
    works = [
        torch.distributed.broadcast(tensor, src=0, group=group, async_op=True)
        for tensor in load_file(file).values()
    ]
    for work in works:
        work.wait()
