"""Weight updates over HTTP while a request runs, with EAGLE and the overlap schedule."""

import base64
import json
import multiprocessing
import os
import pickle

import pytest
import requests
from safetensors.torch import load_file
from sglang_unified_kv.cli.client import SGLangClient
from sglang_unified_kv.cli.demo import environment, launch_command
from sglang_unified_kv.cli.server import ServerProcess, free_port
from sglang_unified_kv.launches import EAGLE
from sglang_unified_kv.reference.harness import prompt
from weight_updates import FILE, GROUP, broadcast, write_other

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
# Under a page, and in two chunks of which the first is in the tree or is not.
LENGTHS = (200, 700)


class Served:
    def __init__(self, url):
        self.url, self.client = url, SGLangClient(url)

    def post(self, path, **body):
        return requests.post(f"{self.url}/{path}", json=body, timeout=300)

    def done(self, path, **body):
        answer = self.post(path, **body)
        assert answer.ok, answer.text

    def start(self, ids, new_tokens):
        """A request that has begun to answer."""
        body = {"input_ids": ids, "stream": True}
        body["sampling_params"] = {
            "temperature": 0,
            "max_new_tokens": new_tokens,
            "ignore_eos": True,
        }
        answer = requests.post(f"{self.url}/generate", json=body, stream=True, timeout=300)
        lines = (line.decode() for line in answer.iter_lines() if line)
        next(lines)
        return lines

    def cached(self, ids):
        return self.client.generate(ids, max_new_tokens=8)


@pytest.fixture(scope="module")
def models(next_n_path, tmp_path_factory):
    return next_n_path, write_other(next_n_path, tmp_path_factory.mktemp("weights") / "other")


@pytest.fixture(scope="module")
def served(models, tmp_path_factory):
    folder, port = tmp_path_factory.mktemp("served"), free_port()
    env = environment("exact", os.environ, storage=folder / "storage")
    command = [*launch_command(models[0], port), *EAGLE]
    with ServerProcess(command, env, folder / "log") as process:
        found = Served(f"http://127.0.0.1:{port}")
        process.wait_until(found.client.healthy, timeout_s=600)
        yield found
        process.check()


def nothing(served, folder):
    served.done("begin_weight_update")
    served.done("end_weight_update")


def disk(served, folder):
    answer = served.post("update_weights_from_disk", model_path=str(folder), load_format="auto")
    assert "cache was not flushed" in answer.text


def tensor(served, folder):
    named = base64.b64encode(pickle.dumps(list(load_file(folder / FILE).items()))).decode()
    served.done("begin_weight_update")
    served.post("update_weights_from_tensor", serialized_named_tensors=[named])
    served.done("end_weight_update")


def distributed(served, folder):
    weights, port = load_file(folder / FILE), free_port()
    trainer = multiprocessing.get_context("spawn").Process(
        target=broadcast, args=(str(folder / FILE), port), daemon=True
    )
    trainer.start()
    group = dict(master_address="127.0.0.1", master_port=port, rank_offset=1, world_size=2)
    served.done("init_weights_update_group", **group, group_name=GROUP, backend="gloo")
    served.done("begin_weight_update")
    served.post(
        "update_weights_from_distributed",
        names=list(weights),
        dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()],
        shapes=[list(tensor.shape) for tensor in weights.values()],
        group_name=GROUP,
    )
    served.done("end_weight_update")
    trainer.join()
    served.done("destroy_weights_update_group", group_name=GROUP)


def ipc(served, folder):
    # Its package needs a GPU, so the update fails; what a failed one left in the weights is not known.
    answer = served.post("update_weights_from_ipc", zmq_handles={})
    assert not answer.ok and "ImportError" in answer.text


CHANGES = {tensor, disk, distributed}


@pytest.mark.parametrize("update", [nothing, disk, tensor, distributed, ipc])
def test_a_running_request_outlives_an_update(served, models, update):
    changed = update in CHANGES
    for length in LENGTHS:
        ids = prompt(1000 * length + len(update.__name__), 700)
        before = served.cached(ids)
        running = served.start(prompt(length, length), 160)
        served.done("pause_generation", mode="in_place")
        update(served, models[1])
        served.done("continue_generation")
        last = json.loads(
            [line for line in running if "DONE" not in line][-1].removeprefix("data: ")
        )
        assert len(last["output_ids"]) == 160
        suspended = [served.cached(ids) for _ in range(2)]
        assert [run.cached_tokens for run in suspended] == [0, 0]
        served.client.flush_cache()
        cold, hit = served.cached(ids), served.cached(ids)
        # Of the same weights storage has the prompt.
        assert (cold.cached_tokens, hit.cached_tokens) == (0 if changed else 512, 512)
        assert cold.cached_by["storage"] == cold.cached_tokens
        assert cold.logprobs == hit.logprobs == suspended[0].logprobs == suspended[1].logprobs
        assert (cold.logprobs != before.logprobs) == changed
        back = dict(model_path=str(models[0]), load_format="auto", flush_cache=False)
        served.done("update_weights_from_disk", **back)
        # SGLang refuses it while writes are on their way.
        served.client.flush_cache()
