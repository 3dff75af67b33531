"""What an edit expects of SGLang, against what is installed.

:func:`inspect_target` answers with a :class:`Finding` or, where all is as declared, with None.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import textwrap
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .series import Edit

ABSENT = "absent"
"""Fingerprint of a target that must not exist yet (a new member, a new registry key)."""


class Problem(str, Enum):
    """What is wrong with a target, gravest first; ``remedy`` is what to do about it."""

    MISSING = "missing"
    EXISTS = "exists already"
    HOOKED = "superseded by another hook"
    OTHER_KIND = "no Python function any more"
    PARAMETERS = "signature changed"
    SOURCE = "body changed"

    @property
    def remedy(self) -> str:
        return _REMEDIES[self]


_REMEDIES = {
    Problem.MISSING: "find where its job is done now and declare the edit there, or drop the edit",
    Problem.EXISTS: "upstream has a member of this name: use it, or take another name",
    Problem.HOOKED: "remove that plugin, or leave it out of SGLANG_PLUGINS",
    Problem.OTHER_KIND: "hook what calls it instead",
    Problem.PARAMETERS: "read the change, adapt our callable, then declare its parameters and fingerprint",
    Problem.SOURCE: "read the change; if the edit's reason still holds, declare the new fingerprint",
}


@dataclass(frozen=True)
class Finding:
    """One target that is not as its edit expects.

    Attributes:
        expected, found: parameter lists, fingerprints, or words.
        text: the finding in one line, without the target.
        place: file and line of what was found, relative to SGLang's package; None without source.
    """

    edit: Edit
    problem: Problem
    expected: str
    found: str
    text: str
    place: str | None = None

    @property
    def line(self) -> str:
        return f"{self.edit.kind.value} {self.edit.target}: {self.text}"


@dataclass(frozen=True)
class Place:
    """A resolved target: where it hangs and what hangs there."""

    holder: Any
    key: str
    is_item: bool

    def get(self) -> Any:
        if self.is_item:
            return self.holder.get(self.key, ABSENT)
        if isinstance(self.holder, type):
            return self.holder.__dict__.get(self.key, getattr(self.holder, self.key, ABSENT))
        return getattr(self.holder, self.key, ABSENT)

    def set(self, value: Any) -> None:
        if self.is_item:
            self.holder[self.key] = value
        else:
            setattr(self.holder, self.key, value)


def resolve(target: str) -> Place:
    """The place that ``package.module:Qualified.name`` or ``package.module:NAME[key]`` names.

    Raises:
        ImportError, AttributeError: it, or what it hangs on, does not exist.
    """
    module_name, _, path = target.partition(":")
    holder: Any = importlib.import_module(module_name)
    if path.endswith("]"):
        name, _, key = path[:-1].partition("[")
        return Place(getattr(holder, name), key, True)
    *parents, key = path.split(".")
    for name in parents:
        holder = getattr(holder, name)
    return Place(holder, key, False)


def plain_function(value: Any) -> Any:
    """The plain function behind a classmethod, staticmethod or property; the value itself otherwise."""
    if isinstance(value, (classmethod, staticmethod)):
        return value.__func__
    if isinstance(value, property):
        return value.fget
    return value


def source_fingerprint(value: Any) -> str:
    """First 16 hex digits of SHA-256 over the dedented source of ``value`` (decorators unwrapped).

    Raises:
        TypeError, OSError: it has no Python source.
    """
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(plain_function(value))))
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def parameter_list(value: Any) -> str:
    """Parameter names of a callable with ``*`` and ``/`` markers, without annotations and defaults.

    Raises:
        TypeError, ValueError: it has no signature.
    """
    signature = inspect.signature(inspect.unwrap(plain_function(value)))
    bare = [p.replace(annotation=p.empty, default=p.empty) for p in signature.parameters.values()]
    # Signature refuses required parameters after optional ones only when defaults are kept.
    text = str(inspect.Signature(bare))
    return text[1:-1]


def foreign_layer(value: Any, package_dir: Path) -> str | None:
    """File of the first layer of ``value`` that is not upstream's own code, if any."""
    layer = plain_function(value)
    while layer is not None:
        code = getattr(layer, "__code__", None)
        if code is not None:
            path = Path(code.co_filename)
            # ``@torch.no_grad()`` in upstream's own source.
            decorator = path.parts[-3:] == ("torch", "utils", "_contextlib.py")
            outside = path.name == "hook_registry.py" or package_dir not in path.parents
            if outside and not decorator:
                return f"{path}:{code.co_firstlineno}"
        layer = getattr(layer, "__wrapped__", None)
    return None


def inspect_target(edit: Edit) -> Finding | None:
    """What is not as ``edit`` expects, the gravest of it; None if everything is. Changes nothing."""
    try:
        value = resolve(edit.target).get()
    except Exception as error:  # importing runs another release's code, which may raise anything
        return Finding(
            edit, Problem.MISSING, "a target", repr(error), f"target is missing ({error})"
        )
    if edit.fingerprint == ABSENT:
        if value is ABSENT:
            return None
        return Finding(
            edit, Problem.EXISTS, ABSENT, repr(value), f"must not exist yet, found {value!r}"
        )
    if value is ABSENT:
        return Finding(edit, Problem.MISSING, "a target", "none", "target is missing")
    return _hook(edit, value) or _change(edit, value)


def _hook(edit: Edit, value: Any) -> Finding | None:
    import sglang
    from sglang.srt.plugins.hook_registry import HookRegistry

    hooks = HookRegistry._hooks.get(edit.dotted, ())
    if hooks:
        names = ", ".join(sorted({s.plugin_name if s else "unknown" for _, _, s in hooks}))
        return Finding(
            edit, Problem.HOOKED, "no hook", names, f"hooked by another plugin ({names})"
        )
    layer = foreign_layer(value, Path(sglang.__file__).parent)
    if layer is not None:
        text = f"already replaced by code in {layer}"
        return Finding(edit, Problem.HOOKED, "SGLang's own code", layer, text)
    return None


def _change(edit: Edit, value: Any) -> Finding | None:
    try:
        params = edit.params and parameter_list(value)
        fingerprint = edit.fingerprint and source_fingerprint(value)
    except (TypeError, ValueError, OSError):
        kind = type(value).__name__
        return Finding(
            edit, Problem.OTHER_KIND, "a function", kind, f"is no Python function but a {kind}"
        )
    if params != edit.params:
        text = f"parameters are ({params}), expected ({edit.params})"
        problem, expected, found = Problem.PARAMETERS, f"({edit.params})", f"({params})"
    elif fingerprint != edit.fingerprint:
        text = f"source fingerprint is {fingerprint}, expected {edit.fingerprint}"
        problem, expected, found = Problem.SOURCE, str(edit.fingerprint), str(fingerprint)
    else:
        return None
    return Finding(edit, problem, expected, found, text, _place(value))


def _place(value: Any) -> str | None:
    import sglang

    function = inspect.unwrap(plain_function(value))
    try:
        path = Path(inspect.getsourcefile(function) or "")
        _, line = inspect.getsourcelines(function)
    except (TypeError, OSError):
        return None
    return f"{path.relative_to(Path(sglang.__file__).parents[1])}:{line}"
