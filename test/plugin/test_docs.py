"""README and docs: the site builds, links lead on, commands parse, examples run, generated parts are new."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from plan_runs import write_pro
from sglang_unified_kv import names
from sglang_unified_kv.attestation import digest
from sglang_unified_kv.cli import app
from sglang_unified_kv.config import variables
from sglang_unified_kv.edits import HISPARSE_SERIES, REPORT, RING, SERIES
from sglang_unified_kv.launches import LINES, block
from sglang_unified_kv.metrics import BY_NAME
from sglang_unified_kv.reference.edits import SERIES as REFERENCE

REPO = Path(__file__).parents[2]
DOCS = REPO / "docs"
sys.path.insert(0, str(DOCS))
import generate  # noqa: E402

PAGES = sorted([*DOCS.glob("*.md"), *REPO.glob("*.md")])
TEXT = {page: page.read_text() for page in PAGES}
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.M | re.S)


def blocks(language, pages=PAGES):
    """(page, text) of every code block, without its indentation."""
    for page in pages:
        for indent, found, text in FENCE.findall(TEXT[page]):
            if found == language:
                yield page, "\n".join(line.removeprefix(indent) for line in text.splitlines())


def prose(page):
    return FENCE.sub("", TEXT[page])


def slug(heading):
    kept = re.sub(r"[^\w\- ]", "", re.sub(r"[`*]|\]\(.*?\)", "", heading).lower())
    return kept.strip().replace(" ", "-")


ANCHORS = {
    p: {slug(h) for h in re.findall(r"^#+ (.+)$", FENCE.sub("", t), re.M)} for p, t in TEXT.items()
}


@pytest.mark.parametrize(
    "page", [p for p in PAGES if "generated: " in TEXT[p]], ids=lambda p: p.name
)
def test_generated_sections_are_up_to_date(page):
    assert generate.filled(TEXT[page]) == TEXT[page], "run python docs/generate.py"


def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    done = subprocess.run(
        [*command, "-d", tmp_path / "trees", DOCS, tmp_path / "site"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for page in DOCS.glob("*.md"):
        assert (tmp_path / "site" / f"{page.stem}.html").exists()
    # A launch flag must not be set as a dash.
    assert "--enable-hierarchical-cache" in (tmp_path / "site" / "limits.html").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_to_a_file_and_a_heading(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in ANCHORS[file], target


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_prose_ends_at_120_columns(page):
    # Tables are one line a row.
    long = [line for line in prose(page).splitlines() if len(line) > 120]
    assert [line for line in long if not line.lstrip().startswith("|")] == []


TESTS = {p.name: p.read_text() for p in (REPO / "test").rglob("*.py")}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_tests_and_files_that_are_named_exist(page):
    for name, test, more in re.findall(r"\b(test_\w+\.py)(?:::(\w+))?(\*?)", TEXT[page]):
        assert name in TESTS, name
        if test:
            end = r"\w*" if more else r"\b"
            found = rf"^ *((async )?def |class |){test}{end}( =|\()"
            assert re.search(found, TESTS[name], re.M), f"{name}::{test}"
    for path in re.findall(r"`((?:benchmark|docs|scripts|test)/[\w/.]+)`", TEXT[page]):
        assert (REPO / path).exists() or path.startswith("docs/_build"), path


def texts_of_the_product():
    """Pieces of its string literals, between what is filled in."""
    for file in (REPO / "python").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from re.split(r"%[.\d]*[a-z]|\{\w*\}", node.value)


def test_messages_that_operators_look_for_are_the_real_ones():
    real = "\n".join(texts_of_the_product())
    spans = re.findall(r"`([^`]+)`", prose(DOCS / "operating.md"))
    # What has words in it and is no command line, flag or assignment.
    messages = [
        s for s in spans if s.count(" ") >= 2 and not re.match(r"sglang-|curl |--\w|\w+=\S+ ", s)
    ]
    assert len(messages) > 15
    for message in messages:
        for piece in re.split(r"\.\.\.|=", message):
            assert piece.strip(" ():") in real, (message, piece)


def test_the_counts_of_edits_are_those_of_the_series():
    series = {
        "exact reuse": SERIES,
        "ring accounting": RING,
        "HiSparse": HISPARSE_SERIES,
        "attestation and metrics": REPORT,
        "reference engine": REFERENCE,
    }
    text = TEXT[DOCS / "upgrading.md"]
    shown = re.findall(r"^\| (\w[\w ]*) \| (\d+) \| 0\.5\.\d+ \| ([\d |]+)\|$", text, re.M)
    assert {name: int(edits) for name, edits, _ in shown} == {
        n: len([*s]) for n, s in series.items()
    }
    for name, edits, found in shown:
        assert sum(map(int, found.split("|"))) == int(edits), name
    said = "edits={} edits_digest={} ".format(*digest([SERIES, REPORT]))
    assert said in TEXT[DOCS / "serving.md"], said


def test_metrics_that_are_named_exist():
    for page in PAGES:
        for name in re.findall(r"sglang:unified_kv_[a-z_]+[a-z]", TEXT[page]):
            # The series of a histogram too.
            plain = name.removesuffix("_sum").removesuffix("_count").removesuffix("_bucket")
            assert plain in BY_NAME, (page.name, name)


def commands_of(page, text):
    """(assignments, words) of every command line of a shell block."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        environ = []
        while words and re.match(r"[A-Z_]+=", words[0]):
            environ.append(words.pop(0))
        if words:
            yield environ, words


