"""Targets of edits that are no Python function any more, in ways that ``inspect`` words differently."""

import inspect
import math
from pathlib import Path

import pytest
import sglang
from sglang_unified_kv.hooking.series import Edit, Kind
from sglang_unified_kv.hooking.upstream import Problem, inspect_target


def edit(target, **expected):
    return Edit(target, Kind.RELIES_ON, "feature", "why", **expected)


def test_a_builtin_without_a_signature_is_a_finding():
    with pytest.raises(ValueError, match="no signature"):
        inspect.signature(getattr)
    found = inspect_target(edit("builtins:getattr", params="name", fingerprint="0" * 16))
    assert (found.problem, found.found) == (Problem.OTHER_KIND, "builtin_function_or_method")


def test_a_function_without_source_is_a_finding(monkeypatch):
    scope = {}
    gone = Path(sglang.__file__).with_name("gone.py")
    exec(compile("def moved(x): pass", str(gone), "exec"), scope)
    with pytest.raises(OSError):
        inspect.getsource(scope["moved"])
    monkeypatch.setattr(sglang, "moved", scope["moved"], raising=False)
    found = inspect_target(edit("sglang:moved", params="x", fingerprint="0" * 16))
    assert found.problem is Problem.OTHER_KIND


def test_a_builtin_with_other_parameters_has_no_place():
    found = inspect_target(edit("math:sqrt", params="y, /"))
    assert inspect.isbuiltin(math.sqrt)
    assert (found.problem, found.found, found.place) == (Problem.PARAMETERS, "(x, /)", None)
