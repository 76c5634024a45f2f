"""holdfast completion: the scripts of bash, zsh and fish, and what click prints to them.

A script passes the command line up to the cursor in COMP_LINE, and reads lines of type, value and description. It does
not pass words, as the scripts of click do: bash would split them at every colon.
"""

from __future__ import annotations

import os
import re
from importlib import resources
from typing import Any

import click
from click.shell_completion import CompletionItem, ShellComplete, add_completion_class

SHELLS = ("bash", "zsh", "fish")


@click.command(short_help="Print the script that completes commands in a shell.")
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the script that completes commands, options and names in SHELL.

    Names of leases, keys of operations and the like are read from the database that the command would use. A database
    that does not answer within a second completes nothing; HOLDFAST_COMPLETION_TIMEOUT sets another number of seconds.
    Completion creates no file and migrates nothing.

    \b
    Put one line into the start-up file of the shell:
      bash  ~/.bashrc                   eval "$(holdfast completion bash)"
      zsh   ~/.zshrc, after compinit    eval "$(holdfast completion zsh)"
      fish  ~/.config/fish/config.fish  holdfast completion fish | source

    \b
    Example:
      holdfast completion fish > ~/.config/fish/completions/holdfast.fish
    """
    click.echo(_script(shell), nl=False)


def _script(shell: str) -> str:
    return resources.files("holdfast.cli").joinpath(f"completion.{shell}").read_text(encoding="utf-8")


def split_line(line: str) -> tuple[list[str], str, str, str]:
    """The complete words of a command line, the word at its end, that word as it was typed, and the quote that is still
    open in it ("" if none is)."""
    words: list[str] = []
    word, typed, quote, is_escaped = "", "", "", False
    for character in line:
        typed += character
        if is_escaped:
            word, is_escaped = word + character, False
        elif character == "\\" and quote != "'":
            is_escaped = True
        elif quote:
            word, quote = (word, "") if character == quote else (word + character, quote)
        elif character in "'\"":
            quote = character
        elif not character.isspace():
            word += character
        else:
            if len(typed) > 1:
                words.append(word)
            word = typed = ""
    return words, word, typed, quote


class _Completion(ShellComplete):
    def source(self) -> str:
        return _script(self.name)

    def get_completion_args(self) -> tuple[list[str], str]:
        words, incomplete, _, _ = split_line(os.environ["COMP_LINE"])
        return words[1:], incomplete

    def format_completion(self, item: CompletionItem) -> str:
        return f"{item.type}\t{item.value}\t{item.help or ''}"


@add_completion_class
class ZshCompletion(_Completion):
    name = "zsh"


@add_completion_class
class FishCompletion(_Completion):
    name = "fish"


@add_completion_class
class BashCompletion(_Completion):
    """bash inserts a value as it is, in place of COMP_WORD, which may be only the end of the word."""

    name = "bash"

    def format_completion(self, item: CompletionItem) -> str:
        _, _, typed, quote = split_line(os.environ["COMP_LINE"])
        value: Any = item.value
        if item.type == "plain" and not quote:
            kept = split_line(typed.removesuffix(os.environ.get("COMP_WORD", typed)))[1]
            value = re.sub(r"([^\w@%+=:,./-])", r"\\\1", value.removeprefix(kept))
        elif item.type == "plain":
            value = re.sub(r'([$`"\\])', r"\\\1", value) if quote == '"' else value.replace("'", r"'\''")
        return f"{item.type}\t{value}\t{item.help or ''}"
