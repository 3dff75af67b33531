"""Declared edits: every touch on SGLang is an object that is checked before it is applied.

An :class:`Edit` names an upstream target and what we do to it. A :class:`Series` collects the edits
of one plugin entry and takes them through three steps, each of which returns *all* of its findings:

``preflight``  target exists, parameters and source are those the edit was written against, nobody
               else hooks it. Nothing is changed.
``apply``      installs the edits, through SGLang's own ``HookRegistry`` where it wraps a callable.
``audit``      every target still is exactly what ``apply`` installed. Cheap; run late as well.

Declarations import neither sglang nor torch, so the series can be listed without either.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

SGLANG_VERSION = "0.5.23"


class Kind(str, Enum):
    """How an edit enters SGLang, in the order of preference."""

    REGISTRY = "registry entry"
    OVERRIDE = "subclass override"
    MEMBER = "new member"
    WRAP = "wrap"
    REPLACE = "replace"
    RELIES_ON = "relies on"


ABSENT = "absent"
"""Fingerprint of a target that must not exist yet (a new member, a new registry key)."""


class EditError(RuntimeError):
    """Preflight, application or audit of a series failed. ``reasons`` holds one line per finding."""

    def __init__(self, reasons: list[str]):
        super().__init__("\n".join(reasons))
        self.reasons = reasons


@dataclass(frozen=True)
class Edit:
    """One touch on SGLang.

    Attributes:
        target: ``package.module:Qualified.name``; for a registry ``package.module:NAME[key]``.
        kind: see :class:`Kind`. ``OVERRIDE`` and ``RELIES_ON`` are checked but not applied: the first
            is a method of a subclass that SGLang is handed, the second is upstream code whose
            behaviour we depend on.
        feature: the feature that needs it, as listed by ``sglang-unified-kv edits``.
        why: why this place.
        params: parameter list of the upstream callable, ``"self, req, *, up_to, **kwargs"``.
        fingerprint: first 16 hex digits of SHA-256 over the upstream source, or :data:`ABSENT`.
        ours: our callable or value, or its dotted name where it is not applied; ``None`` for ``RELIES_ON``.
    """

    target: str
    kind: Kind
    feature: str
    why: str
    params: str | None = None
    fingerprint: str | None = None
    ours: Any = field(default=None, compare=False)

    @property
    def dotted(self) -> str:
        return self.target.replace(":", ".")

    @property
    def ours_name(self) -> str:
        if self.ours is None or isinstance(self.ours, str):
            return self.ours or "-"
        module = getattr(self.ours, "__module__", type(self.ours).__module__)
        return f"{module}.{getattr(self.ours, '__qualname__', repr(self.ours))}"


@dataclass(frozen=True)
class _Place:
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


def _resolve(target: str) -> _Place:
    module_name, _, path = target.partition(":")
    holder: Any = importlib.import_module(module_name)
    if path.endswith("]"):
        name, _, key = path[:-1].partition("[")
        return _Place(getattr(holder, name), key, True)
    *parents, key = path.split(".")
    for name in parents:
        holder = getattr(holder, name)
    return _Place(holder, key, False)


def _function(value: Any) -> Any:
    """The plain function behind a classmethod, staticmethod or property; the value itself otherwise."""
    if isinstance(value, (classmethod, staticmethod)):
        return value.__func__
    if isinstance(value, property):
        return value.fget
    return value


def source_fingerprint(value: Any) -> str:
    """First 16 hex digits of SHA-256 over the dedented source of ``value`` (decorators unwrapped)."""
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(_function(value))))
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def parameter_list(value: Any) -> str:
    """Parameter names of a callable with ``*`` and ``/`` markers, without annotations and defaults."""
    signature = inspect.signature(inspect.unwrap(_function(value)))
    bare = [p.replace(annotation=p.empty, default=p.empty) for p in signature.parameters.values()]
    # Signature refuses required parameters after optional ones only when defaults are kept.
    text = str(inspect.Signature(bare))
    return text[1:-1]


def _foreign_layer(value: Any, package_dir: Path) -> str | None:
    """File of the first layer of ``value`` that is not upstream's own code, if any."""
    layer = _function(value)
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


