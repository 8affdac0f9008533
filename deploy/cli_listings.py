"""The commands `pullfill registry ls|dump` and `pullfill queue ls|show|dead|purge`."""

from __future__ import annotations

from typing import Annotated

import typer

from pullfill.deploy.command import command
from pullfill.options import ClusterOptions

registry_app = typer.Typer(help="What is registered in etcd.", no_args_is_help=True)
queue_app = typer.Typer(help="Job queues on NATS: look, and delete.", no_args_is_help=True)
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON")]
QueueArgument = Annotated[
    str | None,
    typer.Argument(metavar="[QUEUE]", help="A queue of `pullfill queue ls`  [default: all]"),
]
MostOption = Annotated[
    int, typer.Option("--most", metavar="N", min=1, help="Show at most N, oldest first")
]


def add_to(app: typer.Typer) -> None:
    """Add both groups to `app`."""
    app.add_typer(registry_app, name="registry")
    app.add_typer(queue_app, name="queue")


@command(registry_app, "ls")
def registry_ls(cluster: ClusterOptions, as_json: JsonOption = False) -> int:
    """List workers and frontends as etcd holds them."""
    from pullfill.deploy import listings

    return listings.registry_ls(cluster.find_to_ask(), as_json)


@command(registry_app, "dump")
def registry_dump(cluster: ClusterOptions, as_json: JsonOption = False) -> int:
    """Print every key of the namespace in etcd, with its value decoded.

    `etcdctl --endpoints URL get --prefix /pullfill/NAMESPACE/` reads the same keys.
    """
    from pullfill.deploy import listings

    return listings.registry_dump(cluster.find_to_ask(), as_json)


@command(queue_app, "ls")
def queue_ls(cluster: ClusterOptions, as_json: JsonOption = False) -> int:
    """List the job queues of the namespace: jobs, tokens, age, dead letters."""
    from pullfill.deploy import listings

    return listings.queue_ls(cluster.find(), as_json)


@command(queue_app, "show")
def queue_show(
    cluster: ClusterOptions,
    queue: QueueArgument = None,
    as_json: JsonOption = False,
    most: MostOption = 100,
) -> int:
    """List jobs that wait or are in flight, the oldest first."""
    from pullfill.deploy import listings

    return listings.queue_show(listings.Queue(cluster.find(), queue), as_json, most)


@command(queue_app, "dead")
def queue_dead(
    cluster: ClusterOptions,
    queue: QueueArgument = None,
    as_json: JsonOption = False,
    most: MostOption = 100,
) -> int:
    """List dead letters: jobs that no worker may try again, and why."""
    from pullfill.deploy import listings

    return listings.queue_dead(listings.Queue(cluster.find(), queue), as_json, most)


@command(queue_app, "purge")
def queue_purge(
    cluster: ClusterOptions,
    queue: QueueArgument = None,
    dead: Annotated[
        bool, typer.Option("--dead", help="Delete dead letters instead of jobs")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask")] = False,
    as_json: JsonOption = False,
) -> int:
    """Delete all jobs of a queue. Decode workers compute their prompts, within a second.

    A job that a worker has claimed already goes on.
    """
    from pullfill.deploy import listings

    chosen = listings.Queue(cluster.find(), queue)
    return listings.queue_purge(chosen, as_json, letters=dead, sure=yes)
