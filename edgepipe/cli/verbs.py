"""The verbs of ``edgepipe`` and their modules, each imported when its verb is used."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup
from typer.main import get_command

STYLE: dict[str, Any] = {"rich_markup_mode": None, "pretty_exceptions_enable": False}


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb with its one line in ``edgepipe --help``. Its module has a function of that name, or a group: ``app``."""

    name: str
    help: str
    module: str = ""  # below edgepipe.cli, where it has another name than the verb
    command_class: str = ""  # class in the module, for a verb that reads its words itself

    def load(self) -> Any:
        """Import the module. Return the command, or the group of commands."""
        module = import_module(f"edgepipe.cli.{self.module or self.name}")
        app = typer.Typer(add_completion=False, **STYLE)
        app.callback()(_nothing)  # keeps a group of one verb a group
        if hasattr(module, "app"):
            app.add_typer(module.app, name=self.name)
        else:
            own_class = {"cls": getattr(module, self.command_class)} if self.command_class else {}
            app.command(self.name, **own_class)(getattr(module, self.name))
        group: Any = get_command(app)
        return group.commands[self.name]


VERBS = {
    verb.name: verb
    for verb in (
        Verb("setup", "Make this machine a node of your cluster."),
        Verb("demo", "Try a whole cluster on this machine."),
        Verb("plan", "Show where layers would go, and the predicted speed."),
        Verb("serve", "Load a model on the nodes.", command_class="ServeCommand"),
        Verb("chat", "Talk to a model: one prompt, piped text, or a conversation.", "chat.verb"),
        Verb("connect", "Print what a coding agent needs to use a model."),
        Verb("ps", "List the served models and their nodes, and tasks that run."),
        Verb("stop", "Stop serving a model."),
        Verb("open", "Open this node's page in the browser, with the right to manage."),
        Verb("status", "Show nodes, memory, stages, links, downloads."),
        Verb("logs", "Show the log of this machine's node."),
        Verb("doctor", "Find problems of this machine, the network and peers.", "doctor.verb"),
        Verb("bench", "Measure the throughput and latencies of a cluster under load.", "bench.verb"),
        Verb("simulate", "Predict the speed of a cluster that need not exist."),
        Verb("version", "Show versions and the installed backends."),
        Verb("update", "Update edgepipe as it was installed, then restart the node."),
        Verb("uninstall", "Remove edgepipe's service, identity, settings and logs."),
        Verb("node", "This machine's node."),
        Verb("peers", "List and change the members of the cluster."),
        Verb("models", "Models on this machine's disk."),
        Verb("batch", "Run files of requests behind interactive ones."),
        Verb("service", "Run the node at boot, also while no user is logged in."),
        Verb("config", "Settings and where they come from."),
    )
}
"""The order is that of ``edgepipe --help``."""


class VerbGroup(TyperGroup):
    """Lists every verb by its line in ``VERBS``, and loads the one that is used."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """See ``click.Group.resolve_command``."""
        if args and args[0] in VERBS:
            self.commands[args[0]] = VERBS[args[0]].load()
        return super().resolve_command(ctx, args)


def add_verbs(app: typer.Typer) -> None:
    """Add the line of every verb to a command of class ``VerbGroup``."""
    for verb in VERBS.values():
        app.command(verb.name, help=verb.help)(_nothing)


def _nothing() -> NoReturn:
    raise AssertionError("VerbGroup replaces it")