class Series:
    """The ordered edits of one plugin entry.

    Args:
        name: shown in messages and listings.
    """

    def __init__(self, name: str):
        self.name = name
        self._edits: list[Edit] = []
        self._installed: dict[str, Any] = {}

    def __iter__(self) -> Iterator[Edit]:
        return iter(self._edits)

    def __len__(self) -> int:
        return len(self._edits)

    @property
    def applied(self) -> bool:
        """Whether :meth:`apply` has installed the series in this process."""
        return bool(self._installed)

    def add(self, edit: Edit) -> None:
        clash = [e for e in self._edits if e.target == edit.target]
        if clash and edit.kind is not Kind.RELIES_ON:
            raise ValueError(f"{self.name}: two edits of {edit.target}")
        self._edits.append(edit)

    def _declare(self, kind: Kind, target: str, **fields: Any) -> Callable[[Any], Any]:
        def register(ours: Any) -> Any:
            self.add(Edit(target=target, kind=kind, ours=ours, **fields))
            return ours

        return register

    def wrap(self, target: str, **fields: Any) -> Callable[[Any], Any]:
        """Decorator: ``ours(original, *args, **kwargs)`` runs around the upstream callable."""
        return self._declare(Kind.WRAP, target, **fields)

    def replace(self, target: str, **fields: Any) -> Callable[[Any], Any]:
        """Decorator: ours runs instead of the upstream callable."""
        return self._declare(Kind.REPLACE, target, **fields)

    def member(self, target: str, **fields: Any) -> Callable[[Any], Any]:
        """Decorator: ours becomes a new member of an upstream class or module."""
        return self._declare(Kind.MEMBER, target, fingerprint=ABSENT, **fields)

    def override(self, target: str, *, ours: str, **fields: Any) -> None:
        """Declare that the method ``ours`` of a subclass overrides ``target``; upstream's is checked."""
        self.add(Edit(target=target, kind=Kind.OVERRIDE, ours=ours, **fields))

    def registry(self, target: str, **fields: Any) -> Callable[[Any], Any]:
        """Decorator: ours becomes the entry ``module:NAME[key]`` of an upstream dict."""
        return self._declare(Kind.REGISTRY, target, **fields)

    def relies_on(self, target: str, **fields: Any) -> None:
        """Declare upstream code whose behaviour we depend on but do not touch."""
        self.add(Edit(target=target, kind=Kind.RELIES_ON, **fields))

    def preflight(self) -> list[str]:
        """Every reason why this series must not be applied; empty when it may. Changes nothing."""
        from importlib.metadata import PackageNotFoundError, version

        try:
            found = version("sglang")
        except PackageNotFoundError:
            return [f"sglang is not installed; install sglang=={SGLANG_VERSION}"]
        if found.partition("+")[0] != SGLANG_VERSION:
            return [
                f"sglang {found} is installed, the edits are written for {SGLANG_VERSION}; "
                f"install sglang=={SGLANG_VERSION} or unset the feature's environment variable"
            ]
        return [reason for edit in self._edits for reason in self._check(edit)]

    def _check(self, edit: Edit) -> list[str]:
        import sglang
        from sglang.srt.plugins.hook_registry import HookRegistry

        where = f"{edit.kind.value} {edit.target}"
        try:
            value = _resolve(edit.target).get()
        except (ImportError, AttributeError) as error:
            return [f"{where}: target is missing ({error})"]
        if edit.fingerprint == ABSENT:
            if value is not ABSENT:
                return [f"{where}: must not exist yet, found {value!r}"]
            return []
        if value is ABSENT:
            return [f"{where}: target is missing"]
        reasons = []
        if HookRegistry._hooks.get(edit.dotted):
            sources = {
                s.plugin_name if s else "unknown" for _, _, s in HookRegistry._hooks[edit.dotted]
            }
            reasons.append(f"{where}: hooked by another plugin ({', '.join(sorted(sources))})")
        layer = _foreign_layer(value, Path(sglang.__file__).parent)
        if layer is not None:
            reasons.append(f"{where}: already replaced by code in {layer}")
        if reasons:
            return reasons
        if edit.params is not None and (found := parameter_list(value)) != edit.params:
            reasons.append(f"{where}: parameters are ({found}), expected ({edit.params})")
        if (
            edit.fingerprint is not None
            and (found := source_fingerprint(value)) != edit.fingerprint
        ):
            reasons.append(f"{where}: source fingerprint is {found}, expected {edit.fingerprint}")
        return reasons

    def apply(self) -> None:
        """Install every edit.

        Raises:
            EditError: preflight or audit found something; after a failure in the middle the process
                holds a half-applied series and must end.
        """
        reasons = self.preflight()
        if reasons:
            raise EditError(reasons)
        with _propagated_at_once():
            for edit in self._edits:
                try:
                    self._install(edit)
                except Exception as error:
                    raise EditError(
                        [f"{edit.kind.value} {edit.target}: applying failed: {error!r}"]
                    ) from error
        reasons = self.audit()
        if reasons:
            raise EditError(reasons)

    def _install(self, edit: Edit) -> None:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

        if edit.kind in (Kind.OVERRIDE, Kind.RELIES_ON):
            return
        place = _resolve(edit.target)
        if edit.kind in (Kind.WRAP, Kind.REPLACE):
            hook_type = HookType.AROUND if edit.kind is Kind.WRAP else HookType.REPLACE
            source = HookSource(plugin_name=self.name, dist_name="sglang-unified-kv")
            HookRegistry.register(edit.dotted, edit.ours, hook_type, source=source)
            # Only our own target: applying everything would close other plugins' targets early.
            HookRegistry._apply_target(edit.dotted, HookRegistry._hooks[edit.dotted])
            HookRegistry._patched.add(edit.dotted)
        else:
            place.set(edit.ours)
        self._installed[edit.target] = place.get()

    def audit(self) -> list[str]:
        """Every target that is no longer what ``apply`` installed; empty when all edits are live."""
        return audit([self])

    def _changed(self, originals: dict[int, list[str]]) -> Iterator[str]:
        """Targets that changed; notes the bare functions that wraps stand in front of."""
        from sglang.srt.plugins.hook_registry import HookRegistry

        for edit in self._edits:
            if edit.kind in (Kind.OVERRIDE, Kind.RELIES_ON):
                continue
            where = f"{edit.kind.value} {edit.target}"
            if edit.target not in self._installed:
                yield f"{where}: was never applied"
                continue
            installed = self._installed[edit.target]
            if _resolve(edit.target).get() is not installed:
                yield f"{where}: is no longer the object that was installed"
            foreign = [
                s
                for _, hook, s in HookRegistry._hooks.get(edit.dotted, ())
                if hook is not edit.ours
            ]
            if foreign:
                names = sorted({s.plugin_name if s else "unknown" for s in foreign})
                yield f"{where}: another plugin registered a hook ({', '.join(names)})"
            original = getattr(_function(installed), "__wrapped__", None)
            if edit.kind in (Kind.WRAP, Kind.REPLACE) and original is not None:
                originals.setdefault(id(original), []).append(where)


