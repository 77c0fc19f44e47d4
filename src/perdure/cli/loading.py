"""``--app MODULE:NAME``: from what the user wrote to an open app. Every way it can be wrong is one sentence."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import click

from perdure.errors import Invalid

if TYPE_CHECKING:
    from perdure.app import App

FORM = "Write --app MODULE:NAME; NAME is a function that returns perdure.open(...), or what it returns."


def app_option(*, required: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The ``--app`` option."""
    return click.option(
        "--app",
        "target",
        metavar="MODULE:NAME",
        required=required,
        help="Where your app is: the function that opens it.",
    )


@asynccontextmanager
async def app_of(target: str, *, store: str | None, workers: int | None) -> AsyncIterator[App]:
    """The app that ``target`` names, open.

    Args:
        store: the store to open instead of the app's own, or None.
        workers: how many attempts at once instead of the app's own number, or None; 0 for a client.

    Raises:
        Invalid: the target names no app.
    """
    from perdure import app as apps

    with apps.opened_with(store=store, workers=workers):
        found = await _made(target)
        app = await found.__aenter__()
    error: BaseException | None = None
    try:
        if not isinstance(app, apps.App):
            raise Invalid(f"{target} gives a {type(app).__name__}, not an app.", help=FORM)
        yield app
    except BaseException as raised:
        error = raised
        raise
    finally:
        await found.__aexit__(type(error) if error else None, error, error.__traceback__ if error else None)


async def _made(target: str) -> AbstractAsyncContextManager[Any]:
    """Call what the target names, if it is to be called, and say so if no app comes of it."""
    found = _found(target)
    if not hasattr(found, "__aenter__") and callable(found):
        try:
            inspect.signature(found).bind()
        except TypeError:
            raise Invalid(f"{target} takes arguments.", help="Name a function without parameters.") from None
        except ValueError:
            pass  # a builtin that does not tell
        try:
            found = found()
            if inspect.isawaitable(found):
                found = await found
        except Invalid:
            raise
        except Exception as error:
            raise Invalid(f"{target} raised {type(error).__name__}: {error}", help="Run it with --verbose.") from error
    if inspect.isasyncgen(found):
        opened = found
        found = asynccontextmanager(lambda: opened)()
    if not isinstance(found, AbstractAsyncContextManager):
        raise Invalid(f"{target} is a {type(found).__name__}, not an app.", help=FORM)
    return found


def _found(target: str) -> Any:
    module_name, colon, name = target.partition(":")
    if not (colon and name and all(part.isidentifier() for part in [*module_name.split("."), *name.split(".")])):
        raise Invalid(f"{target!r} does not name an app.", help=_of_file(module_name, name) or FORM)
    found: Any = _imported(module_name, name)
    for part in name.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, [one for one in vars(found) if not one.startswith("_")], n=1)
            hint = f"Did you mean {near[0]!r}?" if near else FORM
            raise Invalid(f"Module {module_name!r} has no {name!r}.", help=hint)
        found = getattr(found, part)
    return found


def importable() -> str:
    """Let modules of the current folder be imported, as `python` itself does. The folder."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    return here


def _imported(name: str, wanted: str) -> ModuleType:
    here = importable()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise Invalid(
                f"There is no module {name!r}.",
                help=_of_file(name, wanted) or f"Looked in {here} and among what is installed for {sys.executable}.",
            ) from error
        raise Invalid(f"Module {name!r} cannot be imported: {error}.") from error
    except (Exception, SystemExit) as error:
        raise Invalid(
            f"Module {name!r} cannot be imported: {type(error).__name__}: {error}", help="Run it with --verbose."
        ) from error


def _of_file(module: str, name: str) -> str:
    """What to write instead, where somebody wrote the path of a file in the place of a module's name."""
    path = Path(module)
    if path.suffix != ".py" or not path.is_file():
        return ""
    where = "Write" if path.parent.resolve() == Path.cwd() else f"In the folder {path.parent}, write"
    return f"{where} the module's name: --app {path.stem}:{name or 'NAME'}"
