"""What is published: sdist and wheel, an installation beside SGLang, the help of every command."""

import re
import shutil
import subprocess
import sys
import tomllib
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

import pytest
import typer
from sglang_unified_kv.cli import app
from typer.testing import CliRunner

REPO = Path(__file__).parents[2]
PACKAGE = REPO / "python" / "sglang_unified_kv"
# As a clone has them, without what running leaves behind.
PARTS = ("benchmark", "docs", "python", "scripts", "test", ".ci")
LEFTOVERS = shutil.ignore_patterns("__pycache__", "*.egg-info", "_build", ".pytest_cache")


def run(*command, **options):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(sdist, wheel); the wheel is built from the sdist."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for part in PARTS:
        shutil.copytree(REPO / part, source / part, ignore=LEFTOVERS)
    for file in REPO.glob("*.*"):
        if file.is_file():
            shutil.copy(file, source)
    shutil.copy(REPO / "LICENSE", source)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


def test_the_wheel_has_the_package_and_nothing_else(built):
    _, wheel = built
    with ZipFile(wheel) as packed:
        files = {name for name in packed.namelist() if ".dist-info/" not in name}
    expected = {p.relative_to(PACKAGE.parent).as_posix() for p in PACKAGE.rglob("*.py")}
    assert files == expected | {"sglang_unified_kv/py.typed"}


def test_the_sdist_has_what_building_and_testing_need(built, tmp_path):
    sdist, _ = built
    shutil.unpack_archive(sdist, tmp_path, filter="data")
    (root,) = tmp_path.iterdir()
    for part in (*PARTS, "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"):
        ours, packed = REPO / part, root / part
        if ours.is_file():
            assert packed.read_bytes() == ours.read_bytes()
            continue
        left = {"__pycache__", "_build", ".pytest_cache"}
        wanted = {
            p.relative_to(ours)
            for p in ours.rglob("*")
            if p.is_file() and not left & set(p.parts) and ".egg-info" not in str(p)
        }
        assert wanted <= {p.relative_to(packed) for p in packed.rglob("*")}, part


def test_the_core_package_requires_neither_sglang_nor_torch(built):
    _, wheel = built
    with ZipFile(wheel) as packed:
        (name,) = [n for n in packed.namelist() if n.endswith(".dist-info/METADATA")]
        metadata = message_from_bytes(packed.read(name))
    required = [r for r in metadata.get_all("Requires-Dist") if "extra ==" not in r]
    names = {re.match(r"[\w.-]+", r)[0] for r in required}
    assert names == {"pydantic-settings", "rich", "typer", "xxhash"}
    # No upper bounds: SGLang's environment decides.
    assert not [r for r in required if "<" in r or "==" in r or "~" in r]
    assert 'sglang==0.5.23; extra == "engine"' in metadata.get_all("Requires-Dist")


def test_an_environment_that_has_sglang_is_not_touched(built, tmp_path):
    _, wheel = built
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    (site,) = (tmp_path / "env" / "lib").glob("python3.*/site-packages")
    (here,) = {p for p in sys.path if p.endswith("site-packages") and Path(p, "sglang").is_dir()}
    (site / "sglang_environment.pth").write_text(here)

    def installed():
        listing = "import importlib.metadata as m\n"
        listing += "for d in m.distributions(): print(d.name, d.version, d._path)"
        lines = run(python, "-P", "-c", listing, env={}).splitlines()
        return {line for line in lines if "sglang_unified_kv" not in line}

    before = installed()
    assert any(line.startswith("sglang 0.5.23") for line in before)
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    run(*pip, "install", "--no-index", "--no-deps", "--ignore-installed", wheel)
    assert installed() == before
    assert {p.name for p in site.iterdir()} == {
        "sglang_environment.pth",
        "sglang_unified_kv",
        f"{wheel.name.split('-py3')[0]}.dist-info",
    }
    found = run(python, "-P", "-c", "import sglang_unified_kv as p; print(p.__file__)", env={})
    assert Path(found.strip()).parent == site / "sglang_unified_kv"
    assert "Usage:" in run(tmp_path / "env" / "bin" / "sglang-unified-kv", "--help", env={})


def commands(group, path=()):
    for name, command in group.commands.items():
        yield (*path, name), command
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))


COMMANDS = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_of_every_command(path):
    result = CliRunner().invoke(app, [*path, "--help"])
    assert result.exit_code == 0
    command = COMMANDS[path]
    assert command.help and f"{command.help.split('.')[0].split()[0]} " in result.output
    for parameter in command.params:
        assert parameter.help, f"{' '.join(path)}: {parameter.name} has no help"


def test_the_changelog_has_the_version_that_would_be_released():
    version = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["version"]
    newest = re.search(
        r"^## \[([\d.]+)\] - \d{4}-\d\d-\d\d$", (REPO / "CHANGELOG.md").read_text(), re.M
    )
    assert newest and newest[1] == version