def audit(series: Iterable[Series]) -> list[str]:
    """As :meth:`Series.audit` for several, with one walk over all modules, which is what takes the time."""
    originals: dict[int, list[str]] = {}
    reasons = [reason for one in series for reason in one._changed(originals)]
    # Modules that still hold the bare upstream function through ``from ... import``.
    stale = {
        (where, module.__name__): None
        for module, _, value in _bindings()
        if getattr(module, "__name__", "").startswith("sglang.")
        for where in originals.get(id(value), ())
    }
    return reasons + [f"{where}: {name} still holds the original" for where, name in stale]


def _bindings() -> Iterator[tuple[ModuleType, str, Any]]:
    """(module, name, value) of everything that the loaded modules hold."""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                yield module, name, value


@contextmanager
def _propagated_at_once() -> Iterator[None]:
    """SGLang walks all modules after each target, 0.1 s a time; here once, after the last.

    What it does for a target is done to every ``from ... import`` of it, no more and no less.
    """
    from sglang.srt.plugins import hook_registry

    # With the original, so that its id stays its own.
    replaced: dict[int, tuple[object, object, object]] = {}

    def collect(original: object, wrapped: object, source_module: object) -> int:
        replaced[id(original)] = (original, wrapped, source_module)
        return 0

    upstream = hook_registry._propagate_patch
    hook_registry._propagate_patch = collect
    try:
        yield
    finally:
        hook_registry._propagate_patch = upstream
        for module, name, value in _bindings():
            wrapped, source_module = value, module
            # A target that was reached by two names was replaced twice.
            while id(wrapped) in replaced:
                _, wrapped, source_module = replaced[id(wrapped)]
            if wrapped is not value and source_module is not module:
                with suppress(AttributeError, TypeError):
                    setattr(module, name, wrapped)
