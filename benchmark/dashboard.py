"""The panels of the Grafana dashboard, drawn from a real scrape: docs/grafana/unified_kv.png.

    python benchmark/dashboard.py --prometheus PATH [--minutes N] [--out FILE]

Serves the tiny model twice on the CPU, with exact reuse and with HiSparse, and sends both made-up requests.
A Prometheus server (its binary is PATH) scrapes them every second and is asked the dashboard's own queries;
each panel is drawn where the dashboard has it. Grafana takes no part: colours and axes are matplotlib's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import re
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import requests
from matplotlib.figure import Figure
from sglang_unified_kv.cli.client import ClientError, SGLangClient
from sglang_unified_kv.cli.demo import environment, launch_command
from sglang_unified_kv.cli.demo_story import prompt
from sglang_unified_kv.cli.server import ServerProcess, free_port
from sglang_unified_kv.reference.model import write_tiny_model

DASHBOARD = Path(__file__).parents[1] / "docs" / "grafana" / "unified_kv.json"
MODEL = "tiny"
EXACT = {"SGLANG_UNIFIED_KV_CHECKPOINT_HOST_GB": "0.015", "SGLANG_UNIFIED_KV_RING_FIXES": "1"}
HISPARSE = {"SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE": "0", "SGLANG_UNIFIED_KV_HISPARSE": "1"}
HISPARSE_CONFIG = {"top_k": 512, "device_buffer_size": 512, "host_to_device_ratio": 3}


def without(command: list[str], *flags: str) -> list[str]:
    """``command`` without flags that have a value."""
    kept = list(command)
    for flag in flags:
        at = kept.index(flag)
        del kept[at : at + 2]
    return kept


def commands(model: Path, ports: list[int]) -> list[list[str]]:
    exact, hisparse = (
        [*launch_command(model, port), "--served-model-name", MODEL] for port in ports
    )
    hisparse.remove("--enable-hierarchical-cache")
    hisparse = without(hisparse, "--hicache-storage-backend", "--max-total-tokens")
    hisparse += ["--enable-hisparse", "--hisparse-config", json.dumps(HISPARSE_CONFIG)]
    hisparse += ["--disable-radix-cache", "--max-total-tokens", "24576"]
    return [exact, hisparse]


def converse(client: SGLangClient, until: float, seed: int) -> None:
    """Conversations that share a beginning and grow; now and then the cache is flushed."""
    source = random.Random(seed)
    beginnings = [prompt(i, 700) for i in range(3)]
    while time.monotonic() < until:
        ids = list(source.choice(beginnings))
        for _ in range(source.randint(1, 3)):
            ids += prompt(source.randrange(40), source.randint(50, 500))
            if len(ids) > 2300 or time.monotonic() >= until:
                break
            ids += client.generate(ids, max_new_tokens=16).output_ids
        if seed == 0 and source.random() < 0.1:
            with contextlib.suppress(ClientError):
                client.flush_cache(timeout_s=5)


def read_long(client: SGLangClient, until: float, seed: int) -> None:
    """Prompts of several times the hot buffer."""
    source = random.Random(seed)
    while time.monotonic() < until:
        client.generate(prompt(source.randrange(1000), 3000), max_new_tokens=60)


def run(args, folder: Path) -> tuple[str, float, float, contextlib.ExitStack]:
    """Serve, send and scrape; returns Prometheus' address, begin and end, and what ends the processes."""
    ports, port = [free_port(), free_port()], free_port()
    model = write_tiny_model(folder / "model")
    stack = contextlib.ExitStack()
    clients = []
    for number, (command, more) in enumerate(
        zip(commands(model, ports), (EXACT, HISPARSE), strict=True)
    ):
        env = environment("exact", os.environ, storage=folder / "storage") | more
        process = stack.enter_context(ServerProcess(command, env, folder / f"server-{number}.log"))
        clients.append((process, SGLangClient(f"http://127.0.0.1:{ports[number]}")))
    for process, client in clients:
        process.wait_until(client.healthy, timeout_s=1200)
    targets = ", ".join(f"'127.0.0.1:{p}'" for p in ports)
    config = folder / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 1s}\nscrape_configs:\n"
        f"  - job_name: sglang\n    static_configs: [{{targets: [{targets}]}}]\n"
        # Prometheus 2 is answered with sglang_ for sglang: (docs/metrics.md).
        "    metric_relabel_configs:\n"
        "      - {source_labels: [__name__], regex: 'sglang_(.*)', target_label: __name__, "
        "replacement: 'sglang:$1'}\n"
    )
    listen = f"127.0.0.1:{port}"
    prometheus = [str(args.prometheus), f"--config.file={config}"]
    prometheus += [f"--storage.tsdb.path={folder / 'tsdb'}", f"--web.listen-address={listen}"]
    with (folder / "prometheus.log").open("wb") as log:
        scraper = subprocess.Popen(prometheus, stdout=log, stderr=log)
    stack.callback(lambda: (scraper.terminate(), scraper.wait()))
    begin = time.time()
    until = time.monotonic() + 60 * args.minutes
    (_, exact), (_, hisparse) = clients
    jobs = [(converse, SGLangClient(exact.base_url), seed) for seed in range(3)]
    jobs += [(read_long, SGLangClient(hisparse.base_url), seed) for seed in range(2)]
    threads = [
        threading.Thread(target=job, args=(client, until, seed)) for job, client, seed in jobs
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return f"http://{listen}", begin, time.time(), stack


def ask(
    url: str, expr: str, begin: float, end: float
) -> list[tuple[dict, list[float], list[float]]]:
    """(labels, times, values) of every series that answers a query over the whole run."""
    query = expr.replace("$model_name", MODEL).replace("$instance", ".*")
    query = query.replace("$__rate_interval", "20s")
    session = requests.Session()
    session.trust_env = False
    parameters = {"query": query, "start": begin, "end": end, "step": 2}
    answer = session.get(f"{url}/api/v1/query_range", params=parameters, timeout=60).json()
    if answer["status"] != "success":
        raise SystemExit(f"{query}: {answer}")
    series = []
    for one in answer["data"]["result"]:
        times, values = zip(*one["values"], strict=True)
        series.append((one["metric"], [float(t) for t in times], [float(v) for v in values]))
    return series


def lines_of(panel: dict, url: str, begin: float, end: float) -> list[tuple[str, list, list]]:
    """(legend, seconds since the start, values) of every series that a panel shows."""
    found = []
    for target in panel["targets"]:
        for labels, times, values in ask(url, target["expr"], begin, end):
            legend = re.sub(
                r"{{(\w+)}}", lambda m, of=labels: of.get(m[1], ""), target["legendFormat"]
            )
            found.append((legend.strip(), [t - begin for t in times], values))
    return found


def draw(url: str, begin: float, end: float, out: Path) -> list[str]:
    """Draw every panel in its place; returns the titles of those that no series answers."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    height = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in panels)
    figure = Figure(figsize=(20, height * 0.36))
    empty = []
    for panel in panels:
        at = panel["gridPos"]
        bottom = 1 - (at["y"] + at["h"]) / height
        if panel["type"] == "row":
            figure.text(0.01, bottom, panel["title"], fontsize=15, weight="bold")
            continue
        width = at["w"] / 24 - 0.035
        place = (at["x"] / 24 + 0.025, bottom + 0.7 / height, width, (at["h"] - 1.9) / height)
        axes = figure.add_axes(place)
        axes.set_title(f"{panel['title']} ({panel['fieldConfig']['defaults']['unit']})", fontsize=9)
        lines = lines_of(panel, url, begin, end)
        for legend, times, values in lines:
            axes.plot(times, values, label=legend, linewidth=1.2)
        # Room for the legend above the lines.
        shown = [v for *_, values in lines for v in values if math.isfinite(v)]
        axes.set_ylim(0, 1.4 * max(shown, default=0) or 1)
        axes.set_xlim(0, end - begin)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.3)
        if lines:
            axes.legend(fontsize=7, loc="upper left", ncols=1 if len(lines) < 3 else 2)
        else:
            empty.append(panel["title"])
    figure.text(0.99, 0.002, "seconds since the start of the run", ha="right", fontsize=8)
    figure.savefig(out, dpi=70)
    return empty


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prometheus", type=Path, required=True, help="the binary of Prometheus")
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--out", type=Path, default=DASHBOARD.with_suffix(".png"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        url, begin, end, stack = run(args, Path(folder))
        with stack:
            empty = draw(url, begin, end, args.out)
    print(f"{args.out}: {', '.join(empty) or 'no panel'} without data")


if __name__ == "__main__":
    main()
