"""The command that shows the whole of it."""

from memstore.cli.command import command
from memstore.cli.options.command_options import Json
from memstore.cli.options.demo_options import DemoOptions
from memstore.cli.terminal import console


@command("demo", "memstore demo", "memstore demo --text book.txt --seed 7")
def demo(*, options: DemoOptions, as_json: Json = False) -> None:
    """Hide facts in a long text, read it once, ask a new process.

    The answers, their sources and costs are shown, and at last how many facts were right.
    """
    from memstore.cli.demo_facts import print_demo, run_demo

    result = run_demo(options)
    if as_json:
        console.emit(result)
    else:
        print_demo(result)


COMMANDS = (demo,)
