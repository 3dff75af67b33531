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

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import Any

from .upstream import ABSENT, Finding, inspect_target, plain_function, resolve

SGLANG_VERSION = "0.5.23"


class Kind(str, Enum):
    """How an edit enters SGLang, in the order of preference."""

    REGISTRY = "registry entry"
    OVERRIDE = "subclass override"
    MEMBER = "new member"
    WRAP = "wrap"
    REPLACE = "replace"
    RELIES_ON = "relies on"


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
        ours = plain_function(self.ours)
        module = getattr(ours, "__module__", type(ours).__module__)
        return f"{module}.{getattr(ours, '__qualname__', repr(ours))}"


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

    def findings(self) -> list[Finding]:
        """What is not as an edit expects, at most one finding per edit. Changes nothing."""
        found = (inspect_target(edit) for edit in self._edits)
        return [finding for finding in found if finding is not None]

    def preflight(self) -> list[str]:
        """Every reason why this series must not be applied; empty when it may. Changes nothing."""
        return preflight([self])

    def apply(self) -> None:
        """Install every edit; see :func:`apply`."""
        apply([self])

    def _install_all(self) -> None:
        """Install what :func:`preflight` has passed."""
        with _propagated_at_once():
            for edit in self._edits:
                try:
                    self._install(edit)
                except Exception as error:
                    raise EditError(
                        [f"{edit.kind.value} {edit.target}: applying failed: {error!r}"]
                    ) from error

    def _install(self, edit: Edit) -> None:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

        if edit.kind in (Kind.OVERRIDE, Kind.RELIES_ON):
            return
        place = resolve(edit.target)
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
            if resolve(edit.target).get() is not installed:
                yield f"{where}: is no longer the object that was installed"
            foreign = [
                s
                for _, hook, s in HookRegistry._hooks.get(edit.dotted, ())
                if hook is not edit.ours
            ]
            if foreign:
                names = sorted({s.plugin_name if s else "unknown" for s in foreign})
                yield f"{where}: another plugin registered a hook ({', '.join(names)})"
            original = getattr(plain_function(installed), "__wrapped__", None)
            if edit.kind in (Kind.WRAP, Kind.REPLACE) and original is not None:
                originals.setdefault(id(original), []).append(where)


def audit(series: Iterable[Series]) -> list[str]:
    """As :meth:`Series.audit` for several, with one walk over SGLang's modules."""
    originals: dict[int, list[str]] = {}
    reasons = [reason for one in series for reason in one._changed(originals)]
    # Modules that still hold the bare upstream function through ``from ... import``.
    stale = {
        (where, module.__name__): None
        for module in _modules()
        if getattr(module, "__name__", "").startswith("sglang.")
        for value in list(vars(module).values())
        for where in originals.get(id(value), ())
    }
    return reasons + [f"{where}: {name} still holds the original" for where, name in stale]


def preflight(series: Sequence[Series]) -> list[str]:
    """Every reason why these series must not be applied; empty when they may. Changes nothing.

    Another release is a reason by itself, whatever its source; what differs in it is named as well.
    """
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("sglang")
    except PackageNotFoundError:
        return [f"sglang is not installed; install sglang=={SGLANG_VERSION}"]
    reasons = []
    # A local suffix, as of ROCm builds, says nothing; fingerprints do.
    if found.partition("+")[0] != SGLANG_VERSION:
        reasons.append(
            f"sglang {found} is installed, the edits are written for {SGLANG_VERSION}; "
            f"install sglang=={SGLANG_VERSION} or unset the feature's environment variable"
        )
    return reasons + [finding.line for one in series for finding in one.findings()]


def apply(series: Sequence[Series]) -> None:
    """Install every edit of these series, or none: all are checked before the first is installed.

    Raises:
        EditError: preflight or audit found something; after a failure in the middle the process
            holds half-applied series and must end.
    """
    reasons = preflight(series)
    if not reasons:
        for one in series:
            one._install_all()
        reasons = audit(series)
    if reasons:
        raise EditError(reasons)


def _modules() -> Iterator[ModuleType]:
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            yield module


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
        for module in _modules():
            for name, value in list(vars(module).items()):
                wrapped: object = value
                source_module: object = module
                # A target that was reached by two names was replaced twice.
                while id(wrapped) in replaced:
                    _, wrapped, source_module = replaced[id(wrapped)]
                if wrapped is not value and source_module is not module:
                    with suppress(AttributeError, TypeError):
                        setattr(module, name, wrapped)