COMMANDS = [
    (page.name, environ, words)
    for page, text in blocks("bash")
    for environ, words in commands_of(page, text)
]
SERVER = ["python", "-m", "sglang.launch_server"]


def launch_flags(words):
    if words[:3] == SERVER:
        return words[3:]
    return (
        words[words.index("--") + 1 :] if words[0] == "sglang-unified-kv" and "--" in words else []
    )


def test_launch_flags_are_parsed_by_sglang(forks):
    lines = [launch_flags(words) for *_, words in COMMANDS if launch_flags(words)]
    assert len(lines) > 5
    script = (
        "import argparse, json, sys\n"
        "from sglang.srt.server_args import ServerArgs\n"
        "parser = argparse.ArgumentParser(); ServerArgs.add_cli_args(parser)\n"
        "for line in json.loads(sys.argv[1]): parser.parse_args(line)"
    )
    ended = forks.run(script, argv=["x", json.dumps(lines)])
    assert ended.rc == 0, ended.stderr


def test_every_launch_line_is_one_of_the_table():
    """``test_launches.py`` says that those are right, and the generated sections print them."""
    known = [words for line in LINES.values() for words in (line.command, line.doctor)]
    shown = [
        words
        for *_, words in COMMANDS
        if words[:3] == SERVER or words[:2] == ["sglang-unified-kv", "doctor"]
    ]
    assert len(shown) > 6
    for words in shown:
        assert words in known, words


def test_our_commands_are_parsed():
    group = typer.main.get_command(app)
    ours = [words for *_, words in COMMANDS if words[0] == "sglang-unified-kv"]
    assert {words[1] for words in ours} >= {"doctor", "plan", "check", "edits"}
    for words in ours:
        name, *arguments = words[1:]
        if "--write-config" in arguments:
            continue  # it would write: test_plan_line.py
        group.commands[name].make_context(name, arguments)


def test_scripts_that_are_run_exist():
    ran = [words for *_, words in COMMANDS if "/" in words[0]]
    assert ran and all(os.access(REPO / words[0], os.X_OK) for words in ran)
    files = [
        words[1] for *_, words in COMMANDS if words[0] == "python" and words[1] not in ("-m", "-c")
    ]
    assert files and all((REPO / file).is_file() for file in files)


def test_variables_that_are_set_or_named_exist(forks):
    named = {
        match
        for text in TEXT.values()
        for match in re.findall(r"\bSGLANG_[A-Z0-9_]+[A-Z0-9]\b", text)
    }
    ours = {v.name for v in variables()} | set(names.SWITCHES)
    ours |= {generate.reference.ENV, generate.reference.CHUNK_INVARIANT_ENV}
    folders = ((REPO / folder).rglob("*") for folder in ("scripts", ".github"))
    scripts = "".join(
        p.read_text() for found in folders for p in found if p.suffix != ".pyc" and p.is_file()
    )
    rest = sorted(name for name in named - ours if name not in scripts)
    script = (
        "import json, sys\nfrom pathlib import Path\nimport sglang\n"
        "source = ''.join(p.read_text() for p in Path(sglang.__file__).parent.rglob('*.py'))\n"
        "print(json.dumps([n for n in json.loads(sys.argv[1]) if n not in source]))"
    )
    unknown = forks.run(script, argv=["x", json.dumps(rest)]).stdout
    # The prefix of our own variables, and constants of edit.py.
    assert set(json.loads(unknown)) <= {"SGLANG_VERSION"}


def test_python_blocks_run(forks):
    found = list(blocks("python"))
    assert found
    for page, text in found:
        ended = forks.run(text)
        assert ended.rc == 0, (page, ended.stderr)


PLANS = [
    (page, environ, words)
    for page, environ, words in COMMANDS
    if words[:2] == ["sglang-unified-kv", "plan"] and "--write-config" not in words
]


@pytest.mark.parametrize("case", range(len(PLANS)), ids=lambda i: f"{PLANS[i][0]}-{i}")
def test_a_plan_prints_what_the_page_shows(forks, case, tmp_path):
    page, environ, words = PLANS[case]
    write_pro(tmp_path / words[words.index("--model-path") + 1])
    ended = forks.run(
        f"import os, sys; os.chdir({str(tmp_path)!r})\n"
        "from sglang_unified_kv.cli import app; app(sys.argv[1:])",
        dict(assignment.split("=", 1) for assignment in environ),
        argv=words,
    )
    assert ended.rc == 0, ended.stderr
    shown = [
        " ".join(text.split())
        for p, text in blocks("text")
        if p.name == page and "One rank" in text
    ]
    printed = " ".join(ended.stdout.split())
    (line,) = [line for line in LINES.values() if line.host_gb and line.plan == words]
    assert printed.endswith(" ".join(block(line.command, line.env).split()))
    # Other pages leave the table out.
    assert printed in shown or page != "operating.md"
